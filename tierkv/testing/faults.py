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
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta

from tierkv.config import TierConfig, at, parse_tier
from tierkv.errors import ConfigError, TierClosedError
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.io import CLOSED
from tierkv.tiers.lookups import ask
from tierkv.types import ChunkName, Chunks, JobResult, LoadJob, RequestContext, StoreJob

logger = logging.getLogger(__name__)

Delay = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

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
        # What is to be done when: a job goes to the inner tier, a result to whoever collects results.
        self._due: list[tuple[float, int, StoreJob | LoadJob | JobResult]] = []
        self._order = itertools.count()
        self._inside = 0
        self._finished: deque[JobResult] = deque()
        tier_class, inner_config = parse_tier(config.inner, "inner")
        try:
            # An event, not the lock: an inner tier may call this while it holds a lock of its own.
            self._inner: Tier = tier_class(inner_config, replace(context, wake=self._changed.set))
        except ConfigError as error:
            raise at("inner", error) from error
        self.hit_source = self._inner.hit_source  # type: ignore[misc] # it is where the inner tier's chunks are
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{context.name}-delay-0", daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _before_lookup(self) -> None:
        """Called by lookup threads before the inner tier is asked; may wait or raise."""

    @abc.abstractmethod
    def _delay_of(self, job: StoreJob | LoadJob) -> float | None:
        """Seconds until the inner tier gets ``job``; None for never. May raise."""

    @abc.abstractmethod
    def _reports_of(self, result: JobResult) -> list[tuple[float, JobResult]]:
        """What is reported instead of ``result``, and after how many seconds."""

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        self._before_lookup()
        return self._inner.lookup(name, request)

    def lookup_batch(self, chunks: Chunks, request: RequestContext) -> Sequence[bool]:
        self._before_lookup()
        answers: list[bool] = ask(self._inner, chunks, request).tolist()
        return answers

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
            for _, _, item in sorted(self._due):
                self._finished.append(item if isinstance(item, JobResult) else _all_failed(item, CLOSED))
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

    def _push(self, when: float, item: StoreJob | LoadJob | JobResult) -> None:
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
                if isinstance(item, JobResult):
                    self._finished.append(item)
                    reported = True
                else:
                    self._hand_over_late(item)
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

    def _before_lookup(self) -> None:
        self._closing.wait(self._delays.lookup_delay_s)

    def _delay_of(self, job: StoreJob | LoadJob) -> float | None:
        return 0.0

    def _reports_of(self, result: JobResult) -> list[tuple[float, JobResult]]:
        is_load = result.checksums is not None
        return [(self._delays.load_delay_s if is_load else self._delays.store_delay_s, result)]


class FaultyTierConfig(WrapperConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Which share of jobs, from 0 to 1, meets which fault; a job meets at most one, so together at most 1.

    seed: the same seed, the same faults for jobs with the same numbers, in whatever order they end.
    on: the jobs that meet faults.
    raises: ``submit_*`` raises. fails: all chunks are reported not ok. partial: about half of them are.
    never: the job is never reported, not even by ``close``. late: the job is begun ``late_s`` seconds
    late, so that a load writes to the region long after it was given up. twice: the job is reported a
    second time after ``late_s``. lookup_raises: the share of lookups, or of batches, that raise.
    """

    seed: int = 0
    on: Literal["stores", "loads", "both"] = "both"
    raises: Share = 0.0
    fails: Share = 0.0
    partial: Share = 0.0
    never: Share = 0.0
    late: Share = 0.0
    twice: Share = 0.0
    lookup_raises: Share = 0.0
    late_s: Delay = 1.0


_FAULTS = ("raises", "fails", "partial", "never", "late", "twice")

#: The reason of chunks that ``fails`` and ``partial`` make not ok.
INJECTED = "injected"


class FaultyTier(WrapperTier):
    """A tier that breaks its contract, on purpose, and tells how often it did: ``faults``."""

    Config: ClassVar[type[TierConfig]] = FaultyTierConfig

    def __init__(self, config: FaultyTierConfig, context: TierContext) -> None:
        self._shares = [getattr(config, fault) for fault in _FAULTS]
        if sum(self._shares) > 1:
            raise ConfigError("raises", "shares of jobs above 1", f"{' + '.join(_FAULTS)} of at most 1")
        self._faulty = config
        self._lookup_random = random.Random(config.seed)
        self._fault_of: dict[int, str] = {}
        #: How many jobs (and lookups) met each fault.
        self.faults: Counter[str] = Counter()
        super().__init__(config, context)

    def _before_lookup(self) -> None:
        if self._lookup_random.random() < self._faulty.lookup_raises:
            self.faults["lookup_raises"] += 1
            raise OSError("injected: the lookup failed")

    def _delay_of(self, job: StoreJob | LoadJob) -> float | None:
        fault = self._draw(job)
        if fault is None:
            return 0.0
        self.faults[fault] += 1
        if fault == "raises":
            raise OSError("injected: the job was refused")
        if fault == "never":
            return None
        self._fault_of[job.job_id] = fault
        return self._faulty.late_s if fault == "late" else 0.0

    def _draw(self, job: StoreJob | LoadJob) -> str | None:
        """The fault that ``job`` meets, if any."""
        if self._faulty.on == ("loads" if isinstance(job, StoreJob) else "stores"):
            return None
        drawn = self._random_of(job.job_id, "fault").random()
        for fault, share in zip(_FAULTS, self._shares, strict=True):
            drawn -= share
            if drawn < 0:
                return fault
        return None

    def _reports_of(self, result: JobResult) -> list[tuple[float, JobResult]]:
        fault = self._fault_of.pop(result.job_id, None)
        if fault == "twice":
            return [(0.0, result), (self._faulty.late_s, result)]
        if fault == "fails":
            return [(0.0, _without(result, list(range(len(result.ok)))))]
        if fault == "partial":
            drawn = self._random_of(result.job_id, "partial")
            return [(0.0, _without(result, [i for i in range(len(result.ok)) if drawn.random() < 0.5]))]
        return [(0.0, result)]

    def _random_of(self, job_id: int, purpose: str) -> random.Random:
        return random.Random(f"{self._faulty.seed} {job_id} {purpose}")


def _without(result: JobResult, indices: Sequence[int]) -> JobResult:
    """``result`` with the chunks at ``indices`` not ok."""
    ok, checksums = result.ok.copy(), None
    ok[list(indices)] = False
    if result.checksums is not None:
        checksums = np.where(ok, result.checksums, np.uint64(0))
    return JobResult(result.job_id, ok, checksums, {**result.reasons, **dict.fromkeys(indices, INJECTED)})


def _all_failed(job: StoreJob | LoadJob, reason: str) -> JobResult:
    n = len(job.chunks)
    checksums = np.zeros(n, np.uint64) if isinstance(job, LoadJob) else None
    return JobResult(job.job_id, np.zeros(n, np.bool_), checksums, dict.fromkeys(range(n), reason))
