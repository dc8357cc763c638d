from __future__ import annotations

import errno
import threading

import pytest

from tierkv.errors import RecordError, TierClosedError
from tierkv.tiers.io import IoPool
from tierkv.types import JobResult


def drain(pool: IoPool, n: int, woken: threading.Semaphore) -> dict[int, JobResult]:
    for _ in range(n):
        assert woken.acquire(timeout=60)
    return {result.job_id: result for result in pool.get_finished()}


def test_an_exception_fails_its_chunk_only() -> None:
    errors = [
        None,
        RecordError("checksum", "details"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("without a number"),
        ZeroDivisionError(),
        SystemExit(),
    ]

    def task(index: int) -> int:
        if (error := errors[index]) is not None:
            raise error
        return 7

    woken = threading.Semaphore(0)
    pool = IoPool("io", 1, 1, woken.release)
    pool.read(1, len(errors), task)
    pool.read(2, 1, lambda index: 2**64 - 1)
    results = drain(pool, 2, woken)
    assert results[1].ok.tolist() == [True] + [False] * 5
    assert results[1].reasons == {1: "checksum", 2: "enospc", 3: "error", 4: "error", 5: "error"}
    assert results[1].checksums is not None and results[1].checksums.tolist() == [7, 0, 0, 0, 0, 0]
    assert results[2].checksums is not None and int(results[2].checksums[0]) == 2**64 - 1, "the thread lives on"
    assert "failures={'checksum': 1, 'enospc': 1, 'error': 3}" in repr(pool)
    pool.close()


def test_threads_are_named_and_kinds_are_separate() -> None:
    """Both readers are held up; a store gets through all the same."""
    go, seen = threading.Event(), []

    def read(index: int) -> int:
        seen.append(threading.current_thread().name)
        go.wait()
        return 0

    woken = threading.Semaphore(0)
    pool = IoPool("io", 2, 1, woken.release)
    pool.read(1, 3, read)
    pool.write(2, 1, lambda index: seen.append(threading.current_thread().name))
    assert drain(pool, 1, woken)[2].checksums is None
    go.set()
    assert drain(pool, 1, woken)[1].ok.all()
    assert {"tierkv-io-write-0"} < set(seen) <= {"tierkv-io-read-0", "tierkv-io-read-1", "tierkv-io-write-0"}
    pool.close()


def test_close_waits_for_what_runs_and_reports_what_did_not_start() -> None:
    started, go = threading.Event(), threading.Event()
    ended: list[int] = []

    def task(index: int) -> None:
        started.set()
        go.wait()
        ended.append(index)

    pool = IoPool("io", 1, 1)
    pool.write(1, 3, task)
    pool.write(2, 2, task)
    assert started.wait(60)
    closer = threading.Thread(target=pool.close)
    closer.start()
    # Job 2 is reported before the running chunk has ended; job 1 can only be afterwards.
    results: dict[int, JobResult] = {}
    while 2 not in results:
        results |= {result.job_id: result for result in pool.get_finished()}
    assert 1 not in results and closer.is_alive()
    go.set()
    closer.join()
    assert ended == [0]
    (last,) = pool.get_finished()
    assert last.job_id == 1 and last.ok.tolist() == [True, False, False]
    assert last.reasons == {1: "closed", 2: "closed"} and results[2].reasons == {0: "closed", 1: "closed"}
    with pytest.raises(TierClosedError):
        pool.read(3, 1, lambda index: 0)
    assert pool.get_finished() == []


def test_a_wake_that_raises_loses_nothing() -> None:
    called = threading.Semaphore(0)

    def wake() -> None:
        called.release()
        raise RuntimeError("a bug in the caller")

    pool = IoPool("io", 1, 1, wake)
    pool.read(1, 1, lambda index: 0)
    pool.read(2, 1, lambda index: 0)
    assert set(drain(pool, 2, called)) == {1, 2}
    pool.close()


def test_a_pool_that_cannot_start_its_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, count = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError):
        IoPool("io", 2, 2)
