"""Asking the tiers which chunks they have, off the engine's thread.

A question comes in pieces, so that a long prompt that is stored nowhere costs one piece's lookups: the
next piece is made and asked only if every required chunk of the last one was found. Within a piece, each
tier is asked, in the configured order, only for those chunks that no tier before had.

Each tier has lookup threads of its own, so that one that stalls holds up only the questions that are
put to it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.tiers.base import BatchLookup, Tier
from tierkv.types import Chunks, Flags, RequestContext

logger = logging.getLogger(__name__)

#: For each chunk of a piece, the index within the asked tiers of the first that has it; -1: none, or not known.
Found = npt.NDArray[np.int16]


class Piece(NamedTuple):
    """A part of a question.

    chunks: what to ask, ``n`` chunks. What stands behind a required chunk must be of no use without it:
        once no tier can have that chunk, the rest may not be asked and count as found nowhere.
    required: ``(n,)`` flags; where no tier has a required chunk, nothing beyond this piece is asked.
    tag: the asker's own note of where the chunks come from.
    """

    chunks: Chunks
    required: Flags
    tag: object = None


def ask(tier: Tier, chunks: Chunks, request: RequestContext, required: Flags | None = None) -> Flags:
    """One tier's answers, one a chunk: in a batch where the tier can do that, else one by one.

    Args:
        required: ``(n,)`` flags. Nothing behind the first required chunk that is missing need be asked; it counts
            as missing. None: all is asked.

    Raises whatever the tier raises, and ValueError if it does not give one answer a chunk.
    """
    if not isinstance(tier, BatchLookup):
        has = np.zeros(len(chunks), np.bool_)
        for i in range(len(chunks)):
            has[i] = tier.lookup(chunks.name(i), request)
            if required is not None and required[i] and not has[i]:
                break
        return has
    answers = tier.lookup_batch(chunks, request, required)
    if len(answers) != len(chunks):
        raise ValueError(f"{len(answers)} answers about {len(chunks)} chunks")
    return np.asarray(answers, dtype=np.bool_)


class LookupTicket:
    """The answers to one question, which come in while the tiers are asked.

    Thread safety: may be read, and cancelled, by any thread at any time. At most one lookup thread works
    for a ticket at any time, so that its pieces are never taken by two at once.
    """

    __slots__ = ("_answers", "_cancelled", "_done", "_open", "_pieces", "_tiers", "_waits_for", "request")

    def __init__(self, tiers: Sequence[Tier], pieces: Iterable[Piece], request: RequestContext) -> None:
        self.request = request
        self._tiers = tuple(tiers)
        self._pieces: Iterator[Piece] = iter(pieces)
        #: Pieces that at least one tier has answered; only the last one's ``Found`` still changes.
        self._answers: list[tuple[Piece, Found]] = []
        #: The piece that is being asked.
        self._open: tuple[Piece, Found] | None = None
        self._waits_for = 0
        self._done = not tiers
        self._cancelled = False

    @property
    def answers(self) -> list[tuple[Piece, Found]]:
        """What is known by now: the pieces that were asked, in order, each with its ``(n,)`` int16 ``Found``.

        As long as the ticket is not done, the last one may be the piece under way: then it says what the
        tiers that have answered have, and chunks that only slower ones have are -1. A piece about which no
        tier has answered yet is not there. The list is the reader's own, and no array in it changes.
        """
        answers = list(self._answers)
        if answers and not self._done:
            piece, found = answers[-1]
            answers[-1] = piece, found.copy()
        return answers

    @property
    def done(self) -> bool:
        """Whether everything that had to be asked has been answered: ``answers`` is final."""
        return self._done

    @property
    def waits_for(self) -> int:
        """As long as it is not done: the index, within the asked tiers, of the one whose turn it is to answer."""
        return self._waits_for

    def cancel(self) -> None:
        """Nobody waits any more: who was not asked yet will not be, and the answers are dropped: read them before.

        What the ticket refers to is let go of at once, because behind a tier that is stuck it stays queued.
        """
        self._cancelled = True
        self._pieces = iter(())
        self._answers = []
        self._open = None

    def __repr__(self) -> str:
        answers = self.answers
        found = sum(int((found >= 0).sum()) for _, found in answers)
        of = sum(len(found) for _, found in answers)
        state = f"done={self._done}, cancelled={self._cancelled}"
        return f"LookupTicket(pieces={len(answers)}, found={found}, of={of}, {state})"


class _Question(NamedTuple):
    """What is put to one tier: which chunks of the ticket's open piece. None: the first piece is yet to be taken."""

    ticket: LookupTicket
    tier_index: int
    wanted: npt.NDArray[np.intp] | None


