"""How the host region is cut up: slabs, and how many slots of each size fit into one. Pure functions.

Groups of a model may have chunks of different sizes. The distinct sizes, rounded up, are the *size classes*. All slabs
have the same size but the last, which is what is left; what no slot of a class fits into at the end of a slab is wasted
while the slab is of that class.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.types import Offsets

#: Slots start at multiples of this many bytes within their slab, which is what direct I/O asks of memory.
SLOT_ALIGNMENT = 512

#: Slabs are small against the region, so that one that is being emptied, or is not full, does not matter.
_SLABS = 128
#: … but not larger than this, so that the first ones are ready soon, or than so many of the largest chunks, which is
#: enough for any other class to waste little.
_LARGEST_SLAB = 64 << 20
_MOST_CHUNKS = 12
#: The share of a slab that no slot fits into which is too much if there is any better size.
_WASTE = 0.08
#: How many multiples of each class are looked at, at most.
_LOOKED_AT = 1024


@dataclass(frozen=True)
class SlabPlan:
    """region_bytes: of all slabs. class_bytes: of a slot of each class, ascending. slots_per_slab: of the smallest."""

    region_bytes: int
    slab_bytes: int
    class_bytes: tuple[int, ...]

    @property
    def num_slabs(self) -> int:
        return -(-self.region_bytes // self.slab_bytes)

    @property
    def slots_per_slab(self) -> int:
        return self.slab_bytes // self.class_bytes[0]

    @property
    def num_slots(self) -> int:
        """Numbers that slots can have; as many slots, if all are of the smallest class."""
        whole, rest = divmod(self.region_bytes, self.slab_bytes)
        return whole * self.slots_per_slab + rest // self.class_bytes[0]

    def slots_in(self, slab: int, size_class: int) -> int:
        """Slots of ``size_class`` that fit into ``slab``."""
        size = min(self.slab_bytes, self.region_bytes - slab * self.slab_bytes)
        return size // self.class_bytes[size_class]

    def offsets(self, slots: Offsets, size_classes: Offsets) -> Offsets:
        """Where slots of the given classes start in the region, in bytes."""
        slabs, places = np.divmod(slots, self.slots_per_slab)
        starts: Offsets = slabs * self.slab_bytes + places * np.array(self.class_bytes, np.int64)[size_classes]
        return starts


def slot_bytes(chunk_bytes: int) -> int:
    """The size of a slot for a chunk."""
    return -(-chunk_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def smallest_region(chunk_bytes: Sequence[int]) -> int:
    """The least bytes of host memory that can hold one chunk of each size."""
    classes = {slot_bytes(size) for size in chunk_bytes}
    return len(classes) * max(classes)


def plan_slabs(memory_bytes: int, chunk_bytes: Sequence[int]) -> SlabPlan:
    """The plan for chunks of these sizes in ``memory_bytes``, which is not below ``smallest_region``."""
    classes = tuple(sorted({slot_bytes(size) for size in chunk_bytes}))
    assert memory_bytes >= smallest_region(chunk_bytes)
    largest = classes[-1]
    if len(classes) == 1:
        per_slab = max(1, min(memory_bytes // _SLABS, _LARGEST_SLAB) // largest)
        return SlabPlan(memory_bytes // largest * largest, per_slab * largest, classes)

    def loss(size: int) -> tuple[bool, float]:
        """What slabs of this size waste at their ends, and by not being full: each class has one that is half full."""
        waste = max(size % c for c in classes) / size
        return waste > _WASTE, waste + len(classes) * size / 2 / memory_bytes

    aim = min(memory_bytes // _SLABS, _LARGEST_SLAB)
    bound = min(memory_bytes // len(classes), max(_LARGEST_SLAB, _MOST_CHUNKS * largest))
    slab = min(_candidates(classes, max(aim // 2, largest), bound), key=loss)
    whole, rest = divmod(memory_bytes, slab)
    # What is left makes a slab of its own if that can be of any class.
    last = rest // SLOT_ALIGNMENT * SLOT_ALIGNMENT if rest >= largest else 0
    return SlabPlan(whole * slab + last, slab, classes)


def _candidates(classes: Sequence[int], least: int, bound: int) -> Sequence[int]:
    """Sizes of slabs worth a look, ascending: multiples of a class from ``least`` to ``bound``."""
    multiples = {c * k for c in classes for k in range(-(-least // c), bound // c + 1)[:_LOOKED_AT]}
    return sorted(multiples)


def region_size(plan: SlabPlan) -> int:
    """Bytes of shared memory for ``plan``, in whole pages."""
    return -(-plan.region_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
