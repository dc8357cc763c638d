"""What cannot work is an error when the engine starts, which names the field and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import EngineError, assert_shm_clean, connector, fs, same, shm_names, tokens

if TYPE_CHECKING:
    from vllm_harness import Engine, Engines, Oracle

#: Case → the fields, the field that the error names first, and words that it has for what is accepted.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "misspelt": ({"cpu_bytes_to_us": 1 << 20}, "cpu_bytes_to_us", "did you mean 'cpu_bytes_to_use'"),
    "misspelt in a tier": (
        {"secondary_tiers": [{"type": "fs", "root_dirr": "/tmp/kv"}]},
        "secondary_tiers[0].root_dirr",
        "did you mean 'root_dir'",
    ),
    "negative": ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use", ">= 1"),
    "below one chunk": ({"cpu_bytes_to_use": 65535}, "cpu_bytes_to_use", "at least 65536"),
    "unknown tier": ({"secondary_tiers": [{"type": "tape"}]}, "secondary_tiers[0].type", "fs, memory"),
    "module_path": (
        {"secondary_tiers": [{"type": "mine", "module_path": "no_such_package.tiers:Mine"}]},
        "secondary_tiers[0].module_path",
        "package.module:Class",
    ),
    "two sizes": ({"block_size": 64, "blocks_per_chunk": 2}, "block_size", "one of block_size"),
    "odd size": ({"block_size": 48}, "block_size", "multiple of 32"),
    "root_dir below a file": ({"secondary_tiers": [fs(Path("FILE/kv"))]}, "secondary_tiers[0].root_dir", "writ"),
    "root_dir read-only": ({"secondary_tiers": [fs(Path("READONLY/kv"))]}, "secondary_tiers[0].root_dir", "writ"),
}


def test_errors_at_start(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """All in one process, so it also shows that a start that failed leaves nothing in the way of the next."""
    before = shm_names()
    (tmp_path / "file").touch()
    (tmp_path / "readonly").mkdir()
    engine = engines.process()
    mounted = _mount_read_only(engine, tmp_path / "readonly")
    wrong = {name: message for name, case in CASES.items() if (message := _start(engine, tmp_path, name, *case))}
    assert not wrong or (list(wrong) == ["root_dir read-only"] and not mounted), wrong
    assert_shm_clean(before)
    engine.start("llama", connector())
    prompt = tokens(0, 100)
    assert same([engine.one(prompt)], oracle("llama", [prompt]))
    if not mounted:
        pytest.skip("a read-only file system cannot be mounted here; all other cases passed")


def _mount_read_only(engine: Engine, path: Path) -> bool:
    try:
        engine("mount_read_only", path=str(path))
    except EngineError:
        return False
    return True


def _start(engine: Engine, tmp_path: Path, name: str, fields: dict[str, Any], field: str, accepted: str) -> str:
    """What is wrong with the error, if anything."""
    config = connector(**fields)
    for tier in config["kv_connector_extra_config"].get("secondary_tiers", ()):
        if "root_dir" in tier:
            tier["root_dir"] = _placed(tier["root_dir"], tmp_path)
    try:
        engine.start("llama", config)
    except EngineError as error:
        right = error.type == "ConfigError" and error.message.startswith(f"{field}: ") and accepted in error.message
        return "" if right else f"{error.type}: {error.message}"
    engine("stop")
    return "it started"


def _placed(root: str, tmp_path: Path) -> str:
    return root.replace("FILE", str(tmp_path / "file")).replace("READONLY", str(tmp_path / "readonly"))