class _Lane(NamedTuple):
    """One tier, its waiting questions (None: end) and its threads."""

    tier: Tier
    questions: queue.SimpleQueue[_Question | None]
    threads: list[threading.Thread]


class LookupPool:
    """Lookup threads, named ``tierkv-<tier>-lookup-0``, a few for each tier; they start with ``open``, or when
    a tier is first asked.

    A tier that raises, or that does not give one answer a chunk, counts as one that has none of them.

    Thread safety: any method may be called by any thread. ``submit`` never waits for a tier.
    """

    def __init__(
        self,
        wake: Callable[[], None] = lambda: None,
        note: Callable[[Tier, float, BaseException | None], None] = lambda tier, seconds, error: None,
        threads_per_tier: int = 4,
    ) -> None:
        """
        Args:
            wake: called when a ticket is done, by a lookup thread, without a lock; never by ``submit``.
            note: called after each call of a tier, by the lookup thread that made it, without a lock, with
                the call's seconds and what it raised (None: it has answered); not after ``close``.
        """
        self._wake = wake
        self._note = note
        self._threads_per_tier = threads_per_tier
        self._lock = threading.Lock()
        self._lanes: dict[int, _Lane] = {}
        self._failures: Counter[str] = Counter()
        self._broken = 0
        self._closed = False

    def open(self, tiers: Sequence[Tier]) -> None:
        """Start the threads of ``tiers`` now: whoever starts a thread waits until it runs, ``submit`` is not to."""
        for tier in tiers:
            with self._lock, contextlib.suppress(RuntimeError):  # no more threads to be had: ``submit`` deals with it
                if id(tier) not in self._lanes:
                    self._lanes[id(tier)] = self._open_lane(tier)

    def submit(self, tiers: Sequence[Tier], pieces: Iterable[Piece], request: RequestContext) -> LookupTicket:
        """Ask ``tiers``, in this order, for ``pieces``. Without tiers the ticket is done at once.

        ``pieces`` may be a generator, and long: it is advanced on lookup threads only, by one at a time, and
        only as far as it has to be. If it raises, the ticket is done with the answers until then.

        After ``close`` nobody is asked any more, and no ticket that had to ask is ever done.
        """
        ticket = LookupTicket(tiers, pieces, request)
        if not ticket.done:
            try:
                self._put(_Question(ticket, 0, None))
            except RuntimeError as error:  # no thread to be had; the request goes on without tiers
                self._count_broken(error)
                ticket._done = True
        return ticket

    @property
    def failures(self) -> dict[str, int]:
        """How often each tier, by its name, has raised instead of answering."""
        with self._lock:
            return dict(self._failures)

    @property
    def broken(self) -> int:
        """How many tickets ended early because their pieces, or a thread to ask them on, could not be had."""
        return self._broken

    def close(self, timeout_s: float = 0.5) -> None:
        """Ask no more. Waits at most ``timeout_s`` for tiers that are answering just now.

        A thread that is still stuck in a tier then ends as soon as the tier lets go of it, and is a
        daemon, so that it does not keep the interpreter alive. Open tickets stay as they are.
        """
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        deadline = time.monotonic() + timeout_s
        threads = [thread for lane in lanes for thread in lane.threads]
        for lane in lanes:
            for _ in lane.threads:
                lane.questions.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __repr__(self) -> str:
        with self._lock:
            waiting = {lane.tier.context.name: lane.questions.qsize() for lane in self._lanes.values()}
            counts = f"failures={dict(self._failures)}, broken={self._broken}"
            return f"LookupPool(waiting={waiting}, {counts}, closed={self._closed})"

    def _put(self, question: _Question) -> None:
        question.ticket._waits_for = question.tier_index
        tier = question.ticket._tiers[question.tier_index]
        with self._lock:
            if self._closed:
                return
            lane = self._lanes.get(id(tier))
            if lane is None:
                lane = self._lanes[id(tier)] = self._open_lane(tier)
        lane.questions.put(question)

    def _open_lane(self, tier: Tier) -> _Lane:
        lane = _Lane(tier, queue.SimpleQueue(), [])
        for number in range(self._threads_per_tier):
            name = f"tierkv-{tier.context.name}-lookup-{number}"
            thread = threading.Thread(target=self._run, args=(lane,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had: fewer will do
                if not lane.threads:
                    raise
                break
            lane.threads.append(thread)
        return lane

    def _run(self, lane: _Lane) -> None:
        while (question := lane.questions.get()) is not None and not self._closed:
            try:
                self._answer(lane.tier, question)
            except BaseException as error:  # of the asker's generator, most likely; the thread must live on
                self._count_broken(error)
                self._end(question.ticket)
            del question  # while this thread waits, it keeps no ticket

    def _answer(self, tier: Tier, question: _Question) -> None:
        """Ask one tier, note what it has, and put what is still open to the next one."""
        ticket, tier_index, wanted = question
        if wanted is None:
            self._next_piece(ticket)
            return
        # ``cancel`` may come at any time, so this is read once.
        asked = ticket._open
        if asked is None:
            return
        piece, found = asked
        last = tier_index == len(ticket._tiers) - 1
        has = self._ask(tier, piece, wanted, ticket.request, last)
        if self._closed or ticket._cancelled:
            return
        found[wanted[has]] = tier_index
        if tier_index == 0:
            ticket._answers.append(asked)
        wanted = wanted[~has]
        if len(wanted) and not last:
            self._put(_Question(ticket, tier_index + 1, wanted))
        elif (found[piece.required] < 0).any():
            self._end(ticket)
        else:
            self._next_piece(ticket)

    def _ask(
        self, tier: Tier, piece: Piece, wanted: npt.NDArray[np.intp], request: RequestContext, last: bool
    ) -> Flags:
        """One tier's answers about the ``wanted`` chunks of ``piece``; none if it raises."""
        whole = len(wanted) == len(piece.chunks)
        chunks = piece.chunks if whole else piece.chunks.take(wanted)
        # Only the last tier may stop early: what an earlier one lacks, the next may have.
        required = piece.required[wanted] if last else None
        failure: BaseException | None = None
        start = time.perf_counter()
        try:
            has = ask(tier, chunks, request, required)
        except BaseException as error:  # a user's tier may raise anything
            has = np.zeros(len(wanted), np.bool_)
            failure = error
        seconds = time.perf_counter() - start
        if failure is not None:
            self._count_failure(tier.context.name, failure)
        if not self._closed:
            try:
                self._note(tier, seconds, failure)
            except Exception:
                logger.exception("the note callback of the lookups failed")
        return has

    def _next_piece(self, ticket: LookupTicket) -> None:
        """Put the ticket's next piece to its first tier, or end the ticket if there is none."""
        while not (ticket._cancelled or self._closed):
            piece = next(ticket._pieces, None)
            if piece is None:
                self._end(ticket)
                return
            n = len(piece.chunks)
            if piece.required.shape != (n,):
                raise ValueError(f"required has the shape {piece.required.shape}, for {n} chunks")
            ticket._open = piece, np.full(n, -1, np.int16)
            if n:
                self._put(_Question(ticket, 0, np.arange(n)))
                return
            ticket._answers.append(ticket._open)

    def _end(self, ticket: LookupTicket) -> None:
        if ticket._cancelled:
            return
        ticket._pieces = iter(())
        ticket._open = None
        ticket._done = True
        try:
            self._wake()
        except Exception:
            logger.exception("the wake callback of the lookups failed")

    def _count_failure(self, name: str, error: BaseException) -> None:
        """Count a failure; log the first, second, fourth, eighth … of each tier."""
        with self._lock:
            self._failures[name] += 1
            count = self._failures[name]
        if count & (count - 1) == 0:
            logger.warning("tier %s: a lookup failed (%d times so far): %s", name, count, error, exc_info=error)

    def _count_broken(self, error: BaseException) -> None:
        """As ``_count_failure``, for what is nobody's fault but the asker's."""
        with self._lock:
            self._broken += 1
            count = self._broken
        if count & (count - 1) == 0:
            logger.error("a lookup was ended (%d times so far): %s", count, error, exc_info=error)
