"""What the engines share: one thread a direction, first in, first out, and a result for each transfer."""

from __future__ import annotations

import abc
import collections
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from tierkv.transfer.engine import CopyEngine, DeviceGroup, HostMemory, TransferResult
from tierkv.transfer.plan import Transfer


class FifoEngine(CopyEngine):
    """Two threads, ``tierkv-copy-store-0`` and ``tierkv-copy-load-0``, that copy one transfer after the other.

    So ``submit`` costs the caller a queue's ``put``, however many pages there are, and what one transfer raises is
    caught in one place.

    Thread safety: as ``CopyEngine``. Inside, the threads share ``_running`` and ``_finished`` with the caller, under
    ``_changed``.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory) -> None:
        """To be called last by an implementation: the threads start here."""
        super().__init__(groups, region)
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._finished: collections.deque[TransferResult] = collections.deque()
        self._closed = False
        self._stores: queue.SimpleQueue[tuple[Transfer, Any] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[Transfer, Any] | None] = queue.SimpleQueue()
        # Daemons: a process that ends without close() must not hang on them.
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"tierkv-copy-{name}-0", daemon=True)
            for jobs, name in ((self._stores, "store"), (self._loads, "load"))
        ]
        for thread in self._threads:
            thread.start()

    @abc.abstractmethod
    def _begin(self) -> Any:
        """On the caller's thread, in ``submit``: mark the device work that the copies come after."""

    @abc.abstractmethod
    def _copy(self, transfer: Transfer, begun: Any) -> tuple[int, float]:
        """On the direction's thread: copy, return (bytes, seconds) when no byte moves any more.

        Raises:
            Exception: the copy failed; also then, no byte moves any more.
        """

    def submit(self, transfer: Transfer) -> None:
        try:
            job = (transfer, self._begin())
        except Exception as error:  # a device that has failed must not take the engine's step with it
            self._report(_failed(transfer, _describe(error)))
            return
        with self._changed:
            closed = self._closed
            if not closed:
                self._running.add(transfer.job_id)
        if closed:
            self._report(_failed(transfer, "the copy engine is closed"))
        else:
            (self._stores if transfer.store else self._loads).put(job)

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def wait(self, job_ids: Iterable[int]) -> None:
        awaited = set(job_ids)
        with self._changed:
            self._changed.wait_for(lambda: self._running.isdisjoint(awaited))

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        for jobs in (self._stores, self._loads):
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __repr__(self) -> str:
        with self._changed:
            counts = f"{len(self._running)} running, {len(self._finished)} finished"
        return f"<{type(self).__name__} {counts}>"

    def _work(self, jobs: queue.SimpleQueue[tuple[Transfer, Any] | None]) -> None:
        while (job := jobs.get()) is not None:
            transfer, begun = job
            try:
                nbytes, seconds = self._copy(transfer, begun)
                result = TransferResult(transfer.job_id, transfer.store, True, nbytes, seconds)
            except Exception as error:  # whatever went wrong with this transfer, the next one is served
                result = _failed(transfer, _describe(error))
            self._report(result)

    def _report(self, result: TransferResult) -> None:
        with self._changed:
            self._running.discard(result.job_id)
            self._finished.append(result)
            self._changed.notify_all()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(transfer: Transfer, error: str) -> TransferResult:
    return TransferResult(transfer.job_id, transfer.store, False, 0, 0.0, error)
