"""What the manager knows of one request whose prefix is being found, brought to the host, or loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.host.cache import NOT_WRITING
from tierkv.keys import GroupChunks
from tierkv.layout.spec import GroupSpec
from tierkv.tiering.hits import Range
from tierkv.tiering.query import Query
from tierkv.tiers.lookups import LookupTicket, Piece
from tierkv.types import Chunks, Offsets, filled

#: Verdicts on a chunk that is not in the host cache; 0 and above: the number of the tier that has it. ``LATE`` is also
#: about one that is being written: this request waits for it no longer.
NOWHERE, UNKNOWN, LATE = -1, -2, NOT_WRITING

#: Tiers are first asked about this many chunks of a group, and then about four times as many again and again.
FIRST_PIECE = 256

Verdicts = npt.NDArray[np.int16]


class Part(NamedTuple):
    """Chunks of the group with index ``n``."""

    n: int
    where: Range


@dataclass(slots=True)
class Question:
    """What the tiers are being asked. tiers: the numbers of those that are. parts: about what; pieces come in order."""

    ticket: LookupTicket
    tiers: Sequence[int]
    parts: Sequence[Part]
    deadline: float


@dataclass(slots=True)
class Hit:
    """The state of one request's hit. Thread safety: used under the manager's lock only.

    verdicts: per group, what the tiers said of each chunk; a chunk that this request has had promoted is
        NOWHERE from then on, so that each is read at most once per request.
    held: per group, the slot of each chunk that this request has pinned, or -1. nbytes: of these chunks together.
    coming: how many chunks of the prefix that was found last are not READY in the host cache.
    origins: per group, the number of the tier that this request had a chunk promoted from, or NOWHERE.
    limit: the largest boundary that is aimed at: smaller than asked for, once not all fits.
    asked_at: when the engine has last asked.
    load_deadline, room_deadline: until when it waits for chunks that are being written, and for room.
    use_deadline: until when the answer is kept ready for the engine.
    promoting: chunks have been read for it. windows_asked: how often tiers were asked about the windowed groups.
    ranges: the answer once all is in the host: per group, the chunks to be loaded.
    dirty: something has changed that could change the answer.
    """

    query: Query
    limit: int
    verdicts: list[Verdicts] = field(default_factory=list)
    held: list[Offsets] = field(default_factory=list)
    origins: list[Verdicts] = field(default_factory=list)
    nbytes: int = 0
    coming: int = 0
    asked_at: float = 0.0
    question: Question | None = None
    load_deadline: float | None = None
    room_deadline: float | None = None
    use_deadline: float | None = None
    windows_asked: int = 0
    promoting: bool = False
    answer: int | None = None
    ranges: list[Range] = field(default_factory=list)
    loading: bool = False
    dirty: bool = True

    def __post_init__(self) -> None:
        self._know_nothing(self.query)

    def _know_nothing(self, query: Query) -> None:
        counts = [len(c) for c in query.chunks]
        self.verdicts = [filled(n, UNKNOWN, np.int16) for n in counts]
        self.origins = [filled(n, NOWHERE, np.int16) for n in counts]
        self.held = [filled(n, -1, np.int64) for n in counts]

    def restart(self, query: Query, limit: int) -> None:
        """Take a new query, keeping what is known of chunks that both have. The caller has let go of what is held."""
        assert self.nbytes == 0
        known = (self.verdicts, self.origins)
        self._know_nothing(query)
        if query.space == self.query.space and query.versions == self.query.versions:
            for before, now in zip(known, (self.verdicts, self.origins), strict=True):
                for old, new in zip(before, now, strict=False):
                    common = min(len(new), len(old))
                    new[:common] = old[:common]
        shorter = any(len(c) < len(old) for c, old in zip(query.chunks, self.query.chunks, strict=True))
        if shorter or query.space != self.query.space:
            self.cancel_question()  # its answers are about other chunks
        self.query = query
        self.limit = limit
        self.load_deadline = self.room_deadline = self.use_deadline = None
        self.windows_asked = 0
        self.answer = None
        self.dirty = True

    def due(self, now: float) -> bool:
        """Whether time or a lookup's end has changed what the answer would be."""
        if self.question is not None and (self.question.ticket.done or now >= self.question.deadline):
            return True
        return any(d is not None and now >= d for d in (self.load_deadline, self.room_deadline))

    def absorb_answers(self) -> None:
        """Take over what the lookup has found; what it has not answered counts as a miss."""
        assert self.question is not None
        numbers = np.array([*self.question.tiers, NOWHERE], np.int16)  # the last entry stands for -1: nowhere
        for piece, found in self.question.ticket.answers:
            scatter(piece, numbers[found], self.verdicts)
        for n, where in self.question.parts:
            verdicts = self.verdicts[n][where.first : where.last]
            verdicts[verdicts == UNKNOWN] = NOWHERE
        self.cancel_question()

    def cancel_question(self) -> None:
        """Nobody waits for the open lookup any more, if there is one."""
        if self.question is not None:
            self.question.ticket.cancel()
            self.question = None


class _Tag(NamedTuple):
    """Where the chunks of a piece come from: ``order[i]`` is the place of its chunk i among the parts' chunks."""

    parts: Sequence[Part]
    order: npt.NDArray[np.intp]


def pieces(
    groups: Sequence[GroupSpec], chunks: Sequence[Chunks | GroupChunks], parts: Sequence[Part]
) -> Iterator[Piece]:
    """A question in pieces that grow, in the order of tokens; each says what must be found if it is to go on.

    Chunks of groups without a window must: what lies behind one that is missing is of no use.
    """
    # In tokens: of the group with the largest chunks, the first piece has ``FIRST_PIECE``.
    step = FIRST_PIECE * max(groups[n].tokens_per_chunk for n, _ in parts)
    first = min(where.first * groups[n].tokens_per_chunk for n, where in parts)
    end = max(where.last * groups[n].tokens_per_chunk for n, where in parts)
    while first < end:
        inside = [_between(part, groups[part.n].tokens_per_chunk, first, first + step) for part in parts]
        inside = [part for part in inside if len(part.where)]
        if inside:
            yield _piece(groups, chunks, inside)
        first, step = first + step, 4 * step


def scatter(piece: Piece, found: Verdicts, verdicts: Sequence[Verdicts]) -> None:
    """Note what was found of ``piece``, one of ``pieces``, in ``verdicts``."""
    assert isinstance(piece.tag, _Tag)
    in_parts = np.empty_like(found)
    in_parts[piece.tag.order] = found
    start = 0
    for n, where in piece.tag.parts:
        verdicts[n][where.first : where.last] = in_parts[start : start + len(where)]
        start += len(where)


def _between(part: Part, size: int, first: int, last: int) -> Part:
    """Of ``part``, with chunks of ``size`` tokens, those that start at tokens ``first`` to ``last`` - 1."""
    where = part.where
    return Part(part.n, Range(max(where.first, -(-first // size)), min(where.last, -(-last // size))))


def _piece(groups: Sequence[GroupSpec], chunks: Sequence[Chunks | GroupChunks], parts: Sequence[Part]) -> Piece:
    batch = Chunks.concat([chunks[n].slice(where.first, where.last) for n, where in parts])
    required = np.concatenate([np.full(len(where), not groups[n].windowed) for n, where in parts])
    starts = np.concatenate([np.arange(where.first, where.last) * groups[n].tokens_per_chunk for n, where in parts])
    order = np.argsort(starts, kind="stable")
    if len(parts) > 1:
        batch, required = batch.take(order), required[order]
    return Piece(batch, required, _Tag(parts, order))
