"""Least recently used: the chunk that was not used for the longest time goes first."""

from __future__ import annotations

import numpy as np

from tierkv.host.jit import Int, jit
from tierkv.host.lists import OLDEST, Ends, Links, make_ends, push, unlink
from tierkv.host.policies.base import Policy
from tierkv.host.policies.cursors import next_oldest
from tierkv.host.slots import CLASS, Records, SlotView, State, slab_of
from tierkv.types import Offsets


class LRUPolicy(Policy):
    """Evicts in the order of last use; within one batch, the tail before the head.

    One list for each size class; stamps compare their ends. Thread safety: as ``Policy``.
    """

    def __init__(self, slots: SlotView) -> None:
        super().__init__(slots)
        self._ends = make_ends(len(slots.class_bytes))
        self._now = 0

    def inserted(self, slots: Offsets) -> None:
        self._now += 1
        lru_push(self.slots.state, self._ends, slots, self._now, False)

    def accessed(self, slots: Offsets) -> None:
        self._now += 1
        lru_push(self.slots.state, self._ends, slots, self._now, True)

    def removed(self, slots: Offsets, evicted: bool) -> None:
        lru_remove(self.slots.state, self._ends, slots)

    def victims(self, count: int, size_class: int) -> Offsets:
        found = np.empty(count, np.int64)
        cursors = self._ends[:, OLDEST].copy()
        return found[: lru_victims(self.slots.state.records, cursors, size_class, self._now, found)]

    def __repr__(self) -> str:
        return f"<LRUPolicy of {self.slots.capacity_bytes} bytes>"


def _lru_push(s: State, ends: Ends, slots: Offsets, now: Int, linked: bool) -> None:
    """``slots`` are the newest, the first one newest of all. ``linked``: they are in their lists already."""
    older, newer, stamps = s.records["older"], s.records["newer"], s.records["stamp"]
    slabs, division = s.slabs, s.division
    for back in range(slots.shape[0]):
        slot = slots[slots.shape[0] - 1 - back]
        size_class = slabs[CLASS, slab_of(division, slot)]
        if linked:
            unlink(ends, older, newer, size_class, slot)
        push(ends, older, newer, size_class, slot)
        stamps[slot] = now & 0xFFFFFFFF


def _lru_remove(s: State, ends: Ends, slots: Offsets) -> None:
    older, newer, slabs, division = s.records["older"], s.records["newer"], s.slabs, s.division
    for i in range(slots.shape[0]):
        unlink(ends, older, newer, slabs[CLASS, slab_of(division, slots[i])], slots[i])


def _lru_victims(records: Records, cursors: Links, size_class: Int, now: Int, found: Offsets) -> Int:
    """Fill ``found`` with the oldest slots that are not pinned; how many. ``cursors``: where the lists start."""
    pins = records["pins"]
    count = 0
    while count < found.shape[0]:
        slot = next_oldest(records, cursors, 0, 1, size_class, now)
        if slot < 0:
            break
        if pins[slot] == 0:
            found[count] = slot
            count += 1
    return count


lru_push = jit(_lru_push)
lru_remove = jit(_lru_remove)
lru_victims = jit(_lru_victims)
