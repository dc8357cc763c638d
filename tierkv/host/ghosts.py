"""Ghosts: the keys of chunks that were evicted, in lists from oldest to newest, so that one that comes back is known.

A ghost is known by the second word of its key alone: two keys that share it are one in 2**64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.host.index import NONE, Table, delete, find, insert, make_table
from tierkv.host.jit import Int, inlined
from tierkv.host.lists import NEWEST, OLDEST, Ends, make_ends, push, unlink

#: A ghost: the second word of its key · its neighbours in its list · ``class * 4 + list``, with its chunk's size class.
#: Packed, since there may be one for each slot.
GHOST = np.dtype([("word", "<u8"), ("older", "<i4"), ("newer", "<i4"), ("kind", "u1")])


class Ghosts(NamedTuple):
    """records: ``(capacity,)`` of ``GHOST`` · ends: the lists, and behind them the stack of places that are free again:
    its newest is the last one, from which ``older`` leads to the others · nbytes: by list, of all its chunks together,
    and behind that, how many places have been used so far.
    """

    table: Table
    records: npt.NDArray[np.void]
    ends: Ends
    nbytes: npt.NDArray[np.int64]


def make_ghosts(capacity: int, lists: int) -> Ghosts:
    """No ghosts yet. ``lists``: 3 at most. Places are taken one after another: what was never used costs no memory."""
    return Ghosts(
        table=make_table(capacity),
        records=np.zeros(capacity, GHOST),
        ends=make_ends(lists + 1),
        nbytes=np.zeros(lists + 1, np.int64),
    )


def _find_ghost(g: Ghosts, word1: np.uint64) -> Int:
    """The ghost of a key, by its second word, or -1."""
    return find(g.table, g.records["word"], g.records["word"], word1, word1)


def _ghost_list(g: Ghosts, ghost: Int) -> Int:
    return int(g.records["kind"][ghost]) & 3


def _remove_ghost(g: Ghosts, ghost: Int, class_bytes: npt.NDArray[np.int64]) -> None:
    """Forget ``ghost``. ``class_bytes``: of a chunk of each size class."""
    which = ghost_list(g, ghost)
    records = g.records
    unlink(g.ends, records["older"], records["newer"], which, ghost)
    delete(g.table, records["word"][ghost], ghost)
    g.nbytes[which] -= class_bytes[records["kind"][ghost] >> 2]
    free = g.ends.shape[0] - 1
    records["older"][ghost] = g.ends[free, NEWEST]
    g.ends[free, NEWEST] = ghost


def _add_ghost(g: Ghosts, which: Int, word1: np.uint64, size_class: Int, class_bytes: npt.NDArray[np.int64]) -> bool:
    """Remember an evicted chunk, which is no ghost, as the newest of a list; False if there is no place.

    Of two keys that share the second word both may be ghosts; either is taken for the other, and then for itself.
    """
    free = g.ends.shape[0] - 1
    ghost = np.int64(g.ends[free, NEWEST])
    records = g.records
    if ghost >= 0:
        g.ends[free, NEWEST] = records["older"][ghost]
    elif g.nbytes[free] < records.shape[0]:
        ghost = np.int64(g.nbytes[free])
        g.nbytes[free] += 1
    else:
        return False
    records["word"][ghost] = word1
    records["kind"][ghost] = size_class * 4 + which
    push(g.ends, records["older"], records["newer"], which, ghost)
    insert(g.table, word1, ghost)
    g.nbytes[which] += class_bytes[size_class]
    return True


def _oldest_ghost(g: Ghosts, which: Int) -> Int:
    """The oldest of a list, or -1."""
    if g.ends[which, OLDEST] < 0:
        return NONE
    return np.int64(g.ends[which, OLDEST])


find_ghost = inlined(_find_ghost)
ghost_list = inlined(_ghost_list)
remove_ghost = inlined(_remove_ghost)
add_ghost = inlined(_add_ghost)
oldest_ghost = inlined(_oldest_ghost)
