"""Calls of the store, on one thread: so many at a time, and each ends in time, whatever a server does.

A call is a coroutine. It is cancelled when nobody waits for it any more, and when the tier is closed: then the client
drops its connection, and lets go of the memory that it was sending from.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tierkv.errors import RemoteError, TierClosedError
from tierkv.tiers.io import CLOSED, OpenJob, Reports
from tierkv.types import JobResult

_T = TypeVar("_T")

#: For so long an answer may be on its way to a call that was given up.
_ANSWER_S = 0.05

#: All that are open. tokio's threads, which make the calls, would not survive the end of the interpreter.
_open: weakref.WeakSet[Calls] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for calls in list(_open):
        calls.close()


class Calls:
    """A thread, ``tierkv-<tier>-http-0``, with the event loop that all calls run on.

    Thread safety: any method may be called by any thread but that one.
    """

    def __init__(self, tier: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._waited_for: set[concurrent.futures.Future[Any]] = set()
        self._pools: weakref.WeakSet[CallPool] = weakref.WeakSet()
        self._closed = False
        #: Some call was cancelled.
        self.gave_up = False
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{tier}-http-0", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had
            self.loop.close()
            raise
        _open.add(self)

    def run(self, call: Callable[[], Coroutine[Any, Any, _T]], seconds: float) -> _T:
        """What the coroutine of ``call()`` returns, which is given up after ``seconds``.

        Raises:
            TimeoutError: it was given up. TierClosedError: the tier is being closed. And whatever it raises.
        """
        with self._lock:
            if self._closed:
                raise TierClosedError("closed")
            future = asyncio.run_coroutine_threadsafe(_in_time(call, seconds), self.loop)
            self._waited_for.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise TierClosedError("closed") from None
        except BaseException as error:
            error.__traceback__ = None  # frames of the loop's thread have the error, too, and all that the call used
            raise
        finally:
            with self._lock:
                self._waited_for.discard(future)
            del future  # which has what it raised, whose frames have this one

    def stop(self) -> None:
        """Give up the calls that are waited for, and take no more."""
        with self._lock:
            self._closed = True
            given_up = list(self._waited_for)
        for future in given_up:
            self.gave_up |= future.cancel()

    def close(self) -> None:
        """End the pools and the thread, when all that was given up has let go. Nobody runs calls any more."""
        self.stop()
        for pool in list(self._pools):
            pool.close()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            if left or self.gave_up:  # or the client finds the loop closed, and complains on stderr
                self.loop.run_until_complete(asyncio.sleep(_ANSWER_S))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


async def _in_time(call: Callable[[], Coroutine[Any, Any, _T]], seconds: float) -> _T:
    try:
        return await asyncio.wait_for(call(), seconds)
    except asyncio.TimeoutError:  # a built-in since Python 3.11
        raise TimeoutError("given up") from None


async def let_go(view: memoryview) -> None:
    """Release ``view``, once the client, which may have been interrupted, does not send from it any more.

    However long that takes: before, nothing may be said of the call.
    """
    pause = 0.001
    while True:
        try:
            return view.release()
        except BufferError:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)


#: What is to be done with one chunk of a job, given by its index: the checksum that a load has verified, or None.
ChunkCall = Callable[[int], Coroutine[Any, Any, "int | None"]]


@dataclass(frozen=True, slots=True)
class _Work:
    """A job whose chunks from ``left`` on wait. until: when nobody waits for it any more (``time.monotonic``)."""

    job: OpenJob
    call: ChunkCall
    until: float
    left: Iterator[int]


class _Turns:
    """Jobs that wait, in order, and the calls that run, at most ``most`` at a time. For the loop's thread alone."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: deque[_Work] = deque()
        self.running: set[asyncio.Task[int | None]] = set()

    def next(self) -> tuple[_Work, int] | None:
        """The chunk whose turn it is, which does not wait any more."""
        while self.waiting:
            work = self.waiting[0]
            index = next(work.left, None)
            if index is not None:
                return work, index
            self.waiting.popleft()
        return None


