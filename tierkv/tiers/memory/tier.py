"""A tier that keeps records in this process's memory: small, complete, and meant to be copied.

It stores for real, verifies what it loads, evicts, and keeps the whole contract of
``tierkv.tiers.base``. What a tier of your own needs on top: its storage in the place of ``_records``,
and threads enough for it (``tierkv.tiers.io.IoPool`` has readers and writers and does the reporting).
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from tierkv.config import Positive, TierConfig
from tierkv.errors import RecordError, TierClosedError
from tierkv.tiers import record
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.io import ABSENT, CLOSED, reason_of
from tierkv.types import ChunkName, JobResult, LoadJob, Locality, Medium, RequestContext, StoreJob

#: A header and its payload.
Record = npt.NDArray[np.uint8]


class MemoryTierConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """capacity_bytes: of all records together, headers included; the least recently used go first. None: no bound."""

    capacity_bytes: Positive | None = None


class MemoryTier(Tier):
    """Records in a dictionary, and one thread that moves bytes.

    Thread safety: as every tier. ``_lock`` guards the records and the end of the jobs' queue.
    """

    Config: ClassVar[type[TierConfig]] = MemoryTierConfig
    hit_source: ClassVar[str] = "host"
    medium: Medium | None = "CPU"
    locality: Locality | None = "LOCAL"

    def __init__(self, config: MemoryTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._lock = threading.Lock()
        # The name is the *full* name: what was stored under another one cannot be found by accident.
        self._records: LRUCache[ChunkName, npt.NDArray[np.uint8]] = LRUCache(
            config.capacity_bytes or math.inf, getsizeof=len
        )
        self._jobs: queue.SimpleQueue[StoreJob | LoadJob | None] = queue.SimpleQueue()
        self._finished: deque[JobResult] = deque()
        self._closed = threading.Event()
        # Last: no thread may be left behind by a constructor that raises.
        self._worker = threading.Thread(target=self._run, name=f"tierkv-{context.name}-worker-0", daemon=True)
        self._worker.start()

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        with self._lock:
            return name in self._records

    def submit_store(self, job: StoreJob) -> None:
        self._submit(job)

    def submit_load(self, job: LoadJob) -> None:
        self._submit(job)

    def get_finished_jobs(self) -> list[JobResult]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        # The worker ends the chunk at hand, reports what is left as closed, and touches the region no more.
        with self._lock:
            self._closed.set()
            self._jobs.put(None)
        self._worker.join()

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"MemoryTier({self.context.name!r}, records={len(self._records)}, "
                f"bytes={int(self._records.currsize)}, waiting={self._jobs.qsize()}, "
                f"unreported={len(self._finished)}, closed={self._closed.is_set()})"
            )

    def _submit(self, job: StoreJob | LoadJob) -> None:
        with self._lock:  # so that no job gets behind the end of the queue, where nobody would report it
            if self._closed.is_set():
                raise TierClosedError(f"tier {self.context.name!r} is closed")
            self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._finished.append(self._do(job))
            self.context.wake()

    def _do(self, job: StoreJob | LoadJob) -> JobResult:
        """One job, chunk by chunk. A chunk that fails is not ok, for a reason, and hurts no other."""
        n = len(job.chunks)
        ok = np.zeros(n, np.bool_)
        checksums = np.zeros(n, np.uint64) if isinstance(job, LoadJob) else None
        reasons: dict[int, str] = {}
        for i in range(n):
            if self._closed.is_set():
                reasons[i] = CLOSED
                continue
            try:
                if isinstance(job, StoreJob):
                    self._store(job, i)
                elif checksums is not None:
                    checksums[i] = self._load(job, i)
                ok[i] = True
            except Exception as error:
                reasons[i] = reason_of(error)
        return JobResult(job.job_id, ok, checksums, reasons)

    def _store(self, job: StoreJob, i: int) -> None:
        """Keep chunk ``i`` of ``job``, unless it is there already."""
        name, offset, length = job.chunks.name(i), int(job.offsets[i]), int(job.lengths[i])
        with self._lock:
            present = self._records.get(name)
        if present is not None and len(present) == record.HEADER_BYTES + length:
            return
        header = record.encode_header(name, length, int(job.checksums[i]))
        made = np.empty(len(header) + length, np.uint8)
        made[: len(header)] = np.frombuffer(header, np.uint8)
        with self.context.view[offset : offset + length] as payload:
            # By numpy, which copies without the GIL: bytes and memoryviews would stop the engine meanwhile.
            made[len(header) :] = np.frombuffer(payload, np.uint8)
        with self._lock:
            if len(made) > self._records.maxsize:
                raise RecordError("capacity", f"a record of {len(made)} bytes, room for {self._records.maxsize}")
            self._records[name] = made

    def _load(self, job: LoadJob, i: int) -> int:
        """Copy chunk ``i`` of ``job`` into the region, and return the checksum of what landed there."""
        name, offset, length = job.chunks.name(i), int(job.offsets[i]), int(job.lengths[i])
        with self._lock:
            kept = self._records.get(name)
        if kept is None:
            raise RecordError(ABSENT)
        try:
            header = record.decode_header(kept.data)
            record.check(header, name, length)
            record.check_size(header, len(kept))
            with self.context.view[offset : offset + length] as landed:
                np.frombuffer(landed, np.uint8)[:] = kept[record.HEADER_BYTES :]
                return record.check_payload(header, landed)
        except RecordError:
            # Never serve it again; the next store writes it anew.
            with self._lock:
                self._records.pop(name, None)
            raise
