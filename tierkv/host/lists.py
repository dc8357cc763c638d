"""Doubly linked lists through arrays, oldest to newest: kernels.

``ends`` is ``(lists, 2)`` int32: each list's oldest and newest member, -1 if it is empty. ``older`` and ``newer`` are
each member's neighbours. A member is in one list at most.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierkv.host.jit import Int, inlined

Ends = npt.NDArray[np.int32]
Links = npt.NDArray[np.int32]

OLDEST, NEWEST = 0, 1


def make_ends(lists: int) -> Ends:
    return np.full((lists, 2), -1, np.int32)


def _push(ends: Ends, older: Links, newer: Links, which: Int, member: Int) -> None:
    """Add ``member`` to list ``which`` as its newest."""
    last = ends[which, NEWEST]
    older[member] = last
    newer[member] = -1
    if last >= 0:
        newer[last] = member
    else:
        ends[which, OLDEST] = member
    ends[which, NEWEST] = member


def _unlink(ends: Ends, older: Links, newer: Links, which: Int, member: Int) -> None:
    """Take ``member`` out of list ``which``, which it is in."""
    before, behind = older[member], newer[member]
    if before >= 0:
        newer[before] = behind
    else:
        ends[which, OLDEST] = behind
    if behind >= 0:
        older[behind] = before
    else:
        ends[which, NEWEST] = before


push = inlined(_push)
unlink = inlined(_unlink)
