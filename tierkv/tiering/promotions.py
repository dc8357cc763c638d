"""Tier → host: promotions, each chunk once, shared by all requests that wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.host.cache import HostCache
from tierkv.metrics import Metrics
from tierkv.tiering.jobs import JobTable, LoadRecord
from tierkv.tiers.base import Tier
from tierkv.types import Chunks, JobResult, LoadJob, Offsets


class Promotions:
    """Starts and ends promotions. Thread safety: used under the manager's lock only."""

    def __init__(
        self, cache: HostCache, tiers: Sequence[Tier], jobs: JobTable, chunk_bytes: Offsets, metrics: Metrics
    ) -> None:
        self._cache = cache
        self._tiers = tiers
        self._jobs = jobs
        self._chunk_bytes = chunk_bytes
        self._metrics = metrics

    def start(self, chunks: Chunks, tier_numbers: npt.NDArray[np.int16], deadline: float) -> None:
        """Reserve slots for ``chunks``, which are absent and have room, and ask each one's tier to fill them.

        The slots stay reserved until the tier has reported, however long that takes: a tier that is late
        can never write into a slot that has been given to another chunk.
        """
        slots = self._cache.reserve(chunks)
        assert (slots >= 0).all(), "the caller made sure that there is room"
        self._metrics.add("promotions", len(chunks))
        for number in np.unique(tier_numbers):
            where = np.flatnonzero(tier_numbers == number)
            job = LoadJob(
                self._jobs.new_id(),
                chunks.take(where),
                self._cache.offset(slots[where]),
                self._chunk_bytes[chunks.groups[where]],
            )
            tier = self._tiers[int(number)]
            self._jobs.submit(job, LoadRecord(tier, slots[where], job.chunks, deadline))

    def finish(self, record: LoadRecord, result: JobResult) -> dict[str, Any]:
        """End a promotion: what was verified can be read from now on, the rest never existed."""
        ok = np.asarray(result.ok, np.bool_)
        good, bad = record.slots[ok], record.slots[~ok]
        if len(good):
            assert result.checksums is not None
            self._cache.set_checksums(good, np.asarray(result.checksums)[ok])
            self._cache.commit(good)
        if len(bad):
            self._cache.abort(bad)
            self._metrics.add("promotions_failed", len(bad))
            for index in np.flatnonzero(~ok):
                self._metrics.add_reason(result.reasons.get(int(index), "unknown"))
        return {"tier": record.tier.context.name, "chunks": len(good), "failed": len(bad)}
