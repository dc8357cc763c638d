"""The host cache: the primary tier. Chunks in slots of host memory, with an eviction policy.

    absent ── reserve ──▶ WRITING ── commit ──▶ READY ── evicted ──▶ absent
                             │                    │
                             └─ abort, forget ────┴─ forget ──▶ absent, its slot DEAD until the last pin has gone

Pins are counted; a slot that is pinned or being written is never evicted nor used again. Whoever reserves a slot holds
one pin, the *writer's*, that ``commit`` or ``abort`` gives back; a second one may wait for it by pinning the slot while
it is written. A chunk that is forgotten while others still read or write its slot leaves the index at once; the slot
is *dead* until they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from tierkv.host.policies.base import Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.host.slots import DEAD, FREE, READY, WRITING, Slots
from tierkv.keys import hash_array
from tierkv.types import Checksums, ChunkName, Chunks, Flags, Keys, Offsets, key_list

#: What ``states`` says of a key. (A dead slot's chunk is absent.)
ABSENT = 0
assert (ABSENT, WRITING, READY) == (0, 1, 2)

__all__ = ["ABSENT", "READY", "WRITING", "HostCache"]


class HostCache:
    """``num_slots`` slots of ``slot_bytes`` each; slot ``i`` lies at byte ``i * slot_bytes`` of the host region.

    Works on names and numbers only: it never touches the region. Everything comes in batches; keys are ``(n, 2)``
    uint64 arrays, slots int64 arrays of ``(n,)``. What callers must not do (commit a slot that nobody writes, unpin
    what is not pinned) is an assertion.

    Thread safety: none of its own; every call is made under the manager's lock.
    """

    def __init__(self, num_slots: int, slot_bytes: int, policy: Policy) -> None:
        """``policy`` is this cache's own, made with a capacity of ``num_slots``."""
        assert num_slots > 0 and slot_bytes > 0
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.policy = policy
        #: How often the policy named a victim that may not be evicted, found too few, or raised.
        self.policy_faults = 0
        self._index: dict[bytes, int] = {}  # key → slot, WRITING and READY ones
        self._slots = Slots(num_slots, slot_bytes)
        self._evicted: list[ChunkName] = []
        # Steps in where the policy fails. The built-in LRU needs no second one.
        self._lru = policy if type(policy) is LRUPolicy else LRUPolicy(num_slots)

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def find(self, keys: Keys) -> Offsets:
        """The slot of each key, WRITING ones included; -1 where absent."""
        get = self._index.get
        return np.array([get(key, -1) for key in key_list(keys)], np.int64)

    def states(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """ABSENT, WRITING or READY, for each key."""
        slots = self.find(keys)
        states: npt.NDArray[np.uint8] = np.where(slots < 0, np.uint8(ABSENT), self._slots.state[slots]).astype(np.uint8)
        return states

    def lookup_prefix(self, keys: Keys) -> tuple[int, int]:
        """How many leading keys are READY, and how many are READY or WRITING."""
        states = self.states(keys)
        return _leading(states == READY), _leading(states != ABSENT)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, chunks: Chunks) -> Offsets:
        """Slots to write ``chunks`` into; evicts as needed.

        The chunks are absent and distinct. Their slots are WRITING and carry the writer's pin. The head of the batch
        is served first: from the first chunk for which there is no room, all are -1. What was evicted is told by
        ``take_evicted``.
        """
        keys = key_list(chunks.keys)
        assert len(set(keys)) == len(keys) and not any(key in self._index for key in keys)
        missing = len(keys) - self.free
        if missing > 0:
            self._evict(missing)
        count = min(len(keys), self.free)
        slots = self._slots.take(count)
        self._slots.keys[slots] = chunks.keys[:count]
        self._slots.set_names(slots, [chunks.name(i) for i in range(count)])
        self._index.update(zip(keys[:count], slots.tolist(), strict=True))
        found = np.full(len(keys), -1, np.int64)
        found[:count] = slots
        return found

    def commit(self, slots: Offsets, lengths: Offsets | None = None) -> Flags:
        """Distinct ``slots`` are written: WRITING → READY, and the writer's pins go.

        Args:
            lengths: bytes that were written of each; the whole slot by default.

        Returns:
            which of them are READY now; the others were forgotten meanwhile.
        """
        slots = _as_slots(slots)
        self._slots.end_writing(slots)
        if lengths is not None:
            self._slots.lengths[slots] = lengths
        alive: Flags = self._slots.state[slots] == WRITING
        ready = slots[alive]
        self._slots.become(ready, READY)
        if len(ready):
            self._tell(lambda policy: policy.inserted(self._keys_of(ready)))
        self._slots.free_dead(slots)
        return alive

    def abort(self, slots: Offsets) -> None:
        """Distinct ``slots`` will not be written to the end: their chunks are gone, and so are the writer's pins."""
        slots = _as_slots(slots)
        self._slots.end_writing(slots)
        self._drop(slots)

    # ── using ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, slots: Offsets) -> None:
        """Add one pin for each entry of ``slots`` (a slot may occur more than once); none of them is free."""
        self._slots.pin(_as_slots(slots))

    def unpin(self, slots: Offsets) -> None:
        """Take one pin off for each entry of ``slots``. A dead slot becomes free with its last pin."""
        self._slots.unpin(_as_slots(slots))

    def touch(self, keys: Keys) -> None:
        """One request uses the chunks ``keys``, head first: one access. Those that are not READY are passed over."""
        ready = [key for key in dict.fromkeys(key_list(keys)) if self._state_of(key) == READY]
        if ready:
            self._tell(lambda policy: policy.accessed(list(ready)))

    def set_checksums(self, slots: Offsets, checksums: Checksums) -> None:
        """Keep the xxh3-64 of each slot's payload; 0 until then."""
        self._slots.checksums[_as_slots(slots)] = checksums

    def checksums(self, slots: Offsets) -> Checksums:
        return self._slots.checksums[_as_slots(slots)]

    def lengths(self, slots: Offsets) -> Offsets:
        """The bytes of each slot's payload, as ``commit`` was told."""
        return self._slots.lengths[_as_slots(slots)]

    def offset(self, slots: Offsets) -> Offsets:
        """Where each slot starts in the host region, in bytes."""
        return _as_slots(slots) * self.slot_bytes

    def name(self, slot: int) -> ChunkName:
        """The chunk in ``slot``, which is not free (a dead slot still knows it)."""
        return self._slots.name(int(slot))

    def chunks(self, slots: Offsets) -> Chunks:
        """The chunks in ``slots``: at least one, none free, all of one space."""
        slots = _as_slots(slots)
        names = [self._slots.name(slot) for slot in slots.tolist()]
        assert names and all(name.space == names[0].space for name in names)
        groups = np.array([name.group for name in names], np.int32)
        return Chunks(names[0].space, self._slots.keys[slots], groups, hash_array([name.block_hash for name in names]))

    # ── removing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, slots: Offsets) -> None:
        """The chunks in ``slots`` leave the index at once; each slot is free when its last pin has gone.

        A slot that is dead already stays so.
        """
        slots = np.unique(_as_slots(slots))
        assert (self._slots.state[slots] != FREE).all(), "only slots in use are forgotten"
        self._drop(slots)

    def clear(self) -> None:
        """Forget everything."""
        self.forget(np.array(list(self._index.values()), np.int64))

    def take_evicted(self) -> list[ChunkName]:
        """The chunks that were evicted since the last call, in order."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # ── counts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        return self._slots.counts[FREE]

    @property
    def ready(self) -> int:
        return self._slots.counts[READY]

    @property
    def writing(self) -> int:
        return self._slots.counts[WRITING]

    @property
    def dead(self) -> int:
        """Slots whose chunk has left the index and which somebody still reads or writes."""
        return self._slots.counts[DEAD]

    @property
    def pinned(self) -> int:
        """Slots with at least one pin, the writers' included."""
        return int(np.count_nonzero(self._slots.pins))

    @property
    def evictable(self) -> int:
        """Slots that ``reserve`` could free: READY and not pinned."""
        return int(np.count_nonzero((self._slots.state == READY) & (self._slots.pins == 0)))

    def __len__(self) -> int:
        """The chunks in the index, READY and WRITING."""
        return len(self._index)

    def __repr__(self) -> str:
        return (
            f"<HostCache {self.num_slots} slots of {self.slot_bytes} bytes: {self.free} free, {self.ready} ready, "
            f"{self.writing} writing, {self.dead} dead; {self.pinned} pinned; policy {self.policy!r}, "
            f"{self.policy_faults} faults>"
        )

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _state_of(self, key: bytes) -> int:
        slot = self._index.get(key, -1)
        return ABSENT if slot < 0 else int(self._slots.state[slot])

    def _keys_of(self, slots: Offsets) -> list[bytes]:
        return key_list(self._slots.keys[slots])

    def _evictable(self, key: bytes) -> bool:
        slot = self._index.get(key, -1)
        return slot >= 0 and bool(self._slots.state[slot] == READY) and not self._slots.pins[slot]

    def _drop(self, slots: Offsets) -> None:
        """Distinct ``slots``, each WRITING, READY or DEAD, leave the index and are freed where nobody holds them."""
        states = self._slots.state[slots]
        ready = self._keys_of(slots[states == READY])
        for key in self._keys_of(slots[states != DEAD]):
            del self._index[key]
        self._slots.become(slots, DEAD)
        self._slots.free_dead(slots)
        if ready:
            self._tell(lambda policy: policy.removed(list(ready), evicted=False))

    def _evict(self, count: int) -> None:
        """Make up to ``count`` slots free."""
        victims = self._victims(count)
        slots = np.array([self._index.pop(key) for key in victims], np.int64)
        self._evicted += [self._slots.name(slot) for slot in slots.tolist()]
        if victims:
            self._slots.release(slots)
            self._tell(lambda policy: policy.removed(list(victims), evicted=True))

    def _victims(self, count: int) -> list[bytes]:
        """Up to ``count`` keys to evict, best first: the policy's, checked; LRU's where those do not do."""
        if self._lru is self.policy:
            return self._lru.victims(count, self._evictable)
        try:
            # One more than asked for shows a policy that gives too many, without running through an endless one.
            proposed = list(islice(self.policy.victims(count, self._evictable), count + 1))
        except Exception:  # a user's policy may raise anything; the cache goes on without it
            self.policy_faults += 1
            proposed = []
        chosen = self._checked(proposed, count)
        if len(chosen) < count:
            taken = frozenset(chosen)
            more = self._lru.victims(count - len(chosen), lambda key: key not in taken and self._evictable(key))
            self.policy_faults += bool(more)
            chosen += more
        return chosen

    def _checked(self, proposed: Iterable[object], count: int) -> list[bytes]:
        """Those of the policy's victims that may be evicted, ``count`` at most; the others are counted as faults."""
        chosen: dict[bytes, None] = {}
        for key in proposed:
            if isinstance(key, bytes) and key not in chosen and len(chosen) < count and self._evictable(key):
                chosen[key] = None
            else:
                self.policy_faults += 1
        return list(chosen)

    def _tell(self, call: Callable[[Policy], None]) -> None:
        """Tell something to the policy, and to the LRU order beside it. ``call`` gives each a list of its own."""
        try:
            call(self.policy)
        except Exception:  # as in _victims
            self.policy_faults += 1
        if self._lru is not self.policy:
            call(self._lru)


def _as_slots(slots: Offsets) -> Offsets:
    return np.asarray(slots, dtype=np.int64)


def _leading(flags: Flags) -> int:
    """How many leading ``flags`` are true."""
    return len(flags) if flags.all() else int(flags.argmin())
