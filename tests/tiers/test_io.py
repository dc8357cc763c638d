from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from tierkv.errors import RecordError, TierClosedError
from tierkv.tiers import io
from tierkv.tiers.io import MOST_CHUNKS, IoPool, Outcome, one_by_one
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
    pool.read(1, len(errors), one_by_one(task))
    pool.read(2, 1, lambda part: [2**64 - 1])
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
    pool.read(1, 3, one_by_one(read))
    pool.write(2, 1, one_by_one(lambda index: seen.append(threading.current_thread().name)))
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
    pool.write(1, 3, one_by_one(task))
    pool.write(2, 2, one_by_one(task))
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
        pool.read(3, 1, lambda part: [0])
    assert pool.get_finished() == []


def test_a_wake_that_raises_loses_nothing() -> None:
    called = threading.Semaphore(0)

    def wake() -> None:
        called.release()
        raise RuntimeError("a bug in the caller")

    pool = IoPool("io", 1, 1, wake)
    pool.read(1, 1, lambda part: [0])
    pool.read(2, 1, lambda part: [0])
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


def test_large_jobs_are_taken_in_parts() -> None:
    parts: list[range] = []

    def task(part: range) -> list[Outcome]:
        parts.append(part)
        return list(part)

    woken = threading.Semaphore(0)
    pool = IoPool("io", 2, 1, woken.release)
    pool.read(1, 2000, task)
    (result,) = drain(pool, 1, woken).values()
    assert result.ok.all() and result.checksums is not None and result.checksums.tolist() == list(range(2000))
    assert sorted(index for part in parts for index in part) == list(range(2000))
    assert {len(part) for part in parts} == {MOST_CHUNKS, 2000 % MOST_CHUNKS}
    parts.clear()
    pool.read(2, 9, task)
    assert drain(pool, 1, woken)[2].ok.all()
    assert {len(part) for part in parts} == {1}, "so few that every thread has a part of them"
    pool.close()


def test_a_task_that_raises_fails_the_chunks_that_have_no_outcome() -> None:
    def task(part: range) -> Iterator[Outcome]:
        yield from (1, RecordError("checksum"))
        raise OSError(errno.EIO, "Input/output error")

    woken = threading.Semaphore(0)
    pool = IoPool("io", 1, 1, woken.release)
    pool.read(1, 16, task)
    (result,) = drain(pool, 1, woken).values()
    assert result.ok.tolist() == [True, False, False, False] * 4
    assert [result.reasons[i] for i in range(1, 4)] == ["checksum", "eio", "eio"]
    pool.close()


def test_close_ends_a_part_at_the_chunk_at_hand() -> None:
    begun, go = threading.Event(), threading.Event()

    def task(index: int) -> int:
        begun.set()
        go.wait()
        return index

    pool = IoPool("io", 1, 1)
    pool.read(1, 8, one_by_one(task))
    assert begun.wait(60)
    closer = threading.Thread(target=pool.close)
    closer.start()
    while not pool._closed:
        pass
    go.set()
    closer.join()
    (result,) = pool.get_finished()
    assert result.ok.tolist() == [True] + [False] * 7 and set(result.reasons.values()) == {"closed"}


def test_writes_let_waiting_reads_go_first_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "YIELD_S", 0.2)
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def read(index: int) -> int:
        begun.set()
        go.wait()
        order.append("read")
        return 0

    woken = threading.Semaphore(0)
    pool = IoPool("io", 1, 2, woken.release)
    pool.read(1, 2, one_by_one(read))  # one runs, one waits
    assert begun.wait(60)
    pool.write(2, 2, one_by_one(lambda index: order.append("write")))
    assert not pool.get_finished() and order == []
    assert set(drain(pool, 1, woken)) == {2}, "the write does not wait for ever"
    pool.write(3, 2, one_by_one(lambda index: order.append("write")))
    go.set()
    assert set(drain(pool, 2, woken)) == {1, 3}
    assert order[:2] == ["write", "write"] and order[2] == "read"
    pool.close()


def test_larger_parts_can_be_asked_for() -> None:
    lengths: list[int] = []

    def task(part: range) -> list[Outcome]:
        lengths.append(len(part))
        return [None] * len(part)

    done = threading.Event()
    pool = IoPool("t", 1, 1, done.set, most_chunks=100)
    try:
        pool.read(1, 1000, task)
        assert done.wait(30)
    finally:
        pool.close()
    assert pool.get_finished()[0].ok.all() and lengths == [100] * 10
