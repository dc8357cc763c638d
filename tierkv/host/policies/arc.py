"""ARC, the adaptive replacement cache.

N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", Proceedings of the 2nd USENIX
Conference on File and Storage Technologies (FAST '03), 2003. The names T1, T2, B1, B2, p and c are those of its
figure 4.

T1 holds chunks that were used once lately, T2 those that were used more often; B1 and B2 are *ghosts*: the keys of
chunks that were evicted from T1 and T2. A ghost that comes back says which of the two was too small, and moves ``p``,
the size that T1 aims at. So a long scan of new prompts does not push out what is used again and again.

Where this differs from the paper, and why:

* Sizes are bytes, since chunks may differ; with one size that is the paper's count of pages.
* Eviction comes before insertion here (a slot is reserved, written, then committed), so ``p`` is adapted when the
  chunk is committed, and the paper's tie-break "x is in B2 and |T1| = p" is left out: x is not known at eviction.
* Pinned chunks are skipped; when the list that should give a victim has none, the other one gives it.
* Chunks come in batches, used tail first, so that the head is the more recent one.
* Ghosts together stand for at most c: the paper's bound of 2c for all four lists lets them grow beyond that while the
  host cache is not full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierkv.host.ghosts import Ghosts, add_ghost, find_ghost, ghost_list, make_ghosts, oldest_ghost, remove_ghost
from tierkv.host.jit import Int, inlined, jit
from tierkv.host.lists import OLDEST, Ends, Links, make_ends, push, unlink
from tierkv.host.policies.base import Policy
from tierkv.host.policies.cursors import fetch_ghosts, next_oldest
from tierkv.host.slots import Records, SlotView, State, size_class_of
from tierkv.types import Offsets

Sizes = npt.NDArray[np.int64]

# T1 and T2 have a list for each size class: list ``2 * class + T1``. B1 and B2 are lists of ghosts.
T1, T2 = 0, 1
B1, B2 = 0, 1


class ARCPolicy(Policy):
    """Adaptive between recency and frequency.

    Thread safety: as ``Policy``.
    """

    def __init__(self, slots: SlotView) -> None:
        super().__init__(slots)
        self._ends = make_ends(2 * len(slots.class_bytes))
        # One more than ghosts may stay: the newest is there before the oldest one goes.
        self._ghosts = make_ghosts(slots.capacity_bytes // int(slots.class_bytes[0]) + 1, 2)
        self._nbytes: Sizes = np.zeros(2, np.int64)  # of T1 and T2
        self._p: npt.NDArray[np.float64] = np.zeros(1, np.float64)
        self._now = 0

    def inserted(self, slots: Offsets) -> None:
        self._now += 1
        arc_insert(
            self.slots.state,
            self._ends,
            self._ghosts,
            self._nbytes,
            self._p,
            self.slots.class_bytes,
            self.slots.capacity_bytes,
            slots,
            self._now,
        )

    def accessed(self, slots: Offsets) -> None:
        self._now += 1
        arc_access(self.slots.state, self._ends, self._nbytes, self.slots.class_bytes, slots, self._now)

    def removed(self, slots: Offsets, evicted: bool) -> None:
        arc_remove(
            self.slots.state,
            self._ends,
            self._ghosts,
            self._nbytes,
            self.slots.class_bytes,
            self.slots.capacity_bytes,
            slots,
            evicted,
        )

    def victims(self, count: int, size_class: int) -> Offsets:
        found = np.empty(count, np.int64)
        t1, p = int(self._nbytes[T1]), float(self._p[0])
        state, sizes = self.slots.state, self.slots.class_bytes
        return found[: arc_victims(state, self._ends[:, OLDEST].copy(), t1, p, sizes, size_class, self._now, found)]

    @property
    def index_bytes(self) -> Int:
        return sum(array.nbytes for array in self._ghosts)

    def __repr__(self) -> str:
        t1, t2 = self._nbytes.tolist()
        b1, b2 = self._ghosts.nbytes.tolist()[:2]
        return (
            f"<ARCPolicy T1 {t1}, T2 {t2}, B1 {b1}, B2 {b2}, p {self._p[0]:.0f} of {self.slots.capacity_bytes} bytes>"
        )


def _arc_push(s: State, ends: Ends, nbytes: Sizes, sizes: Sizes, which: Int, slot: Int, now: Int) -> None:
    """``slot`` is the newest of T1 or T2."""
    size_class = size_class_of(s, slot)
    push(ends, s.records["older"], s.records["newer"], 2 * size_class + which, slot)
    s.records["place"][slot] = which
    s.records["stamp"][slot] = now & 0xFFFFFFFF
    nbytes[which] += sizes[size_class]


def _arc_unlink(s: State, ends: Ends, nbytes: Sizes, sizes: Sizes, slot: Int) -> Int:
    """Take ``slot`` out of T1 or T2; says out of which."""
    which = np.int64(s.records["place"][slot])
    size_class = size_class_of(s, slot)
    unlink(ends, s.records["older"], s.records["newer"], 2 * size_class + which, slot)
    nbytes[which] -= sizes[size_class]
    return which


def _arc_bound_ghosts(g: Ghosts, nbytes: Sizes, sizes: Sizes, capacity: int) -> None:
    """The paper's invariants, |T1| + |B1| <= c and all four lists <= 2c, and |B1| + |B2| <= c."""
    while nbytes[T1] + g.nbytes[B1] > capacity and g.nbytes[B1] > 0:
        remove_ghost(g, oldest_ghost(g, B1), sizes)
    while g.nbytes[B2] > 0 and (
        nbytes[T1] + nbytes[T2] + g.nbytes[B1] + g.nbytes[B2] > 2 * capacity or g.nbytes[B1] + g.nbytes[B2] > capacity
    ):
        remove_ghost(g, oldest_ghost(g, B2), sizes)


