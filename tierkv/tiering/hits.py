"""Which prefix can be served: one decision over all groups of a request, as pure functions.

A *boundary* is a number of tokens: a hit at boundary B means that the engine continues at token B, so
each group must have, on the device or in a cache, what the token at position B attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.layout.spec import GroupSpec
from tierkv.types import Flags


@dataclass(frozen=True, slots=True)
class Range:
    """Chunks ``first`` to ``last`` - 1 of one group."""

    first: int
    last: int

    def __len__(self) -> int:
        return max(0, self.last - self.first)


def needed(group: GroupSpec, local: int, boundary: int) -> Range:
    """The chunks of ``group`` that a hit at ``boundary`` loads when ``local`` tokens are on the device."""
    size = group.tokens_per_chunk
    first = max(local, group.first_needed_token(boundary)) // size
    return Range(first, -(-boundary // size))


def best_boundary(groups: Sequence[GroupSpec], usable: Sequence[Flags], local: int, limit: int, align: int) -> int:
    """The largest boundary, at most ``limit``, that every group can serve; ``local`` if there is none.

    Args:
        usable: for each group, whether its chunk i (tokens i·T to (i+1)·T) could be loaded.
        local: tokens that are on the device already.
        align: boundaries are multiples of this: the engine can only use whole blocks of every group.
    """
    holes = [np.flatnonzero(~flags) for flags in usable]
    boundary = min([limit, *(len(flags) * g.tokens_per_chunk for g, flags in zip(groups, usable, strict=True))])
    boundary -= boundary % align
    settled = False
    while not settled and boundary > local:
        settled = True
        for group, missing in zip(groups, holes, strict=True):
            want = needed(group, local, boundary)
            # A boundary beyond a hole of the range needs that hole, and so does every smaller one down to
            # the hole's own first token, since ranges of smaller boundaries start no later. Without a
            # window that is true of the first hole, with one of the last.
            side = want.last if group.window else want.first
            index = int(np.searchsorted(missing, side)) - (1 if group.window else 0)
            if 0 <= index < len(missing) and want.first <= missing[index] < want.last:
                boundary = int(missing[index]) * group.tokens_per_chunk
                boundary -= boundary % align
                settled = False
    return max(boundary, local)


def fitting_limit(
    groups: Sequence[GroupSpec], wanting: Sequence[Flags], local: int, boundary: int, room: int, align: int
) -> int:
    """A limit below ``boundary`` at which fewer chunks are wanted, when not all of them fit.

    Args:
        wanting: for each group, whether its chunk must be brought to the host.
        room: how many chunks fit.
    """
    starts: list[int] = []
    for group, flags in zip(groups, wanting, strict=True):
        want = needed(group, local, boundary)
        chunks = np.flatnonzero(flags[want.first : want.last]) + want.first
        if group.window:
            room -= len(chunks)  # a window moves with the boundary and needs about as much anywhere
        else:
            starts.extend(int(c) * group.tokens_per_chunk for c in chunks)
    starts.sort()
    limit = starts[max(0, room)] if max(0, room) < len(starts) else boundary - align
    return min(limit, boundary - align)
