"""The slots of the host cache: who is where, in which state, how often pinned.

This file moves slots between states and knows nothing of keys or of eviction; ``cache`` decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.types import Checksums, ChunkName, Flags, Offsets

FREE, WRITING, READY, DEAD = 0, 1, 2, 3

States = npt.NDArray[np.uint8]


class Slots:
    """``count`` slots, each FREE, WRITING, READY or DEAD (left the index, and still pinned).

    A slot that is being written carries its writer's pin, which is counted in ``pins`` and marked in ``writer``; so a
    DEAD slot is not free before its writer has reported. All arrays are indexed by slot:

    state: uint8 · pins: int32 · writer: bool · keys: ``(count, 2)`` uint64 · lengths: int64 bytes ·
    checksums: uint64 · names: the full names, None where FREE.

    Thread safety: none of its own; used under the manager's lock.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.state: States = np.zeros(count, np.uint8)
        self.pins: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        self.writer: Flags = np.zeros(count, np.bool_)
        self.keys: npt.NDArray[np.uint64] = np.zeros((count, 2), np.uint64)
        self.lengths: Offsets = np.zeros(count, np.int64)
        self.checksums: Checksums = np.zeros(count, np.uint64)
        self.names: list[ChunkName | None] = [None] * count
        self.counts = [count, 0, 0, 0]  # by state
        # A stack, so that a slot that was just freed, and may still be in the processor's cache, is used next.
        self._free = list(range(count - 1, -1, -1))

    def take(self, count: int) -> Offsets:
        """``count`` FREE slots, at most ``counts[FREE]``, that are WRITING from now on and carry the writer's pin."""
        assert count <= len(self._free)
        start = len(self._free) - count
        slots = np.array(self._free[start:][::-1], np.int64)
        del self._free[start:]
        self.become(slots, WRITING)
        self.pins[slots] = 1
        self.writer[slots] = True
        self.lengths[slots] = self.slot_bytes
        self.checksums[slots] = 0
        return slots

    def become(self, slots: Offsets, state: int) -> None:
        """Move distinct ``slots`` to ``state`` and keep the counts."""
        for before, number in zip(*np.unique(self.state[slots], return_counts=True), strict=True):
            self.counts[before] -= int(number)
        self.counts[state] += len(slots)
        self.state[slots] = state

    def pin(self, slots: Offsets) -> None:
        assert (self.state[slots] != FREE).all(), "only slots in use are pinned"
        np.add.at(self.pins, slots, 1)

    def unpin(self, slots: Offsets) -> None:
        np.subtract.at(self.pins, slots, 1)
        assert (self.pins[slots] >= self.writer[slots]).all(), "a slot was unpinned more often than pinned"
        self.free_dead(slots)

    def end_writing(self, slots: Offsets) -> None:
        """The writer of distinct ``slots`` has reported: its pin goes."""
        assert self.writer[slots].all(), "only slots that are being written are committed or aborted"
        assert len(np.unique(slots)) == len(slots)
        self.writer[slots] = False
        self.pins[slots] -= 1

    def free_dead(self, slots: Offsets) -> None:
        """Free those of ``slots`` (duplicates allowed) that are DEAD and pinned no more."""
        gone = slots[(self.state[slots] == DEAD) & (self.pins[slots] == 0)]
        if len(gone):
            self.release(np.unique(gone))

    def release(self, slots: Offsets) -> None:
        """Distinct ``slots``, which are not pinned, are FREE from now on."""
        assert not self.pins[slots].any(), "a pinned slot is never freed"
        self.become(slots, FREE)
        for slot in slots.tolist():
            self.names[slot] = None
            self._free.append(slot)

    def set_names(self, slots: Offsets, names: Sequence[ChunkName]) -> None:
        for slot, name in zip(slots.tolist(), names, strict=True):
            self.names[slot] = name

    def name(self, slot: int) -> ChunkName:
        name = self.names[slot]
        assert name is not None, f"slot {slot} is free"
        return name
