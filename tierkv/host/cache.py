"""The host cache: the primary tier. Chunks in slots of host memory, with an eviction policy.

    absent ── reserve ──▶ WRITING ── commit ──▶ READY ── evicted ──▶ absent
                             │                    │
                             └─ abort, forget ────┴─ forget ──▶ absent, its slot DEAD until the last pin has gone

Pins are counted; a slot that is pinned or being written is never evicted nor used again. Whoever reserves a slot holds
one pin, the *writer's*, that ``commit`` or ``abort`` gives back; a second one may wait for it by pinning the slot while
it is written. A chunk that is forgotten while others still read or write its slot leaves the index at once; the slot
is *dead* until they are done.

Slots of several sizes share the memory by slabs (``slabs.py``). Each request for a slot is served from its own size
class, as long as that can. How far the other classes hold colder chunks, or nothing, meanwhile is kept as a *debt*, and
when that is worth a slab, one of theirs is emptied and moves over. One without pins moves at once; of others, one at a
time is given out no more, and moves when its last pin has gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError
from tierkv.host import slots as kernels
from tierkv.host.policies.base import ANY, Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.host.slabs import SlabPlan, plan_slabs
from tierkv.host.slots import (
    BUSY,
    CLASS,
    DEAD,
    DRAINING,
    EVICTABLE,
    FREE,
    ORPHAN,
    PINNED,
    READY,
    USED,
    WRITING,
    SlotView,
    make_state,
)
from tierkv.keys import group_mask, make_chunks
from tierkv.types import (
    DIGEST_BYTES,
    KEY_BYTES,
    Checksums,
    ChunkName,
    Chunks,
    Flags,
    Hashes,
    Keys,
    Offsets,
    Space,
    every,
    filled,
)

logger = logging.getLogger(__name__)

#: What ``states`` says of a key that is not there. (A dead slot's chunk is absent.)
ABSENT = FREE

#: A verdict on a chunk, given to ``first_gap`` and ``last_gap``: not to be counted on as long as it is being written.
NOT_WRITING = kernels.NOT_WRITING

__all__ = ["ABSENT", "NOT_WRITING", "READY", "WRITING", "Holding", "HostCache", "Reservation"]

_BUILT_IN = "tierkv.host.policies"

#: How many of the coldest chunks are looked at, at most, to see whose they are.
_SAMPLE = 256

#: So many pairs of space and group are numbered before anybody looks whether the first ones are still in use.
_MANY_OWNERS = 64


class Reservation(NamedTuple):
    """slots: ``(n,)`` for each chunk its slot, or -1. evicted: ``(m, 2)``, the keys of what had to go for them."""

    slots: Offsets
    evicted: Keys


class FoundGap(NamedTuple):
    """chunk: the one that cannot be counted on. pinned: how many pins more are held than before.

    coming: how many of the chunks that were passed are not READY: somebody else has them, or they are being written.
    """

    chunk: int
    pinned: int
    coming: int


class Holding(NamedTuple):
    """missing: the numbers of chunks that are not here. writing: how many of the held ones are being written."""

    missing: Offsets
    writing: int


class _Owner(NamedTuple):
    """What the slots of one space and group have in common."""

    space: Space
    group: int
    mask: npt.NDArray[np.uint64]


class HostCache:
    """The slots of ``plan``, for chunks whose sizes are ``chunk_bytes[group]``.

    Works on names and numbers only: it never touches the region. Everything comes in batches; keys are ``(n, 2)``
    uint64 arrays, slots int64 arrays of ``(n,)``. What callers must not do (commit a slot that nobody writes, unpin
    what is not pinned) is an assertion.

    A new cache has no memory: ``grow`` says how much of the region can be used.

    Thread safety: none of its own; every call is made under one lock, the manager's for host memory.
    """

    def __init__(self, plan: SlabPlan, chunk_bytes: Sequence[int], make_policy: Callable[[SlotView], Policy]) -> None:
        self.plan = plan
        self.num_slots = plan.num_slots
        self._state = make_state(plan)
        self._view = SlotView(self._state, plan)
        self.policy = make_policy(self._view)
        #: How often the policy named a victim that may not be evicted, found too few, or raised.
        self.policy_faults = 0
        self._trusted = type(self.policy).__module__.startswith(_BUILT_IN)
        if not self._trusted:
            _refuse_derived(type(self.policy))
        # Steps in where a user's policy fails, and keeps its order meanwhile.
        self._order = self.policy if self._trusted else LRUPolicy(self._view)
        self._chunk_bytes: Offsets = np.array(chunk_bytes, np.int64)
        self._class_of_group: Offsets = np.searchsorted(plan.class_bytes, self._chunk_bytes).astype(np.int64)
        self._checksums: Checksums = np.zeros(plan.num_slots, np.uint64)
        self._heads: Hashes | None = None  # what the full hash has before the 16 bytes that the key is made of
        self._owners: list[_Owner | None] = []
        self._owner_of: dict[tuple[Space, int], int] = {}
        self._owners_bound = _MANY_OWNERS
        classes = len(plan.class_bytes)
        #: Slots of each class in a slab, the last slab perhaps excepted, which may be smaller.
        self._per_slab: Offsets = plan.slab_bytes // self._view.class_bytes
        #: ``[k, c]``: bytes of class k that were colder than what class c evicted of its own, less the reverse.
        self._debts: Offsets = np.zeros((classes, classes), np.int64)
        #: The class that the slab which is being emptied goes to, or -1; and the slab that one got so last.
        self._heir, self._inherited = -1, -1
        self._slabs_grown = 0

    def grow(self, ready_bytes: int) -> None:
        """The first ``ready_bytes`` of the region can be used from now on; never less than before."""
        whole = self.plan.num_slabs if ready_bytes >= self.plan.region_bytes else ready_bytes // self.plan.slab_bytes
        pool = self._state.pool
        for slab in reversed(range(self._slabs_grown, whole)):  # the first ones are taken first
            pool[0] += 1
            pool[pool[0]] = slab
        self._slabs_grown = max(self._slabs_grown, whole)

    def add_slabs(self, slabs: Offsets, size_class: int = -1) -> None:
        """Instead of ``grow``, in any order: ``slabs``, none of which can be used yet, can be from now on.

        Args:
            size_class: that all of their slots are free of; if none, they are taken after those that wait already.
        """
        if size_class >= 0:
            for slab in slabs.tolist():
                kernels.assign(self._state, slab, size_class, self.plan.slots_in(slab, size_class))
            return
        pool = self._state.pool
        there, added = int(pool[0]), len(slabs)
        pool[1 + added : 1 + added + there] = pool[1 : 1 + there].copy()
        pool[1 : 1 + added] = slabs[::-1]
        pool[0] = there + added

    def populate(self) -> None:
        """Make the index's memory present, which the first to touch it would wait for. Does not hold the GIL.

        Before the first slab can be used; the other calls may be made meanwhile.
        """
        for array in (self._state.table, self._state.records, self._checksums):
            array.view(np.uint8).fill(0)

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def locate(self, keys: Keys) -> tuple[Offsets, npt.NDArray[np.uint8]]:
        """For each key its slot, -1 where absent, and its state: ABSENT, WRITING or READY."""
        slots, states = np.empty(len(keys), np.int64), np.empty(len(keys), np.uint8)
        kernels.locate(self._state, _as_keys(keys), slots, states)
        return slots, states

    def find(self, keys: Keys) -> Offsets:
        """The slot of each key, WRITING ones included; -1 where absent."""
        return self.locate(keys)[0]

    def states(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """ABSENT, WRITING or READY, for each key."""
        return self.locate(keys)[1]

    def lookup_prefix(self, keys: Keys) -> tuple[int, int]:
        """How many leading keys are READY, and how many are READY or WRITING."""
        counts = np.empty(2, np.int64)
        kernels.leading(self._state, _as_keys(keys), counts)
        return int(counts[0]), int(counts[1])

    def first_gap(self, keys: Keys, held: Offsets, verdicts: npt.NDArray[np.int16], first: int, last: int) -> FoundGap:
        """The first of the chunks ``first`` to ``last`` - 1 that cannot be counted on; ``last`` if all can.

        One can, if its verdict is 0 or more (somebody else has it), or it is READY, or it is WRITING and its verdict is
        not ``NOT_WRITING``. Stops at the first gap, whatever lies behind it, and pins what it passes, as ``hold`` does.

        Args:
            keys, held, verdicts: of all chunks, of which only these are looked at. held: as in ``hold``.
        """
        return self._gap(keys, held, verdicts, first, last, False)

    def last_gap(self, keys: Keys, held: Offsets, verdicts: npt.NDArray[np.int16], first: int, last: int) -> FoundGap:
        """As ``first_gap``, from the end: the last chunk that cannot be counted on, ``first`` - 1 if all can."""
        return self._gap(keys, held, verdicts, first, last, True)

    def _gap(
        self, keys: Keys, held: Offsets, verdicts: npt.NDArray[np.int16], first: int, last: int, backward: bool
    ) -> FoundGap:
        found = np.empty(3, np.int64)
        kernels.gap(self._state, _as_keys(keys), held, verdicts, first, last, backward, found)
        return FoundGap(*found.tolist())

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, chunks: Chunks) -> Reservation:
        """Slots to write ``chunks`` into; evicts as needed.

        The slots are WRITING and carry the writer's pin. The head of the batch is served first: from the first chunk
        for which there is no room, all of its size class get -1. So does a chunk that is there already.
        """
        owners = self._owner_ids(chunks)
        if len(self.plan.class_bytes) == 1:
            slots, evicted = self._reserve(_as_keys(chunks.keys), owners, 0)
        else:
            classes = self._class_of_group[chunks.groups]
            slots = np.full(len(chunks), -1, np.int64)
            parts = [np.empty((0, 2), np.uint64), *self._share_out(chunks.keys, classes)]
            for size_class in np.unique(classes).tolist():
                where = np.flatnonzero(classes == size_class)
                slots[where], gone = self._reserve(chunks.keys[where], owners[where], size_class)
                parts.append(gone)
            evicted = np.concatenate(parts)
        taken = slots >= 0
        placed = slots if every(taken) else slots[taken]
        self._checksums[placed] = 0
        self._set_heads(placed, chunks.hashes if len(placed) == len(slots) else chunks.hashes[taken])
        return Reservation(slots, evicted)

    def commit(self, slots: Offsets) -> Flags:
        """Distinct ``slots`` are written: WRITING → READY, and the writer's pins go.

        Returns:
            which of them are READY now; the others were forgotten meanwhile.
        """
        slots = _as_slots(slots)
        alive = np.zeros(len(slots), np.bool_)
        kernels.end_writing(self._state, slots, True, alive)
        ready = slots if every(alive) else slots[alive]
        if len(ready):
            self._tell("inserted", ready)
        return alive

    def abort(self, slots: Offsets) -> None:
        """Distinct ``slots`` will not be written to the end: their chunks are gone, and so are the writer's pins."""
        slots = _as_slots(slots)
        kernels.end_writing(self._state, slots, False, np.zeros(len(slots), np.bool_))

    def restore(self, chunks: Chunks, slots: Offsets) -> Flags:
        """``chunks`` lie in ``slots`` since an earlier life: READY at once, as one access, head first.

        Args:
            slots: free ones, distinct, of the chunks' own size class.

        Returns:
            which of them are READY now; a chunk that is there already was passed over.
        """
        slots, restored = _as_slots(slots), np.zeros(len(slots), np.bool_)
        kernels.restore(self._state, _as_keys(chunks.keys), self._owner_ids(chunks), slots, restored)
        ready = slots if every(restored) else slots[restored]
        if len(ready):
            self._checksums[ready] = 0
            self._set_heads(ready, chunks.hashes if every(restored) else chunks.hashes[restored])
            self._tell("inserted", ready)
        return restored

    # ── using ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, slots: Offsets) -> None:
        """Add one pin for each entry of ``slots`` (a slot may occur more than once); none of them is free."""
        kernels.pin(self._state, _as_slots(slots))

    def unpin(self, slots: Offsets) -> None:
        """Take one pin off for each entry of ``slots``. A dead slot becomes free with its last pin."""
        kernels.unpin(self._state, _as_slots(slots))

    def hold(self, keys: Keys, held: Offsets, first: int, last: int) -> Holding:
        """Pin those of the chunks ``first`` to ``last`` - 1 that are here, READY or WRITING, and no others.

        Args:
            held: ``(n,)``, one for each key: the slot that is pinned for this holder, or -1. Brought up to date.
        """
        missing, counts = np.empty(max(0, last - first), np.int64), np.empty(2, np.int64)
        kernels.hold(self._state, _as_keys(keys), held, first, last, missing, counts)
        return Holding(missing[: counts[0]], int(counts[1]))

    def let_go(self, held: Offsets) -> int:
        """Give up what ``held`` holds; returns how many pins these were."""
        return int(kernels.let_go(self._state, held))

    def touch(self, slots: Offsets) -> None:
        """One request uses the chunks in distinct ``slots``, head first: one access. Only READY ones count."""
        slots = _as_slots(slots)
        ready = slots[self._state.records["state"][slots] == READY]
        if len(ready):
            self._tell("accessed", ready)

    def set_checksums(self, slots: Offsets, checksums: Checksums) -> None:
        """Keep the xxh3-64 of each slot's payload; 0 until then."""
        self._checksums[_as_slots(slots)] = checksums

    def checksums(self, slots: Offsets) -> Checksums:
        return self._checksums[_as_slots(slots)]

    def offset(self, slots: Offsets) -> Offsets:
        """Where each slot starts in the host region, in bytes."""
        slots = _as_slots(slots)
        if len(self.plan.class_bytes) == 1:
            return slots * self.plan.class_bytes[0]
        return self.plan.offsets(slots, self._view.size_classes(slots))

    def name(self, slot: int) -> ChunkName:
        """The chunk in ``slot``, which is not free (a dead slot still knows it)."""
        return self.chunks(np.array([slot], np.int64)).name(0)

    def chunks(self, slots: Offsets) -> Chunks:
        """The chunks in ``slots``: at least one, none free, all of one space."""
        slots = _as_slots(slots)
        records = self._state.records[slots]
        assert len(slots) and (records["state"] != FREE).all(), "only slots in use have a name"
        keys = np.stack([records["word0"], records["word1"]], axis=1)
        groups, tails = np.empty(len(slots), np.int32), np.empty_like(keys)
        spaces = set()
        for number in np.unique(records["owner"]).tolist():
            owner = self._owners[number]
            assert owner is not None
            where = records["owner"] == number
            groups[where] = owner.group
            tails[where] = keys[where] ^ owner.mask
            spaces.add(owner.space)
        assert len(spaces) == 1 and self._heads is not None
        hashes = np.concatenate([self._heads[slots], tails.astype("<u8").view(np.uint8)], axis=1)
        return Chunks(spaces.pop(), keys, groups, hashes)

    # ── removing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, slots: Offsets) -> None:
        """The chunks in ``slots``, none of them free, leave the index at once; each slot is free when nobody holds it.

        A slot that is dead already stays so.
        """
        slots = np.unique(_as_slots(slots))
        states = self._state.records["state"][slots]
        assert (states != FREE).all(), "only slots in use are forgotten"
        ready = slots[states == READY]
        if len(ready):
            self._tell("removed", ready, False)
        kernels.drop(self._state, slots)

    def clear(self) -> None:
        """Forget everything."""
        states = self._state.records["state"]
        self.forget(np.flatnonzero((states == READY) | (states == WRITING)))

    # ── counts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        """Slots that can be taken without evicting: those of slabs without a class as if they were of the smallest."""
        return self._count(FREE) + sum(self.plan.slots_in(slab, 0) for slab in self._pooled())

    @property
    def ready(self) -> int:
        return self._count(READY)

    @property
    def writing(self) -> int:
        return self._count(WRITING)

    @property
    def dead(self) -> int:
        """Slots whose chunk has left the index and which somebody still reads or writes."""
        return self._count(DEAD) + self._count(ORPHAN)

    @property
    def pinned(self) -> int:
        """Slots with at least one pin, the writers' included."""
        return self._count(PINNED)

    @property
    def evictable(self) -> int:
        """Slots that ``reserve`` could free: READY and not pinned."""
        return self._count(EVICTABLE)

    @property
    def bytes_ready(self) -> int:
        """Bytes of the slots that are READY."""
        return int(self._state.counts[:, READY] @ self._view.class_bytes)

    @property
    def index_bytes(self) -> int:
        """Bytes of memory for index, names and policy, for as many chunks as there can be (checksums: 8 more each)."""
        heads = 0 if self._heads is None else self._heads.nbytes
        own = sum(array.nbytes for array in self._state) + heads
        return own + int(getattr(self.policy, "index_bytes", 0))

    def room(self, groups: npt.NDArray[np.int32]) -> bool:
        """Whether ``reserve`` would find a slot for one chunk of each of ``groups`` (a group may occur often)."""
        wanted = np.bincount(self._class_of_group[groups], minlength=len(self.plan.class_bytes))
        own, slabs = self._own(), self._state.slabs
        short = np.maximum(wanted - own, 0)
        if len(own) == 1:
            return int(short[0]) <= sum(self.plan.slots_in(slab, 0) for slab in self._pooled())
        # The last slab may be smaller: it is not counted on.
        whole = np.arange(self.plan.num_slabs) < self.plan.region_bytes // self.plan.slab_bytes
        idle = whole & (slabs[BUSY] == 0) & (slabs[CLASS] >= 0)
        moving = idle & (slabs[DRAINING] != 0)
        spare = int(np.count_nonzero(whole[self._pooled()])) + int(np.count_nonzero(moving))
        idle_of_class = np.bincount(slabs[CLASS, idle & ~moving], minlength=len(own))
        spare += int(np.minimum(idle_of_class, np.maximum(own - wanted, 0) // self._per_slab).sum())
        return int((-(-short // self._per_slab)).sum()) <= spare

    def __len__(self) -> int:
        """The chunks in the index, READY and WRITING."""
        return self.ready + self.writing

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.plan.class_bytes))
        return (
            f"<HostCache of {self.plan.region_bytes} bytes in slots of {sizes}: {self.free} free, {self.ready} ready, "
            f"{self.writing} writing, {self.dead} dead; {self.pinned} pinned; policy {self.policy!r}, "
            f"{self.policy_faults} faults>"
        )

    # ── inside: names ────────────────────────────────────────────────────────────────────────────────────────────────

    def _owner_ids(self, chunks: Chunks) -> npt.NDArray[np.uint16]:
        """For each chunk the number of its space and group."""
        if len(chunks) and chunks.groups.strides == (0,):  # one group, as of most batches
            group = int(chunks.groups[0])
            one = self._owner_of.get((chunks.space, group))
            return filled(len(chunks), self._add_owner(chunks.space, group) if one is None else one, np.uint16)
        by_group = np.zeros(len(self._chunk_bytes), np.uint16)
        present = np.bincount(chunks.groups, minlength=len(by_group))
        for group in np.flatnonzero(present).tolist():
            number = self._owner_of.get((chunks.space, group))
            by_group[group] = self._add_owner(chunks.space, group) if number is None else number
        return by_group[chunks.groups]

    def _add_owner(self, space: Space, group: int) -> int:
        """A number for a new space and group; those of spaces of which no slot is left are given again."""
        if None not in self._owners and len(self._owners) >= self._owners_bound:
            self._drop_owners(space)
        number = self._owners.index(None) if None in self._owners else len(self._owners)
        if number == len(self._owners):
            self._owners.append(None)
        self._owners[number] = _Owner(space, group, group_mask(space, group))
        self._owner_of[space, group] = number
        return number

    def _drop_owners(self, kept: Space) -> None:
        """Free the numbers of other spaces of which no slot is left.

        Looks at each slot, so it is done when the numbers have doubled since, and not for each new one.
        """
        in_use = set(np.unique(self._state.records["owner"][self._state.records["state"] != FREE]).tolist())
        for number, owner in enumerate(self._owners):
            if owner is not None and owner.space != kept and number not in in_use:
                self._owners[number] = None
                del self._owner_of[owner.space, owner.group]
        self._owners_bound = max(_MANY_OWNERS, 2 * len(in_use))

    def _set_heads(self, slots: Offsets, hashes: Hashes) -> None:
        if not len(slots):
            return
        size = hashes.shape[1] - KEY_BYTES
        if self._heads is None:
            self._heads = np.zeros((self.num_slots, size), np.uint8)
        assert self._heads.shape[1] == size, "all hashes of one cache have one length"
        if size:
            whole = f"V{size}"  # as items of that size, which is quicker than by bytes
            self._heads.view(whole)[slots, 0] = hashes[:, :size].view(whole)[:, 0]

    # ── inside: room ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _reserve(self, keys: Keys, owners: npt.NDArray[np.uint16], size_class: int) -> tuple[Offsets, Keys]:
        """As ``reserve``, for keys of one size class."""
        slots, evicted = np.empty(len(keys), np.int64), [np.empty((0, 2), np.uint64)]
        done = kernels.take(self._state, keys, owners, size_class, slots)
        while done < len(keys):
            evicted += self._make_room(size_class, len(keys) - done)
            if not self._state.counts[size_class, FREE]:
                break
            done += kernels.take(self._state, keys[done:], owners[done:], size_class, slots[done:])
        return slots, np.concatenate(evicted) if len(evicted) > 1 else evicted[0]

    def _make_room(self, size_class: int, count: int) -> list[Keys]:
        """Free slots of the class, ``count`` if that goes, none if none can be; the keys of what was evicted."""
        if self._state.pool[0]:
            self._assign(size_class)
            return []
        victims = self._victims(count, size_class)
        return [self._evict(victims)] if len(victims) else []

    def _assign(self, size_class: int) -> int:
        """A slab of no class, of which there is one, has ``size_class`` from now on; says which slab."""
        pool = self._state.pool
        slab = int(pool[pool[0]])
        pool[0] -= 1
        kernels.assign(self._state, slab, size_class, self.plan.slots_in(slab, size_class))
        return slab

    # ── inside: several size classes ─────────────────────────────────────────────────────────────────────────────────

    def _share_out(self, keys: Keys, classes: Offsets) -> list[Keys]:
        """Before a batch is served: move slabs to the classes that lack them; the keys of what was evicted.

        If there is room for the whole batch, each of its classes has what it needs afterwards.
        """
        evicted = self._go_on_draining()
        wanted = np.bincount(classes, minlength=len(self.plan.class_bytes))
        if (wanted > self._own()).any():
            wanted = np.bincount(classes[self.find(keys) < 0], minlength=len(wanted))
        for size_class in np.flatnonzero(wanted).tolist():
            evicted += self._provide(size_class, wanted)
        for size_class in np.flatnonzero(wanted).tolist():
            evicted += self._balance(size_class, wanted)
        return evicted

    def _provide(self, size_class: int, wanted: Offsets) -> list[Keys]:
        """Move slabs to ``size_class`` until it can give what is wanted of it, as far as others can do without them."""
        evicted: list[Keys] = []
        while self._own()[size_class] < wanted[size_class]:
            if not self._state.pool[0]:
                slab = self._slab_to_drain(size_class, wanted, ANY)
                if slab < 0:
                    break
                evicted += self._drain(slab, size_class)
                if not self._state.pool[0]:  # pins are in the way
                    break
            self._assign(size_class)
        return evicted

    def _balance(self, size_class: int, wanted: Offsets) -> list[Keys]:
        """Note what class owes which; move slabs to ``size_class`` when that is due. The keys of what was evicted."""
        evicted: list[Keys] = []
        slabs, free, slab_bytes = self._state.slabs, self._state.counts[:, FREE], self.plan.slab_bytes
        while free[size_class] < wanted[size_class] and not self._state.pool[0]:
            empty = np.flatnonzero(self._spare_slabs(size_class, free - wanted) & (slabs[USED] == 0))
            empty = empty[empty != self._inherited]  # its class has waited for it
            if not len(empty):
                break
            self._drain(int(empty[0]), size_class)
            self._assign(size_class)
        if free[size_class] >= wanted[size_class] or self._state.pool[0]:
            return evicted
        debts = self._debts
        owed = self._owed(size_class, wanted)
        debts[:, size_class] += owed
        debts[size_class, :] -= owed
        for giver in np.argsort(-debts[:, size_class]).tolist():
            while debts[giver, size_class] >= slab_bytes:
                slab = self._slab_to_drain(size_class, wanted, giver)
                if slab < 0:
                    break
                debts[giver, size_class] -= slab_bytes
                debts[size_class, giver] += slab_bytes
                evicted += self._drain(slab, size_class)
                if self._state.pool[0]:
                    self._assign(size_class)
        np.clip(debts, -2 * slab_bytes, 2 * slab_bytes, out=debts)
        return evicted

    def _owed(self, size_class: int, wanted: Offsets) -> Offsets:
        """Bytes, by class, that would go for what ``size_class`` lacks of what is wanted if sizes did not matter.

        First what others have free, but for a slab's worth, as each class has one that is being filled; then the
        coldest chunks.
        """
        sizes, free = self._view.class_bytes, self._state.counts[:, FREE]
        missing = int(wanted[size_class] - free[size_class])
        needed = missing * int(sizes[size_class])
        unused = (free - wanted) * sizes - self.plan.slab_bytes
        unused[size_class] = 0
        owed: Offsets = np.clip(unused, 0, needed)
        rest = needed - int(owed.sum())
        if rest > 0:
            # Those equally cold, as the chunks of one batch are, are no reason to take from another class.
            coldest = self._order.victims(min(missing, _SAMPLE), ANY - size_class)
            weights = np.bincount(self._view.size_classes(coldest), minlength=len(sizes)) * sizes
            owed += rest * weights // max(1, int(weights.sum()))
        owed[size_class] = 0
        return owed

    def _own(self) -> Offsets:
        """For each class, the slots that it could give by itself: free ones, and what can be evicted where it stays."""
        counts, slabs = self._state.counts, self._state.slabs
        own: Offsets = counts[:, FREE] + counts[:, EVICTABLE]
        for slab in np.flatnonzero(slabs[DRAINING]).tolist():
            own[slabs[CLASS, slab]] -= slabs[USED, slab] - slabs[BUSY, slab]
        return own

    def _spare_slabs(self, size_class: int, spare: Offsets) -> Flags:
        """Which slabs of other classes could go, if so many slots of each class are to spare."""
        slabs = self._state.slabs
        of = slabs[CLASS]
        loss = self._per_slab[of] - slabs[BUSY]
        loss[-1] = self.plan.slots_in(self.plan.num_slabs - 1, int(of[-1])) - slabs[BUSY, -1]
        could: Flags = (of >= 0) & (of != size_class) & (slabs[DRAINING] == 0) & (loss <= spare[of])
        return could

    def _slab_to_drain(self, size_class: int, wanted: Offsets, giver: int) -> int:
        """The slab of another class (``giver``, or any) that is best given up; -1 if there is none.

        One that nobody holds a pin in, if possible: the emptiest, or, if that is not half empty, the one with the
        coldest chunk. Of the others, the one with the fewest pinned slots, unless another is being emptied already.
        """
        slabs = self._state.slabs
        fitting = self._spare_slabs(size_class, self._own() - wanted)
        if giver != ANY:
            fitting &= slabs[CLASS] == giver
        candidates = np.flatnonzero(fitting & (slabs[BUSY] == 0))
        if not len(candidates):
            candidates = np.flatnonzero(fitting)
            if not len(candidates) or slabs[DRAINING].any():
                return -1
            return int(candidates[np.argmin(slabs[BUSY, candidates] / self._per_slab[slabs[CLASS, candidates]])])
        if len(candidates) > 1 and candidates[-1] == self.plan.num_slabs - 1:
            candidates = candidates[:-1]  # it may be smaller, and not give as much as it must
        fill = slabs[USED, candidates] / self._per_slab[slabs[CLASS, candidates]]
        best = int(candidates[np.argmin(fill)])
        if fill.min() > 0.5:
            for slot in self._order.victims(1, giver).tolist():
                at = slot // self.plan.slots_per_slab
                best = at if at in candidates else best
        return best

    def _drain(self, slab: int, heir: int) -> list[Keys]:
        """Evict all of ``slab`` that can be. It is in the pool then, or goes to ``heir`` when its last pin has gone."""
        kernels.drain(self._state, slab, self.plan.slots_in(slab, int(self._state.slabs[CLASS, slab])))
        evicted = self._evict_all(slab)
        if self._state.slabs[DRAINING, slab]:
            self._heir = heir
        return evicted

    def _go_on_draining(self) -> list[Keys]:
        """Evict what can be meanwhile in the slab that is being emptied, and hand that over if that was all."""
        draining = self._state.slabs[DRAINING]
        evicted = [keys for slab in np.flatnonzero(draining).tolist() for keys in self._evict_all(slab)]
        if self._heir >= 0 and not draining.any():
            if self._state.pool[0]:
                self._inherited = self._assign(self._heir)
            self._heir = -1
        return evicted

    def _evict_all(self, slab: int) -> list[Keys]:
        """Evict what can be in ``slab``; the keys."""
        first, last = slab * self.plan.slots_per_slab, min((slab + 1) * self.plan.slots_per_slab, self.num_slots)
        slots = np.arange(first, last, dtype=np.int64)
        victims = slots[self._view.evictable(slots)]
        return [self._evict(victims)] if len(victims) else []

    def _evict(self, victims: Offsets) -> Keys:
        """Evict ``victims``, which are evictable and distinct; their keys."""
        keys = np.empty((len(victims), 2), np.uint64)
        self._tell("removed", victims, True)
        kernels.evict(self._state, victims, keys)
        return keys

    # ── inside: the policy ───────────────────────────────────────────────────────────────────────────────────────────

    def _victims(self, count: int, size_class: int) -> Offsets:
        """Up to ``count`` slots to evict, best first: the policy's, checked; LRU's where those do not do."""
        if self._trusted:
            return self.policy.victims(count, size_class)
        try:
            # One more than asked for shows a policy that gives too many, without running through an endless one.
            proposed = list(islice(iter(self.policy.victims(count, size_class)), count + 1))
        except Exception:  # a user's policy may raise anything; the cache goes on without it
            self.policy_faults += 1
            proposed = []
        chosen = self._checked(proposed, count, size_class)
        if len(chosen) < count:
            more = self._order.victims(count, size_class)
            more = more[~np.isin(more, chosen)][: count - len(chosen)]
            self.policy_faults += bool(len(more))
            chosen = np.concatenate([chosen, more])
        return chosen

    def _checked(self, proposed: Sequence[object], count: int, size_class: int) -> Offsets:
        """Those of the policy's victims that may be evicted, ``count`` at most; the others are counted as faults."""
        chosen: dict[int, None] = {}
        for slot in proposed:
            number = int(slot) if isinstance(slot, int | np.integer) and 0 <= slot < self.num_slots else -1
            one = np.array([number], np.int64)
            fits = number >= 0 and self._view.evictable(one)[0] and self._view.size_classes(one)[0] == size_class
            if fits and number not in chosen and len(chosen) < count:
                chosen[number] = None
            else:
                self.policy_faults += 1
        return np.array(list(chosen), np.int64)

    def _tell(self, event: str, slots: Offsets, *details: bool) -> None:
        """Tell something to the policy, and to the LRU order beside a user's."""
        if not self._trusted:
            try:
                getattr(self.policy, event)(slots.copy(), *details)
            except Exception:  # as in _victims
                self.policy_faults += 1
                if self.policy_faults == 1:
                    logger.exception("policy %r raised; least-recently-used order steps in where it fails", self.policy)
        getattr(self._order, event)(slots, *details)

    def _count(self, column: int) -> int:
        return int(self._state.counts[:, column].sum())

    def _pooled(self) -> list[int]:
        """The slabs of no class."""
        pool = self._state.pool
        slabs: list[int] = pool[1 : pool[0] + 1].tolist()
        return slabs


def warm_up(make_policy: Callable[[SlotView], Policy]) -> None:
    """Compile all that a cache with this policy runs, so that no running step pays for it.

    Takes some seconds where the compiled kernels are not on disk yet.
    """
    chunk_bytes = (512, 1024)
    cache = HostCache(plan_slabs(16 * 1024, chunk_bytes), chunk_bytes, make_policy)
    cache.grow(cache.plan.region_bytes)
    space = Space(bytes(DIGEST_BYTES), bytes(DIGEST_BYTES))
    for number in range(24):  # more than fits, of both sizes: evicts, comes back from ghosts, moves slabs
        chunks = make_chunks(space, number // 12, [bytes([number % 20]) * KEY_BYTES])
        held, verdicts = np.full(1, -1, np.int64), np.full(1, -1, np.int16)
        slots = cache.reserve(chunks).slots
        cache.commit(slots[slots >= 0])
        cache.touch(cache.find(chunks.keys)[slots >= 0])
        cache.lookup_prefix(chunks.keys)
        cache.first_gap(chunks.keys, held, verdicts, 0, 1)
        cache.last_gap(chunks.keys, held, verdicts, 0, 1)
        cache.hold(chunks.keys, held, 0, 1)
        cache.let_go(held)
        cache.pin(slots[slots >= 0])
        cache.unpin(slots[slots >= 0])
    cache.clear()
    cache.abort(cache.reserve(chunks).slots)
    free = cache.reserve(chunks).slots
    cache.abort(free)
    cache.restore(chunks, free)


def _refuse_derived(policy: type[Policy]) -> None:
    """A user's policy must not be derived from a built-in one.

    Those keep their lists in the slots' own links, where the order that steps in for a user's policy has its lists;
    and one that raised halfway would leave them broken.
    """
    for parent in policy.__mro__:
        if parent is not Policy and parent.__module__.startswith(_BUILT_IN):
            raise ConfigError(
                "eviction_policy",
                f"{policy.__name__} is derived from {parent.__name__}, which works on what is the host cache's own",
                "a class derived from tierkv.host.policies.base.Policy itself",
            )


def _as_slots(slots: Offsets) -> Offsets:
    if slots.dtype == np.int64 and slots.flags.c_contiguous:
        return slots
    return np.ascontiguousarray(slots, dtype=np.int64)


def _as_keys(keys: Keys) -> Keys:
    """``keys`` as the kernels are compiled for: another layout, or one that may not be written, is another type."""
    if keys.flags.carray and keys.dtype == np.uint64:
        return keys
    return np.require(keys, np.uint64, ["C", "W"])
