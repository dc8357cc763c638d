"""Two ranks with one shared region."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_harness import (
    BLOCK,
    EXTENSION,
    Engine,
    assert_shm_clean,
    connector,
    fs,
    most_hits,
    same,
    settle,
    shm_names,
    tokens,
)

if TYPE_CHECKING:
    from vllm_harness import Engines, Json

CHUNK = 2 * BLOCK
PROMPTS = [tokens(seed, length) for seed, length in ((0, 3 * CHUNK), (1, 515), (2, 4 * CHUNK + 20))]
HITS = [most_hits(len(p), CHUNK) for p in PROMPTS]


def _start(engines: Engines, config: Json) -> Engine:
    return engines.start("llama", config, tensor_parallel_size=2, distributed_executor_backend="mp", **EXTENSION)


def test_two_ranks(engines: Engines, tmp_path: Path) -> None:
    """Reloaded from the host, and from fs by new processes.

    Both ranks are told what their weights are; what has no name does not share with what has one.
    """
    before = shm_names()
    config = connector(blocks_per_chunk=2, secondary_tiers=[fs(tmp_path / "kv")])
    first = _start(engines, config)
    first.invalidate("step-1")
    cold = first.generate(PROMPTS)
    assert [a["external"] for a in cold] == [0, 0, 0]
    first.forget_device()
    again = first.generate(PROMPTS)
    assert [a["external"] for a in again] == HITS
    assert same(again, cold)
    first.drain()
    settle(tmp_path / "kv")
    first.kill()
    assert_shm_clean(before)

    second = _start(engines, config)
    assert [a["external"] for a in second.generate(PROMPTS)] == [0, 0, 0]
    assert second.reset(connector=True)
    second.invalidate("step-1")
    again = second.generate(PROMPTS)
    assert [a["external"] for a in again] == HITS
    assert same(again, cold)
    second.close()
    assert_shm_clean(before)
