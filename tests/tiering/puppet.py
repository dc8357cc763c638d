"""A tier that does what a test says, when the test says so, and counts what it was asked."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, ClassVar

import numpy as np
from tiering_harness import Bench

from tierkv.config import TierConfig
from tierkv.layout import canonical
from tierkv.tiers.base import Tier, TierContext
from tierkv.types import ChunkName, Chunks, Flags, JobResult, LoadJob, Locality, Medium, RequestContext, StoreJob


class PuppetConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    medium: Medium | None = None
    locality: Locality | None = None
    hit_source: str = "external_unspecified"


class PuppetTier(Tier):
    """Keeps chunks for real, as long as nothing else is said.

    answers: lookups wait as long as it is not set. lookup_error, submit_error, report_error: raised if there is one.
    stores_at_once, loads_at_once: jobs are done when they come; else they wait, in ``open``, for ``do``.
    asked: for each lookup, how many chunks it was about. loaded, stored: how often each chunk was asked for in a job.
    """

    Config: ClassVar[type[TierConfig]] = PuppetConfig

    def __init__(self, config: PuppetConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.medium, self.locality = config.medium, config.locality
        self.hit_source = config.hit_source  # type: ignore[misc]
        self.records: dict[ChunkName, bytes] = {}
        self.answers = threading.Event()
        self.answers.set()
        self.lookup_error: Exception | None = None
        self.submit_error: Exception | None = None
        self.report_error: Exception | None = None
        self.stores_at_once = self.loads_at_once = True
        self.open: list[StoreJob | LoadJob] = []
        self.reports: list[Any] = []
        self.asked: list[int] = []
        self.loaded: Counter[ChunkName] = Counter()
        self.stored: Counter[ChunkName] = Counter()

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        raise AssertionError("asked in batches")

    def lookup_batch(self, chunks: Chunks, request: RequestContext, required: Flags | None = None) -> list[bool]:
        self.asked.append(len(chunks))
        self.answers.wait(60)
        if self.lookup_error is not None:
            raise self.lookup_error
        return [chunks.name(i) in self.records for i in range(len(chunks))]

    def submit_store(self, job: StoreJob) -> None:
        self._submit(job, self.stored, self.stores_at_once)

    def submit_load(self, job: LoadJob) -> None:
        self._submit(job, self.loaded, self.loads_at_once)

    def get_finished_jobs(self) -> list[JobResult]:
        if self.report_error is not None:
            raise self.report_error
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> None:
        self.answers.set()
        for job in self.open:
            self.reports.append(self.failed(job, "closed"))

    def _submit(self, job: StoreJob | LoadJob, counter: Counter[ChunkName], at_once: bool) -> None:
        counter.update(job.chunks.name(i) for i in range(len(job.chunks)))
        if self.submit_error is not None:
            raise self.submit_error
        self.open.append(job)
        if at_once:
            self.do(job)

    def carry_out(self, job: StoreJob | LoadJob) -> JobResult:
        """Move the bytes; what would be reported."""
        ok, sums = np.zeros(len(job.chunks), np.bool_), np.zeros(len(job.chunks), np.uint64)
        for i in range(len(job.chunks)):
            where = self.context.view[int(job.offsets[i]) : int(job.offsets[i] + job.lengths[i])]
            if isinstance(job, StoreJob):
                self.records[job.chunks.name(i)] = bytes(where)
                ok[i] = True
            elif (kept := self.records.get(job.chunks.name(i))) is not None:
                where[:] = kept
                ok[i], sums[i] = True, canonical.checksum(where)
        reasons = dict.fromkeys(np.flatnonzero(~ok).tolist(), "absent")
        return JobResult(job.job_id, ok, sums if isinstance(job, LoadJob) else None, reasons)

    def do(self, *jobs: StoreJob | LoadJob) -> None:
        """Carry out and report ``jobs``, or all that are open."""
        for job in jobs or list(self.open):
            self.open.remove(job)
            self.reports.append(self.carry_out(job))

    @staticmethod
    def failed(job: StoreJob | LoadJob, reason: str) -> JobResult:
        none = np.zeros(len(job.chunks), np.bool_)
        return JobResult(job.job_id, none, none.astype(np.uint64), dict.fromkeys(range(len(none)), reason))


def puppet(**fields: Any) -> dict[str, Any]:
    return {"type": "puppet", "module_path": "puppet:PuppetTier", **fields}


def puppet_of(bench: Bench, number: int = 0) -> PuppetTier:
    tier = bench.manager._lanes[number].tier
    assert isinstance(tier, PuppetTier)
    return tier
