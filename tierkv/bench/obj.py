"""``tierkv bench obj``: the ``obj`` tier beside plain obstore, on the same server, turn by turn.

* *plain*: objects that are the chunks' bytes and nothing else, by a client with the tier's settings and as many
  connections: sent from views of one large buffer, and read with one copy into another. Once by threads, once by
  asyncio; the tier's limit is the faster of the two, round by round.
* *store*, *load*: the tier, through its interface, one job for all chunks. What is loaded is compared, byte for byte.
* *lookup*: of chunks that are there, and of others; and stores of what is there already.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import mmap
import os
import resource
import shutil
import threading
import time
import urllib.parse
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tierkv.bench import BenchError, require
from tierkv.bench.report import Case, Figure, Report, installed
from tierkv.bench.sides import some_hashes
from tierkv.config import decode
from tierkv.errors import TierKVError
from tierkv.keys import FIRST_GENERATION, make_chunks
from tierkv.tiers import record
from tierkv.tiers.base import Deadlines, TierContext
from tierkv.tiers.obj import ObjTier
from tierkv.tiers.obj.client import Target, open_target, translated
from tierkv.tiers.obj.config import ObjTierConfig
from tierkv.tiers.paths import record_path, space_path
from tierkv.types import JobResult, LoadJob, RequestContext, Space, StoreJob

#: Bytes of a chunk, and the share of ``ObjOptions.nbytes`` that is moved in chunks of this size.
SIZES = ((2 << 20, 1.0), (256 << 10, 0.125), (16 << 10, 1 / 32))

#: How many chunks are looked up at once, and their bytes. As many as the first are stored once more.
LOOKUPS, LOOKED_UP_BYTES = (256, 4096), 4 << 10

#: Before anything is timed, each side stores and loads so many chunks: then its connections are made.
WARMING = 32

#: How long a job may take, in seconds; nobody gives up earlier here, as slow as a server may be.
PATIENCE_S = 600.0

#: So often what was written is listed, and removed, until nothing is left.
CLEARINGS = 5

NAMESPACE = b"tierkv bench obj"

#: What is timed of each side.
STORE, LOAD = "store", "load"
MEASURES = (STORE, LOAD)

#: What the tier's lookups are compared with, and which.
HEADS, UNKNOWN = "plain heads", "lookup: there, unknown"

NOTES = (
    "median over the rounds (smallest–largest), in alternating order; every byte is compared",
    "plain: obstore without a tier, with the same settings and connections, objects that are the chunks' bytes alone: "
    "put from views of one buffer, get and one copy into another; share: of the faster of threads and asyncio in the "
    "same round",
    "store, load: one job for all chunks, from its submission to its report; a record has a header, and its checksum "
    "is verified; nothing is known of a chunk before it is stored",
    "CPU: of this process, user and system; of plain: of the faster. A server on the same machine takes its own",
    "lookup: one question for all chunks; unknown: by a tier that was opened just now and lists nothing (its "
    "connections are made meanwhile), known: by the same tier once more; plain heads: as many requests, by asyncio",
    "store: all there: a job of chunks that are in the store already; if the tier knows, it sends nothing",
)


@dataclass(frozen=True, kw_only=True)
class ObjOptions:
    """url: below it everything is written, and removed. endpoint, region, ca_bundle, profile: as the tier's fields.
    nbytes: of a turn in large chunks."""

    url: str
    endpoint: str = ""
    region: str = ""
    ca_bundle: str = ""
    profile: str = ""
    nbytes: int = 512 << 20
    rounds: int = 5


class Spent(NamedTuple):
    """Seconds on the clock, and on processors: of all threads of this process, those of the client included."""

    wall: float
    cpu: float


def run(options: ObjOptions, report: Report) -> None:
    """Measure everything.

    Raises:
        MissingExtraError: obstore is not installed.
        ConfigError: the store cannot be used.
        BenchError: a request or a job failed, or other bytes came back.
    """
    require(["obstore"], "to install: pip install 'tierkv[obj]'")
    faster: list[str] = []
    with _place(options) as place:
        _start(options, place, report)
        for chunk_bytes, share in SIZES:
            case = Case(chunk_bytes, max(1, int(options.nbytes * share) // chunk_bytes))
            faster += _measure_case(options, case, place, report)
        _measure_lookups(options, place, report)
    report.close((*NOTES, f"the faster of plain: {'; '.join(faster)}"))


def _start(options: ObjOptions, place: Place, report: Report) -> None:
    config = place.config()
    report.start(
        {
            "url": options.url,
            "endpoint": options.endpoint or None,
            "obstore": installed("obstore"),
            "readers": config.n_read_connections,
            "writers": config.n_write_connections,
            "askers": config.n_lookup_connections,
            "checksum": config.checksum,
            "bytes": options.nbytes,
            "rounds": options.rounds,
        }
    )


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Place:
    """Below a URL, names that nobody else uses.

    Thread safety: none.
    """

    def __init__(self, options: ObjOptions) -> None:
        self._options = options
        self._name = f"tierkv-bench-{uuid.uuid4().hex}"

    def config(self, **fields: Any) -> ObjTierConfig:
        """Of a tier there that lists nothing: when a listing falls into a turn is a matter of luck."""
        options = self._options
        given = {
            "type": "obj",
            "url": options.url,
            "endpoint_override": options.endpoint,
            "region": options.region,
            "ca_bundle": options.ca_bundle,
            "profile": options.profile,
            "prefix": self._name,
            "list_interval_s": 0,
        }
        return decode({**given, **fields}, ObjTierConfig)

    def open(self) -> Target:
        """A client without a tier."""
        return open_target(self.config(), PATIENCE_S)

    def tier(self, view: memoryview, chunk_bytes: int, wake: Callable[[], None], **fields: Any) -> ObjTier:
        """A tier there.

        Raises:
            ConfigError: the store cannot be used.
        """
        deadlines = Deadlines(PATIENCE_S, PATIENCE_S, PATIENCE_S)
        context = TierContext("obj", view, NAMESPACE, {"model": "bench"}, wake, (chunk_bytes,), deadlines)
        return ObjTier(self.config(**fields), context)

    def check(self) -> None:
        """See that the store can be used, and write nothing.

        Raises:
            ConfigError: it cannot.
        """
        self.tier(memoryview(bytearray(1)), 1, lambda: None, mode="read").close()

    def clear(self) -> None:
        """Remove everything that was written there.

        Raises:
            BenchError: something is left.
        """
        import obstore

        url = urllib.parse.urlsplit(self._options.url)
        if url.scheme == "file":  # directories, too, which are no objects
            shutil.rmtree(os.path.join(urllib.parse.unquote(url.path), self._name), ignore_errors=True)
            return
        target = self.open()
        try:
            # Until none is found: a request that was given up may yet have been answered.
            for _ in range(CLEARINGS):
                found = [item["path"] for page in obstore.list(target.store, target.prefix) for item in page]
                if not found:
                    return
                obstore.delete(target.store, found)
        except Exception as error:  # whatever obstore has for this store
            raise BenchError(f"what is left below {target.url} could not be removed: {translated(error)}") from error
        raise BenchError(f"objects are left below {target.url}")


@contextlib.contextmanager
def _place(options: ObjOptions) -> Iterator[Place]:
    """A place, and nothing is left of it afterwards, however that ends.

    Raises:
        ConfigError: the store cannot be used.
    """
    place = Place(options)
    place.check()
    try:
        yield place
    except TierKVError as error:
        try:
            place.clear()
        except TierKVError as another:  # mostly for the same reason
            raise BenchError(f"{error}; and {another}") from error
        raise
    except BaseException:
        place.clear()
        raise
    place.clear()


# ── the sides ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Memory:
    """Chunks to be stored, and as much room for what is loaded."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.view = memoryview(mmap.mmap(-1, -(-2 * case.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
        bytes_ = np.frombuffer(self.view, np.uint8)
        self.source, self.target = bytes_[: case.nbytes], bytes_[case.nbytes : 2 * case.nbytes]
        self.source[:] = np.random.default_rng(0).integers(0, 256, case.nbytes, np.uint8)
        self.target.fill(0)  # its pages are present

    def chunk(self, number: int) -> memoryview:
        """One to be stored."""
        return self.view[number * self.case.chunk_bytes :][: self.case.chunk_bytes]

    def take(self, number: int, found: Any) -> None:
        """Copy what was loaded, and let other threads run meanwhile."""
        at = number * self.case.chunk_bytes
        self.target[at : at + self.case.chunk_bytes] = np.frombuffer(found, np.uint8)