def _arc_insert(
    s: State,
    ends: Ends,
    g: Ghosts,
    nbytes: Sizes,
    p: npt.NDArray[np.float64],
    sizes: Sizes,
    capacity: int,
    slots: Offsets,
    now: Int,
) -> None:
    fetch_ghosts(s, g, slots)
    for back in range(slots.shape[0]):
        slot = slots[slots.shape[0] - 1 - back]
        size = sizes[size_class_of(s, slot)]
        ghost = find_ghost(g, s.records["word1"][slot])
        which = T1  # case IV of the paper
        if ghost >= 0:
            b1, b2 = g.nbytes[B1], g.nbytes[B2]
            if ghost_list(g, ghost) == B1:  # case II: T1 was too small
                p[0] = min(float(capacity), p[0] + max(b2 / b1, 1.0) * size)
            else:  # case III: T2 was too small
                p[0] = max(0.0, p[0] - max(b1 / b2, 1.0) * size)
            remove_ghost(g, ghost, sizes)
            which = T2
        arc_push(s, ends, nbytes, sizes, which, slot, now)
        arc_bound_ghosts(g, nbytes, sizes, capacity)


def _arc_access(s: State, ends: Ends, nbytes: Sizes, sizes: Sizes, slots: Offsets, now: Int) -> None:
    for back in range(slots.shape[0]):  # case I
        slot = slots[slots.shape[0] - 1 - back]
        arc_unlink(s, ends, nbytes, sizes, slot)
        arc_push(s, ends, nbytes, sizes, T2, slot, now)


def _arc_remove(
    s: State, ends: Ends, g: Ghosts, nbytes: Sizes, sizes: Sizes, capacity: int, slots: Offsets, evicted: bool
) -> None:
    fetch_ghosts(s, g, slots)
    for i in range(slots.shape[0]):
        slot = slots[i]
        which = arc_unlink(s, ends, nbytes, sizes, slot)
        if evicted:
            add_ghost(g, which, s.records["word1"][slot], size_class_of(s, slot), sizes)
            arc_bound_ghosts(g, nbytes, sizes, capacity)


def _arc_victims(
    s: State, cursors: Links, t1_bytes: Int, p: float, sizes: Sizes, size_class: Int, now: Int, found: Offsets
) -> Int:
    """REPLACE of the paper, again and again: T1 gives while it is larger than it aims to be, else T2."""
    records = s.records
    count = 0
    while count < found.shape[0]:
        slot, from_t1 = np.int64(-1), False
        if t1_bytes > p:
            slot, from_t1 = arc_next(records, cursors, T1, size_class, now), True
        if slot < 0:
            slot, from_t1 = arc_next(records, cursors, T2, size_class, now), False
        if slot < 0:
            slot, from_t1 = arc_next(records, cursors, T1, size_class, now), True
        if slot < 0:
            break
        if from_t1:
            t1_bytes -= sizes[size_class_of(s, slot)]
        found[count] = slot
        count += 1
    return count


def _arc_next(records: Records, cursors: Links, which: Int, size_class: Int, now: Int) -> Int:
    """The next slot of T1 or T2 that is not pinned, or -1."""
    while True:
        slot = next_oldest(records, cursors, which, 2, size_class, now)
        if slot < 0 or records["pins"][slot] == 0:
            return slot


arc_push = inlined(_arc_push)
arc_unlink = inlined(_arc_unlink)
arc_bound_ghosts = inlined(_arc_bound_ghosts)
arc_insert = jit(_arc_insert)
arc_access = jit(_arc_access)
arc_remove = jit(_arc_remove)
arc_next = inlined(_arc_next)
arc_victims = jit(_arc_victims)
