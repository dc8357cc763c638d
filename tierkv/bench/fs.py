"""``tierkv bench fs``: the ``fs`` tier beside what its directory can do, and beside vLLM's own.

* *raw*: plain threads that read files of one chunk each past the page cache, and overwrite segments that lie there.
* *store*, *load*: the tier, through its interface: one job stores all chunks, one loads them when none of them is in
  the page cache any more, and one loads them again. What is loaded is compared, byte for byte.
* *promotion*: a request asks a manager for chunks that lie in the tier only, until they can be loaded: the time that
  this takes on the scheduler's thread.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import mmap
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tierkv.bench import BenchError
from tierkv.bench.report import Case, Figure, Report
from tierkv.bench.sides import Setup, Vllm, import_vllm, some_hashes, vllm_tiering
from tierkv.bench.tiering import STEP_S, live, opened
from tierkv.config import decode
from tierkv.keys import FIRST_GENERATION, make_chunks
from tierkv.tiers import record
from tierkv.tiers.base import TierContext
from tierkv.tiers.fs import FsTier, FsTierConfig
from tierkv.types import JobResult, LoadJob, Space, StoreJob

#: What is measured of tierkv's tier: ``files`` makes a file for each chunk, and ``files, full``
#: has room for three turns only, so that each one evicts; ``segments`` writes over what was there.
LAYOUTS = ("files", "files, full", "segments")

#: For how many turns those that are bounded have room, and how many are stored before anything is timed.
TURNS = 3

#: Bytes of a chunk, and the share of ``FsOptions.nbytes`` that is moved in chunks of this size.
SIZES = ((1 << 20, 1.0), (16 << 10, 0.125))

#: *promotion*: chunks at most, their bytes, and how many are stored in one step.
PROMOTED, PROMOTED_BYTES, BATCH = 2000, 16 << 10, 512

#: Files that raw writes overwrite, and that a tier could reuse.
SEGMENTS = 4

#: vLLM's tier gives a whole job to one thread, and has as many threads of each kind: its best case is as many jobs.
VLLM_JOBS = 16

#: How long a job may take, in seconds, and how many threads flush files.
PATIENCE_S, FLUSHERS = 600.0, 8

NAMESPACE = b"tierkv bench fs."

#: What a tier is timed in.
MEASURES = ("store", "store, flushed", "load, cold", "load, again")

#: What of the directory is timed, and which of a tier's measures are compared with that.
READ, WRITE, WRITE_DIRECT = "cold reads", "buffered writes", "direct writes"
SHARES = (("store", WRITE), ("store", WRITE_DIRECT), ("load, cold", READ))

#: Whose turn it is, beside the layouts.
RAW, ONE_JOB, MANY_JOBS = "raw", "vLLM, one job", "vLLM, many jobs"

NOTES = (
    "median over the rounds (smallest–largest); the ratio of a round is that of its two turns; every byte is compared",
    "raw: plain threads in page-aligned memory; reads open, read and close a file a chunk; writes overwrite "
    f"{SEGMENTS} segments that were written before",
    "store: one job, as the tier reports it; flushed: until fsync of every file has returned, too",
    "cold: after fsync and posix_fadvise(DONTNEED) of every file, a device's own cache excepted; again: at once after "
    "it, from the page cache if the tier reads through it",
    f"files, full and segments: room for the chunks of {TURNS} turns, filled before: each store evicts",
    "share: of the speed of the raw reads or writes of the same round",
    f"vLLM's tier gives a whole job to one thread; in {VLLM_JOBS} jobs: as many chunks, shared by its threads, "
    "beside one job of tierkv",
    "promotion: on the clock of the scheduler's thread, for chunks that lie in the tier only; steps of "
    f"{1e3 * STEP_S:.0f} ms; on a processor: of this thread alone",
)
NO_DIRECT = (
    "O_DIRECT is not supported here: raw reads are buffered, after posix_fadvise(DONTNEED); no raw direct writes"
)


@dataclass(frozen=True, kw_only=True)
class FsOptions:
    """root_dir: below it everything is written, and removed. nbytes: of a turn in large chunks. threads: of *raw*."""

    root_dir: str = "."
    nbytes: int = 256 << 20
    threads: int = 8
    rounds: int = 5
    against_vllm: bool = False


def run(options: FsOptions, report: Report) -> None:
    """Measure everything.

    Raises:
        MissingExtraError: vLLM is wanted and not installed.
        BenchError: the directory cannot be used, a job failed, or other bytes came back.
    """
    if options.against_vllm:
        import_vllm()
    try:
        with _temporary(options.root_dir) as directory:
            direct = supports_direct(directory)
            _start(options, direct, report)
            for chunk_bytes, share in SIZES:
                _measure_case(
                    options, Case(chunk_bytes, _count(options, chunk_bytes, share)), directory, direct, report
                )
            for layout in ("files", "segments"):
                _measure_promotion(options, layout, directory, report)
    except OSError as error:
        raise BenchError(f"{options.root_dir!r} cannot be used: {error}") from error
    report.close(NOTES if direct else (*NOTES, NO_DIRECT))


def supports_direct(directory: str) -> bool:
    """Whether files in ``directory`` can be written and read past the page cache."""
    path = os.path.join(directory, "direct")
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            with _open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd:
                return os.pwrite(fd, page, 0) == os.preadv(fd, [page], 0) == mmap.PAGESIZE
        except OSError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _start(options: FsOptions, direct: bool, report: Report) -> None:
    report.start(
        {
            "root_dir": options.root_dir,
            "bytes": options.nbytes,
            "threads": options.threads,
            "layout": list(LAYOUTS),
            "o_direct": direct,
            "against": "vllm" if options.against_vllm else None,
            "rounds": options.rounds,
        }
    )


def _count(options: FsOptions, chunk_bytes: int, share: float) -> int:
    return max(1, int(options.nbytes * share) // chunk_bytes)


# ── the directory's own limits ───────────────────────────────────────────────────────────────────────────────────────


class Raw:
    """Chunks that plain threads read and write. Everything that is timed is in seconds.

    Thread safety: none.
    """

    def __init__(self, directory: str, case: Case, threads: int, direct: bool) -> None:
        """Writes what is read and what is overwritten. direct: whether the page cache can be passed by."""
        self._case = case
        self._threads = threads
        self._direct = direct
        self._view = memoryview(mmap.mmap(-1, case.nbytes))
        _fill(np.frombuffer(self._view, np.uint8))
        self._pool = ThreadPoolExecutor(threads)
        self._files = [os.path.join(directory, f"{number}.chunk") for number in range(case.count)]
        self._spread(self._create)
        kinds = (False, True) if direct else (False,)
        self._segments = {kind: self._open_segments(directory, kind) for kind in kinds}
        for kind in kinds:
            self.write(kind)  # once: what is timed finds its blocks allocated

    def live(self) -> dict[str, float]:
        """What the chunks take, by measure."""
        times = {READ: self.read(), WRITE: self.write(False)}
        if self._direct:
            times[WRITE_DIRECT] = self.write(True)
        return times

    def read(self) -> float:
        """Every file, none of it from the page cache."""
        if not self._direct:
            _each(self._files, _drop)
        return self._spread(self._read)

    def write(self, direct: bool) -> float:
        """Every chunk into the segments; then, not timed, these are flushed, so that nobody else waits for that, and
        dropped from the page cache, which does not hold a tier's whole disk either."""
        segments = self._segments[direct]
        spent = self._spread(lambda number: self._overwrite(segments, number))
        for fd in segments:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return spent

    def close(self) -> None:
        self._pool.shutdown()
        for fd in itertools.chain.from_iterable(self._segments.values()):
            os.close(fd)

    def _open_segments(self, directory: str, direct: bool) -> list[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        paths = [
            os.path.join(directory, f"{number}-{'direct' if direct else 'buffered'}") for number in range(SEGMENTS)
        ]
        segments = [os.open(path, flags, 0o600) for path in paths]
        for fd in segments:
            os.posix_fallocate(fd, 0, -(-self._case.count // SEGMENTS) * self._case.chunk_bytes)
        return segments

    def _spread(self, work: Callable[[int], None]) -> float:
        """``work`` on each chunk's number, on all threads."""

        def part(first: int) -> None:
            for number in range(first, self._case.count, self._threads):
                work(number)

        begin = time.perf_counter()
        for _ in self._pool.map(part, range(self._threads)):
            pass
        return time.perf_counter() - begin

    def _create(self, number: int) -> None:
        with _open(self._files[number], os.O_WRONLY | os.O_CREAT) as fd:
            self._expect(os.pwrite(fd, self._chunk(number), 0))
            os.fsync(fd)

    def _read(self, number: int) -> None:
        with _open(self._files[number], os.O_RDONLY | (os.O_DIRECT if self._direct else 0)) as fd:
            self._expect(os.preadv(fd, [self._chunk(number)], 0))

    def _overwrite(self, segments: list[int], number: int) -> None:
        place = number // SEGMENTS * self._case.chunk_bytes
        self._expect(os.pwrite(segments[number % SEGMENTS], self._chunk(number), place))

    def _chunk(self, number: int) -> memoryview:
        return self._view[number * self._case.chunk_bytes :][: self._case.chunk_bytes]

    def _expect(self, done: int) -> None:
        if done != self._case.chunk_bytes:
            raise BenchError(f"raw: {done} of {self._case.chunk_bytes} bytes were read or written")


# ── the tiers ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Bed(abc.ABC):
    """One tier and a host region: chunks are stored from its first half and loaded into its second.

    Everything that is timed is in seconds. Thread safety: none.
    """

    name: ClassVar[str]

    def __init__(self, root_dir: str, case: Case, region: npt.NDArray[np.uint8]) -> None:
        """root_dir: where the tier's files are. region: of twice the case's bytes."""
        self.root_dir = root_dir
        self.case = case
        self.source, self.target = region[: case.nbytes], region[case.nbytes :]
        _fill(self.source)
        self._job_ids = itertools.count(1)

    @abc.abstractmethod
    def rename(self, hashes: list[bytes]) -> None:
        """The chunks are named by ``hashes`` from now on, so that none of them is in the tier."""

    @abc.abstractmethod
    def run(self, store: bool, jobs: int) -> float:
        """Store or load every chunk, in as many jobs; from the first call to the last report.

        Raises:
            BenchError: not every chunk was stored or loaded.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Make room for the chunks of the next turn; these are not asked for again."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def live(self, hashes: list[bytes], jobs: int) -> dict[str, float]:
        """What chunks that are new take, by measure."""
        self.rename(hashes)
        store = self.run(True, jobs)
        paths = _files_below(self.root_dir)
        flush = _each(paths, _flush)
        _each(paths, _drop)
        cold, again = self._load(jobs), self._load(jobs)
        self.forget()
        return dict(zip(MEASURES, (store, store + flush, cold, again), strict=True))

    def _load(self, jobs: int) -> float:
        self.target.fill(0)  # nothing of an earlier load is taken for this one's; and its pages are present
        spent = self.run(False, jobs)
        if not np.array_equal(self.source, self.target):
            raise BenchError(f"{self.name}: other bytes came back than were stored")
        return spent

    def _empty_files(self, suffix: str) -> None:
        """Give back what the files of all chunks occupy, and wait for it: that falls into nobody's turn.

        They are removed when all is over: ext4 without a journal does not use an inode again for minutes, and each new
        file looks at all of those.
        """
        paths = [path for path in _files_below(self.root_dir) if path.endswith(suffix)]
        for path in paths:
            os.truncate(path, 0)
        _each(paths, _flush)


class TierBed(Bed):
    """tierkv's tier, with its threads by default."""

    name = "tierkv"

    def __init__(self, root_dir: str, case: Case, layout: str) -> None:
        view = memoryview(mmap.mmap(-1, 2 * case.nbytes))
        super().__init__(os.path.join(root_dir, f"tierkv-{layout}"), case, np.frombuffer(view, np.uint8))
        self._layout = layout
        self._space = Space(NAMESPACE, FIRST_GENERATION)
        self._woken = threading.Event()
        fields: dict[str, Any] = {"type": "fs", "root_dir": self.root_dir, **_layout_fields(layout)}
        if layout != "files":
            # With what headers, ledger and the ends of slabs take.
            fields["capacity_bytes"] = int(1.2 * TURNS * case.nbytes) + (4 << 20)
        context = TierContext("fs", view, NAMESPACE, {"model": "bench"}, self._woken.set, (case.chunk_bytes,))
        self._tier = FsTier(decode(fields, FsTierConfig), context)
        self._offsets = np.arange(2 * case.count, dtype=np.int64) * case.chunk_bytes
        # Not timed: in the product a thread of its own takes them when a slot is committed.
        sums = [
            record.payload_checksum(view[at : at + case.chunk_bytes]) for at in self._offsets[: case.count].tolist()
        ]
        self._checksums = np.array(sums, np.uint64)
        if layout != "files":
            rng = np.random.default_rng(3)
            for _ in range(TURNS + 1):
                self.rename(some_hashes(case.count, rng))
                self.run(True, 1)

    def rename(self, hashes: list[bytes]) -> None:
        self._chunks = make_chunks(self._space, 0, hashes)

    def run(self, store: bool, jobs: int) -> float:
        parts = [self._job(store, first, last) for first, last in _parts(self.case.count, jobs)]
        begin = time.perf_counter()
        for job in parts:
            if isinstance(job, StoreJob):
                self._tier.submit_store(job)
            else:
                self._tier.submit_load(job)
        results = self._collect(len(parts))
        spent = time.perf_counter() - begin
        for result in results:
            if not result.ok.all():
                raise BenchError(f"{self.name}: chunks failed: {', '.join(sorted(set(result.reasons.values())))}")
        return spent

    def forget(self) -> None:
        if self._layout == "files":  # the others make room themselves
            self._empty_files(".tkv")

    def close(self) -> None:
        self._tier.close()

    def _job(self, store: bool, first: int, last: int) -> StoreJob | LoadJob:
        chunks, lengths = self._chunks.slice(first, last), np.full(last - first, self.case.chunk_bytes, np.int64)
        if store:
            offsets, checksums = self._offsets[first:last], self._checksums[first:last]
            return StoreJob(next(self._job_ids), chunks, offsets, lengths, checksums)
        offsets = self._offsets[self.case.count :][first:last]
        return LoadJob(next(self._job_ids), chunks, offsets, lengths)

    def _collect(self, jobs: int) -> list[JobResult]:
        """The reports of as many jobs."""
        results: list[JobResult] = []
        while len(results) < jobs:
            if not self._woken.wait(PATIENCE_S):
                raise BenchError(f"{self.name}: no report within {PATIENCE_S:.0f} s: {self._tier!r}")
            self._woken.clear()
            results += self._tier.get_finished_jobs()
        return results


class VllmBed(Bed):
    """vLLM's tier, with its threads by default, in its own region."""

    name = "vllm"

    def __init__(self, root_dir: str, case: Case) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.tiering.base import TransferJob

        setup = Setup(slots=2 * case.count, page_bytes=case.chunk_bytes, tier="fs", root_dir=root_dir)
        self._manager, self._tier = vllm_tiering(setup)
        self._make_key: Callable[[bytes, int], Any] = base.make_offload_key
        self._make_job: Callable[..., Any] = TransferJob
        self._context = base.ReqContext(req_id="bench")
        region = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8).reshape(-1)
        super().__init__(os.path.join(root_dir, Vllm.name), case, region)

    def rename(self, hashes: list[bytes]) -> None:
        self._keys = [self._make_key(block_hash, 0) for block_hash in hashes]

    def run(self, store: bool, jobs: int) -> float:
        submit = self._tier.submit_store if store else self._tier.submit_load
        parts = [self._job(store, first, last) for first, last in _parts(self.case.count, jobs)]
        begin = time.perf_counter()
        for job in parts:
            submit(job)
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        spent = time.perf_counter() - begin
        if len(results) != len(parts) or not all(result.success for result in results):
            raise BenchError(f"{self.name}: jobs failed")
        return spent

    def forget(self) -> None:
        self._empty_files(".bin")

    def close(self) -> None:
        del self.source, self.target  # its region cannot be unmapped before
        self._manager.shutdown()

    def _job(self, store: bool, first: int, last: int) -> Any:
        slots = np.arange(first, last) + (0 if store else self.case.count)
        return self._make_job(next(self._job_ids), self._keys[first:last], slots, not store, self._context)


#: Seconds of each round, by turn and measure.
Times = Mapping[str, Mapping[str, Sequence[float]]]


def _measure_case(options: FsOptions, case: Case, directory: str, direct: bool, report: Report) -> None:
    """Turn by turn: the directory, each layout, vLLM's tier with one job and with many."""
    rng = np.random.default_rng(1)
    times: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with contextlib.ExitStack() as stack:
        inside = _below(directory, f"chunks-{case.chunk_bytes}")
        raw = stack.enter_context(contextlib.closing(Raw(inside, case, options.threads, direct)))
        turns: list[tuple[str, Bed, int]] = []
        for layout in LAYOUTS:
            turns.append((layout, stack.enter_context(contextlib.closing(TierBed(inside, case, layout))), 1))
        if options.against_vllm:
            vllm = stack.enter_context(contextlib.closing(VllmBed(inside, case)))
            turns += [(ONE_JOB, vllm, 1), (MANY_JOBS, vllm, VLLM_JOBS)]
        for number in range(options.rounds):
            report.progress(f"{case}: round {number + 1}, raw")
            for measure, seconds in raw.live().items():
                times[RAW][measure].append(seconds)
            for turn, bed, jobs in turns:
                report.progress(f"{case}: round {number + 1}, {turn}")
                for measure, seconds in bed.live(some_hashes(case.count, rng), jobs).items():
                    times[turn][measure].append(seconds)
    for measure, spent in times[RAW].items():
        values = {"tierkv": _speeds(case, spent)}
        report.add(Figure(measure=f"raw: {measure}", case=str(case), unit="GB/s", values=values, compared=False))
    for layout in LAYOUTS:
        _add_durations(layout, case, times, report)
        _add_speeds(layout, case, times, report)


def _add_durations(layout: str, case: Case, times: Times, report: Report) -> None:
    for measure in MEASURES:
        for turn, suffix in ((ONE_JOB, ""), (MANY_JOBS, f": vLLM in {VLLM_JOBS} jobs")):
            if turn in times or turn == ONE_JOB:
                values = {
                    side: [1e6 * seconds / case.count for seconds in found[measure]]
                    for side, found in _sides(layout, turn, times).items()
                }
                report.add(
                    Figure(measure=f"{measure}{suffix}", case=f"{layout}, {case}", unit="µs/chunk", values=values)
                )


def _add_speeds(layout: str, case: Case, times: Times, report: Report) -> None:
    """Also as shares of what plain threads do."""
    name, sides = f"{layout}, {case}", _sides(layout, ONE_JOB, times)
    for measure in ("store", "load, cold", "load, again"):
        values = {side: _speeds(case, found[measure]) for side, found in sides.items()}
        report.add(Figure(measure=f"{measure}: speed", case=name, unit="GB/s", values=values, compared=False))
    for measure, limit in SHARES:
        if limit not in times[RAW]:
            continue
        values = {
            side: [raw / seconds for raw, seconds in zip(times[RAW][limit], found[measure], strict=True)]
            for side, found in sides.items()
        }
        report.add(
            Figure(measure=f"{measure}: share of {limit}", case=name, unit="of raw", values=values, compared=False)
        )


def _sides(layout: str, turn: str, times: Times) -> dict[str, Mapping[str, Sequence[float]]]:
    """What a layout takes, and what vLLM's tier took in ``turn``, if it was there."""
    return {"tierkv": times[layout], **({"vllm": times[turn]} if turn in times else {})}


def _speeds(case: Case, times: Sequence[float]) -> list[float]:
    """In GB/s."""
    return [case.nbytes / seconds / 1e9 for seconds in times]


# ── a promotion ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _measure_promotion(options: FsOptions, layout: str, directory: str, report: Report) -> None:
    count = min(PROMOTED, _count(options, *SIZES[-1]))
    rng = np.random.default_rng(2)
    values: dict[str, dict[str, list[float]]] = {}
    setup = Setup(
        slots=2 * count,
        page_bytes=PROMOTED_BYTES,
        tier="fs",
        root_dir=_below(directory, f"promotion-{layout}"),
        fs_fields=_layout_fields(layout, PROMOTED_BYTES * 8 * options.rounds * count),
    )
    with opened(setup, options.against_vllm) as sides:
        for number in range(options.rounds):
            hashes = some_hashes(count, rng)
            for side in sides:
                report.progress(f"{layout}: promotion, round {number + 1}, {side.name}")
                for measure, value in live(side, hashes, BATCH).promotion(count).items():
                    values.setdefault(measure, {}).setdefault(side.name, []).append(value)
    for measure, found in values.items():
        steps = measure.endswith("answer")
        report.add(
            Figure(
                measure=measure,
                case=f"{layout}, {Case(PROMOTED_BYTES, count)}",
                unit="steps" if steps else "µs/chunk",
                values=found,
                compared=not steps,
            )
        )


# ── files and memory ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _temporary(directory: str) -> Iterator[str]:
    """A directory of its own below ``directory``, an absolute path; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=os.path.abspath(directory)) as path:
        yield path


def _below(directory: str, name: str) -> str:
    """A new directory there."""
    path = os.path.join(directory, name)
    os.mkdir(path)
    return path


@contextlib.contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _files_below(directory: str) -> list[str]:
    """All that are not empty."""
    paths = (os.path.join(above, name) for above, _, names in os.walk(directory) for name in names)
    return [path for path in paths if os.path.getsize(path)]


def _each(paths: Sequence[str], work: Callable[[str], None]) -> float:
    """``work`` on each of ``paths``, by several threads; seconds."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(FLUSHERS) as pool:
        for _ in pool.map(work, paths):
            pass
    return time.perf_counter() - begin


def _flush(path: str) -> None:
    with _open(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def _drop(path: str) -> None:
    """From the page cache; what is not flushed stays."""
    with _open(path, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(memory: npt.NDArray[np.uint8]) -> None:
    """With random bytes, always the same."""
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)


def _parts(count: int, jobs: int) -> list[tuple[int, int]]:
    """``count`` chunks as at most ``jobs`` ranges of nearly the same length."""
    jobs = min(jobs, count)
    bounds = [count * number // jobs for number in range(jobs + 1)]
    return list(itertools.pairwise(bounds))


def _layout_fields(layout: str, capacity_bytes: int = 0) -> dict[str, Any]:
    """What the tier's configuration says of ``layout``, which needs ``capacity_bytes`` if it is ``segments``."""
    if layout != "segments":
        return {}
    return {"layout": layout, **({"capacity_bytes": capacity_bytes + (64 << 20)} if capacity_bytes else {})}
