"""``tierkv bench index``: what the index and the policy of a full host cache cost the scheduler, chunk by chunk.

With ``chunks`` resident, each round gives each side one turn of lookups, then of loads, then of stores that evict. A
turn is many calls, and only they are timed. The payload of the chunks is not touched.

The cold start is measured in fresh processes, with nothing that an earlier one has compiled: run as a module, this
file is such a process.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tierkv.bench import BenchError
from tierkv.bench.report import Figure, Report, Stopwatch, no_collections
from tierkv.bench.sides import VLLM_POLICIES, Setup, Side, TierKV, Vllm, import_vllm, some_hashes

#: Chunks of a request: a prompt of 65,536 tokens.
PREFIX = 4096

#: Chunks that a turn of lookups or loads, and one of stores, goes through; a small cache's are fewer.
READ_CHUNKS, STORE_CHUNKS = 16 * PREFIX, 4 * PREFIX

#: The groups of the cold request, by their windows in tokens.
COLD_CASES = {"1 group": (0,), "4 groups, 3 windows": (0, 1024, 1024, 1024), "4 groups": (0, 0, 0, 0)}

COLD_MEASURES = {
    "first_ms": "cold",
    "cpu_ms": "cold, on a processor",
    "second_ms": "cold, second request",
    "open_ms": "opening",
}

NOTES = (
    "median over the rounds (smallest–largest); the ratio of a round is that of its two turns; no garbage collection",
    "name: from list[bytes] to keys, once a request. lookup: to the answer, all of it pinned, and let go (vLLM pins "
    "nothing here). load: from pinned to unpinned, recency included. store: in batches, evicting as many",
    "tiered: with a tier beside the host, in which all of it is, too; of vLLM its TieringOffloadingManager, else its "
    "CPUOffloadingManager",
    "memory: of index, policy and ghosts; for vLLM, what it has allocated while it was filled",
    "cold: the first step of a request of which neither the host nor an fs tier has anything, in a fresh process that "
    "has nothing compiled",
)


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    """chunks: resident ones. batch: chunks stored in one step. tiered: managers with a tier, too.

    cold_chunks: of the cold request, in each group. processes: fresh ones for each cold start and side; 0 for none.
    """

    chunks: int
    batch: int
    policies: tuple[str, ...]
    against_vllm: bool = False
    tiered: bool = False
    rounds: int = 5
    cold_chunks: int = 65_536
    processes: int = 3


def run(options: IndexOptions, report: Report) -> None:
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
        }
    )
    for policy in options.policies:
        _Resident(options, policy, report).run()
    if options.processes:
        for case, windows in COLD_CASES.items():
            _measure_cold(options, case, windows, report)
    report.close(NOTES)


# ── a full host cache ────────────────────────────────────────────────────────────────────────────────────────────────


class _Resident:
    """One policy, on both sides: the cache is filled, and used. Thread safety: none."""

    def __init__(self, options: IndexOptions, policy: str, report: Report) -> None:
        self._options = options
        self._policy = policy
        self._report = report
        self._rng = np.random.default_rng(1)
        self._choice = random.Random(1)
        self._prefix = max(1, min(PREFIX, options.chunks // 4))
        hashes = some_hashes(options.chunks, self._rng)
        self._prefixes = [hashes[i : i + self._prefix] for i in range(0, options.chunks, self._prefix)]

    def run(self) -> None:
        sides: list[Side] = []
        try:
            self._fill(sides)
            reads = min(READ_CHUNKS, self._options.chunks) // self._prefix
            stores = max(1, min(STORE_CHUNKS, self._options.chunks // 2) // self._prefix)
            batch = self._options.batch
            with no_collections():
                self._measure("name", sides, functools.partial(self._some_resident, reads), _names)
                self._measure("lookup", sides, functools.partial(self._some_resident, reads), _lookups)
                self._measure("load", sides, functools.partial(self._some_resident, reads), _loads)
                # Last: what was resident is not, afterwards.
                self._measure(
                    "store", sides, functools.partial(self._some_new, stores), functools.partial(_stores, batch=batch)
                )
        finally:
            for side in sides:
                side.close()
        if self._options.tiered and len(sides) > 1:
            self._run_tiered(reads, stores)

    def _run_tiered(self, reads: int, stores: int) -> None:
        """The same with managers that have a tier beside the host."""
        setup = Setup(slots=self._options.chunks, policy=self._policy, tier="memory")
        sides: list[Side] = []
        try:
            for make in (TierKV, Vllm):
                self._report.progress(f"{self._policy}, tiered: filling")
                sides.append(make(setup))
                self._store_all(sides[-1])
                sides[-1].rest()
            with no_collections():
                for measure, turn in (("lookup", _lookups), ("load", _loads)):
                    self._measure(measure, sides, functools.partial(self._some_resident, reads), turn, "tiered")
                cascading = functools.partial(_stores, batch=self._options.batch, rest=True)
                self._measure("store", sides, functools.partial(self._some_new, stores), cascading, "tiered")
        finally:
            for side in sides:
                side.close()

    def _fill(self, sides: list[Side]) -> None:
        """Open the sides, fill them with the same chunks, and report what that takes."""
        setup = Setup(slots=self._options.chunks, policy=self._policy)
        self._report.progress(f"{self._policy}: filling tierkv's cache")
        ours = TierKV(setup)
        sides.append(ours)
        self._store_all(ours)
        used = {ours.name: ours.index_bytes()}
        if self._options.against_vllm and self._policy in VLLM_POLICIES:
            self._report.progress(f"{self._policy}: filling vLLM's cache")
            tracemalloc.start()
            try:
                theirs = Vllm(setup)
                sides.append(theirs)
                self._store_all(theirs)
                gc.collect()
                used[theirs.name] = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
        per_chunk = {name: [count / self._options.chunks] for name, count in used.items()}
        self._report.add(Figure(measure="memory", case=self._policy, unit="bytes/chunk", values=per_chunk))

    def _store_all(self, side: Side) -> None:
        for hashes in self._prefixes:
            _stores(side, [hashes], self._options.batch, evicting=False)

    def _some_resident(self, count: int) -> list[list[bytes]]:
        return self._choice.sample(self._prefixes, count)

    def _some_new(self, count: int) -> list[list[bytes]]:
        return [some_hashes(self._prefix, self._rng) for _ in range(count)]

    def _measure(
        self,
        measure: str,
        sides: Sequence[Side],
        choose: Callable[[], list[list[bytes]]],
        turn: Callable[[Side, list[list[bytes]]], Stopwatch],
        kind: str = "",
    ) -> None:
        """Rounds of a turn for each side, with the same prompts."""
        self._report.progress(f"{self._policy}: {measure}")
        wall: dict[str, list[float]] = {side.name: [] for side in sides}
        cpu: dict[str, list[float]] = {side.name: [] for side in sides}
        chunks = 0
        for _ in range(self._options.rounds):
            prompts = choose()
            chunks = sum(map(len, prompts))
            for side in sides:
                watch = turn(side, prompts)
                wall[side.name].append(1e6 * watch.wall / chunks)
                cpu[side.name].append(1e6 * watch.cpu / chunks)
        self._report.add(
            Figure(
                measure=measure,
                case=f"{self._policy}, {kind}" if kind else self._policy,
                unit="µs/chunk",
                values=wall,
                details={"chunks_per_turn": chunks, "chunks_per_request": self._prefix, "cpu": cpu},
            )
        )


def _names(side: Side, prompts: list[list[bytes]]) -> Stopwatch:
    """Make the keys of prompts."""
    watch = Stopwatch()
    for hashes in prompts:
        with watch:
            request = side.request(hashes)
        side.finish(request)
    return watch


def _lookups(side: Side, prompts: list[list[bytes]]) -> Stopwatch:
    """Ask for prefixes that are there, and let go of them."""
    watch = Stopwatch()
    for request in [side.request(hashes) for hashes in prompts]:
        with watch:
            count = side.ask(request)
            side.finish(request)
        _expect(count == len(request.hashes), f"{side.name} has {count} of {len(request.hashes)} chunks")
    return watch


def _loads(side: Side, prompts: list[list[bytes]]) -> Stopwatch:
    """Load prefixes that were found."""
    watch = Stopwatch()
    for request in [side.request(hashes) for hashes in prompts]:
        count = side.ask(request)
        _expect(count == len(request.hashes), f"{side.name} has {count} of {len(request.hashes)} chunks")
        with watch:
            side.load(request, len(request.hashes))
            side.finish(request)
    return watch


def _stores(side: Side, prompts: list[list[bytes]], batch: int, evicting: bool = True, rest: bool = False) -> Stopwatch:
    """Store new prefixes into a cache that is full, if ``evicting``; ``rest``: until the tier has each batch, too."""
    watch = Stopwatch()
    before = side.evicted()
    for request in [side.request(hashes) for hashes in prompts]:
        for first in range(0, len(request.hashes), batch):
            with watch:
                side.store(request, first, min(first + batch, len(request.hashes)))
            if rest:
                side.rest(watch)
        side.finish(request)
    evicted, expected = side.evicted() - before, sum(map(len, prompts)) if evicting else 0
    _expect(evicted == expected, f"{side.name} has evicted {evicted} chunks, not {expected}")
    return watch


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise BenchError(otherwise)


# ── cold start ───────────────────────────────────────────────────────────────────────────────────────────────────────


class ColdRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a fresh process is to do: ``chunks`` of the request in each group, a group for each of ``windows``."""

    side: str
    chunks: int
    windows: tuple[int, ...]
    root_dir: str


