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
    """A promotion: ``tier`` fills ``slots``, which are being written."""

    tier: Tier
    slots: Offsets
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A cascade: ``tier`` reads ``slots``, which are pinned once for it."""

    tier: Tier
    slots: Offsets


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

    def __len__(self) -> int:
        return len(self._jobs)
