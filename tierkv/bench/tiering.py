"""``tierkv bench tiering``: what a tier below the host costs the scheduler's thread.

* *life*: the whole life of a chunk through a tier: stored, cascaded, forgotten by the host, found in the tier,
  promoted, loaded. Only the calls on the scheduler's thread are timed; between its steps it sleeps.
* *prefix*: a prefix that is larger than the host: how much of it is served, after how many steps and reads.
* *step*: how long the manager takes in each step of an engine that stores and loads, while another request waits for
  much that is promoted from a slow tier, and without that.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.bench import BenchError
from tierkv.bench.report import Figure, Report, Stopwatch, no_collections
from tierkv.bench.sides import Request, Setup, Side, import_vllm, open_sides, some_hashes

#: The length of an engine's step.
STEP_S = 0.02

#: An answer that takes that many steps will not come.
TOO_MANY_STEPS = 10_000

#: *life*: chunks of a request, a prompt of 65,536 tokens; the tiers, with the seconds that a load takes longer.
PREFIX = 4096
LIFE_TIERS = {"memory": ("memory", 0.0), "memory + 50 ms": ("memory", 0.05), "fs": ("fs", 0.0)}

#: *prefix*: chunks that fit in the host, chunks of the prefix, steps in which an answer is awaited, and their length.
ROOM, PREFIXES, PATIENCE, SHORT_STEP_S = 16, (17, 32, 1000), 200, 0.002

#: *step*: bytes of a chunk; chunks that a running request stores in a step; chunks that another one loads in it; slots
#: beside those that are promoted into.
CHUNK_BYTES, STORED, LOADED, SPARE = 64 << 10, 16, 256, 1024

#: (measure, percentile, which of a stopwatch's times)
STEP_MEASURES = (
    ("p50", 50, "wall"),
    ("p99", 99, "wall"),
    ("p99 on a processor", 99, "cpu"),
    ("longest", 100, "wall"),
)

NOTES = (
    "median over the rounds (smallest–largest); the ratio of a round is that of its two turns; no garbage collection",
    f"life: on the clock of the scheduler's thread, steps of {1e3 * STEP_S:.0f} ms; vLLM's memory tier is its example, "
    "which moves no bytes",
    f"prefix: the host has room for {ROOM} chunks; never: no answer within {PATIENCE} steps",
    f"step: of {1e3 * STEP_S:.0f} ms; a request stores {STORED} chunks and one loads {LOADED}; promoting: until it is "
    "loaded; alone: as many steps without it",
    "on a processor: of the scheduler's thread alone; the rest of its time it waits for other threads",
)


@dataclass(frozen=True, kw_only=True)
class TieringOptions:
    """chunks: that fit in the host, for *life*. batch: chunks stored in one step.

    promote_bytes: what is promoted in *step*, from a tier that takes ``latency_s`` seconds longer than it does.
    """

    chunks: int
    batch: int
    policies: tuple[str, ...]
    against_vllm: bool = False
    rounds: int = 5
    promote_bytes: int = 1 << 30
    latency_s: float = 0.5


def run(options: TieringOptions, report: Report) -> None:
    """Measure everything.

    Raises:
        MissingExtraError: vLLM is wanted and not installed.
        ConfigError: a policy is unknown.
        BenchError: something did not do what it was to do, so that its time means nothing.
    """
    if options.against_vllm:
        import_vllm()
    report.start(
        {
            "chunks": options.chunks,
            "batch": options.batch,
            "policy": list(options.policies),
            "against": "vllm" if options.against_vllm else None,
            "rounds": options.rounds,
            "promote_bytes": options.promote_bytes,
            "latency_s": options.latency_s,
        }
    )
    for policy in options.policies:
        for tier in LIFE_TIERS:
            _measure_life(options, policy, tier, report)
        for count in PREFIXES:
            _measure_prefix(options, policy, count, report)
        _measure_steps(options, policy, report)
    report.close(NOTES)


@contextlib.contextmanager
def opened(setup: Setup, against_vllm: bool) -> Iterator[list[Side]]:
    """The sides, and no garbage collection while they are open."""
    sides = open_sides(setup, against_vllm)
    try:
        with no_collections():
            yield sides
    finally:
        for side in sides:
            side.close()


# ── the life of a chunk ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Life:
    """Time on the scheduler's thread in the parts of it, and in how many steps the request asked."""

    store: Stopwatch
    lookup: Stopwatch
    load: Stopwatch
    steps: int

    def values(self, count: int) -> dict[str, float]:
        """By measure, for each of ``count`` chunks, in µs."""
        parts = {"store": self.store, "lookup": self.lookup, "load": self.load}
        found = {f"life: {part}": 1e6 * watch.wall / count for part, watch in parts.items()}
        found["life: all"] = sum(found.values())
        found["life: on a processor"] = 1e6 * sum(watch.cpu for watch in parts.values()) / count
        return {**found, "life: steps to the answer": float(self.steps)}

    def promotion(self, count: int) -> dict[str, float]:
        """As ``values``, of what comes after the chunks were stored: lookups and load."""
        return {
            "promotion": 1e6 * (self.lookup.wall + self.load.wall) / count,
            "promotion: on a processor": 1e6 * (self.lookup.cpu + self.load.cpu) / count,
            "promotion: steps to the answer": float(self.steps),
        }


