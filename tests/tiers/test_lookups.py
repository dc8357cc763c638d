from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tierkv.config import TierConfig
from tierkv.testing.driver import NAMESPACE, some_chunks
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.lookups import LookupPool, LookupTicket
from tierkv.types import ChunkName, Chunks, JobResult, LoadJob, RequestContext, StoreJob

CHUNKS = some_chunks(6)
HASHES = [hash_.tobytes() for hash_ in CHUNKS.hashes]
REQUEST = RequestContext("request-1")


class StubTier(Tier):
    """Has the chunks of ``CHUNKS`` with the numbers ``has``; notes what it was asked, and by which thread."""

    def __init__(self, name: str, has: Sequence[int] = (), before: Callable[[], None] = lambda: None) -> None:
        super().__init__(TierConfig(type="stub"), TierContext(name, memoryview(bytearray(1)), NAMESPACE, {}))
        self.has = {HASHES[i] for i in has}
        self.before = before
        self.asked: list[int] = []
        self.threads: set[str] = set()

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        assert request is REQUEST
        self.threads.add(threading.current_thread().name)
        self.asked.append(HASHES.index(name.block_hash))
        self.before()
        return name.block_hash in self.has

    def submit_store(self, job: StoreJob) -> None:
        raise NotImplementedError

    def submit_load(self, job: LoadJob) -> None:
        raise NotImplementedError

    def get_finished_jobs(self) -> list[JobResult]:
        return []


class BatchTier(StubTier):
    answers: Sequence[bool] | None = None
    batches = 0

    def lookup_batch(self, chunks: Chunks, request: RequestContext) -> Sequence[bool]:
        self.batches += 1
        answers = [self.lookup(chunks.name(i), request) for i in range(len(chunks))]
        return answers if self.answers is None else self.answers


def fail() -> None:
    raise OSError("the storage is gone")


class Pool(LookupPool):
    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        super().__init__(self.woken.release)

    def ask(self, *tiers: Tier, chunks: Chunks = CHUNKS) -> LookupTicket:
        ticket = self.submit(tiers, chunks, REQUEST)
        assert self.woken.acquire(timeout=60)
        assert ticket.done
        return ticket


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", [StubTier, BatchTier])
def test_asks_in_order_and_only_about_what_is_still_open(pool: Pool, kind: type[StubTier]) -> None:
    first, second, third = kind("first", [0, 2]), kind("second", [2, 3]), kind("third", [0, 1, 3])
    ticket = pool.ask(first, second, third)
    assert ticket.found.dtype == np.int16 and ticket.found.tolist() == [0, 2, 0, 1, -1, -1]
    assert (first.asked, second.asked, third.asked) == ([0, 1, 2, 3, 4, 5], [1, 3, 4, 5], [1, 4, 5])
    assert "found=4, of=6, done=True" in repr(ticket)


def test_asks_no_further_tier_when_everything_is_found(pool: Pool) -> None:
    second = StubTier("second")
    assert pool.ask(StubTier("first", range(6)), second).found.tolist() == [0] * 6
    assert second.asked == []


def test_asks_in_one_batch_where_the_tier_can(pool: Pool) -> None:
    tier = BatchTier("batch", [1])
    pool.ask(tier)
    assert tier.batches == 1


def test_threads_carry_the_name_of_the_tier(pool: Pool) -> None:
    tier = StubTier("fs-2")
    for _ in range(5):
        pool.ask(tier)
    assert tier.threads <= {f"tierkv-fs-2-lookup-{i}" for i in range(4)}


def test_without_tiers_or_chunks_a_ticket_is_done_at_once(pool: Pool) -> None:
    assert pool.submit([], CHUNKS, REQUEST).done
    assert pool.submit([StubTier("first")], CHUNKS.take([]), REQUEST).done
    assert not pool.woken.acquire(blocking=False), "who submits is not woken"


@pytest.mark.parametrize("kind", [StubTier, BatchTier])
def test_a_tier_that_raises_has_none(pool: Pool, kind: type[StubTier]) -> None:
    bad, good = kind("bad", [0, 1], before=fail), kind("good", [1])
    for _ in range(6):  # more often than there are threads: none of them has died
        assert pool.ask(bad, good).found.tolist() == [-1, 1, -1, -1, -1, -1]
    assert pool.failures == {"bad": 6}


def test_a_tier_that_miscounts_has_none(pool: Pool) -> None:
    tier = BatchTier("bad")
    tier.answers = [True] * 5
    assert pool.ask(tier).found.tolist() == [-1] * 6
    assert pool.failures == {"bad": 1}


def test_a_stalled_tier_holds_up_no_other_and_partial_answers_can_be_used(pool: Pool) -> None:
    go, stalled = threading.Event(), threading.Semaphore(0)

    def stall() -> None:
        stalled.release()
        go.wait()

    first, stalling, last = StubTier("first", [0]), StubTier("stalling", [1], before=stall), StubTier("last", [2])
    waiting = [pool.submit([first, stalling, last], CHUNKS, REQUEST) for _ in range(10)]
    for _ in range(4):  # all threads of that tier
        assert stalled.acquire(timeout=60)
    assert pool.ask(first, last).found.tolist() == [0, -1, 1, -1, -1, -1]
    assert not waiting[0].done and waiting[0].found.tolist() == [0, -1, -1, -1, -1, -1]
    go.set()
    for _ in waiting:
        assert pool.woken.acquire(timeout=60)
    assert all(ticket.found.tolist() == [0, 1, 2, -1, -1, -1] for ticket in waiting)


def test_a_cancelled_ticket_is_not_put_to_further_tiers(pool: Pool) -> None:
    go, stalled = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        go.wait()

    first, second = StubTier("first", before=stall), StubTier("second")
    ticket = pool.submit([first, second], CHUNKS, REQUEST)
    assert stalled.wait(60)
    ticket.cancel()
    go.set()
    pool.ask(second)  # one that was submitted later is through
    assert not ticket.done and second.asked == [0, 1, 2, 3, 4, 5]


def test_close_does_not_wait_for_a_blocked_lookup() -> None:
    go, blocked = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go.wait()

    pool = Pool()
    tier = StubTier("blocked", [0], before=block)
    ticket = pool.submit([tier], CHUNKS, REQUEST)
    assert blocked.wait(60)
    try:
        pool.close(timeout_s=0.05)  # would never return if it waited
        assert not ticket.done
        assert not pool.submit([tier], CHUNKS, REQUEST).done, "nobody is asked any more"
    finally:
        go.set()
    assert not pool.woken.acquire(blocking=False)
