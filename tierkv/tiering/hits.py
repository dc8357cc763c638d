"""Which prefix can be served: one decision over all groups of a request, as pure functions.

A *boundary* is a number of tokens: a hit at boundary B means that the engine continues at token B, so
each group must have, on the device or in a cache, what the token at position B attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.layout.spec import GroupSpec


@dataclass(frozen=True, slots=True)
class Range:
    """Chunks ``first`` to ``last`` - 1 of one group."""

    first: int
    last: int

    def __len__(self) -> int:
        return max(0, self.last - self.first)


class Boundary(NamedTuple):
    """tokens: the boundary. whole: what it would be without the windowed groups.

    gaps: the chunks, as (group, chunk), that made it less.
    """

    tokens: int
    whole: int
    gaps: list[tuple[int, int]]


#: ``gap(n, want)``: in group ``n``, the first chunk of ``want`` that cannot be had, or with a window, the last one;
#: None if all can.
Gap = Callable[[int, Range], "int | None"]


def needed(group: GroupSpec, local: int, boundary: int) -> Range:
    """The chunks of ``group`` that a hit at ``boundary`` loads when ``local`` tokens are on the device."""
    size = group.tokens_per_chunk
    if boundary <= local:
        return Range(0, 0)
    first = max(local, group.first_needed_token(boundary)) // size
    return Range(first, -(-boundary // size))


def by_position(groups: Sequence[GroupSpec], ranges: Sequence[Range]) -> npt.NDArray[np.intp] | None:
    """The chunks of ``ranges``, one of each group, taken one after another: their order by the token they end with.

    None if that is the order they are in. What is used, or stored, in this order is evicted from the end of the prompt
    on in all groups alike: a chunk whose partners at its position are gone is of no use to anybody.
    """
    if sum(map(bool, ranges)) <= 1:
        return None
    ends = [np.arange(r.first + 1, r.last + 1) * g.tokens_per_chunk for g, r in zip(groups, ranges, strict=True)]
    return np.argsort(np.concatenate(ends), kind="stable")


def best_boundary(groups: Sequence[GroupSpec], gap: Gap, local: int, limit: int, align: int) -> Boundary:
    """The largest boundary, at most ``limit``, that every group can serve; ``local`` if there is none.

    Args:
        gap: what cannot be had. Groups without a window come first and are asked once each: what lies behind the
            first gap of one of them is of no use to any group.
        local: tokens that are on the device already.
        align: boundaries are multiples of this: the engine can only use whole blocks of every group.

    """
    boundary = limit - limit % align
    gaps: list[tuple[int, int]] = []

    def cut(n: int) -> bool:
        nonlocal boundary
        if boundary <= local:
            return False
        chunk = gap(n, needed(groups[n], local, boundary))
        if chunk is not None:
            gaps.append((n, chunk))
            boundary = chunk * groups[n].tokens_per_chunk
            boundary -= boundary % align
        return chunk is not None

    for n, group in enumerate(groups):
        if not group.windowed:
            cut(n)
    whole = max(boundary, local)
    windowed = [n for n, group in enumerate(groups) if group.windowed]
    # A boundary beyond a hole of a window needs that hole, and so does every smaller one down to the hole's own first
    # token, since the windows of smaller boundaries start no later. Of several holes, the last one tells.
    while any([cut(n) for n in windowed]):
        pass
    return Boundary(max(boundary, local), whole, gaps)


def fitting_limit(
    groups: Sequence[GroupSpec],
    missing: Sequence[npt.NDArray[np.int64]],
    boundary: int,
    align: int,
    fits: Callable[[npt.NDArray[np.int32]], bool],
) -> int:
    """A limit below ``boundary`` at which fewer chunks are missing, when not all of them fit.

    Args:
        missing: for each group, the numbers of the chunks that must be brought to the host for ``boundary``.
        fits: whether there is room for chunks of these groups (a group may occur often).
    """
    # A window moves with the boundary and needs about as much anywhere; so its chunks come first.
    windowed = [(g, m) for g, m in zip(groups, missing, strict=True) if g.windowed]
    others = [(g, m) for g, m in zip(groups, missing, strict=True) if not g.windowed]
    always, ids = (
        np.concatenate([np.full(len(m), g.group, np.int32) for g, m in some] + [np.empty(0, np.int32)])
        for some in (windowed, others)
    )
    starts = np.concatenate([m * g.tokens_per_chunk for g, m in others] + [np.empty(0, np.int64)])
    order = np.argsort(starts, kind="stable")
    if not fits(always):
        return min(boundary // 2, boundary - align)
    low, high = 0, len(order)  # the first ``low`` of them fit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(np.concatenate([always, ids[order[:middle]]])):
            low = middle
        else:
            high = middle - 1
    limit = int(starts[order[low]]) if low < len(order) else boundary - align
    return min(limit, boundary - align)