class Side(abc.ABC):
    """Who stores and loads. Thread safety: none."""

    name: ClassVar[str]

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @abc.abstractmethod
    def rename(self, turn: str) -> None:
        """The chunks have new names from now on: none of them is in the store."""

    @abc.abstractmethod
    def move(self, store: bool, count: int) -> Spent:
        """Store or load as many chunks.

        Raises:
            BenchError: not every one was stored or loaded.
        """

    @abc.abstractmethod
    def close(self) -> None: ...

    def live(self, turn: str, count: int) -> dict[str, Spent]:
        """What ``count`` chunks that are new take, by measure."""
        self.rename(turn)
        store = self.move(True, count)
        self.memory.target.fill(0)  # nothing of an earlier load is taken for this one's
        load = self.move(False, count)
        nbytes = count * self.memory.case.chunk_bytes
        if not np.array_equal(self.memory.source[:nbytes], self.memory.target[:nbytes]):
            raise BenchError(f"{self.name}: other bytes came back than were stored")
        return {STORE: store, LOAD: load}


class Plain(Side):
    """obstore, and what the tier's settings make of it."""

    def __init__(self, place: Place, memory: Memory) -> None:
        super().__init__(memory)
        self._store, self._prefix, _ = place.open()
        config = place.config()
        self._connections = {True: config.n_write_connections, False: config.n_read_connections}
        self._turn = ""

    def rename(self, turn: str) -> None:
        self._turn = turn

    def close(self) -> None:
        self.__dict__.pop("_store", None)  # connections live as long as the client

    def _path(self, number: int) -> str:
        return f"{self._prefix}/{self.name}/{self._turn}/{number}"


