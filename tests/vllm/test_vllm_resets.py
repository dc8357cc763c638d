"""Sleep and cache resets while stores and loads are under way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import BLOCK, Engine, EngineError, connector, fs, most_hits, same, settle, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_harness import Engines, Oracle


def _slow_store(root: Path) -> dict[str, Any]:
    path = "tierkv.testing.faults:LatencyTier"
    return {"type": "latency", "module_path": path, "inner": fs(root), "store_delay_s": 1.0}


def _sleep(engine: Engine) -> bool:
    engine("sleep", level=1)
    return bool(engine("wake_up"))


def _reset_all(engine: Engine) -> bool:
    return engine.reset(running=True, connector=True)


@pytest.mark.parametrize("reset", [_sleep, _reset_all])
def test_reset_while_storing(reset: Callable[[Engine], bool], engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """It succeeds at any step of a prefill; nothing from before it is served; what is computed is right."""
    prompts = [tokens(seed, 700 + 10 * seed) for seed in range(3)]
    expected = oracle("llama", prompts)
    config = connector(secondary_tiers=[_slow_store(tmp_path / "kv")])
    # Short steps: each prompt takes eleven and more, and each step plans stores.
    with engines.running("llama", config, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        for steps in (1, 2, 5, 14):
            assert reset(engine)
            names = [engine.submit(prompt) for prompt in prompts]
            run = engine.step(count=steps)
            assert not run["answers"]
            assert reset(engine)
            if reset is _sleep:  # has aborted them; an engine in its caller's process does not tell the caller
                engine("abort", requests=names)
            else:  # they start again
                answers = engine.step()["answers"]
                assert [answers[name]["tokens"] for name in names] == [a["tokens"] for a in expected]
            # Without a step in between, so that the last stores are not even submitted.
            assert reset(engine)
            assert engine("free_blocks") == engine.device_blocks
            answers = engine.generate(prompts)
            assert [a["external"] for a in answers] == [0] * 3, f"served after a reset in step {steps}"
            assert same(answers, expected)
            engine.forget_device()
            again = engine.generate(prompts)
            assert [a["external"] for a in again] == [most_hits(len(p), BLOCK) for p in prompts]
            assert same(again, expected)


def test_device_reset_while_storing(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Blocks that are freed and written again at once: the stores that read them are finished first."""
    prompts = [tokens(20 + seed, 10 * BLOCK + 3) for seed in range(6)]
    expected = oracle("llama", prompts)
    config = connector(secondary_tiers=[_slow_store(tmp_path / "kv")])
    # Memory for one request at a time, so that the next one takes the blocks of the one before.
    with engines.running("llama", config, num_gpu_blocks_override=13, max_model_len=384) as engine:
        engine("call", function="slow_copies", arguments={"store": True, "seconds": 0.1})
        for prompt in prompts:
            engine.one(prompt)
            assert engine.reset()
        engine.forget_device()
        again = engine.generate(prompts)
        assert [a["external"] for a in again] == [10 * BLOCK] * 6
        assert same(again, expected)


def test_reset_while_loading(engines: Engines, oracle: Oracle) -> None:
    """vLLM refuses it while blocks wait to be filled, whatever the connector; then the load ends as it would have."""
    prompt = tokens(50, 600)
    expected = oracle("llama", [prompt])
    with engines.running("llama", connector()) as engine:
        engine.one(prompt)
        engine("call", function="slow_copies", arguments={"store": False, "seconds": 1.0})
        for reset in (_sleep, _reset_all, Engine.reset):
            engine.forget_device()
            name = engine.submit(prompt)
            run = engine.step(count=3, pause=0.01)
            assert run["samples"][-1][1] < engine.device_blocks, "no load is under way"
            if reset is Engine.reset:
                assert not engine.reset()
            else:
                with pytest.raises(EngineError, match="waiting for remote KV transfer"):
                    reset(engine)
            if reset is _sleep:
                assert engine("wake_up")
                engine("abort", requests=[name])
            else:
                assert same(list(engine.step(pause=0.01)["answers"].values()), expected)
            engine.drain()
            assert engine("free_blocks") == engine.device_blocks
            assert same([engine.one(prompt)], expected)


def test_reset_forgets_tiers_and_restart_does_not(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """After ``reset_connector`` not even fs serves what it had; a new process has the weights of the files again."""
    config = connector(secondary_tiers=[fs(tmp_path / "kv")])
    prompt = tokens(30, 300)
    expected = oracle("llama", [prompt])
    with engines.running("llama", config) as engine:
        engine.one(prompt)
        engine.drain()
        settle(tmp_path / "kv")
        assert engine.reset(connector=True)
        answer = engine.one(prompt)
        assert answer["external"] == 0
        assert same([answer], expected)
    with engines.running("llama", config) as engine:
        answer = engine.one(prompt)
        assert answer["external"] == most_hits(len(prompt), BLOCK)
        assert same([answer], expected)


def test_abort_while_loading(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Requests that are aborted while they wait for a tier leave nothing behind."""
    tier = {**_slow_store(tmp_path / "kv"), "store_delay_s": 0.0, "load_delay_s": 0.5}
    config = connector(secondary_tiers=[tier], reset_scope="host")
    prompt = tokens(40, 300)
    expected = oracle("llama", [prompt])
    with engines.running("llama", config) as engine:
        engine.one(prompt)
        engine.drain()
        settle(tmp_path / "kv")
        for steps in (1, 3, 60):
            assert engine.reset(connector=True)
            name = engine.submit(prompt)
            engine.step(count=steps, pause=0.005)
            engine("abort", requests=[name])
            engine.drain()
            assert engine("free_blocks") == engine.device_blocks
            assert same([engine.one(prompt)], expected)
            engine.drain()
