"""The jobs that tiers have been given and have not yet reported."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tierkv.tiering.lanes import Lane
from tierkv.types import JobResult, LoadJob, Offsets, StoreJob

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class JobRecord:
    """One job. Of a promotion, the tier fills ``slots``, which are being written; of a cascade, it reads them, and they
    are pinned once for it.

    deadline: when nobody waits for it any more. late: that has come; the slots stay the tier's until it reports.
    """

    lane: Lane
    load: bool
    slots: Offsets
    lengths: Offsets
    submitted: float
    deadline: float
    late: bool = False


def checked(result: JobResult, record: JobRecord) -> JobResult:
    """``result``, or if it does not have one flag (and for a load, one checksum) a chunk, that all has failed."""
    try:
        ok, sums = np.asarray(result.ok), result.checksums
        if sums is not None:
            sums = np.asarray(sums, np.uint64)
        fits = ok.dtype == np.bool_ and ok.shape == record.slots.shape
        fits &= sums.shape == ok.shape if sums is not None else not (record.load and ok.any())
        fits &= all(isinstance(word, str) for word in result.reasons.values())
        if fits:
            return JobResult(result.job_id, ok, sums, result.reasons)
    except Exception as error:  # a user's tier may report anything
        logger.debug("%s: %s", type(error).__name__, error)
    logger.error("tier %s gave a malformed report of job %d", record.lane.name, result.job_id)
    return _all_failed(result.job_id, len(record.slots), "malformed")


def _all_failed(job_id: int, count: int, reason: str) -> JobResult:
    none = np.zeros(count, np.bool_)
    return JobResult(job_id, none, none.astype(np.uint64), dict.fromkeys(range(count), reason))


class JobTable:
    """Job id → what it is for; ids are never used twice. Thread safety: under the manager's lock only."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._jobs: dict[int, JobRecord] = {}
        self._refused: list[JobResult] = []

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, job: LoadJob | StoreJob, record: JobRecord) -> None:
        """Give ``job`` to the record's tier. A tier that raises has refused it: that is a report, too."""
        self._jobs[job.job_id] = record
        try:
            if isinstance(job, LoadJob):
                record.lane.tier.submit_load(job)
            else:
                record.lane.tier.submit_store(job)
        except Exception as error:  # a user's tier may raise anything
            logger.warning("tier %s refused a job: %s: %s", record.lane.name, type(error).__name__, error)
            self._refused.append(_all_failed(job.job_id, len(job.chunks), "refused"))

    def ended(self, lane: Lane) -> Iterator[tuple[JobRecord, JobResult]]:
        """The jobs that the tier of ``lane`` reports now, and of all tiers, those that were refused: each once.

        A tier that reports a job twice, or one that it was not given, must not end another's.
        """
        refused, self._refused = self._refused, []
        for result in refused:
            yield self._jobs.pop(result.job_id), result
        try:
            reports: list[object] = list(lane.tier.get_finished_jobs())
        except Exception as error:  # as above; its jobs stay open, and their slots theirs
            logger.warning("tier %s does not report: %s: %s", lane.name, type(error).__name__, error)
            reports = []
        for report in reports:
            if isinstance(report, JobResult) and isinstance(report.job_id, int):
                record = self._jobs.get(report.job_id)
                if record is not None and record.lane is lane:
                    del self._jobs[report.job_id]
                    yield record, checked(report, record)

    def abandoned(self) -> Iterator[tuple[JobRecord, JobResult]]:
        """The jobs that are left when the tiers have closed: none of them touches the region any more."""
        self._refused.clear()
        while self._jobs:
            job_id, record = self._jobs.popitem()
            yield record, _all_failed(job_id, len(record.slots), "closed")

    def overdue(self, now: float) -> list[JobRecord]:
        """Those whose deadline has come, each once: they are late from now on."""
        overdue = [record for record in self._jobs.values() if not record.late and now >= record.deadline]
        for record in overdue:
            record.late = True
        return overdue

    def __len__(self) -> int:
        return len(self._jobs)
