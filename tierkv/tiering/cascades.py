"""Host → tiers: every chunk that is stored goes to every tier, from its host copy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from tierkv.host.cache import READY, HostCache
from tierkv.metrics import Metrics
from tierkv.tiering.jobs import JobTable, StoreRecord
from tierkv.tiers.base import Tier
from tierkv.types import Checksums, JobResult, Offsets, StoreJob

#: The share of the slots that one tier may hold pinned while it writes.
TIER_SHARE = 0.25


class Cascades:
    """Takes checksums off the scheduler's thread, then hands chunks to the tiers.

    Thread safety: ``add`` and ``finish`` are called under the manager's lock, which the thread
    ``tierkv-checksum-0`` takes itself for all but the checksums.
    """

    def __init__(
        self,
        cache: HostCache,
        view: memoryview,
        tiers: Sequence[Tier],
        jobs: JobTable,
        chunk_bytes: Offsets,
        metrics: Metrics,
        lock: threading.Lock,
        wake: threading.Event,
    ) -> None:
        self._cache = cache
        self._view = view
        self._tiers = tiers
        self._jobs = jobs
        self._chunk_bytes = chunk_bytes
        self._metrics = metrics
        self._lock = lock
        self._wake = wake
        self._queue: queue.SimpleQueue[Offsets | None] = queue.SimpleQueue()
        self._queued = 0
        self._thread = threading.Thread(target=self._run, name="tierkv-checksum-0", daemon=True)
        if tiers:
            self._thread.start()

    @property
    def queued(self) -> int:
        """Slots that wait for their checksum."""
        return self._queued

    def add(self, slots: Offsets) -> None:
        """Cascade ``slots``, which are ready. They are pinned until their checksums are taken."""
        if self._tiers and len(slots):
            self._cache.pin(slots)
            self._queued += len(slots)
            self._queue.put(slots)

    def finish(self, record: StoreRecord, result: JobResult) -> dict[str, Any]:
        """A tier has reported: its pins go."""
        self._cache.unpin(record.slots)
        ok = np.asarray(result.ok, np.bool_)
        failed = int((~ok).sum())
        self._metrics.add("cascades_failed", failed)
        for index in np.flatnonzero(~ok):
            self._metrics.add_reason(result.reasons.get(int(index), "unknown"))
        return {"tier": record.tier.context.name, "chunks": len(ok) - failed, "failed": failed}

    def close(self) -> None:
        """Stop the thread; what is still queued is not cascaded."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (slots := self._queue.get()) is not None:
            # Pinned slots do not change, so the lock is not needed to read their bytes.
            with self._lock:
                offsets = self._cache.offset(slots)
                lengths = self._chunk_bytes[self._cache.chunks(slots).groups]
            sums = np.array(
                [xxhash.xxh3_64_intdigest(self._view[o : o + n]) for o, n in zip(offsets.tolist(), lengths.tolist())],
                np.uint64,
            )
            with self._lock:
                self._queued -= len(slots)
                self._submit(slots, sums)
                self._cache.unpin(slots)
            self._wake.set()

    def _submit(self, slots: Offsets, sums: Checksums) -> None:
        chunks = self._cache.chunks(slots)
        # A reset may have come in between: what the cache has forgotten is not to be found in a tier either.
        current = (self._cache.find(chunks.keys) == slots) & (self._cache.states(chunks.keys) == READY)
        slots, sums, chunks = slots[current], sums[current], chunks.take(np.flatnonzero(current))
        if not len(slots):
            return
        self._cache.set_checksums(slots, sums)
        share = max(1, int(TIER_SHARE * self._cache.num_slots))
        for tier in self._tiers:
            if self._jobs.slots_read_by(tier) + len(slots) > share:
                self._metrics.add("cascades_throttled", len(slots))
                continue
            job = StoreJob(
                self._jobs.new_id(), chunks, self._cache.offset(slots), self._chunk_bytes[chunks.groups], sums
            )
            self._cache.pin(slots)
            self._metrics.add("cascades", len(slots))
            self._jobs.submit(job, StoreRecord(tier, slots))
