"""The threads that read and write for a tier: a job is split into parts and reported when the last one ended.

Readers and writers are separate, and writers let reads that wait go first, so that a burst of stores cannot make a
request wait for its load.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from tierkv.errors import RecordError, RemoteError, TierClosedError
from tierkv.types import Checksums, Flags, JobResult

logger = logging.getLogger(__name__)

#: The reason of chunks that had not been started when the pool was closed.
CLOSED = "closed"
#: The reason of chunks that are not there.
ABSENT = "absent"

#: Chunks that a thread takes at a time, at most, unless more are asked for; fewer if the others would have none.
MOST_CHUNKS = 32
#: How long a writer lets reads go first that wait for a reader: a store has a deadline, too.
YIELD_S = 0.05

#: What became of one chunk: the checksum that a load has verified, None for a store, or why not.
Outcome = int | None | BaseException

#: What a thread does with a part of a job, given by the indices of its chunks: outcomes, one a chunk, in that order.
#: An iterator is advanced chunk by chunk, and not to its end if the pool is closed.
Task = Callable[[range], Iterable[Outcome]]


def one_by_one(task: Callable[[int], int | None]) -> Task:
    """A task for parts, from one for a single chunk; whatever that raises is the outcome of its chunk."""

    def outcome(index: int) -> Outcome:
        try:
            return task(index)
        except BaseException as error:
            return error

    return lambda part: map(outcome, part)


def reason_of(error: BaseException) -> str:
    """The word that metrics count for ``error``: its own reason, an errno's name (``enospc``) or ``error``."""
    if isinstance(error, RecordError | RemoteError):
        return error.reason
    if isinstance(error, TierClosedError):
        return CLOSED
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, "error").lower()
    return "error"


@dataclass(slots=True)
class OpenJob:
    """A job on its way. ``left`` counts chunks that have not ended; all fields change under one lock, its reports'."""

    job_id: int
    ok: Flags
    checksums: Checksums | None
    left: int
    reasons: dict[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, job_id: int, n: int) -> OpenJob:
        """A job that is to load ``n`` chunks."""
        return cls(job_id, np.zeros(n, np.bool_), np.zeros(n, np.uint64), n)

    @classmethod
    def store(cls, job_id: int, n: int) -> OpenJob:
        """A job that is to store ``n`` chunks."""
        return cls(job_id, np.zeros(n, np.bool_), None, n)

    def end(self, part: range, outcomes: list[int | str | None]) -> JobResult | None:
        """Note what became of a part's chunks, a word for those that are not ok; the job's report, if it was the last.

        Chunks without an outcome were not started any more.
        """
        for index, outcome in zip_longest(part, outcomes, fillvalue=CLOSED):
            assert isinstance(index, int), "one outcome a chunk"
            if isinstance(outcome, str):
                self.reasons[index] = outcome
            else:
                self.ok[index] = True
                if self.checksums is not None and outcome is not None:
                    self.checksums[index] = outcome
        self.left -= len(part)
        return None if self.left else self.report()

    def report(self) -> JobResult:
        return JobResult(self.job_id, self.ok, self.checksums, self.reasons)