class Threads(Plain):
    """Calls that wait, on threads of our own."""

    name = "threads"

    def __init__(self, place: Place, memory: Memory) -> None:
        super().__init__(place, memory)
        self._pools = {store: ThreadPoolExecutor(count) for store, count in self._connections.items()}

    def move(self, store: bool, count: int) -> Spent:
        work = self._put if store else self._get

        def every() -> None:
            for _ in self._pools[store].map(work, range(count)):
                pass

        with _told():
            return timed(every)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
        super().close()

    def _put(self, number: int) -> None:
        import obstore

        obstore.put(self._store, self._path(number), self.memory.chunk(number), use_multipart=False)

    def _get(self, number: int) -> None:
        import obstore

        self.memory.take(number, obstore.get(self._store, self._path(number)).bytes())


class Asyncio(Plain):
    """Coroutines on the calling thread."""

    name = "asyncio"

    def move(self, store: bool, count: int) -> Spent:
        work = self._put if store else self._get
        with _told():
            return timed(lambda: asyncio.run(_at_once(work, count, self._connections[store])))

    async def _put(self, number: int) -> None:
        import obstore

        await obstore.put_async(self._store, self._path(number), self.memory.chunk(number), use_multipart=False)

    async def _get(self, number: int) -> None:
        import obstore

        got = await obstore.get_async(self._store, self._path(number))
        self.memory.take(number, await got.bytes_async())


