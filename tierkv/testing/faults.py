"""Faults and latency, as wrappers around any tier, usable from a configuration::

{"type": "latency", "module_path": "tierkv.testing.faults:LatencyTier",
 "inner": {"type": "fs", "root_dir": "/cache"}, "load_delay_s": 0.5, "store_delay_s": 2}

{"type": "faulty", "module_path": "tierkv.testing.faults:FaultyTier",
 "inner": {"type": "memory"}, "seed": 7, "on": "loads", "late": 0.2, "late_s": 3, "never": 0.1}
"""

from __future__ import annotations

import abc
import heapq
import itertools
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta

from tierkv.config import TierConfig, at, parse_tier
from tierkv.errors import ConfigError, TierClosedError
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.io import CLOSED
from tierkv.tiers.lookups import ask
from tierkv.types import ChunkName, Chunks, Flags, JobResult, LoadJob, RequestContext, StoreJob

logger = logging.getLogger(__name__)

Delay = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

#: What is reported: a ``JobResult``, and by a broken tier anything.
Report = Any

#: How often an inner tier that does not call ``wake`` is asked for its reports.
_POLL_S = 0.02


class WrapperConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """inner: the configuration of the tier that is wrapped."""

    inner: dict[str, Any]


class WrapperTier(Tier):
    """A tier around another one, which gets its jobs, and whose reports are passed on, when a subclass says so.

    Thread safety: as every tier. One thread, ``tierkv-<tier>-delay-0``, keeps the times; ``_lock`` is held
    around each call of the inner tier, so that it sees one thread at a time.
    """

    Config: ClassVar[type[TierConfig]] = WrapperConfig

    def __init__(self, config: WrapperConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        # What is to be done when: a job goes to the inner tier, a report to whoever collects reports.
        self._due: list[tuple[float, int, StoreJob | LoadJob | Report]] = []
        self._order = itertools.count()
        self._inside = 0
        self._finished: deque[Report] = deque()
        tier_class, inner_config = parse_tier(config.inner, "inner")
        try:
            # An event, not the lock: an inner tier may call this while it holds a lock of its own.
            self._inner: Tier = tier_class(inner_config, replace(context, wake=self._changed.set))
        except ConfigError as error:
            raise at("inner", error) from error
        # Its chunks are where the inner tier's are.
        self.hit_source = self._inner.hit_source  # type: ignore[misc]
        self.medium, self.locality = self._inner.medium, self._inner.locality
        self.stores = self._inner.stores
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{context.name}-delay-0", daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _look_up(self, ask_inner: Callable[[], list[bool]]) -> list[bool]:
        """What is answered to a lookup, to which the inner tier would say ``ask_inner()``; may wait or raise."""

    @abc.abstractmethod
    def _delay_of(self, job: StoreJob | LoadJob) -> float | None:
        """Seconds until the inner tier gets ``job``; None for never. May raise."""

    @abc.abstractmethod
    def _reports_of(self, result: JobResult) -> list[tuple[float, Report]]:
        """What is reported instead of ``result``, and after how many seconds."""

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        return self._look_up(lambda: [self._inner.lookup(name, request)])[0]

    def lookup_batch(self, chunks: Chunks, request: RequestContext, required: Flags | None = None) -> Sequence[bool]:
        return self._look_up(lambda: list(map(bool, ask(self._inner, chunks, request, required))))

    def submit_store(self, job: StoreJob) -> None:
        self._submit(job)

    def submit_load(self, job: LoadJob) -> None:
        self._submit(job)

    def get_finished_jobs(self) -> list[JobResult]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        self._closing.set()
        self._changed.set()
        self._thread.join()
        with self._lock:
            self._inner.close()
            for result in self._inner.get_finished_jobs():
                self._finished.extend(report for _, report in self._reports_of(result))
            for _, _, item in sorted(self._due, key=lambda due: due[:2]):
                self._finished.append(_all_failed(item, CLOSED) if isinstance(item, StoreJob | LoadJob) else item)
            self._due.clear()
            self._inside = 0

    def __repr__(self) -> str:
        with self._lock:
            return f"{type(self).__name__}(inside={self._inside}, due={len(self._due)}, inner={self._inner!r})"

    def _submit(self, job: StoreJob | LoadJob) -> None:
        with self._lock:
            if self._closing.is_set():
                raise TierClosedError(f"tier {self.context.name!r} is closed")
            delay = self._delay_of(job)
            if delay == 0:
                self._hand_over(job)
            elif delay is not None:
                self._push(time.monotonic() + delay, job)
        self._changed.set()

    def _push(self, when: float, item: StoreJob | LoadJob | Report) -> None:
        heapq.heappush(self._due, (when, next(self._order), item))

    def _hand_over(self, job: StoreJob | LoadJob) -> None:
        if isinstance(job, StoreJob):
            self._inner.submit_store(job)
        else:
            self._inner.submit_load(job)
        self._inside += 1

    def _run(self) -> None:
        while not self._closing.is_set():
            self._changed.clear()
            timeout, reported = self._advance(time.monotonic())
            if reported:
                self.context.wake()
            self._changed.wait(timeout)

    def _advance(self, now: float) -> tuple[float | None, bool]:
        """Do what is due. Returns seconds until there is more to do, and whether anything was reported."""
        with self._lock:
            for result in self._inner.get_finished_jobs():
                self._inside -= 1
                for delay, report in self._reports_of(result):
                    self._push(now + delay, report)
            reported = False
            while self._due and self._due[0][0] <= now:
                _, _, item = heapq.heappop(self._due)
                if isinstance(item, StoreJob | LoadJob):
                    self._hand_over_late(item)
                else:
                    self._finished.append(item)
                    reported = True
            waits = [_POLL_S] if self._inside else []
            if self._due:
                waits.append(max(0.0, self._due[0][0] - now))
            return min(waits, default=None), reported

    def _hand_over_late(self, job: StoreJob | LoadJob) -> None:
        try:
            self._hand_over(job)
        except Exception:
            logger.exception("tier %s: the inner tier refused job %d", self.context.name, job.job_id)
            self._push(0.0, _all_failed(job, "error"))


class LatencyTierConfig(WrapperConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """load_delay_s, store_delay_s: seconds from a job's end to its report. lookup_delay_s: before each lookup."""

    load_delay_s: Delay = 0.0
    store_delay_s: Delay = 0.0
    lookup_delay_s: Delay = 0.0


class LatencyTier(WrapperTier):
    """A tier that is right, and slow."""

    Config: ClassVar[type[TierConfig]] = LatencyTierConfig

    def __init__(self, config: LatencyTierConfig, context: TierContext) -> None:
        self._delays = config
        super().__init__(config, context)

    def _look_up(self, ask_inner: Callable[[], list[bool]]) -> list[bool]:
        self._closing.wait(self._delays.lookup_delay_s)
        return ask_inner()

    def _delay_of(self, job: StoreJob | LoadJob) -> float | None:
        return 0.0

    def _reports_of(self, result: JobResult) -> list[tuple[float, Report]]:
        is_load = result.checksums is not None
        return [(self._delays.load_delay_s if is_load else self._delays.store_delay_s, result)]


class FaultyTierConfig(WrapperConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Which share, from 0 to 1, meets which fault. A job, or a lookup, meets at most one, so together at most 1.

    seed: the same seed, the same faults for jobs with the same numbers, in whatever order they end.
    late_s: how late what is late is.

    Of jobs; ``on`` says which meet faults:

    raises: ``submit_*`` raises. fails: all chunks are reported not ok. partial: about half of them are. Of a load,
    their bytes in the region are garbage. never: the job is never reported, not even by ``close``. late: the job is
    begun ``late_s`` seconds late, so that a load writes to the region long after it was given up. twice: the job is
    reported a second time after ``late_s``. malformed: the report is none: of another length, of another job, without
    flags … wrong_sums: a load carries other checksums than those of its bytes.

    Of lookups, of a batch all together:

    lookup_raises. lookup_blocks: it takes ``late_s``. lookup_invents: the tier has it, it says. lookup_denies: the
    tier has it not, it says.

    Of collecting reports, when there are some: reports_raise.
    """

    seed: int = 0
    on: Literal["stores", "loads", "both"] = "both"
    raises: Share = 0.0
    fails: Share = 0.0
    partial: Share = 0.0
    never: Share = 0.0
    late: Share = 0.0
    twice: Share = 0.0
    malformed: Share = 0.0
    wrong_sums: Share = 0.0
    lookup_raises: Share = 0.0
    lookup_blocks: Share = 0.0
    lookup_invents: Share = 0.0
    lookup_denies: Share = 0.0
    reports_raise: Share = 0.0
    late_s: Delay = 1.0


_FAULTS = ("raises", "fails", "partial", "never", "late", "twice", "malformed", "wrong_sums")
_LOOKUP_FAULTS = ("lookup_raises", "lookup_blocks", "lookup_invents", "lookup_denies")

#: The reason of chunks that ``fails`` and ``partial`` make not ok.
INJECTED = "injected"

#: What garbage in the region consists of.
GARBAGE = 0xDB


class FaultyTier(WrapperTier):
    """A tier that breaks its contract, on purpose, and tells how often it did: ``faults``.

    One thing it never does, because nobody could notice: report as ok and with their checksum bytes that are not those
    of the chunk.
    """

    Config: ClassVar[type[TierConfig]] = FaultyTierConfig

    def __init__(self, config: FaultyTierConfig, context: TierContext) -> None:
        self._shares = _shares(config, _FAULTS)
        self._lookup_shares = _shares(config, _LOOKUP_FAULTS)
        self._faulty = config
        self._random = random.Random(config.seed)
        self._fault_of: dict[int, tuple[str, StoreJob | LoadJob]] = {}
        self._seen: set[int] = set()
        #: How many jobs, lookups and collections met each fault.
        self.faults: Counter[str] = Counter()
        #: The jobs that will never be reported, not even by ``close``.
        self.silent: set[int] = set()
        super().__init__(config, context)

    def get_finished_jobs(self) -> list[JobResult]:
        if self._finished and self._random.random() < self._faulty.reports_raise:
            self.faults["reports_raise"] += 1
            raise OSError("injected: no reports now")
        return super().get_finished_jobs()

    def _look_up(self, ask_inner: Callable[[], list[bool]]) -> list[bool]:
        fault = _pick(self._random.random(), _LOOKUP_FAULTS, self._lookup_shares)
        if fault is None:
            return ask_inner()
        self.faults[fault] += 1
        if fault == "lookup_raises":
            raise OSError("injected: the lookup failed")
        if fault == "lookup_blocks":
            self._closing.wait(self._faulty.late_s)
            return ask_inner()
        return [fault == "lookup_invents"] * len(ask_inner())

    def _delay_of(self, job: StoreJob | LoadJob) -> float | None:
        self._seen.add(job.job_id)
        if self._faulty.on == ("loads" if isinstance(job, StoreJob) else "stores"):
            return 0.0
        fault = _pick(self._random_of(job.job_id, "fault").random(), _FAULTS, self._shares)
        if fault is None or (fault == "wrong_sums" and isinstance(job, StoreJob)):
            return 0.0
        self.faults[fault] += 1
        if fault == "raises":
            raise OSError("injected: the job was refused")
        if fault == "never":
            self.silent.add(job.job_id)
            return None
        self._fault_of[job.job_id] = fault, job
        return self._faulty.late_s if fault == "late" else 0.0

    def _reports_of(self, result: JobResult) -> list[tuple[float, Report]]:
        fault, job = self._fault_of.pop(result.job_id, (None, None))
        if job is None or fault == "late":
            return [(0.0, result)]
        if fault == "twice":
            return [(0.0, result), (self._faulty.late_s, result)]
        count, drawn = len(result.ok), self._random_of(result.job_id, "which")
        if fault == "fails":
            return [(0.0, self._without(job, result, range(count)))]
        if fault == "partial":
            return [(0.0, self._without(job, result, [i for i in range(count) if drawn.random() < 0.5]))]
        if fault == "wrong_sums":
            assert result.checksums is not None
            return [(0.0, replace(result, checksums=np.where(result.ok, ~result.checksums, 0)))]
        if isinstance(job, LoadJob):
            self._spoil(job, range(count))
        return [(0.0, self._malformed(result, drawn))]

    def _without(self, job: StoreJob | LoadJob, result: JobResult, indices: Sequence[int]) -> JobResult:
        """``result`` with the chunks at ``indices`` not ok."""
        ok, checksums = result.ok.copy(), None
        ok[list(indices)] = False
        if isinstance(job, LoadJob):
            assert result.checksums is not None
            checksums = np.where(ok, result.checksums, np.uint64(0))
            self._spoil(job, indices)
        return JobResult(result.job_id, ok, checksums, {**result.reasons, **dict.fromkeys(indices, INJECTED)})

    def _spoil(self, job: LoadJob, indices: Sequence[int]) -> None:
        """A load that fails may have written anything to its chunks."""
        for i in indices:
            offset, length = int(job.offsets[i]), int(job.lengths[i])
            self.context.view[offset : offset + length] = bytes([GARBAGE]) * length

    def _malformed(self, result: JobResult, drawn: random.Random) -> Report:
        """Something in the place of ``result``, about a job of at least one chunk."""
        count = len(result.ok)
        # A number that no job of this tier has, and perhaps one of another tier's.
        stranger = next(n for n in range(result.job_id, -1, -1) if n not in self._seen)
        all_ok = np.ones(count, np.bool_)
        fields: dict[str, dict[str, Any]] = {
            "longer": {"ok": np.ones(count + 1, np.bool_)},
            "flat": {"ok": True},
            "no flags": {"ok": None},
            "words": {"ok": ["no"] * count},
            "ragged": {"ok": [[True], []]},
            "no reasons": {"ok": ~all_ok, "reasons": None},
            "no sums": {"ok": all_ok, "checksums": np.ones(count, np.uint64) if result.checksums is None else None},
            "other sums": {"ok": all_ok, "checksums": np.ones(count + 1, np.uint64)},
            "a stranger's": {"job_id": stranger},
            "no number": {"job_id": [result.job_id]},
        }
        kinds: dict[str, Report] = {name: replace(result, **changed) for name, changed in fields.items()}
        kinds |= {"nothing": None, "a word": "done"}
        kind = drawn.choice(sorted(kinds))
        if kind in ("a stranger's", "no number", "nothing", "a word"):
            self.silent.add(result.job_id)
        return kinds[kind]

    def _random_of(self, job_id: int, purpose: str) -> random.Random:
        return random.Random(f"{self._faulty.seed} {job_id} {purpose}")


def _shares(config: FaultyTierConfig, faults: Sequence[str]) -> list[float]:
    """The shares of ``faults``, of which at most one happens."""
    shares = [getattr(config, fault) for fault in faults]
    if sum(shares) > 1:
        raise ConfigError(faults[0], "shares above 1", f"{' + '.join(faults)} of at most 1")
    return shares


def _pick(drawn: float, faults: Sequence[str], shares: Sequence[float]) -> str | None:
    """Which of ``faults`` a number from 0 to 1 stands for, if any."""
    for fault, share in zip(faults, shares, strict=True):
        drawn -= share
        if drawn < 0:
            return fault
    return None


def _all_failed(job: StoreJob | LoadJob, reason: str) -> JobResult:
    n = len(job.chunks)
    checksums = np.zeros(n, np.uint64) if isinstance(job, LoadJob) else None
    return JobResult(job.job_id, np.zeros(n, np.bool_), checksums, dict.fromkeys(range(n), reason))