class ColdResult(msgspec.Struct, frozen=True, kw_only=True):
    """open_ms: to make the manager. first_ms: the first request's first step; cpu_ms: of these, on a processor.

    answered_ms: until it has its answer. second_ms: the first step of another request like it, after that.
    """

    open_ms: float
    first_ms: float
    cpu_ms: float
    answered_ms: float
    second_ms: float


def _measure_cold(options: IndexOptions, case: str, windows: tuple[int, ...], report: Report) -> None:
    names = [TierKV.name, *([Vllm.name] if options.against_vllm else [])]
    results: dict[str, list[ColdResult]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as root_dir:
        for name in names:
            _use_tier(name, windows, root_dir)
        for number in range(options.processes):
            for name in names:
                report.progress(f"cold start of {name}, {case}, process {number + 1}")
                cold = ColdRun(side=name, chunks=options.cold_chunks, windows=windows, root_dir=root_dir)
                results[name].append(_fresh_process(cold))
    for field, measure in COLD_MEASURES.items():
        report.add(
            Figure(
                measure=measure,
                case=case,
                unit="ms",
                values={name: [getattr(r, field) for r in found] for name, found in results.items()},
                compared=field != "open_ms",
                details={"chunks": options.cold_chunks, "processes": msgspec.to_builtins(results)},
            )
        )


def _cold_side(name: str, windows: tuple[int, ...], root_dir: str, slots: int) -> Side:
    setup = Setup(slots=slots, windows=windows, tier="fs", root_dir=root_dir)
    return TierKV(setup) if name == TierKV.name else Vllm(setup)


def _use_tier(name: str, windows: tuple[int, ...], root_dir: str) -> None:
    """Put something into the tier: that a directory is not there at all is soon found out."""
    side = _cold_side(name, windows, root_dir, slots=64)
    try:
        request = side.request(some_hashes(8, np.random.default_rng(0)))
        side.store(request, 0, 8)
        side.finish(request)
        side.rest()
    finally:
        side.close()


def _fresh_process(cold: ColdRun) -> ColdResult:
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as directory:
        done = subprocess.run(
            [sys.executable, "-m", "tierkv.bench.index", msgspec.json.encode(cold).decode()],
            env=_environment(directory),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        said = (done.stderr.strip() or "no message").splitlines()[-1]
        raise BenchError(f"the cold start of {cold.side} failed: {said}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=ColdResult)


def _environment(directory: str) -> dict[str, str]:
    """Of a fresh process: what it compiles goes to ``directory``, where nothing is."""
    return {**os.environ, "NUMBA_CACHE_DIR": directory}


def cold_start(cold: ColdRun) -> ColdResult:
    """What the fresh process does."""
    rng = np.random.default_rng(1)
    prompts = [some_hashes(cold.chunks, rng) for _ in range(2)]
    if cold.side == Vllm.name:
        import_vllm()
    start = time.perf_counter()
    side = _cold_side(cold.side, cold.windows, cold.root_dir, cold.chunks)
    opened = time.perf_counter() - start
    with no_collections():
        first, answered = _cold_request(side, prompts[0])
        second, _ = _cold_request(side, prompts[1])
    side.close()
    return ColdResult(
        open_ms=1e3 * opened,
        first_ms=1e3 * first.wall,
        cpu_ms=1e3 * first.cpu,
        answered_ms=1e3 * answered,
        second_ms=1e3 * second.wall,
    )


def _cold_request(side: Side, hashes: list[bytes]) -> tuple[Stopwatch, float]:
    """The time of its first step, and the seconds until it knows that nothing is there."""
    request = side.unnamed(hashes)
    watch = Stopwatch()
    start = time.perf_counter()
    with watch:
        answer = side.ask(request)
        side.end_step()
    _expect(answer is None, f"{side.name} has answered a cold request at once")
    while answer is None:
        time.sleep(0.001)
        answer = side.ask(request)
        side.end_step()
    answered = time.perf_counter() - start
    _expect(answer == 0, f"{side.name} has found {answer} chunks of a cold request")
    side.finish(request)
    return watch, answered


if __name__ == "__main__":
    print(msgspec.json.encode(cold_start(msgspec.json.decode(sys.argv[1], type=ColdRun))).decode())