def live(side: Side, hashes: list[bytes], batch: int) -> Life:
    """The life of the chunks of a prompt that is new to ``side``."""
    store, lookup, load = Stopwatch(), Stopwatch(), Stopwatch()
    writer = side.unnamed(hashes)
    for first in range(0, len(hashes), batch):
        with store:
            side.store(writer, first, min(first + batch, len(hashes)))
            side.end_step()
    with store:
        side.finish(writer)
    side.rest(store, STEP_S)
    side.forget_host()
    reader = side.unnamed(hashes)
    steps, answer = 0, None
    while answer is None:
        if steps:
            time.sleep(STEP_S)
        steps += 1
        _expect(steps < TOO_MANY_STEPS, f"{side.name}: no answer after {steps} steps")
        with lookup:
            answer = side.ask(reader)
            if answer is None:
                side.end_step()
    _expect(answer == len(hashes), f"{side.name}: {answer} of {len(hashes)} chunks promoted")
    with load:
        side.load(reader, answer)
        side.finish(reader)
        side.end_step()
    return Life(store, lookup, load, steps)


def _measure_life(options: TieringOptions, policy: str, tier: str, report: Report) -> None:
    count = max(1, min(PREFIX, options.chunks // 4))
    rng = np.random.default_rng(1)
    kind, delay = LIFE_TIERS[tier]
    values: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as root_dir:
        setup = Setup(slots=options.chunks, policy=policy, tier=kind, root_dir=root_dir, load_delay_s=delay)
        with opened(setup, options.against_vllm) as sides:
            for number in range(options.rounds):
                hashes = some_hashes(count, rng)
                for side in sides:
                    report.progress(f"{policy}, {tier}: life, round {number + 1}, {side.name}")
                    for measure, value in live(side, hashes, options.batch).values(count).items():
                        values.setdefault(measure, {}).setdefault(side.name, []).append(value)
    for measure, found in values.items():
        steps = measure.endswith("answer")
        unit = "steps" if steps else "µs/chunk"
        report.add(
            Figure(
                measure=measure,
                case=f"{policy}, {tier}",
                unit=unit,
                values=found,
                compared=not steps,
                details={"chunks": count},
            )
        )


# ── a prefix that is larger than the host ────────────────────────────────────────────────────────────────────────────


def serve(side: Side, hashes: list[bytes]) -> tuple[int | None, int, int]:
    """Chunks served of a prompt that the tier has and the host cannot hold; chunks read for it; steps.

    None for an answer that does not come.
    """
    writer = side.unnamed(hashes)
    for first in range(0, len(hashes), ROOM // 2):
        side.store(writer, first, min(first + ROOM // 2, len(hashes)))
        side.rest(step_s=SHORT_STEP_S)
    side.finish(writer)
    side.forget_host()
    reader = side.unnamed(hashes)
    before = side.reads()
    steps, answer = 0, None
    while answer is None and steps < PATIENCE:
        steps += 1
        answer = side.ask(reader)
        side.end_step()
        time.sleep(SHORT_STEP_S)
    if answer:
        side.load(reader, answer)
    side.finish(reader)
    return answer, side.reads() - before, steps


def _measure_prefix(options: TieringOptions, policy: str, count: int, report: Report) -> None:
    hashes = some_hashes(count, np.random.default_rng(count))
    served: dict[str, list[float | None]] = {}
    reads: dict[str, list[float | None]] = {}
    steps: dict[str, list[float | None]] = {}
    for _ in range(min(options.rounds, 3)):
        with opened(Setup(slots=ROOM, policy=policy, tier="memory"), options.against_vllm) as sides:
            for side in sides:
                report.progress(f"{policy}: a prefix of {count} chunks, {side.name}")
                answer, read, asked = serve(side, hashes)
                served.setdefault(side.name, []).append(answer)
                reads.setdefault(side.name, []).append(read)
                steps.setdefault(side.name, []).append(asked)
    case = f"{policy}, {count} chunks"
    for measure, unit, values in (("served", "chunks", served), ("read", "chunks", reads), ("asked", "steps", steps)):
        report.add(Figure(measure=f"prefix: {measure}", case=case, unit=unit, values=values, compared=False))


# ── an engine that steps ─────────────────────────────────────────────────────────────────────────────────────────────


class Stepping:
    """A side within an engine: in each step a request stores, another one loads, and one may wait.

    Thread safety: none.
    """

    def __init__(self, side: Side, promoted: list[bytes], batch: int, rng: np.random.Generator) -> None:
        """Puts ``promoted``, which fits in the host, into the tier."""
        self._side = side
        self._promoted = promoted
        self._rng = rng
        self._resident = some_hashes(LOADED, rng)
        self._put(promoted, batch)
        self._runner, self._stored = self._new_runner(), 0

    def run(self, steps: int | None) -> list[Stopwatch]:
        """What the manager takes in each of ``steps``; None: until what waits has been loaded."""
        side = self._side
        side.rest()
        side.forget_host()
        self._put(self._resident, LOADED)
        waiting = side.unnamed(self._promoted) if steps is None else None
        times: list[Stopwatch] = []
        while waiting is not None or (steps is not None and len(times) < steps):
            _expect(len(times) < TOO_MANY_STEPS, f"{side.name}: no answer after {len(times)} steps")
            spent, loaded = self._step(waiting)
            waiting = None if loaded else waiting
            times.append(spent)
            time.sleep(max(0.0, STEP_S - spent.wall))
        return times

    def _step(self, waiting: Request | None) -> tuple[Stopwatch, bool]:
        """What a step's calls take, and whether ``waiting`` has been loaded in it."""
        side, watch = self._side, Stopwatch()
        if self._stored == len(self._runner.hashes):
            side.finish(self._runner)
            self._runner, self._stored = self._new_runner(), 0
        reader = side.unnamed(self._resident)
        found: int | None = None
        with watch:
            side.store(self._runner, self._stored, self._stored + STORED)
            answer = side.ask(reader)
            _expect(answer == LOADED, f"{side.name}: {answer} of {LOADED} chunks in the host")
            side.load(reader, LOADED)
            side.finish(reader)
            if waiting is not None:
                found = side.ask(waiting)
                if found is not None:
                    _expect(found == len(self._promoted), f"{side.name}: {found} of {len(self._promoted)} promoted")
                    side.load(waiting, found)
                    side.finish(waiting)
            side.end_step()
        self._stored += STORED
        return watch, found is not None

    def _put(self, hashes: list[bytes], batch: int) -> None:
        """Store ``hashes``, as far as the tier."""
        writer = self._side.unnamed(hashes)
        for first in range(0, len(hashes), batch):
            self._side.store(writer, first, min(first + batch, len(hashes)))
        self._side.finish(writer)
        self._side.rest()

    def _new_runner(self) -> Request:
        return self._side.unnamed(some_hashes(64 * STORED, self._rng))


def _measure_steps(options: TieringOptions, policy: str, report: Report) -> None:
    count = max(1, options.promote_bytes // CHUNK_BYTES)
    setup = Setup(
        slots=count + count // 4 + SPARE,
        page_bytes=CHUNK_BYTES,
        policy=policy,
        tier="memory",
        load_delay_s=options.latency_s,
    )
    promoted = some_hashes(count, np.random.default_rng(2))
    times: dict[str, dict[str, list[list[Stopwatch]]]] = {"alone": {}, "promoting": {}}
    with opened(setup, options.against_vllm) as sides:
        report.progress(f"{policy}: {count:,} chunks go to the tier")
        engines = {s.name: Stepping(s, promoted, options.batch, np.random.default_rng(3)) for s in sides}
        for number in range(options.rounds):
            for name, engine in engines.items():
                report.progress(f"{policy}: an engine steps, round {number + 1}, {name}")
                found = engine.run(None)
                times["promoting"].setdefault(name, []).append(found)
                times["alone"].setdefault(name, []).append(engine.run(len(found)))
    for case, by_side in times.items():
        steps = {name: [len(r) for r in rounds] for name, rounds in by_side.items()}
        for measure, share, clock in STEP_MEASURES:
            values = {name: [_percentile(r, share, clock) for r in rounds] for name, rounds in by_side.items()}
            report.add(
                Figure(
                    measure=f"step: {measure}",
                    case=f"{policy}, {case}",
                    unit="ms",
                    values=values,
                    details={"steps": steps, "chunks": count},
                )
            )


def _percentile(times: Sequence[Stopwatch], share: int, clock: str) -> float:
    """In ms."""
    return 1e3 * float(np.percentile([getattr(watch, clock) for watch in times], share))


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise BenchError(otherwise)
