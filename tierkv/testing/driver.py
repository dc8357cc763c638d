"""A client of one tier: a host region, jobs on its slots, and their reports, each of which may come once."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from tierkv.keys import FIRST_GENERATION, make_chunks
from tierkv.tiers.base import Tier, TierContext
from tierkv.types import Chunks, JobResult, LoadJob, Space, StoreJob

NAMESPACE = bytes(range(16))
SPACE = Space(NAMESPACE, FIRST_GENERATION)
#: What the region is filled with where no test has written.
FILLER = 0xA5


def some_hashes(n: int, seed: int = 0) -> list[bytes]:
    """``n`` block hashes of 32 bytes, the same for the same ``seed``."""
    raw = np.random.default_rng(seed).bytes(32 * n)
    return [raw[i : i + 32] for i in range(0, len(raw), 32)]


def some_chunks(n: int, seed: int = 0, *, space: Space = SPACE, group: int = 0) -> Chunks:
    """``n`` chunks of one group, the same for the same arguments."""
    return make_chunks(space, group, some_hashes(n, seed))


class TierDriver:
    """One host region of ``n_slots`` slots and one tier that works on it.

    Thread safety: for one thread; the tier may call ``wake`` from any.
    """

    def __init__(
        self,
        make_tier: Callable[[TierContext], Tier],
        *,
        name: str = "tested",
        n_slots: int = 64,
        slot_bytes: int = 4096,
        patience_s: float = 60.0,
        chunk_bytes: tuple[int, ...] | None = None,
    ) -> None:
        """
        Args:
            chunk_bytes: of the groups that the tier is told of; ``slot_bytes`` of four groups by default.
            patience_s: how long to wait for a report before the test fails; no statement about speed.
        """
        self.slot_bytes = slot_bytes
        self.n_slots = n_slots
        memory = np.full(n_slots * slot_bytes + mmap.PAGESIZE, FILLER, np.uint8)
        start = -memory.ctypes.data % mmap.PAGESIZE  # as the host region does
        self.memory = memory[start : start + n_slots * slot_bytes]
        self.wakes = 0
        self._woken = threading.Event()
        self._patience_s = patience_s
        self._job_ids = itertools.count(1)
        self._results: dict[int, JobResult] = {}
        sizes = (slot_bytes,) * 4 if chunk_bytes is None else chunk_bytes
        context = TierContext(name, self.memory.data, NAMESPACE, {"model": "a model"}, self._wake, sizes)
        self.tier = make_tier(context)

    def fill(self, slots: Sequence[int], lengths: Sequence[int] | None = None, seed: int = 0) -> list[bytes]:
        """Write random payloads of ``lengths`` bytes (whole slots by default) into ``slots``, and return them."""
        rng = np.random.default_rng(seed)
        payloads = [rng.bytes(length) for length in self._lengths(slots, lengths)]
        for slot, payload in zip(slots, payloads, strict=True):
            start = slot * self.slot_bytes
            self.memory[start : start + len(payload)] = np.frombuffer(payload, np.uint8)
        return payloads

    def payload(self, slot: int, length: int | None = None) -> bytes:
        """What is in ``slot``."""
        start = slot * self.slot_bytes
        return self.memory[start : start + (self.slot_bytes if length is None else length)].tobytes()

    def wipe(self) -> None:
        """Fill the whole region with ``FILLER``."""
        self.memory[:] = FILLER

    def store_job(self, chunks: Chunks, slots: Sequence[int], lengths: Sequence[int] | None = None) -> StoreJob:
        """A job that stores what is in ``slots`` now."""
        lengths = self._lengths(slots, lengths)
        sums = [xxhash.xxh3_64_intdigest(self.payload(s, n)) for s, n in zip(slots, lengths, strict=True)]
        return StoreJob(
            next(self._job_ids), chunks, self._offsets(slots), np.array(lengths, np.int64), np.array(sums, np.uint64)
        )

    def load_job(self, chunks: Chunks, slots: Sequence[int], lengths: Sequence[int] | None = None) -> LoadJob:
        """A job that loads into ``slots``."""
        sizes = np.array(self._lengths(slots, lengths), np.int64)
        return LoadJob(next(self._job_ids), chunks, self._offsets(slots), sizes)

    def submit(self, job: StoreJob | LoadJob) -> int:
        """Hand ``job`` to the tier; its number."""
        if isinstance(job, StoreJob):
            self.tier.submit_store(job)
        else:
            self.tier.submit_load(job)
        return job.job_id

    def store(self, chunks: Chunks, slots: Sequence[int], lengths: Sequence[int] | None = None) -> JobResult:
        """Store what is in ``slots`` and wait for the report."""
        return self.wait([self.submit(self.store_job(chunks, slots, lengths))])[0]

    def load(self, chunks: Chunks, slots: Sequence[int], lengths: Sequence[int] | None = None) -> JobResult:
        """Load into ``slots`` and wait for the report."""
        return self.wait([self.submit(self.load_job(chunks, slots, lengths))])[0]

    def collect(self) -> None:
        """Take the reports that are there. AssertionError: one came twice."""
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self._results, f"job {result.job_id} was reported twice"
            self._results[result.job_id] = result

    def wait(self, job_ids: Sequence[int]) -> list[JobResult]:
        """The reports of ``job_ids``. AssertionError: one did not come."""
        deadline = time.monotonic() + self._patience_s
        while True:
            self._woken.clear()
            self.collect()
            missing = [job_id for job_id in job_ids if job_id not in self._results]
            if not missing:
                return [self._results[job_id] for job_id in job_ids]
            assert time.monotonic() < deadline, f"jobs {missing} were not reported; {self.tier!r}"
            self._woken.wait(0.05)

    def reports(self) -> dict[int, JobResult]:
        """All reports so far, by job."""
        self.collect()
        return dict(self._results)

    def close(self) -> None:
        self.tier.close()

    def __enter__(self) -> TierDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        self.wakes += 1
        self._woken.set()

    def _lengths(self, slots: Sequence[int], lengths: Sequence[int] | None) -> list[int]:
        return [self.slot_bytes] * len(slots) if lengths is None else list(lengths)

    def _offsets(self, slots: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(slots, np.int64) * self.slot_bytes