class CallPool:
    """Jobs whose chunks are calls: the interface of ``IoPool``, without its threads.

    A chunk's outcome that is an exception makes it not ok, with ``reason_of`` it. Each job is reported exactly once, on
    ``close`` too. Chunks start in the order in which they came.

    Thread safety: any method may be called by any thread but the loop's.
    """

    def __init__(
        self, tier: str, calls: Calls, n_reads: int, n_writes: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._tier = tier
        self._calls = calls
        self._loop = calls.loop
        calls._pools.add(self)
        self._reports = Reports(tier, wake)
        self._lock = threading.Lock()
        self._reads, self._writes = _Turns(n_reads), _Turns(n_writes)
        self._closed = False
        self._idle = threading.Event()

    def read(self, job_id: int, n: int, call: ChunkCall, until: float) -> None:
        """Make ``call`` for each of ``n`` chunks. What was not done by ``until`` is given up (``timeout``).

        Raises:
            TierClosedError: the pool is closed.
        """
        self._submit(self._reads, OpenJob.load(job_id, n), n, call, until)

    def write(self, job_id: int, n: int, call: ChunkCall, until: float) -> None:
        """As ``read``, in turns of its own."""
        self._submit(self._writes, OpenJob.store(job_id, n), n, call, until)

    def get_finished(self) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        return self._reports.get_finished()

    def close(self) -> None:
        """End: what was not started, and what runs, is not ok (``closed``). Returns when nothing runs any more."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:  # behind whatever was submitted
                self._loop.call_soon_threadsafe(self._give_up)
        self._idle.wait()

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{kind}_{what}={len(of)}"
            for kind, turns in (("reads", self._reads), ("writes", self._writes))
            for what, of in (("waiting", turns.waiting), ("running", turns.running))
        )
        return f"CallPool({self._tier!r}, {counts}, {self._reports!r}, closed={self._closed})"

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, turns: _Turns, job: OpenJob, n: int, call: ChunkCall, until: float) -> None:
        with self._lock:
            if self._closed:
                raise TierClosedError(f"tier {self._tier!r} is closed")
            if n:
                work = _Work(job, call, until, iter(range(n)))
                self._loop.call_soon_threadsafe(self._take, turns, work)
            else:
                self._reports.end_empty(job)

    # ── the loop's thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, turns: _Turns, work: _Work) -> None:
        turns.waiting.append(work)
        self._go_on(turns)

    def _go_on(self, turns: _Turns) -> None:
        while len(turns.running) < turns.most and (chunk := turns.next()) is not None:
            work, index = chunk
            if self._loop.time() >= work.until:
                self._end(work, index, self._late())
                continue
            task = self._loop.create_task(work.call(index))
            timer = self._loop.call_at(work.until, task.cancel)
            turns.running.add(task)
            task.add_done_callback(partial(self._ended, turns, work, index, timer))

    def _ended(
        self, turns: _Turns, work: _Work, index: int, timer: asyncio.TimerHandle, task: asyncio.Task[int | None]
    ) -> None:
        timer.cancel()
        turns.running.discard(task)
        if task.cancelled():
            outcome: int | str | None = CLOSED if self._closed else self._late()
        else:
            error = task.exception()
            outcome = task.result() if error is None else self._reports.word(error)
        self._end(work, index, outcome)
        self._go_on(turns)
        if self._closed:
            self._note_idle()

    def _end(self, work: _Work, index: int, outcome: int | str | None) -> None:
        self._reports.end(work.job, range(index, index + 1), [outcome])

    def _late(self) -> str:
        return self._reports.word(RemoteError("timeout", "nobody waits for it any more"))

    def _give_up(self) -> None:
        for turns in (self._reads, self._writes):
            while (chunk := turns.next()) is not None:
                self._end(*chunk, CLOSED)
            for task in turns.running:
                self._calls.gave_up |= task.cancel()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._reads.running and not self._writes.running:
            self._idle.set()
