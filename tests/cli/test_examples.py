"""The examples and the README name a configuration that tierkv accepts. The engine's tests run one of them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierkv.config import CacheConfig, parse, parse_tier

ROOT = Path(__file__).parents[2]


def check_config(connector: dict[str, Any]) -> CacheConfig:
    assert connector["kv_connector"] == "TierKVConnector"
    assert connector["kv_connector_module_path"] == "tierkv.connector"
    assert connector["kv_load_failure_policy"] == "recompute"
    config = parse(connector["kv_connector_extra_config"])
    for i, tier in enumerate(config.secondary_tiers):
        parse_tier(tier, f"secondary_tiers[{i}]")
    return config


def test_readme() -> None:
    (found,) = re.findall(r"--kv-transfer-config '(.*?)'", (ROOT / "README.md").read_text(), re.DOTALL)
    check_config(json.loads(found))


def test_readme_lists_every_field() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in CacheConfig.__struct_fields__ if f"`{name}`" not in readme] == []


def test_serve(tmp_path: Path) -> None:
    """With a python3 that prints its arguments in place of the server."""
    fake = tmp_path / "python3"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n'
        f"exec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n"
    )
    fake.chmod(0o755)
    root_dir = '/a "quoted" directory'
    done = subprocess.run(
        [ROOT / "examples" / "serve.sh", "some-model", root_dir, "--port", "8001"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    argv = json.loads(done.stdout)
    assert argv[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "some-model"]
    assert argv[-2:] == ["--port", "8001"]
    config = check_config(json.loads(argv[argv.index("--kv-transfer-config") + 1]))
    assert config.secondary_tiers[0]["root_dir"] == root_dir


def test_offline_config() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "offline.py"))
    check_config(example["kv_transfer_config"]("/somewhere"))


@pytest.mark.vllm
def test_offline(tmp_path: Path) -> None:
    from tierkv.bench.demo.model import model_folder

    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "offline.py", str(model_folder()), str(tmp_path)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    computed, loaded = re.findall(
        r"^(?:computed|loaded): \S+ s, (\d+) of \d+ tokens cached$", done.stdout, re.MULTILINE
    )
    assert int(computed) == 0
    assert int(loaded) > 0


def test_the_check_of_a_gpu_says_when_there_is_none(tmp_path: Path) -> None:
    """The rest of it needs one; at least it is a script."""
    script = ROOT / "examples" / "check_gpu.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    python = tmp_path / "python"  # one without torch, wherever this runs
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    run = subprocess.run([str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "no CUDA device" in run.stderr
