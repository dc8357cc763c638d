"""What cannot work is an error when the engine starts, which names the field and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import EngineError, assert_shm_clean, connector, fs, shm_names

if TYPE_CHECKING:
    from vllm_harness import Engine, Engines

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


@pytest.mark.parametrize("case", CASES)
def test_error_at_start(case: str, engines: Engines, tmp_path: Path) -> None:
    before = shm_names()
    fields, field, accepted = CASES[case]
    engine = engines.process()
    (tmp_path / "file").touch()
    if "read-only" in case:
        _mount_read_only(engine, tmp_path / "readonly")
    config = connector(**fields)
    for tier in config["kv_connector_extra_config"].get("secondary_tiers", ()):
        if "root_dir" in tier:
            tier["root_dir"] = _placed(tier["root_dir"], tmp_path)
    with pytest.raises(EngineError) as raised:
        engine.start("llama", config)
    assert raised.value.type == "ConfigError"
    assert raised.value.message.startswith(f"{field}: ")
    assert accepted in raised.value.message
    engine.close()
    assert_shm_clean(before)


def _mount_read_only(engine: Engine, path: Path) -> None:
    path.mkdir()
    try:
        engine("mount", path=str(path), read_only=True)
    except EngineError as error:
        pytest.skip(f"a read-only file system cannot be mounted here: {error.message}")


def _placed(root: str, tmp_path: Path) -> str:
    return root.replace("FILE", str(tmp_path / "file")).replace("READONLY", str(tmp_path / "readonly"))
