"""When device blocks are held, shown by the trace, the engine's block pool and a tier that is slow."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_harness import BLOCK, connector, fs, same, tokens, wait_for

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

STORE_S, LOAD_S = 2.0, 1.0


def _slow(root: Path) -> dict[str, Any]:
    return {
        "type": "latency",
        "module_path": "tierkv.testing.faults:LatencyTier",
        "inner": fs(root),
        "store_delay_s": STORE_S,
        "load_delay_s": LOAD_S,
    }


class Timeline:
    """The events of a trace, as far as they have been written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def events(self, name: str, since: float = 0.0) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        return [e for e in lines if e["event"] == name and e["t"] >= since]

    def time(self, name: str, since: float = 0.0) -> float:
        """When the last ``name`` since then happened."""
        found = self.events(name, since)
        assert found, f"no {name!r} in {self._path.read_text()}"
        return float(max(e["t"] for e in found))


def test_device_blocks_do_not_wait_for_a_slow_tier(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    trace = Timeline(tmp_path / "trace.jsonl")
    prompt = tokens(0, 9 * BLOCK + 5)
    expected = oracle("llama", [prompt])
    config = connector(
        secondary_tiers=[_slow(tmp_path / "kv")], trace_path=str(tmp_path / "trace.jsonl"), reset_scope="host"
    )
    with engines.running("llama", config) as engine:
        # Store. The blocks are free, and can be given away, while the tier is still at it.
        began = time.monotonic()
        engine.submit(prompt)
        run = engine.step()
        engine.drain()
        assert same(list(run["answers"].values()), expected)
        assert engine.reset()
        held = [blocks for _, blocks in run["samples"] if blocks < engine.device_blocks]
        freed, blocks = run["samples"][-1]
        assert held, "the request has never held a block"
        assert blocks == engine.device_blocks, "blocks are held after the request has ended"
        wait_for(lambda: sum(e["chunks"] for e in trace.events("cascaded")) >= 9, 20.0, "the slow tier's stores")
        planned, copied, cascaded = (trace.time(e) for e in ("store_planned", "store_copied", "cascaded"))
        first_cascaded = min(e["t"] for e in trace.events("cascaded"))
        assert began < planned < copied < first_cascaded <= cascaded
        assert first_cascaded - planned >= STORE_S
        assert freed < first_cascaded

        # Load, from the tier alone. No block is allocated before the last chunk is in host memory.
        assert engine.reset(connector=True)
        asked = time.monotonic()
        engine.submit(prompt)
        run = engine.step(pause=0.005)
        assert same(list(run["answers"].values()), expected)
        found, promoted, loading, loaded = (
            trace.time(e, asked) for e in ("lookup_found", "promoted", "load_planned", "loaded")
        )
        assert asked < found <= promoted <= loading <= loaded
        assert promoted - found >= LOAD_S
        waiting = [blocks for t, blocks in run["samples"] if t < promoted]
        assert len(waiting) > 3, "the engine was not free to step while the tier was reading"
        assert set(waiting) == {engine.device_blocks}
        assert min(blocks for t, blocks in run["samples"] if t >= loading) < engine.device_blocks
        _report(began, planned, freed, copied, cascaded, asked, found, promoted, loading, loaded)


def test_a_slow_tier_delays_nobody_else(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """While one request waits for a slow tier, others are computed and answered."""
    slow, quick = tokens(10, 5 * BLOCK + 5), tokens(11, 5 * BLOCK + 5)
    config = connector(secondary_tiers=[_slow(tmp_path / "kv")], reset_scope="host")
    with engines.running("llama", config) as engine:
        engine.one(slow)
        engine.drain()
        wait_for(lambda: sum(1 for p in (tmp_path / "kv").rglob("*") if p.is_file()) >= 5, 20.0, "the stores")
        time.sleep(0.5)
        assert engine.reset(connector=True)
        waiting = engine.submit(slow)
        engine.step(count=3)
        answer = engine.submit(quick)
        answers: dict[str, Any] = {}
        while answer not in answers:
            answers |= engine.step(count=1)["answers"]
        assert waiting not in answers
        answers |= engine.step(pause=0.005)["answers"]
        assert same([answers[waiting], answers[answer]], oracle("llama", [slow, quick]))


def _report(began: float, planned: float, freed: float, copied: float, cascaded: float, *load: float) -> None:
    """For people: ``pytest -s`` shows it."""
    store = {"planned": planned, "host copy done": copied, "device blocks free": freed, "tier done": cascaded}
    print("\nstore:", ", ".join(f"{name} {1000 * (t - began):.0f} ms" for name, t in store.items()))
    names = ("found", "in host memory", "device blocks allocated", "loaded")
    print("load:", ", ".join(f"{n} {1000 * (t - load[0]):.0f} ms" for n, t in zip(names, load[1:], strict=True)))
