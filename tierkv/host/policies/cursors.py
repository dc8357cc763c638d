"""What policies share: above all, to walk several lists, one for each size class, as if they were one list."""

from __future__ import annotations

import numpy as np

from tierkv.host.ghosts import Ghosts
from tierkv.host.index import NONE
from tierkv.host.jit import Int, inlined
from tierkv.host.lists import Links
from tierkv.host.slots import Records, State, fetch_slots
from tierkv.types import Offsets


def _peek_oldest(records: Records, cursors: Links, first: Int, step: Int, size_class: Int, now: Int) -> Int:
    """The list whose cursor is at the oldest member, of lists ``first``, ``first + step`` …, or -1 if all have ended.

    Args:
        cursors: by list, where the walk is, or -1 at its end.
        size_class: only the list of that class; ``ANY - c`` for all, where of those equally old, that of c comes first.
        now: the newest stamp there is. Stamps are 32 bits wide and wrap, so ages are compared.
    """
    if size_class >= 0:
        which = first + size_class * step
        return which if cursors[which] >= 0 else -1
    preferred = first + (-1 - size_class) * step
    best, best_age = -1, -1
    for which in range(first, cursors.shape[0], step):
        if cursors[which] >= 0:
            age = (now - np.int64(records["stamp"][cursors[which]])) & 0xFFFFFFFF
            if age > best_age or (age == best_age and which == preferred):
                best, best_age = which, age
    return best


def _next_oldest(records: Records, cursors: Links, first: Int, step: Int, size_class: Int, now: Int) -> Int:
    """The member that ``peek_oldest`` finds, which the walk then has passed; -1 at the end."""
    which = peek_oldest(records, cursors, first, step, size_class, now)
    if which < 0:
        return NONE
    slot = np.int64(cursors[which])
    cursors[which] = records["newer"][slot]
    return slot


def _fetch_ghosts(s: State, g: Ghosts, slots: Offsets) -> None:
    """Have the processor get where the ghosts of the chunks in ``slots`` are, or will be: see ``fetch``."""
    fetch_slots(s, g.table, s.records["word1"], slots, 0, slots.shape[0])


peek_oldest = inlined(_peek_oldest)
next_oldest = inlined(_next_oldest)
fetch_ghosts = inlined(_fetch_ghosts)
