"""The jobs that tiers have been given and have not yet reported."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass

import numpy as np

from tierkv.tiers.base import Tier
from tierkv.types import Chunks, JobResult, LoadJob, Offsets, StoreJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """A promotion: ``tier`` fills ``slots``, which are being written. After ``deadline`` nobody waits for it."""

    tier: Tier
    slots: Offsets
    chunks: Chunks
    deadline: float


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A cascade: ``tier`` reads ``slots``, which are pinned once for it."""

    tier: Tier
    slots: Offsets


def checked(result: JobResult, record: LoadRecord | StoreRecord) -> JobResult:
    """``result``, or if it does not have one flag (and for a load, one checksum) a chunk, that all has failed."""
    count = len(record.slots)
    ok = np.asarray(result.ok)
    sums = count if result.checksums is None else len(result.checksums)
    needed = isinstance(record, LoadRecord) and result.checksums is None and ok.any()
    if ok.shape == (count,) and sums == count and not needed:
        return result
    logger.error("tier %s gave a malformed report of job %d", record.tier.context.name, result.job_id)
    none = np.zeros(count, np.bool_)
    return JobResult(result.job_id, none, none.astype(np.uint64), dict.fromkeys(range(count), "malformed"))


class JobTable:
    """Job id → what it is for; ids are never used twice. Thread safety: under the manager's lock only."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._jobs: dict[int, LoadRecord | StoreRecord] = {}
        self._refused: list[JobResult] = []

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, job: LoadJob | StoreJob, record: LoadRecord | StoreRecord) -> None:
        """Give ``job`` to the record's tier. A tier that raises has refused it: that is a report, too."""
        self._jobs[job.job_id] = record
        try:
            if isinstance(job, LoadJob):
                record.tier.submit_load(job)
            else:
                record.tier.submit_store(job)
        except Exception as error:  # a user's tier may raise anything
            logger.warning("tier %s refused a job: %s: %s", record.tier.context.name, type(error).__name__, error)
            none = np.zeros(len(job.chunks), np.bool_)
            reasons = dict.fromkeys(range(len(none)), "refused")
            self._refused.append(JobResult(job.job_id, none, none.astype(np.uint64), reasons))

    def reports(self, tier: Tier) -> list[JobResult]:
        """What ``tier`` reports now, and for all tiers, what was refused."""
        refused, self._refused = self._refused, []
        try:
            return refused + tier.get_finished_jobs()
        except Exception as error:  # as above; its jobs stay open, and their slots theirs
            logger.warning("tier %s does not report: %s: %s", tier.context.name, type(error).__name__, error)
            return refused

    def take(self, job_id: int) -> LoadRecord | StoreRecord | None:
        """The record of a job that a tier reports; None for one that is unknown or was reported before."""
        return self._jobs.pop(job_id, None)

    def overdue_slots(self, tier: Tier, now: float) -> int:
        """Slots that ``tier`` was to have filled by now."""
        return sum(
            len(r.slots)
            for r in self._jobs.values()
            if isinstance(r, LoadRecord) and r.tier is tier and now >= r.deadline
        )

    def __len__(self) -> int:
        return len(self._jobs)
