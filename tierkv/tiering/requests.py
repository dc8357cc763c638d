"""What the manager knows of one request whose prefix is being found, brought to the host, or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.tiers.lookups import LookupTicket
from tierkv.types import Chunks, Flags, Offsets, RequestContext, Space

#: Verdicts on a chunk that is not in the host cache; 0 and above: the number of the tier that has it.
UNKNOWN, NOWHERE = -2, -1


@dataclass(frozen=True, slots=True)
class Query:
    """A request's question: how much of its prefix can be served?

    chunks: for each group, the request's complete chunks from its first token on.
    local: tokens that are on the device already. limit: the largest useful boundary.
    """

    context: RequestContext
    space: Space
    chunks: tuple[Chunks, ...]
    local: int
    limit: int

    def same_as(self, other: Query) -> bool:
        return (
            self.local == other.local
            and self.limit == other.limit
            and self.space == other.space
            and [len(c) for c in self.chunks] == [len(c) for c in other.chunks]
        )


@dataclass(slots=True)
class Hit:
    """The state of one request's hit. Thread safety: used under the manager's lock only.

    verdicts: per group, what the tiers said of each chunk; a chunk that this request has had promoted is
        NOWHERE from then on, so that each is read at most once per request.
    asked, asked_tiers: what the open lookup is about, by group, and the numbers of the tiers that it goes to.
    load_deadline, room_deadline: until when it waits for chunks that are being written, and for room.
    late: per group, chunks that this request waits for no longer.
    origins: per group, the number of the tier that this request had a chunk promoted from, or NOWHERE.
    pins: the slots that this request holds, each pinned once.
    boundary, slots: the answer once all is in the host: per group, the slot of each chunk, or -1.
    dirty: something has changed that could change the answer.
    """

    query: Query
    verdicts: list[npt.NDArray[np.int16]] = field(default_factory=list)
    late: list[Flags] = field(default_factory=list)
    origins: list[npt.NDArray[np.int16]] = field(default_factory=list)
    pins: set[int] = field(default_factory=set)
    ticket: LookupTicket | None = None
    asked: list[npt.NDArray[np.intp]] = field(default_factory=list)
    asked_tiers: list[int] = field(default_factory=list)
    lookup_deadline: float = 0.0
    load_deadline: float | None = None
    room_deadline: float | None = None
    promoted: int = 0
    answer: int | None = None
    slots: list[Offsets] = field(default_factory=list)
    loading: bool = False
    dirty: bool = True

    def __post_init__(self) -> None:
        self.restart(self.query)

    def restart(self, query: Query) -> None:
        """Take a new query, keeping what is known of chunks that both have."""
        same_space = query.space == self.query.space
        old = (*self.verdicts, *self.late, *self.origins)
        self.verdicts = [np.full(len(c), UNKNOWN, np.int16) for c in query.chunks]
        self.late = [np.zeros(len(c), np.bool_) for c in query.chunks]
        self.origins = [np.full(len(c), NOWHERE, np.int16) for c in query.chunks]
        if same_space and old:
            for new, before in zip((*self.verdicts, *self.late, *self.origins), old, strict=True):
                common = min(len(new), len(before))
                new[:common] = before[:common]
        elif not same_space:
            self.cancel_lookup()  # its answers are about other chunks
        self.query = query
        self.dirty = True

    def due(self, now: float) -> bool:
        """Whether time or a lookup's end has changed what the answer would be."""
        if self.ticket is not None and (self.ticket.done or now >= self.lookup_deadline):
            return True
        return any(d is not None and now >= d for d in (self.load_deadline, self.room_deadline))

    def absorb_ticket(self) -> None:
        """Take over what the lookup has found; what it has not answered counts as a miss."""
        assert self.ticket is not None
        # The last entry stands for -1: nowhere.
        found = np.array([*self.asked_tiers, NOWHERE], np.int16)[self.ticket.found]
        start = 0
        for verdicts, indices in zip(self.verdicts, self.asked, strict=True):
            verdicts[indices] = found[start : start + len(indices)]
            start += len(indices)
        self.cancel_lookup()

    def cancel_lookup(self) -> None:
        """Nobody waits for the open lookup any more, if there is one."""
        if self.ticket is not None:
            self.ticket.cancel()
            self.ticket = None


def concat_asked(chunks: Sequence[Chunks], asked: Sequence[npt.NDArray[np.intp]]) -> Chunks:
    """The chunks at ``asked`` of each group, as one batch in group order."""
    return Chunks.concat([c.take(where) for c, where in zip(chunks, asked, strict=True) if len(where)])
