"""What one engine process has stored in the ``fs`` tier serves another: later, at the same time, after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, Engine, assert_shm_clean, connector, fs, most_hits, same, settle, shm_names, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

CHUNK = 2 * BLOCK


@pytest.mark.parametrize("layout", ["files", "segments"])
@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_next_process_is_served(model: str, layout: str, engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """After an orderly end, and after ``kill -9``; nothing is left in shared memory."""
    before = shm_names()
    config = connector(blocks_per_chunk=2, secondary_tiers=[fs(tmp_path / "kv", layout)])
    prompts = [tokens(seed, length) for seed, length in ((0, 3 * CHUNK), (1, 515), (2, 5 * CHUNK - 1))]
    hits = [most_hits(len(p), CHUNK) for p in prompts]
    expected = oracle(model, prompts)

    first = engines.start(model, config)
    assert same(first.generate(prompts), expected)
    first.drain()
    settle(tmp_path / "kv")
    first.close()
    assert_shm_clean(before)

    second = engines.start(model, config)
    answers = second.generate(prompts)
    assert [a["external"] for a in answers] == hits
    assert same(answers, expected)
    extra = tokens(3, 5 * CHUNK + 9)
    second.one(extra)
    second.drain()
    settle(tmp_path / "kv")
    second.kill()
    assert_shm_clean(before)

    third = engines.start(model, config)
    answers = third.generate([*prompts, extra])
    assert [a["external"] for a in answers] == [*hits, 5 * CHUNK]
    assert same(answers, [*expected, *oracle(model, [extra])])


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_killed_while_storing(layout: str, engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Whatever a crash has left half-done is not served."""
    before = shm_names()
    config = connector(secondary_tiers=[fs(tmp_path / "kv", layout)])
    prompts = [tokens(10 + seed, 900) for seed in range(6)]
    expected = oracle("llama", prompts)
    for crash in range(2):
        engine = engines.start("llama", config)
        for prompt in prompts:
            engine.submit(prompt)
        engine.step(count=4 + 3 * crash)
        engine.kill()
        assert_shm_clean(before)
    with engines.running("llama", config) as engine:
        assert same(engine.generate(prompts), expected)
        engine.forget_device()
        assert same(engine.generate(prompts), expected)


def test_two_at_once(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Each serves what the other has stored, while both run; also what both have stored at the same time."""
    config = connector(secondary_tiers=[fs(tmp_path / "kv")])
    mine, yours, both = tokens(20, 333), tokens(21, 444), tokens(22, 555)
    one, other = engines.start("llama", config), engines.start("llama", config)
    one.generate([mine])
    other.generate([yours])
    for engine in (one, other):
        engine.submit(both)
    for engine in (one, other):
        engine.step()
        engine.drain()
    settle(tmp_path / "kv")
    for engine, prompt in ((one, yours), (other, mine)):
        answer = engine.one(prompt)
        assert answer["external"] == most_hits(len(prompt), BLOCK)
        assert same([answer], oracle("llama", [prompt]))
        engine.forget_device()
        assert same([engine.one(both)], oracle("llama", [both]))


def test_larger_than_the_host_cache(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """More than host memory holds: what was evicted there comes from fs, one prefix from both."""
    slots, block_bytes = 12, 4 * 2 * 2 * 32 * 4 * BLOCK
    config = connector(slots * block_bytes, secondary_tiers=[fs(tmp_path / "kv")])
    prompts = [tokens(30 + seed, 8 * BLOCK + 5) for seed in range(4)]
    expected = oracle("llama", prompts)
    with engines.running("llama", config) as engine:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert same([engine.one(prompt)], [answer])
            engine.drain()
            settle(tmp_path / "kv")
        for _ in range(2):
            engine.forget_device()
            again = engine.generate(prompts)
            assert [a["external"] for a in again] == [8 * BLOCK] * 4
            assert same(again, expected)
        # A prefix larger than host memory: as much as fits is served, and the request ends.
        large = tokens(34, 30 * BLOCK)
        engine.one(large)
        engine.drain()
        settle(tmp_path / "kv")
        engine.forget_device()
        answer = engine.one(large)
        assert answer["external"] <= slots * BLOCK
        assert same([answer], oracle("llama", [large]))


def test_a_request_bounds_its_loads_and_stores(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """The fields of ``kv_transfer_params`` that vLLM's own offloading has."""
    config = connector(secondary_tiers=[{**fs(tmp_path / "kv"), "locality": "LOCAL"}])
    prompt = tokens(80, 6 * BLOCK + 5)
    expected = oracle("llama", [prompt])

    def loaded(engine: Engine, **params: object) -> int:
        """Blocks. What a question computes is not stored, so that it does not change the next one's answer."""
        engine.forget_device()
        params = {"max_offload_tokens": 0, **params}
        answer = engine.one(prompt, extra_args={"kv_transfer_params": params})
        assert same([answer], expected)
        return int(answer["external"]) // BLOCK

    with engines.running("llama", config) as engine:
        assert loaded(engine) == 0
        assert loaded(engine, max_offload_tokens=4 * BLOCK + 1) == 0
        assert [loaded(engine, max_load_tokens=most) for most in (2 * BLOCK + 3, 0, 9 * BLOCK)] == [2, 0, 4]
        assert loaded(engine) == 4
        settle(tmp_path / "kv")
    with engines.running("llama", config) as engine:
        for none in ([], [{"medium": "CPU"}], [{"medium": "storage", "locality": "remote"}]):
            assert loaded(engine, kv_load_tiers=none) == 0
        assert loaded(engine, kv_load_tiers=[{"medium": "CPU"}, {"locality": "local"}]) == 4
        assert loaded(engine, kv_load_tiers=[]) == 4, "what lies in the host cache serves every request"
