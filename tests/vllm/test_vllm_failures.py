"""Copies that fail in the worker: the request is computed instead, and the engine lives on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import BLOCK, connector, fs, most_hits, same, settle, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_failed_load_is_recomputed(model: str, engines: Engines, oracle: Oracle) -> None:
    prompts = [tokens(seed, 400) for seed in range(3)]
    expected = oracle(model, prompts)
    hits = most_hits(400, BLOCK)
    with engines.running(model, connector()) as engine:
        engine.generate(prompts)
        engine.forget_device()
        engine("call", function="fail_copies", arguments={"store": False, "which": [1]})
        answers = engine.generate(prompts)
        assert same(answers, expected)
        # What was recomputed is on the device and, after the failure, in host memory again.
        engine.forget_device()
        again = engine.generate(prompts)
        assert [a["external"] for a in again] == [hits] * 3
        assert same(again, expected)


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_every_load_fails(model: str, engines: Engines, oracle: Oracle) -> None:
    """Also of many requests at once; each is computed, and its blocks are freed."""
    prompts = [tokens(10 + seed, 300 + seed) for seed in range(5)]
    expected = [a["tokens"] for a in oracle(model, prompts)]
    with engines.running(model, connector()) as engine:
        engine.generate(prompts)
        engine.forget_device()
        engine("call", function="fail_copies", arguments={"store": False, "which": list(range(100))})
        for _ in range(2):
            assert [a["tokens"] for a in engine.generate(prompts, together=True)] == expected
            engine.forget_device()
            assert engine("free_blocks") == engine.device_blocks


def test_failed_store_is_a_miss(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Neither the host cache nor a tier serves a chunk whose store has failed."""
    prompts = [tokens(20 + seed, 400) for seed in range(3)]
    expected = oracle("llama", prompts)
    config = connector(secondary_tiers=[fs(tmp_path / "kv")])
    with engines.running("llama", config) as engine:
        engine("call", function="fail_copies", arguments={"store": True, "which": [1]})
        assert same(engine.generate(prompts), expected)
        engine.drain()
        settle(tmp_path / "kv")
        for hits in ([384, 0, 384], [384] * 3):  # the second time around it has been stored
            engine.forget_device()
            answers = engine.generate(prompts)
            assert [a["external"] for a in answers] == hits
            assert same(answers, expected)


def test_tier_that_fails(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Loads from a tier that fail, come late or never: misses, and right answers."""
    prompts = [tokens(30 + seed, 300) for seed in range(4)]
    expected = oracle("gpt-oss", prompts)
    for fault in ("fails", "late", "never"):
        config = connector(secondary_tiers=[_faulty(tmp_path, fault)], reset_scope="host", load_timeout_s=0.5)
        with engines.running("gpt-oss", config) as engine:
            engine.generate(prompts)
            engine.drain()
            settle(tmp_path / fault)
            assert engine.reset(connector=True)
            answers = engine.generate(prompts)
            assert same(answers, expected), fault
            assert any(a["external"] < 288 for a in answers), f"{fault}: no load was hit"


def _faulty(tmp_path: Path, fault: str) -> dict[str, Any]:
    path = "tierkv.testing.faults:FaultyTier"
    tier = {"type": "faulty", "module_path": path, "inner": fs(tmp_path / fault), "seed": 1, "on": "loads", fault: 0.5}
    return {**tier, "late_s": 1.0} if fault == "late" else tier
