"""A request that waits for its prefix has no device blocks, costs running requests nothing, and may be aborted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_harness import BLOCK, Engine, connector, fs, most_hits, same, settle, tokens, wait_for

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

LOAD_S = 0.5
LENGTH = 60 * BLOCK + 5
DECODED = 200


def _config(root: Path) -> dict[str, Any]:
    slow = {
        "type": "slow",
        "module_path": "tierkv.testing.faults:LatencyTier",
        "inner": fs(root),
        "load_delay_s": LOAD_S,
    }
    return connector(secondary_tiers=[slow], reset_scope="host")


def _only_in_the_tier(engine: Engine, prompt: list[int], root: Path) -> None:
    engine.one(prompt)
    engine.drain()
    settle(root)
    wait_for(lambda: not _books(engine)["unanswered"], 20.0, "the stores")
    assert engine.reset(connector=True)


def _books(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine("call", function="books", arguments={})
    return found


def _blocks(engine: Engine) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = engine("call", function="blocks_of_requests", arguments={})
    return {name.rpartition("-")[0]: blocks for name, blocks in found.items()}


def test_no_device_block_is_held_for_one_who_waits(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """It has none until all of its prefix is in host memory, while others are computed with those that are left."""
    prompt, others = tokens(800, LENGTH), [tokens(801 + i, 2 * BLOCK + 3) for i in range(2)]
    with engines.running("gpt-oss", _config(tmp_path / "kv")) as engine:
        _only_in_the_tier(engine, prompt, tmp_path / "kv")
        running = [engine.submit(other, max_tokens=DECODED) for other in others]
        # The tier is asked for them first, so they may wait for a few steps too.
        asked = time.monotonic()
        while not all(_blocks(engine)[name][1] for name in running):
            assert time.monotonic() - asked < 20.0 and not engine.step(count=1)["answers"]
        waiting = engine.submit(prompt)
        answers: dict[str, Any] = {}
        asked, steps = time.monotonic(), 0
        while time.monotonic() - asked < 0.8 * LOAD_S:
            answers |= engine.step(count=1)["answers"]
            steps += 1
            held = {name: count for name, (_, count) in _blocks(engine).items()}
            assert held[waiting] == 0
            assert all(held[name] > 0 for name in running if name not in answers)
            assert engine("free_blocks") == engine.device_blocks - sum(held.values())
        assert steps > 5 and waiting not in answers
        answers |= engine.step()["answers"]
        assert engine("metrics")["external_prefix_cache_hits"] == most_hits(LENGTH, BLOCK)
        assert same([answers[waiting]], oracle("gpt-oss", [prompt]))
        assert same([answers[name] for name in running], oracle("gpt-oss", others, max_tokens=DECODED))
        engine.drain()
        assert _books(engine)["counts"]["slots_pinned"] == 0


def test_one_who_is_aborted_while_it_waits_leaves_nothing_pinned(engines: Engines, tmp_path: Path) -> None:
    prompt = tokens(810, LENGTH)
    with engines.running("llama", _config(tmp_path / "kv")) as engine:
        for times, steps in enumerate((1, 5, 20)):
            _only_in_the_tier(engine, prompt, tmp_path / "kv")
            promoted = _books(engine)["counts"]["promotions"]
            other = engine.submit(tokens(811 + times, BLOCK + 3), max_tokens=DECODED)
            name = engine.submit(prompt)
            engine.step(count=steps)
            assert _blocks(engine)[name][1] == 0
            engine("abort", requests=[name])
            counts = _books(engine)["counts"]
            assert counts["bytes_waiting"] == 0 and counts["requests"] <= 1
            assert set(engine.step()["answers"]) == {other}
            engine.drain()
            # What the tier was asked for still comes, and is there for whoever asks next.
            wait_for(lambda: not _books(engine)["unanswered"], 20.0, "the tier's reports")
            counts = _books(engine)["counts"]
            assert counts["slots_pinned"] == counts["slots_writing"] == counts["requests"] == counts["slots_late"] == 0
            assert engine("free_blocks") == engine.device_blocks
            assert engine.one(prompt)["external"] == most_hits(LENGTH, BLOCK)
            assert _books(engine)["counts"]["promotions"] - promoted == LENGTH // BLOCK
