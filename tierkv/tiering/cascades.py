"""Host → tiers: every chunk that is stored goes to every tier that takes stores, from its host copy."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tierkv.host.cache import HostCache
from tierkv.layout import canonical
from tierkv.metrics import Metrics
from tierkv.tiering.jobs import JobRecord, JobTable
from tierkv.tiering.lanes import Lane
from tierkv.tiers.breaker import verdict
from tierkv.types import Checksums, JobResult, Keys, Offsets, StoreJob

#: The share of the slots that all tiers together may hold pinned while they write; each has an equal part.
TIER_SHARE = 0.5

#: Chunks of one job, so that the first ones are reported, and their pins go, before the last ones are written.
JOB_CHUNKS = 256


class Cascades:
    """Takes checksums off the scheduler's thread, then hands chunks to the tiers.

    Thread safety: ``add``, ``finish`` and ``give_up`` are called under the manager's lock, which the thread
    ``tierkv-checksum-0`` takes itself for all but the checksums.
    """

    def __init__(
        self,
        cache: HostCache,
        view: memoryview,
        lanes: Sequence[Lane],
        jobs: JobTable,
        chunk_bytes: Offsets,
        metrics: Metrics,
        lock: threading.Lock,
        wake: threading.Event,
        timeout_s: float,
    ) -> None:
        self._cache = cache
        self._view = view
        self._lanes = [lane for lane in lanes if lane.tier.stores]
        self._jobs = jobs
        self._chunk_bytes = chunk_bytes
        self._metrics = metrics
        self._lock = lock
        self._wake = wake
        self._timeout_s = timeout_s
        self._share = max(1, int(TIER_SHARE * cache.num_slots / max(1, len(self._lanes))))
        self._queue: queue.SimpleQueue[Offsets | None] = queue.SimpleQueue()
        self._queued = 0
        self._thread = threading.Thread(target=self._run, name="tierkv-checksum-0", daemon=True)
        if self._lanes:
            self._thread.start()

    @property
    def queued(self) -> int:
        """Slots that wait for their checksum."""
        return self._queued

    def add(self, slots: Offsets) -> None:
        """Cascade ``slots``, which are ready. They are pinned until their checksums are taken."""
        if self._lanes and len(slots):
            self._cache.pin(slots)
            self._queued += len(slots)
            self._queue.put(slots)

    def give_up(self, record: JobRecord, now: float) -> None:
        """The deadline has come. The tier may still read, so its pins stay, and count against its share."""
        record.lane.writing.failed(now)
        self._metrics.add("cascades_late", len(record.slots))

    def finish(self, record: JobRecord, result: JobResult, now: float) -> dict[str, Any]:
        """A tier has reported: its pins go."""
        lane = record.lane
        self._cache.unpin(record.slots)
        lane.held -= len(record.slots)
        ok = np.asarray(result.ok, np.bool_)
        failed = int((~ok).sum())
        if not record.late:
            lane.writing.judge(verdict(result), now)
        if lane.throttle is not None:
            lane.throttle.finished(now - record.submitted, int(record.lengths[ok].sum()), now)
        self._metrics.add("cascades_failed", failed)
        for index in np.flatnonzero(~ok):
            self._metrics.add_reason(result.reasons.get(int(index), "unknown"))
        self._feed(lane, now)
        return {"tier": lane.name, "chunks": len(ok) - failed, "failed": failed}

    def close(self) -> None:
        """Stop the thread, after what is queued has been given to the tiers, and give them no more."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        with self._lock:
            for lane in self._lanes:
                self._metrics.add("cascades_missed", lane.waiting)
                lane.backlog.clear()
                lane.waiting = 0

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
        keys = self._cache.chunks(slots).keys
        # A reset may have come in between: what the cache has forgotten is not to be found in a tier either.
        current = self._cache.find(keys) == slots
        slots, keys = slots[current], keys[current]
        if not len(slots):
            return
        self._cache.set_checksums(slots, sums[current])
        now = time.monotonic()
        for lane in self._lanes:
            if not lane.writing.allows(now):
                self._metrics.add("cascades_cut_off", len(slots))
            elif lane.throttle is not None and not lane.throttle.admits(len(slots), now):
                self._metrics.add("cascades_throttled", len(slots))
            else:
                self._enqueue(lane, slots, keys)
                self._feed(lane, now)

    def _enqueue(self, lane: Lane, slots: Offsets, keys: Keys) -> None:
        lane.backlog.append((slots, keys))
        lane.waiting += len(slots)
        while lane.waiting > self._cache.num_slots:  # the oldest has long been evicted
            missed = len(lane.backlog.popleft()[0])
            lane.waiting -= missed
            self._metrics.add("cascades_missed", missed)

    def _feed(self, lane: Lane, now: float) -> None:
        """Give the tier what waits for it, as far as its share of the slots goes.

        What waits is not pinned: a slow tier loses chunks to eviction before it keeps the host from others.
        """
        while lane.backlog and (room := min(self._share - lane.held, JOB_CHUNKS)) > 0:
            slots, keys = lane.backlog.popleft()
            if len(slots) > room:
                lane.backlog.appendleft((slots[room:], keys[room:]))
                slots, keys = slots[:room], keys[:room]
            lane.waiting -= len(slots)
            # The slot may hold another chunk by now, or the same one anew, which has its own turn to come.
            there = (self._cache.find(keys) == slots) & (self._cache.checksums(slots) != 0)
            self._metrics.add("cascades_missed", int((~there).sum()))
            if there.any():
                self._submit(lane, slots[there], now)

    def _submit(self, lane: Lane, slots: Offsets, now: float) -> None:
        chunks = self._cache.chunks(slots)
        offsets, lengths = self._cache.offset(slots), self._chunk_bytes[chunks.groups]
        job = StoreJob(self._jobs.new_id(), chunks, offsets, lengths, self._cache.checksums(slots))
        self._cache.pin(slots)
        lane.held += len(slots)
        self._metrics.add("cascades", len(slots))
        self._jobs.submit(job, JobRecord(lane, False, slots, lengths, now, now + self._timeout_s))
