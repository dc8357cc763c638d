"""Everything at once, for as long as one likes: faulty tiers, little memory, aborts, resets; and the answers are right.

``TIERKV_SOAK_S`` is how many seconds the long one takes in all (300). The short one runs with all other tests.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import (
    BLOCK,
    EXTENSION,
    Engine,
    EngineError,
    assert_shm_clean,
    connector,
    shm_names,
    tokens,
    wait_for,
)

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

LONG_S = float(os.environ.get("TIERKV_SOAK_S", "300"))
SHORT_S = 20.0

#: Device blocks: enough for three or four of the requests. The groups of a model share them.
DEVICE_BLOCKS = {"llama": 22, "gpt-oss": 36}
#: Host memory for about a fifth of what all prompts together need.
HOST_BYTES = {"llama": 3 << 20, "gpt-oss": 3 << 20}
DECODED = 12
TOGETHER = 6

FAULTS = {
    "raises": 0.04,
    "fails": 0.06,
    "partial": 0.1,
    "never": 0.0005,
    "late": 0.05,
    "twice": 0.1,
    "malformed": 0.002,
    "wrong_sums": 0.1,
    "lookup_raises": 0.04,
    "lookup_blocks": 0.03,
    "lookup_invents": 0.1,
    "lookup_denies": 0.1,
    "reports_raise": 0.1,
    "late_s": 0.6,
}


def _tiers(seed: int) -> list[dict[str, Any]]:
    module = "tierkv.testing.faults:"
    delays = {"load_delay_s": 0.02, "store_delay_s": 0.02, "lookup_delay_s": 0.002}
    return [
        {"type": "slow", "module_path": module + "LatencyTier", "inner": {"type": "memory"}, **delays},
        {"type": "faulty", "module_path": module + "FaultyTier", "inner": {"type": "memory"}, "seed": seed, **FAULTS},
    ]


def _prompts() -> list[list[int]]:
    """Families that share one to four blocks, of different lengths."""
    roots = [tokens(7000 + i, (1 + i) * BLOCK) for i in range(4)]
    return [roots[i % 4] + tokens(7100 + i, 11 + 17 * (i % 11)) for i in range(40)]


class Soak:
    """Requests that come, share, are aborted and answered, while everything is reset now and then."""

    def __init__(self, engine: Engine, prompts: list[list[int]], expected: list[list[int]], seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._engine = engine
        self._prompts = prompts
        self._expected = expected
        self._draw = random.Random(seed)
        self._running: dict[str, int] = {}

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while len(self._running) < TOGETHER:
                number = self._draw.randrange(len(self._prompts))
                name = self._engine.submit(self._prompts[number], max_tokens=DECODED, logprobs=None)
                self._running[name] = number
                self.done["requests"] += 1
            self._step(self._draw.randint(1, 15))
            self._disturb()

    def finish(self) -> None:
        while self._running:
            self._step(50)
        self._engine.drain()

    def _step(self, count: int) -> None:
        run = self._engine.step(count=count)
        self.done["steps"] += len(run["samples"])
        for name, answer in run["answers"].items():
            number = self._running.pop(name)
            assert answer["tokens"] == self._expected[number], f"{name}, prompt {number}, after {self.done}"
            self.done["answers"] += 1

    def _disturb(self) -> None:
        chance = self._draw.random()
        if chance < 0.08:
            name = self._draw.choice(sorted(self._running) or ["nobody"])
            self._engine("abort", requests=[name])
            self.done["aborts"] += self._running.pop(name, None) is not None
        elif chance < 0.2:
            self._reset("device resets", connector=False)
        elif chance < 0.24:
            self._reset("resets", connector=True)
        elif chance < 0.25:
            self._engine.invalidate(self._draw.choice(["one", "two", None]))
            self.done["invalidations"] += 1

    def _reset(self, kind: str, connector: bool) -> None:
        try:
            self.done[kind] += self._engine.reset(running=True, connector=connector)
        except EngineError as error:  # vLLM's own: not while blocks wait to be filled
            assert "waiting for remote KV transfer" in str(error)
            self.done["refused resets"] += 1


def _books(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine("call", function="books", arguments={})
    return found


def _at_rest(engine: Engine) -> dict[str, Any]:
    """The books when tiers have reported what they ever will."""
    wait_for(lambda: _books(engine)["unanswered"] == 0, 30.0, "the tiers' reports")
    return _books(engine)


def _soak(model: str, seconds: float, seed: int, engines: Engines, oracle: Oracle) -> None:
    prompts = _prompts()
    expected = [a["tokens"] for a in oracle(model, prompts, max_tokens=DECODED, logprobs=None)]
    config = connector(
        HOST_BYTES[model],
        secondary_tiers=_tiers(seed),
        offload_prompt_only=False,
        reset_scope="host",
        lookup_timeout_s=0.2,
        load_timeout_s=0.3,
        store_timeout_s=0.4,
    )
    options: dict[str, Any] = {
        "num_gpu_blocks_override": DEVICE_BLOCKS[model],
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        **EXTENSION,
    }
    names = shm_names()
    with engines.running(model, config, **options) as engine:
        copies = random.Random(seed)
        for store in (False, True):
            which = [n for n in range(1_000_000) if copies.random() < 0.01]
            engine("call", function="fail_copies", arguments={"store": store, "which": which})
        soak = Soak(engine, prompts, expected, seed)
        soak.run(min(3.0, seconds / 3))  # until every thread has been started
        before = _books(engine)
        soak.run(seconds - min(3.0, seconds / 3))
        soak.finish()
        books = _at_rest(engine)
        counts = {name: count for name, count in books["counts"].items() if count}
        hits = engine("metrics")["external_prefix_cache_hits"]
        print(f"\n{model}, {seconds:.0f} s: {dict(soak.done)}; {hits:.0f} tokens reloaded\n{books['faults']}\n{counts}")
        assert engine("free_blocks") == engine.device_blocks
        assert books["counts"]["requests"] == books["counts"]["bytes_waiting"] == books["counts"]["slots_writing"] == 0
        assert books["counts"]["slots_pinned"] == books["silent"]
        assert set(books["threads"]) <= set(before["threads"])
        assert books["descriptors"] <= before["descriptors"]
        assert hits > 0 and soak.done["answers"] > 0
        assert soak.done["answers"] + soak.done["aborts"] == soak.done["requests"]
        assert len(books["faults"]) >= 8, "not much has happened"
    assert_shm_clean(names)


@pytest.mark.parametrize("model", DEVICE_BLOCKS)
def test_short_soak(model: str, engines: Engines, oracle: Oracle) -> None:
    _soak(model, SHORT_S / len(DEVICE_BLOCKS), 1, engines, oracle)


@pytest.mark.soak
@pytest.mark.parametrize("model", DEVICE_BLOCKS)
def test_soak(model: str, engines: Engines, oracle: Oracle) -> None:
    _soak(model, LONG_S / len(DEVICE_BLOCKS), int(time.time()), engines, oracle)
