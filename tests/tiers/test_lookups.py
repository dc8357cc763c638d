from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from tierkv.config import TierConfig
from tierkv.testing.driver import NAMESPACE, some_chunks
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.lookups import LookupPool, LookupTicket, Piece, ask
from tierkv.types import ChunkName, Chunks, Flags, JobResult, LoadJob, RequestContext, StoreJob

CHUNKS = some_chunks(6)
HASHES = [hash_.tobytes() for hash_ in CHUNKS.hashes]
REQUEST = RequestContext("request-1")


def a_piece(numbers: Sequence[int] = range(6), required: Sequence[int] = (), tag: object = None) -> Piece:
    """The chunks of ``CHUNKS`` with these numbers, of which those with the numbers ``required`` are required."""
    return Piece(CHUNKS.take(numbers), np.isin(numbers, required), tag)


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

    def lookup_batch(self, chunks: Chunks, request: RequestContext, required: Flags | None = None) -> Sequence[bool]:
        self.batches += 1
        answers = [self.lookup(chunks.name(i), request) for i in range(len(chunks))]
        return answers if self.answers is None else self.answers


def fail() -> None:
    raise OSError("the storage is gone")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Stall:
    """What a tier does ``before`` it answers: it says that it was asked, then waits until it may go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = threading.Semaphore(0)

    def __call__(self) -> None:
        self.asked.release()
        self.go.wait()

    def wait_until_asked(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.asked.acquire(timeout=60)


class Pool(LookupPool):
    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        self.noted: list[tuple[str, float, BaseException | None, str]] = []
        super().__init__(self.woken.release, self.take_note)

    def take_note(self, tier: Tier, seconds: float, error: BaseException | None) -> None:
        self.noted.append((tier.context.name, seconds, error, threading.current_thread().name))

    def ask(self, *tiers: Tier, pieces: Iterable[Piece] | None = None) -> LookupTicket:
        ticket = self.submit(tiers, [a_piece()] if pieces is None else pieces, REQUEST)
        self.wait_until_woken()
        assert ticket.done
        return ticket

    def wait_until_woken(self) -> None:
        assert self.woken.acquire(timeout=60)


def founds(ticket: LookupTicket) -> list[list[int]]:
    assert all(found.dtype == np.int16 for _, found in ticket.answers)
    return [found.tolist() for _, found in ticket.answers]


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", [StubTier, BatchTier])
def test_asks_in_order_and_only_about_what_is_still_open(pool: Pool, kind: type[StubTier]) -> None:
    first, second, third = kind("first", [0, 2]), kind("second", [2, 3]), kind("third", [0, 1, 3])
    ticket = pool.ask(first, second, third)
    assert founds(ticket) == [[0, 2, 0, 1, -1, -1]]
    assert (first.asked, second.asked, third.asked) == ([0, 1, 2, 3, 4, 5], [1, 3, 4, 5], [1, 4, 5])
    assert "pieces=1, found=4, of=6, done=True" in repr(ticket)


def test_asks_no_further_tier_when_everything_is_found(pool: Pool) -> None:
    second = StubTier("second")
    assert founds(pool.ask(StubTier("first", range(6)), second)) == [[0] * 6]
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


# ---- pieces


@pytest.mark.parametrize("kind", [StubTier, BatchTier])
def test_goes_on_as_long_as_what_is_required_is_found_in_some_tier(pool: Pool, kind: type[StubTier]) -> None:
    first, second = kind("first", [0, 2]), kind("second", [1, 4])
    pieces = [a_piece([0, 1], [0, 1], "a"), a_piece([2, 3], [2], "b"), a_piece([4, 5], [5], "c"), a_piece([0])]
    ticket = pool.ask(first, second, pieces=pieces)
    assert [piece.tag for piece, _ in ticket.answers] == ["a", "b", "c"]
    assert all(answered is piece for (answered, _), piece in zip(ticket.answers, pieces, strict=False))
    assert founds(ticket) == [[0, 1], [0, -1], [1, -1]]
    assert (first.asked, second.asked) == ([0, 1, 2, 3, 4, 5], [1, 3, 4, 5])


def test_ends_with_the_pieces(pool: Pool) -> None:
    ticket = pool.ask(StubTier("first", range(6)), pieces=[a_piece([n], [n]) for n in range(6)])
    assert founds(ticket) == [[0]] * 6


def test_a_piece_without_chunks_is_answered_by_nobody(pool: Pool) -> None:
    tier = StubTier("first", [1])
    ticket = pool.ask(tier, pieces=[a_piece([]), a_piece([1]), a_piece([]), a_piece([])])
    assert founds(ticket) == [[], [0], [], []] and tier.asked == [1]


def test_without_tiers_a_ticket_is_done_at_once(pool: Pool) -> None:
    made = []

    def pieces() -> Iterator[Piece]:
        made.append(1)
        yield a_piece()

    ticket = pool.submit([], pieces(), REQUEST)
    assert ticket.done and ticket.answers == [] and made == []
    assert not pool.woken.acquire(blocking=False), "who submits is not woken"


def test_without_pieces_a_ticket_is_done(pool: Pool) -> None:
    tier = StubTier("first")
    assert pool.ask(tier, pieces=iter(())).answers == []
    assert tier.asked == [] and pool.noted == []


def test_pieces_are_made_on_lookup_threads_and_only_as_far_as_they_are_asked(pool: Pool) -> None:
    made: list[str] = []

    def pieces() -> Iterator[Piece]:
        for n in range(6):
            made.append(threading.current_thread().name)
            yield a_piece([n], [n])

    pool.ask(StubTier("first", [0, 1]), StubTier("second", [2]), pieces=pieces())
    assert len(made) == 4  # the fourth is found nowhere
    assert all(name.startswith(("tierkv-first-lookup-", "tierkv-second-lookup-")) for name in made)


def test_pieces_are_never_made_by_two_threads_at_once(pool: Pool) -> None:
    makers = threading.Semaphore(1)

    def pieces() -> Iterator[Piece]:
        for n in range(200):
            assert makers.acquire(blocking=False)
            makers.release()
            yield a_piece([n % 6], [n % 6], n)

    tiers = [StubTier("even", [0, 2, 4]), StubTier("odd", [1, 3, 5])]
    tickets = [pool.submit(tiers, pieces(), REQUEST) for _ in range(8)]
    for _ in tickets:
        pool.wait_until_woken()
    for ticket in tickets:
        assert [piece.tag for piece, _ in ticket.answers] == list(range(200))
        assert founds(ticket) == [[n % 2] for n in range(200)]


def test_pieces_that_raise_end_the_ticket(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def pieces() -> Iterator[Piece]:
        yield a_piece([0], [0])
        raise ArithmeticError("a bug of the asker")

    tier = StubTier("first", range(6))
    for _ in range(6):  # more often than there are threads: none of them has died
        assert founds(pool.ask(tier, pieces=pieces())) == [[0]]
    assert pool.broken == 6 and pool.failures == {}
    assert "a bug of the asker" in caplog.text and "broken=6" in repr(pool)


def test_a_piece_that_is_none_ends_the_ticket(pool: Pool) -> None:
    too_short = Piece(CHUNKS, np.ones(5, np.bool_))
    assert pool.ask(StubTier("first"), pieces=[a_piece([0]), too_short]).done
    assert pool.ask(StubTier("first"), pieces=cast("list[Piece]", ["not a piece"])).done
    assert pool.broken == 2


# ---- one by one


def test_one_by_one_nothing_behind_a_required_miss_is_asked() -> None:
    tier = StubTier("first", [0, 1, 4])
    piece = a_piece(required=[0, 1, 3])
    assert ask(tier, piece.chunks, REQUEST, piece.required).tolist() == [True, True, False, False, False, False]
    assert tier.asked == [0, 1, 2, 3]
    assert ask(tier, piece.chunks, REQUEST).tolist() == [True, True, False, False, True, False]
    assert ask(BatchTier("batch", [4]), piece.chunks, REQUEST, piece.required).tolist() == [False] * 4 + [True, False]


def test_a_cold_prompt_costs_one_call_of_the_last_tier(pool: Pool) -> None:
    tier = StubTier("only")
    assert founds(pool.ask(tier, pieces=[a_piece(required=range(6))] * 10)) == [[-1] * 6]
    assert tier.asked == [0]


def test_an_earlier_tier_is_asked_behind_a_miss_because_the_next_one_may_have_it(pool: Pool) -> None:
    first, second = StubTier("first", [0, 2]), StubTier("second", [1])
    assert founds(pool.ask(first, second, pieces=[a_piece(required=range(6))])) == [[0, 1, 0, -1, -1, -1]]
    assert (first.asked, second.asked) == ([0, 1, 2, 3, 4, 5], [1, 3])


# ---- tiers that fail


@pytest.mark.parametrize("kind", [StubTier, BatchTier])
def test_a_tier_that_raises_has_none(pool: Pool, kind: type[StubTier]) -> None:
    bad, good = kind("bad", [0, 1], before=fail), kind("good", [1])
    for _ in range(6):  # more often than there are threads: none of them has died
        assert founds(pool.ask(bad, good)) == [[-1, 1, -1, -1, -1, -1]]
    assert pool.failures == {"bad": 6}


def test_a_tier_that_miscounts_has_none(pool: Pool) -> None:
    tier = BatchTier("bad")
    tier.answers = [True] * 5
    assert founds(pool.ask(tier)) == [[-1] * 6]
    assert pool.failures == {"bad": 1}


def test_each_call_of_a_tier_is_noted(pool: Pool) -> None:
    slow = BatchTier("slow", [0], before=lambda: time.sleep(0.01))
    pool.ask(BatchTier("bad", before=fail), slow, pieces=[a_piece([0], [0]), a_piece([1], [1])])
    assert [name for name, *_ in pool.noted] == ["bad", "slow", "bad", "slow"]
    for name, seconds, error, thread in pool.noted:
        assert thread.startswith(f"tierkv-{name}-lookup-")
        assert isinstance(error, OSError) if name == "bad" else error is None
        assert 0 <= seconds < 60 and (name == "bad" or seconds >= 0.01)


def test_a_miscount_is_noted_as_a_failure(pool: Pool) -> None:
    tier = BatchTier("bad")
    tier.answers = [True] * 5
    pool.ask(tier)
    assert [(name, type(error)) for name, _, error, _ in pool.noted] == [("bad", ValueError)]


def test_callbacks_that_raise_hurt_nobody(caplog: pytest.LogCaptureFixture) -> None:
    woken = threading.Semaphore(0)

    def wake() -> None:
        woken.release()
        fail()

    pool = LookupPool(wake, lambda tier, seconds, error: fail())
    try:
        for _ in range(6):
            ticket = pool.submit([StubTier("first", [0])], [a_piece([0])], REQUEST)
            assert woken.acquire(timeout=60)
            assert founds(ticket) == [[0]]
    finally:
        pool.close()
    assert "the note callback" in caplog.text and "the wake callback" in caplog.text


# ---- tiers that stall


def test_a_stalled_tier_holds_up_no_other_and_partial_answers_can_be_used(pool: Pool) -> None:
    stall = Stall()
    first, stalling, last = StubTier("first", [0]), StubTier("stalling", [1], before=stall), StubTier("last", [2])
    waiting = [pool.submit([first, stalling, last], [a_piece()], REQUEST) for _ in range(10)]
    stall.wait_until_asked(4)  # all threads of that tier
    assert founds(pool.ask(first, last)) == [[0, -1, 1, -1, -1, -1]]
    assert not waiting[0].done and founds(waiting[0]) == [[0, -1, -1, -1, -1, -1]]
    stall.go.set()
    for _ in waiting:
        pool.wait_until_woken()
    assert all(founds(ticket) == [[0, 1, 2, -1, -1, -1]] for ticket in waiting)


def test_the_piece_under_way_has_the_answers_of_the_tiers_that_gave_them(pool: Pool) -> None:
    stall = Stall()
    first = StubTier("first", [0, 2])
    second = StubTier("second", [1, 3], before=lambda: stall() if second.asked[-1] == 3 else None)
    ticket = pool.submit([first, second], [a_piece([0, 1], [0, 1]), a_piece([2, 3], [2, 3])], REQUEST)
    stall.wait_until_asked()
    seen = ticket.answers
    assert not ticket.done and [found.tolist() for _, found in seen] == [[0, 1], [0, -1]]
    assert "pieces=2, found=3, of=4, done=False" in repr(ticket)
    stall.go.set()
    pool.wait_until_woken()
    assert founds(ticket) == [[0, 1], [0, 1]]
    assert [found.tolist() for _, found in seen] == [[0, 1], [0, -1]], "what was read does not change"


def test_a_piece_that_no_tier_has_answered_is_not_there(pool: Pool) -> None:
    stall = Stall()
    ticket = pool.submit([StubTier("first", [0], before=stall)], [a_piece()], REQUEST)
    stall.wait_until_asked()
    assert ticket.answers == [] and not ticket.done
    stall.go.set()
    pool.wait_until_woken()


def test_a_cancelled_ticket_is_not_put_to_further_tiers(pool: Pool) -> None:
    stall = Stall()
    first, second = StubTier("first", before=stall), StubTier("second")
    ticket = pool.submit([first, second], [a_piece()], REQUEST)
    stall.wait_until_asked()
    ticket.cancel()
    stall.go.set()
    pool.ask(second)  # one that was submitted later is through
    assert not ticket.done and second.asked == [0, 1, 2, 3, 4, 5]


def test_a_cancelled_ticket_takes_no_further_pieces(pool: Pool) -> None:
    stall, made = Stall(), []

    def pieces() -> Iterator[Piece]:
        for n in range(6):
            made.append(n)
            yield a_piece([n])

    first = StubTier("first", range(6), before=stall)
    ticket = pool.submit([first], pieces(), REQUEST)
    stall.wait_until_asked()
    ticket.cancel()
    stall.go.set()
    pool.ask(first)
    assert made == [0] and not ticket.done and ticket.answers == []
    assert not pool.woken.acquire(blocking=False), "nobody waits for it"


def test_a_cancelled_ticket_keeps_nothing_alive_behind_a_stuck_tier(pool: Pool) -> None:
    class Query(list[int]):
        """What the generator of pieces refers to."""

    def pieces(query: Query) -> Iterator[Piece]:
        for n in query:
            yield a_piece([n])

    stall = Stall()
    fast, stuck = StubTier("fast", range(5)), StubTier("stuck", before=stall)
    for _ in range(4):
        pool.submit([stuck], [a_piece([0])], REQUEST)
    stall.wait_until_asked(4)
    query = Query(range(6))
    gone = weakref.ref(query)
    ticket = pool.submit([fast, stuck], pieces(query), REQUEST)
    del query
    wait_until(lambda: len(ticket.answers) == 6)
    ticket.cancel()
    gc.collect()
    assert gone() is None
    stall.go.set()
    for _ in range(4):
        pool.wait_until_woken()


def test_a_ticket_may_be_read_while_it_is_answered(pool: Pool) -> None:
    tiers = [BatchTier("even", [0, 2, 4]), BatchTier("odd", [1, 3])]
    ticket = pool.submit(tiers, [a_piece(tag=n) for n in range(300)], REQUEST)
    before, deadline = 0, time.monotonic() + 60
    while not ticket.done:
        assert time.monotonic() < deadline
        answers = ticket.answers
        assert [piece.tag for piece, _ in answers] == list(range(len(answers))) and len(answers) >= before
        for _, found in answers[:-1]:
            assert found.tolist() == [0, 1, 0, 1, 0, -1]
        before = len(answers)
    assert founds(ticket) == [[0, 1, 0, 1, 0, -1]] * 300


def test_close_does_not_wait_for_a_blocked_lookup() -> None:
    stall, pool = Stall(), Pool()
    tier = StubTier("blocked", [0], before=stall)
    ticket = pool.submit([tier], [a_piece([0]), a_piece([1])], REQUEST)
    stall.wait_until_asked()
    try:
        pool.close(timeout_s=0.05)  # would never return if it waited
        assert not ticket.done
        assert not pool.submit([tier], [a_piece()], REQUEST).done, "nobody is asked any more"
    finally:
        stall.go.set()
    assert not pool.woken.acquire(timeout=0.05)
    assert tier.asked == [0] and not ticket.done and pool.noted == []


@pytest.mark.parametrize("available", [0, 1])
def test_where_threads_cannot_be_had(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_some(thread: threading.Thread) -> None:
        if len(started) == available:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    pool = Pool()
    try:
        # One thread is enough for a tier; a second tier cannot be asked, and the ticket ends.
        ticket = pool.submit([StubTier("first", [0]), StubTier("second", [1])], [a_piece([0, 1])], REQUEST)
        if available:
            pool.wait_until_woken()
        assert ticket.done and founds(ticket) == [[0, -1]] * available and pool.broken == 1
    finally:
        pool.close()
