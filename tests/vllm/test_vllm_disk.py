"""A disk that is full, fails or does not answer: the engine goes on, and caching resumes when that has ended."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, Engine, EngineError, connector, fs, same, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

LENGTH = 8 * BLOCK + 5


def counts(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine("call", function="books", arguments={})["counts"]
    return found


def expect_caching(engine: Engine, oracle: Oracle, first_seed: int, patience_s: float = 60.0) -> None:
    """New prompts are stored and come back, once the tier is tried again."""
    until = time.monotonic() + patience_s
    for seed in range(first_seed, first_seed + 200):
        prompt = tokens(seed, LENGTH)
        expected = oracle("llama", [prompt])
        assert same([engine.one(prompt)], expected)
        engine.drain()
        time.sleep(0.2)
        assert engine.reset(connector=True)
        answer = engine.one(prompt)
        assert same([answer], expected)
        if answer["external"] == 8 * BLOCK:
            return
        assert time.monotonic() < until, f"nothing is cached any more: {counts(engine)}"
    raise AssertionError("nothing is cached any more")


def test_a_full_disk(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Of 1 MiB, mounted for the engine's process alone, which is then given more."""
    root = tmp_path / "kv"
    root.mkdir()
    prompts = [tokens(200 + seed, LENGTH) for seed in range(5)]
    expected = oracle("llama", prompts)
    engine = engines.process()
    try:
        engine("mount", path=str(root), size="1m")
    except EngineError as error:
        pytest.skip(f"cannot mount in a namespace of one's own: {error.message}")
    engine.start("llama", connector(secondary_tiers=[fs(root)], reset_scope="host"))
    for prompt, answer in zip(prompts, expected, strict=True):
        assert same([engine.one(prompt)], [answer])
        engine.drain()
    assert counts(engine)["reason:enospc"] >= 1
    assert engine.reset(connector=True)
    again = engine.generate(prompts)
    assert same(again, expected)
    assert again[0]["external"] == 8 * BLOCK, "what fitted is served"
    engine("grow", path=str(root), size="64m")
    expect_caching(engine, oracle, 300)


@pytest.mark.parametrize("calls", [["preadv"], ["writev"], []], ids=["reads", "writes", "everything"])
def test_a_disk_that_fails(calls: list[str], engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    prompts = [tokens(210 + seed, LENGTH) for seed in range(4)]
    expected = oracle("llama", prompts)
    config = connector(secondary_tiers=[fs(tmp_path / "kv")], reset_scope="host")
    with engines.running("llama", config) as engine:
        assert same(engine.generate(prompts[:2]), expected[:2])
        engine.drain()
        engine("call", function="break_disk", arguments={"number": errno.EIO, "names": calls})
        for _ in range(3):
            assert engine.reset(connector=True)
            for prompt, answer in zip(prompts, expected, strict=True):
                assert same([engine.one(prompt)], [answer])
            engine.drain()
        found = counts(engine)
        assert found.get("reason:eio", 0) + found["lookups_failed"] >= 1
        engine("call", function="mend_disk", arguments={})
        expect_caching(engine, oracle, 400)
        assert engine.reset(connector=True)
        again = engine.generate(prompts[:2])
        assert same(again, expected[:2]) and [a["external"] for a in again] == [8 * BLOCK] * 2, (
            "nothing was thrown away"
        )


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_a_disk_that_does_not_answer(seconds: float, engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    prompts = [tokens(220 + seed, LENGTH) for seed in range(4)]
    expected = oracle("llama", prompts)
    config = connector(
        secondary_tiers=[fs(tmp_path / "kv")],
        reset_scope="host",
        lookup_timeout_s=0.2,
        load_timeout_s=0.2,
        store_timeout_s=0.5,
    )
    with engines.running("llama", config) as engine:
        assert same(engine.generate(prompts[:2]), expected[:2])
        engine.drain()
        engine("call", function="break_disk", arguments={"number": None, "names": []})
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert engine.reset(connector=True)
            begun = time.monotonic()
            assert same(engine.generate(prompts), expected)
            assert time.monotonic() - begun < 30.0, "each deadline is kept"
        found = counts(engine)
        assert found["lookup_timeouts"] + found["promotions_late"] >= 1
        engine("call", function="mend_disk", arguments={})
        expect_caching(engine, oracle, 500, 120.0)
        assert counts(engine)["slots_late"] == 0, "what was quarantined has come back"
