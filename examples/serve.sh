#!/usr/bin/env bash
# An OpenAI-compatible server that keeps its KV cache in 8 GiB of host memory and in a directory.
#
#   examples/serve.sh MODEL ROOT_DIR [OPTIONS OF VLLM...]
#
# Start it twice with one ROOT_DIR and two values of --port: what one has computed, the other loads.
set -euo pipefail

model=${1:?the model: a name or a folder}
root_dir=${2:?a directory for chunks, which several servers may share}
shift 2

# The root's path as a JSON string.
root_dir=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$root_dir")

exec python3 -m vllm.entrypoints.openai.api_server --model "$model" --kv-transfer-config '{
  "kv_connector": "TierKVConnector",
  "kv_connector_module_path": "tierkv.connector",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {
    "cpu_bytes_to_use": 8589934592,
    "secondary_tiers": [{"type": "fs", "root_dir": '"$root_dir"'}]
  }
}' "$@"
