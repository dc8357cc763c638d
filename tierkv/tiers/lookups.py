"""Asking the tiers which chunks they have, off the engine's thread.

Each tier has lookup threads of its own, so that one that stalls holds up only the questions that are
put to it. A question goes from tier to tier, in the configured order, and takes along only those
chunks that no tier before had.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.tiers.base import BatchLookup, Tier
from tierkv.types import Chunks, Flags, RequestContext

logger = logging.getLogger(__name__)


def ask(tier: Tier, chunks: Chunks, request: RequestContext) -> Flags:
    """One tier's answers, one a chunk: in a batch where the tier can do that, else one by one.

    Raises whatever the tier raises, and ValueError if it does not give one answer a chunk.
    """
    if isinstance(tier, BatchLookup):
        answers = tier.lookup_batch(chunks, request)
    else:
        answers = [tier.lookup(chunks.name(i), request) for i in range(len(chunks))]
    if len(answers) != len(chunks):
        raise ValueError(f"{len(answers)} answers about {len(chunks)} chunks")
    return np.asarray(answers, dtype=np.bool_)


class LookupTicket:
    """The answer to one question, which fills up while the tiers are asked.

    found: ``(n,)`` int16: for each chunk the index, within the tiers that were asked, of the first one
    that has it; -1 if none has, or as long as none has said so. Read it, never write it.

    Thread safety: may be read by any thread at any time; an entry changes once, from -1 to its answer.
    """

    __slots__ = ("_cancelled", "_done", "_tiers", "chunks", "found", "request")

    def __init__(self, tiers: Sequence[Tier], chunks: Chunks, request: RequestContext) -> None:
        self.chunks = chunks
        self.request = request
        self.found: npt.NDArray[np.int16] = np.full(len(chunks), -1, np.int16)
        self._tiers = tuple(tiers)
        self._done = not len(chunks) or not tiers
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether every tier that had to be asked has answered."""
        return self._done

    def cancel(self) -> None:
        """Nobody waits any more: who was not asked yet will not be. Optional; keeps late tickets from piling up."""
        self._cancelled = True

    def __repr__(self) -> str:
        found = int((self.found >= 0).sum())
        return f"LookupTicket(found={found}, of={len(self.chunks)}, done={self._done}, cancelled={self._cancelled})"


class _Question(NamedTuple):
    """What is put to one tier: its index within the ticket's tiers, and which of the chunks are still open."""

    ticket: LookupTicket
    tier_index: int
    open: npt.NDArray[np.intp]


class _Lane(NamedTuple):
    """One tier, its waiting questions (None: end) and its threads."""

    tier: Tier
    questions: queue.SimpleQueue[_Question | None]
    threads: list[threading.Thread]


class LookupPool:
    """Lookup threads, named ``tierkv-<tier>-lookup-0``, a few for each tier; they start when a tier is first asked.

    A tier that raises, or that does not give one answer a chunk, counts as one that has none of them.

    Thread safety: any method may be called by any thread. ``submit`` never waits for a tier.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None, threads_per_tier: int = 4) -> None:
        """
        Args:
            wake: called when a ticket is done, by a lookup thread, without a lock; never by ``submit``.
        """
        self._wake = wake
        self._threads_per_tier = threads_per_tier
        self._lock = threading.Lock()
        self._lanes: dict[int, _Lane] = {}
        self._failures: Counter[str] = Counter()
        self._closed = False

    def submit(self, tiers: Sequence[Tier], chunks: Chunks, request: RequestContext) -> LookupTicket:
        """Ask ``tiers``, in this order, for ``chunks``. Without tiers or chunks the ticket is done at once.

        After ``close`` nobody is asked any more, and no ticket that had to ask is ever done.
        """
        ticket = LookupTicket(tiers, chunks, request)
        if not ticket.done:
            self._put(_Question(ticket, 0, np.arange(len(chunks))))
        return ticket

    @property
    def failures(self) -> dict[str, int]:
        """How often each tier, by its name, has raised instead of answering."""
        with self._lock:
            return dict(self._failures)

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
            return f"LookupPool(waiting={waiting}, failures={dict(self._failures)}, closed={self._closed})"

    def _put(self, question: _Question) -> None:
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
            thread.start()
            lane.threads.append(thread)
        return lane

    def _run(self, lane: _Lane) -> None:
        while (question := lane.questions.get()) is not None and not self._closed:
            if not question.ticket._cancelled:
                has = self._ask(lane.tier, question)
                if not self._closed:
                    self._advance(question, has)

    def _ask(self, tier: Tier, question: _Question) -> Flags:
        ticket, _, open_ = question
        chunks = ticket.chunks if len(open_) == len(ticket.chunks) else ticket.chunks.take(open_)
        try:
            return ask(tier, chunks, ticket.request)
        except BaseException as error:  # a user's tier may raise anything; the thread must live on
            self._note(tier.context.name, error)
            return np.zeros(len(open_), np.bool_)

    def _advance(self, question: _Question, has: Flags) -> None:
        """Note one tier's answers and put what is still open to the next one."""
        ticket, tier_index, open_ = question
        ticket.found[open_[has]] = tier_index
        rest = open_[~has]
        if len(rest) and tier_index + 1 < len(ticket._tiers):
            self._put(_Question(ticket, tier_index + 1, rest))
            return
        ticket._done = True
        try:
            self._wake()
        except Exception:
            logger.exception("the wake callback of the lookups failed")

    def _note(self, name: str, error: BaseException) -> None:
        """Count a failure; log the first, second, fourth, eighth … of each tier."""
        with self._lock:
            self._failures[name] += 1
            count = self._failures[name]
        if count & (count - 1) == 0:
            logger.warning("tier %s: a lookup failed (%d times so far): %s", name, count, error, exc_info=error)