class Reports:
    """What became of jobs: each is reported once, when the last of its chunks has ended.

    Thread safety: any method may be called by any thread.
    """

    def __init__(self, tier: str, wake: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            tier: its name, for the log.
            wake: called at each job's end, by the thread that ended it, without a lock.
        """
        self._tier = tier
        self._wake = wake
        self._lock = threading.Lock()
        self._finished: deque[JobResult] = deque()
        self._failures: Counter[str] = Counter()

    def end(self, job: OpenJob, part: range, outcomes: list[int | str | None]) -> None:
        """Note what became of chunks of ``job``, as ``OpenJob.end`` says."""
        with self._lock:
            report = job.end(part, outcomes)
            if report is not None:
                self._finished.append(report)
        if report is None:
            return
        try:
            self._wake()
        except Exception:
            logger.exception("tier %s: the wake callback failed", self._tier)

    def end_empty(self, job: OpenJob) -> None:
        """End a job without chunks; who submits is not to be woken."""
        assert not job.left
        with self._lock:
            self._finished.append(job.report())

    def get_finished(self) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        with self._lock:
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def word(self, error: BaseException) -> str:
        """``reason_of`` a failure, which is counted, and logged the first, second, fourth, eighth … time."""
        reason = reason_of(error)
        if reason in (ABSENT, CLOSED):
            error.__traceback__ = None
            return reason
        with self._lock:
            self._failures[reason] += 1
            count = self._failures[reason]
        if count & (count - 1) == 0:  # a full disk fails every store
            trace = error if reason == "error" else None
            # In words: who keeps what is logged would keep all that the error has gone through.
            logger.warning("tier %s: %s (%d times so far): %s", self._tier, reason, count, str(error), exc_info=trace)
        error.__traceback__ = None  # its frames hold what the call has worked on: a part of the region, a connection
        return reason

    def __repr__(self) -> str:
        with self._lock:
            return f"Reports(unreported={len(self._finished)}, failures={dict(self._failures)})"


class _Queue:
    """Parts of jobs that wait for one kind of thread. ``ready`` shares the pool's lock."""

    def __init__(self, lock: threading.Lock, n_threads: int, most_chunks: int) -> None:
        self.ready = threading.Condition(lock)
        self.items: deque[tuple[OpenJob, Task, range]] = deque()
        self.n_threads = n_threads
        self.most_chunks = most_chunks

    def put(self, job: OpenJob, task: Task) -> None:
        """Split ``job`` among the threads: in parts large enough not to cost much, and small enough for all to help."""
        n = job.left
        size = max(1, min(self.most_chunks, n // (4 * self.n_threads)))
        self.items.extend((job, task, range(first, min(first + size, n))) for first in range(0, n, size))
        self.ready.notify(len(self.items))


class IoPool:
    """Reader and writer threads, named ``tierkv-<tier>-read-0`` and ``tierkv-<tier>-write-0``.

    A task gets a part of a job and does its work. An outcome that is an exception makes its chunk not ok, with
    ``reason_of`` it; what the task raises itself, the part's chunks that have none. Each job is reported exactly once,
    on ``close`` too.

    Thread safety: any method may be called by any thread.
    """

    def __init__(
        self,
        tier: str,
        n_readers: int,
        n_writers: int,
        wake: Callable[[], None] = lambda: None,
        most_chunks: int = MOST_CHUNKS,
    ) -> None:
        """Start the threads.

        Args:
            tier: the tier's name, for names of threads and the log.
            wake: called at each job's end, by the thread that ended it, without a lock.
            most_chunks: that a part has, at most. For tasks to which a part costs much, and a small chunk little.
        """
        self._tier = tier
        self._reports = Reports(tier, wake)
        self._lock = threading.Lock()
        self._reads = _Queue(self._lock, n_readers, most_chunks)
        self._writes = _Queue(self._lock, n_writers, most_chunks)
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for kind, queue in (("read", self._reads), ("write", self._writes)):
                for number in range(queue.n_threads):
                    self._start(f"tierkv-{tier}-{kind}-{number}", queue)
        except RuntimeError:  # no more threads to be had: keep none
            self.close()
            raise

    def read(self, job_id: int, n: int, task: Task) -> None:
        """Run ``task`` on the readers, for ``n`` chunks in all. Its outcomes are the checksums that it verified.

        Raises:
            TierClosedError: the pool is closed.
        """
        self._submit(self._reads, OpenJob.load(job_id, n), task)

    def write(self, job_id: int, n: int, task: Task) -> None:
        """Run ``task`` on the writers, for ``n`` chunks in all.

        Raises:
            TierClosedError: the pool is closed.
        """
        self._submit(self._writes, OpenJob.store(job_id, n), task)

    def get_finished(self) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        return self._reports.get_finished()

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
        for job, _, part in dropped:
            self._reports.end(job, part, [])
        for thread in self._threads:
            thread.join()

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"IoPool({self._tier!r}, reads_waiting={len(self._reads.items)}, "
                f"writes_waiting={len(self._writes.items)}, {self._reports!r}, closed={self._closed})"
            )

    def _start(self, name: str, queue: _Queue) -> None:
        thread = threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _submit(self, queue: _Queue, job: OpenJob, task: Task) -> None:
        with self._lock:
            if self._closed:
                raise TierClosedError(f"tier {self._tier!r} is closed")
            if not job.left:
                self._reports.end_empty(job)
            else:
                queue.put(job, task)

    def _run(self, queue: _Queue) -> None:
        while (item := self._next(queue)) is not None:
            job, task, part = item
            self._reports.end(job, part, list(self._outcomes(task, part)))
            # While this thread waits, nothing of the last job is kept: a task may hold the host region.
            del item, job, task

    def _next(self, queue: _Queue) -> tuple[OpenJob, Task, range] | None:
        with self._lock:
            while True:
                while not queue.items and not self._closed:
                    queue.ready.wait()
                if queue is self._writes:
                    self._let_reads_go_first()
                if queue.items:
                    item = queue.items.popleft()
                    if queue is self._reads and not queue.items:
                        self._writes.ready.notify_all()
                    return item
                if self._closed:
                    return None

    def _let_reads_go_first(self) -> None:
        """As long as reads wait for a reader, the storage has enough to do."""
        until = time.monotonic() + YIELD_S
        while self._reads.items and not self._closed and (left := until - time.monotonic()) > 0:
            self._writes.ready.wait(left)

    def _outcomes(self, task: Task, part: range) -> Iterator[int | str | None]:
        """The outcomes of ``part``, failures as words; fewer than there are chunks if the pool is closed meanwhile."""
        done = 0
        try:
            for outcome in task(part):
                yield self._reports.word(outcome) if isinstance(outcome, BaseException) else outcome
                done += 1
                if self._closed:
                    return
        except BaseException as error:
            word = self._reports.word(error)
            yield from [word] * (len(part) - done)
