"""Host → tiers: every chunk that is stored goes to every tier, from its host copy."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from tierkv.host.cache import HostCache
from tierkv.layout import canonical
from tierkv.metrics import Metrics
from tierkv.tiering.jobs import JobTable, StoreRecord
from tierkv.tiers.base import Tier
from tierkv.types import Checksums, JobResult, Keys, Offsets, StoreJob

#: The share of the slots that all tiers together may hold pinned while they write; each has an equal part.
TIER_SHARE = 0.5


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
        self._share = max(1, int(TIER_SHARE * cache.num_slots / max(1, len(tiers))))
        #: By tier: what waits for it, and how many slots are pinned for it.
        self._backlogs: dict[str, deque[tuple[int, Keys]]] = {t.context.name: deque() for t in tiers}
        self._held = {t.context.name: 0 for t in tiers}
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
        self._held[record.tier.context.name] -= len(record.slots)
        ok = np.asarray(result.ok, np.bool_)
        failed = int((~ok).sum())
        self._metrics.add("cascades_failed", failed)
        for index in np.flatnonzero(~ok):
            self._metrics.add_reason(result.reasons.get(int(index), "unknown"))
        self._feed(record.tier)
        return {"tier": record.tier.context.name, "chunks": len(ok) - failed, "failed": failed}

    def close(self) -> None:
        """Stop the thread, after what is queued has been given to the tiers."""
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
                [
                    canonical.checksum(self._view[o : o + n])
                    for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True)
                ],
                np.uint64,
            )
            with self._lock:
                self._queued -= len(slots)
                self._offer(slots, sums)
                self._cache.unpin(slots)
            self._wake.set()

    def _offer(self, slots: Offsets, sums: Checksums) -> None:
        """Put ``slots``, whose checksums have been taken, to every tier."""
        chunks = self._cache.chunks(slots)
        # A reset may have come in between: what the cache has forgotten is not to be found in a tier either.
        current = self._cache.find(chunks.keys) == slots
        slots, keys = slots[current], chunks.keys[current]
        self._cache.set_checksums(slots, sums[current])
        for tier in self._tiers:
            backlog = self._backlogs[tier.context.name]
            backlog.extend(zip(slots.tolist(), keys, strict=True))
            while len(backlog) > self._cache.num_slots:  # the oldest has long been evicted
                backlog.popleft()
                self._metrics.add("cascades_missed")
            self._feed(tier)

    def _feed(self, tier: Tier) -> None:
        """Give ``tier`` what waits for it, as far as its share of the slots goes.

        What waits is not pinned: a slow tier loses chunks to eviction before it keeps the host from others.
        """
        backlog = self._backlogs[tier.context.name]
        while count := min(len(backlog), self._share - self._held[tier.context.name]):
            waiting = [backlog.popleft() for _ in range(count)]
            slots = np.array([slot for slot, _ in waiting], np.int64)
            keys = np.array([key for _, key in waiting], np.uint64)
            # The slot may hold another chunk by now, or the same one anew, which has its own turn to come.
            there = (self._cache.find(keys) == slots) & (self._cache.checksums(slots) != 0)
            self._metrics.add("cascades_missed", int((~there).sum()))
            if there.any():
                self._submit(tier, slots[there])

    def _submit(self, tier: Tier, slots: Offsets) -> None:
        chunks = self._cache.chunks(slots)
        offsets, lengths = self._cache.offset(slots), self._chunk_bytes[chunks.groups]
        job = StoreJob(self._jobs.new_id(), chunks, offsets, lengths, self._cache.checksums(slots))
        self._cache.pin(slots)
        self._held[tier.context.name] += len(slots)
        self._metrics.add("cascades", len(slots))
        self._jobs.submit(job, StoreRecord(tier, slots))
