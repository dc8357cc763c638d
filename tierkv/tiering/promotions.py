"""Tier → host: promotions, each chunk once, shared by all requests that wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.host.cache import HostCache
from tierkv.metrics import Metrics
from tierkv.tiering.jobs import JobRecord, JobTable
from tierkv.tiering.lanes import Lane
from tierkv.tiers.breaker import verdict
from tierkv.types import Chunks, Flags, JobResult, LoadJob, Offsets


class Promotions:
    """Starts and ends promotions. Thread safety: used under the manager's lock only."""

    def __init__(
        self, cache: HostCache, lanes: Sequence[Lane], jobs: JobTable, chunk_bytes: Offsets, metrics: Metrics
    ) -> None:
        self._cache = cache
        self._lanes = lanes
        self._jobs = jobs
        self._chunk_bytes = chunk_bytes
        self._metrics = metrics

    def start(self, chunks: Chunks, tier_numbers: npt.NDArray[np.int16], now: float, timeout_s: float) -> Flags:
        """Reserve slots for ``chunks``, which are absent, and ask each one's tier to fill them.

        The slots stay reserved until the tier has reported, however long that takes: a tier that is late
        can never write into a slot that has been given to another chunk.

        Returns:
            which of them are on their way; for the others there was no room after all.
        """
        reserved = self._cache.reserve(chunks)
        self._metrics.add("evictions", len(reserved.evicted))
        placed: Flags = reserved.slots >= 0
        self._metrics.add("promotions", int(placed.sum()))
        for number in np.unique(tier_numbers[placed]):
            where = np.flatnonzero(placed & (tier_numbers == number))
            slots, lengths = reserved.slots[where], self._chunk_bytes[chunks.groups[where]]
            job = LoadJob(self._jobs.new_id(), chunks.take(where), self._cache.offset(slots), lengths)
            record = JobRecord(self._lanes[int(number)], True, slots, lengths, now, now + timeout_s)
            self._jobs.submit(job, record)
        return placed

    def give_up(self, record: JobRecord, now: float) -> None:
        """The deadline has come: the chunks never existed. The tier may still write, so their slots stay its own."""
        self._cache.forget(record.slots)
        record.lane.late += len(record.slots)
        record.lane.reading.failed(now)
        self._metrics.add("promotions_late", len(record.slots))

    def finish(self, record: JobRecord, result: JobResult, now: float) -> dict[str, Any]:
        """End a promotion: what was verified can be read from now on, the rest never existed.

        What is late was forgotten, and stays so: its slots are free now, and are given to others.
        """
        ok = np.asarray(result.ok, np.bool_)
        good, bad = record.slots[ok], record.slots[~ok]
        if record.late:
            record.lane.late -= len(record.slots)
        else:
            record.lane.reading.judge(verdict(result), now)
        if len(good):
            assert result.checksums is not None
            self._cache.set_checksums(good, np.asarray(result.checksums)[ok])
            self._cache.commit(good)
        if len(bad):
            self._cache.abort(bad)
            self._metrics.add("promotions_failed", len(bad))
            for index in np.flatnonzero(~ok):
                self._metrics.add_reason(result.reasons.get(int(index), "unknown"))
        return {"tier": record.lane.name, "chunks": len(good), "failed": len(bad)}