class TierSide(Side):
    """The tier, with its connections by default."""

    name = "tierkv"

    def __init__(self, place: Place, memory: Memory) -> None:
        super().__init__(memory)
        case = memory.case
        self._woken = threading.Event()
        self._job_ids = itertools.count(1)
        self._offsets = np.arange(2 * case.count, dtype=np.int64) * case.chunk_bytes
        # Not timed: in the product a thread of its own takes them when a slot is committed.
        sums = [record.payload_checksum(memory.chunk(number)) for number in range(case.count)]
        self._checksums = np.array(sums, np.uint64)
        self.tier = place.tier(memory.view, case.chunk_bytes, self._woken.set)

    def rename(self, turn: str) -> None:
        rng = np.random.default_rng(list(turn.encode()))
        self.name_them(Space(NAMESPACE, rng.bytes(16)), some_hashes(self.memory.case.count, rng))

    def name_them(self, space: Space, hashes: list[bytes]) -> None:
        self._chunks = make_chunks(space, 0, hashes)

    def move(self, store: bool, count: int) -> Spent:
        chunks, lengths = self._chunks.slice(0, count), np.full(count, self.memory.case.chunk_bytes, np.int64)
        results: list[JobResult] = []

        def one_job() -> None:
            if store:
                offsets, sums = self._offsets[:count], self._checksums[:count]
                self.tier.submit_store(StoreJob(next(self._job_ids), chunks, offsets, lengths, sums))
            else:
                offsets = self._offsets[self.memory.case.count :][:count]
                self.tier.submit_load(LoadJob(next(self._job_ids), chunks, offsets, lengths))
            while not results:
                if not self._woken.wait(PATIENCE_S):
                    raise BenchError(f"{self.name}: no report within {PATIENCE_S:.0f} s: {self.tier!r}")
                self._woken.clear()
                results.extend(self.tier.get_finished_jobs())

        spent = timed(one_job)
        for result in results:
            if len(result.ok) != count or not result.ok.all():
                raise BenchError(f"{self.name}: chunks failed: {', '.join(sorted(set(result.reasons.values())))}")
        return spent

    def close(self) -> None:
        self.tier.close()


