"""The threads that read and write for a tier: a job is split into chunks and reported when the last one ended.

Readers and writers are separate, so that a burst of stores cannot make a request wait for its load.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tierkv.errors import RecordError, TierClosedError
from tierkv.types import Checksums, Flags, JobResult

logger = logging.getLogger(__name__)

#: The reason of chunks that had not been started when the pool was closed.
CLOSED = "closed"
#: The reason of chunks that are not there.
ABSENT = "absent"


def reason_of(error: BaseException) -> str:
    """The word that metrics count for ``error``: a record's own reason, an errno's name (``enospc``) or ``error``."""
    if isinstance(error, RecordError):
        return error.reason
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, "error").lower()
    return "error"


@dataclass(slots=True)
class _Job:
    """A job on its way. ``left`` counts chunks that have not ended; all fields change under the pool's lock."""

    job_id: int
    task: Callable[[int], int | None]
    ok: Flags
    checksums: Checksums | None
    left: int
    reasons: dict[int, str] = field(default_factory=dict)

    def end(self, index: int, checksum: int | None, reason: str | None) -> JobResult | None:
        """Note that chunk ``index`` has ended; the job's report, if it was the last one."""
        if reason is not None:
            self.reasons[index] = reason
        else:
            self.ok[index] = True
            if self.checksums is not None and checksum is not None:
                self.checksums[index] = checksum
        self.left -= 1
        return None if self.left else self.report()

    def report(self) -> JobResult:
        return JobResult(self.job_id, self.ok, self.checksums, self.reasons)


class _Queue:
    """Chunks that wait for one kind of thread. ``ready`` shares the pool's lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.ready = threading.Condition(lock)
        self.items: deque[tuple[_Job, int]] = deque()


class IoPool:
    """Reader and writer threads, named ``tierkv-<tier>-read-0`` and ``tierkv-<tier>-write-0``.

    A task gets the index of a chunk within its job and does its work; whatever it raises makes that one
    chunk not ok, with ``reason_of`` the exception. Each job is reported exactly once, on ``close`` too.

    Thread safety: any method may be called by any thread.
    """

    def __init__(self, tier: str, n_readers: int, n_writers: int, wake: Callable[[], None] = lambda: None) -> None:
        """Start the threads.

        Args:
            tier: the tier's name, for names of threads and the log.
            wake: called at each job's end, by the thread that ended it, without a lock.
        """
        self._tier = tier
        self._wake = wake
        self._lock = threading.Lock()
        self._reads = _Queue(self._lock)
        self._writes = _Queue(self._lock)
        self._finished: deque[JobResult] = deque()
        self._failures: Counter[str] = Counter()
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for kind, queue, count in (("read", self._reads, n_readers), ("write", self._writes, n_writers)):
                for number in range(count):
                    self._start(f"tierkv-{tier}-{kind}-{number}", queue)
        except RuntimeError:  # no more threads to be had: keep none
            self.close()
            raise

    def read(self, job_id: int, n: int, task: Callable[[int], int]) -> None:
        """Run ``task(0) … task(n - 1)`` on the readers. A task returns the checksum that it verified.

        Raises:
            TierClosedError: the pool is closed.
        """
        job = _Job(job_id, task, np.zeros(n, np.bool_), np.zeros(n, np.uint64), left=n)
        self._submit(self._reads, job)

    def write(self, job_id: int, n: int, task: Callable[[int], None]) -> None:
        """Run ``task(0) … task(n - 1)`` on the writers.

        Raises:
            TierClosedError: the pool is closed.
        """
        self._submit(self._writes, _Job(job_id, task, np.zeros(n, np.bool_), None, left=n))

    def get_finished(self) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        with self._lock:
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def close(self) -> None:
        """End: what was not started is not ok (``closed``), what runs is waited for, then the threads end.

        The wait is as long as the storage takes: a task may be writing to memory that is gone afterwards.
        """
        with self._lock:
            self._closed = True
            dropped = [item for queue in (self._reads, self._writes) for item in queue.items]
            for queue in (self._reads, self._writes):
                queue.items.clear()
                queue.ready.notify_all()
        for job, index in dropped:
            self._end(job, index, None, CLOSED)
        for thread in self._threads:
            thread.join()

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"IoPool({self._tier!r}, reads_waiting={len(self._reads.items)}, "
                f"writes_waiting={len(self._writes.items)}, "
                f"unreported={len(self._finished)}, failures={dict(self._failures)}, closed={self._closed})"
            )

    def _start(self, name: str, queue: _Queue) -> None:
        thread = threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _submit(self, queue: _Queue, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise TierClosedError(f"tier {self._tier!r} is closed")
            if not job.left:  # without chunks; who submits is not to be woken
                self._finished.append(job.report())
            queue.items.extend((job, index) for index in range(job.left))
            queue.ready.notify(job.left)

    def _run(self, queue: _Queue) -> None:
        while (item := self._next(queue)) is not None:
            job, index = item
            checksum, reason = None, None
            try:
                checksum = job.task(index)
            except BaseException as error:
                reason = reason_of(error)
                self._note(reason, error)
            self._end(job, index, checksum, reason)
            # While this thread waits, nothing of the last job is kept: a task may hold the host region.
            del item, job

    def _next(self, queue: _Queue) -> tuple[_Job, int] | None:
        with self._lock:
            while not queue.items and not self._closed:
                queue.ready.wait()
            return queue.items.popleft() if queue.items else None

    def _end(self, job: _Job, index: int, checksum: int | None, reason: str | None) -> None:
        with self._lock:
            report = job.end(index, checksum, reason)
            if report is not None:
                self._finished.append(report)
        if report is None:
            return
        try:
            self._wake()
        except Exception:
            logger.exception("tier %s: the wake callback failed", self._tier)

    def _note(self, reason: str, error: BaseException) -> None:
        """Count a failure; log the first, second, fourth, eighth … of each reason: a full disk fails every store."""
        if reason == ABSENT:
            return
        with self._lock:
            self._failures[reason] += 1
            count = self._failures[reason]
        if count & (count - 1) == 0:
            trace = error if reason == "error" else None
            logger.warning("tier %s: %s (%d times so far): %s", self._tier, reason, count, error, exc_info=trace)