def timed(work: Callable[[], object]) -> Spent:
    cpu, begin = _cpu(), time.perf_counter()
    work()
    return Spent(time.perf_counter() - begin, _cpu() - cpu)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _at_once(work: Callable[[int], Awaitable[None]], count: int, most: int) -> None:
    """``work`` on each number, ``most`` at the same time."""
    room = asyncio.Semaphore(most)

    async def one(number: int) -> None:
        async with room:
            await work(number)

    await asyncio.gather(*map(one, range(count)))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the client raises, in few words, and without what a server says."""
    try:
        yield
    except Exception as error:
        raise BenchError(f"plain obstore: {translated(error)}") from error


# ── stores and loads ─────────────────────────────────────────────────────────────────────────────────────────────────


def _measure_case(options: ObjOptions, case: Case, place: Place, report: Report) -> list[str]:
    """Which of plain was the faster one, for people."""
    memory = Memory(case)
    times: defaultdict[str, defaultdict[str, list[Spent]]] = defaultdict(lambda: defaultdict(list))
    with contextlib.ExitStack() as stack:
        sides: list[Side] = [
            stack.enter_context(contextlib.closing(kind(place, memory))) for kind in (Threads, Asyncio, TierSide)
        ]
        for side in sides:
            report.progress(f"{case}: {side.name} warms up")
            side.live(f"{case.chunk_bytes}-warm", min(case.count, WARMING))
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                report.progress(f"{case}: round {number + 1}, {side.name}")
                for measure, spent in side.live(f"{case.chunk_bytes}-{number}", case.count).items():
                    times[measure][side.name].append(spent)
                place.clear()  # falls into nobody's turn, and a server need not have room for all
    return [_add_case(case, measure, times[measure], report) for measure in MEASURES]


def _add_case(case: Case, measure: str, times: dict[str, list[Spent]], report: Report) -> str:
    tier, plain = times[TierSide.name], [times[Threads.name], times[Asyncio.name]]
    limits = [min(both) for both in zip(*plain, strict=True)]
    names = [Threads.name if spent is both[0] else Asyncio.name for spent, *both in zip(limits, *plain, strict=True)]

    def add(what: str, unit: str, values: Sequence[float], **details: Any) -> None:
        report.add(
            Figure(measure=what, case=str(case), unit=unit, values={"tierkv": values}, compared=False, details=details)
        )

    for name in (Threads.name, Asyncio.name):
        add(f"plain, {name}: {measure}", "MB/s", _speeds(case, times[name]))
    add(measure, "MB/s", _speeds(case, tier))
    shares = [limit.wall / spent.wall for limit, spent in zip(limits, tier, strict=True)]
    add(f"{measure}: share of plain", "of plain", shares, faster=names)
    add(f"plain: {measure}: CPU", "CPU s/GiB", _cpu_per_gib(case, limits))
    add(f"{measure}: CPU", "CPU s/GiB", _cpu_per_gib(case, tier))
    counts = ", ".join(f"{name} in {count}" for name, count in Counter(names).most_common())
    return f"{measure} {case}: {counts}"


def _speeds(case: Case, times: Sequence[Spent]) -> list[float]:
    return [case.nbytes / spent.wall / 1e6 for spent in times]


def _cpu_per_gib(case: Case, times: Sequence[Spent]) -> list[float]:
    return [spent.cpu / case.nbytes * (1 << 30) for spent in times]


# ── lookups ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _measure_lookups(options: ObjOptions, place: Place, report: Report) -> None:
    report.progress(f"{max(LOOKUPS):,} chunks are stored, to be looked up")
    with contextlib.closing(Asked(place, max(LOOKUPS))) as asked:
        for count in LOOKUPS:
            values: defaultdict[str, list[float]] = defaultdict(list)
            turns = (asked.by_heads, asked.by_tiers)
            for number in range(options.rounds):
                report.progress(f"{count:,} lookups: round {number + 1}")
                for turn in turns if number % 2 == 0 else turns[::-1]:
                    for measure, seconds in turn(count).items():
                        values[measure].append(1e3 * seconds)
            pairs = zip(values[HEADS], values[UNKNOWN], strict=True)
            shares = [plain / tier for plain, tier in pairs]
            for measure, found in values.items():
                _add_lookups(measure, count, "ms", found, report)
            _add_lookups(f"{UNKNOWN}: share of {HEADS}", count, "of plain", shares, report)


def _add_lookups(measure: str, count: int, unit: str, values: list[float], report: Report) -> None:
    report.add(Figure(measure=measure, case=f"{count:,} chunks", unit=unit, values={"tierkv": values}, compared=False))


class Asked:
    """Chunks that are in the store, and who asks for them. What is timed is in seconds, by measure.

    Thread safety: none.
    """

    def __init__(self, place: Place, count: int) -> None:
        """Stores the chunks, and makes the connections of the client without a tier."""
        self._place = place
        self._rng = np.random.default_rng(1)
        self._space = Space(NAMESPACE, FIRST_GENERATION)
        self._hashes = some_hashes(count, self._rng)
        self._memory = Memory(Case(LOOKED_UP_BYTES, count))
        with self._fresh() as side:
            side.move(True, count)
        self._store, prefix, _ = place.open()
        self._paths = [f"{prefix}/{record_path(space_path(self._space), 0, each)}" for each in self._hashes]
        self._most = place.config().n_lookup_connections
        self.by_heads(min(self._most, count))

    def by_heads(self, count: int) -> dict[str, float]:
        with _told():
            return {HEADS: timed(lambda: asyncio.run(_at_once(self._head, count, self._most))).wall}

    def by_tiers(self, count: int) -> dict[str, float]:
        there = self._hashes[:count]
        times: dict[str, float] = {}
        with self._fresh() as side:
            times[UNKNOWN] = self._look(side, there, True)
            times["lookup: there, known"] = self._look(side, there, True)
            times["lookup: not there"] = self._look(side, some_hashes(count, self._rng), False)
            if count == LOOKUPS[0]:
                times["store: all there, known"] = side.move(True, count).wall
        if count == LOOKUPS[0]:
            with self._fresh() as side:
                times["store: all there, unknown"] = side.move(True, count).wall
        return times

    def close(self) -> None:
        self.__dict__.pop("_store", None)  # connections live as long as the client

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[TierSide]:
        """A tier that knows of nothing yet."""
        with contextlib.closing(TierSide(self._place, self._memory)) as side:
            side.name_them(self._space, self._hashes)
            yield side

    def _look(self, side: TierSide, hashes: list[bytes], expected: bool) -> float:
        chunks, answers = make_chunks(self._space, 0, hashes), list[bool]()
        required = np.ones(len(chunks), np.bool_)  # as of a group without a window
        spent = timed(lambda: answers.extend(side.tier.lookup_batch(chunks, RequestContext(), required)))
        if answers != [expected] * len(hashes):
            raise BenchError(f"tierkv: {sum(answers)} of {len(hashes)} chunks were found, which are there: {expected}")
        return spent.wall

    async def _head(self, number: int) -> None:
        import obstore

        await obstore.head_async(self._store, self._paths[number])
