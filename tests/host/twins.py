"""Plain, slow twins of the eviction policies and of the host cache around them, and what compares them with the real.

The twins are written from the papers and from what the docstrings of the policies promise. They know chunks by their
keys and sizes, keep ordered dictionaries (oldest first), and count what they want to know again each time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierkv import keys as key_tools
from tierkv.host.cache import HostCache
from tierkv.host.lists import NEWEST, OLDEST
from tierkv.host.policies.arc import ARCPolicy
from tierkv.host.policies.base import ANY, Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.host.policies.s3fifo import S3FIFOPolicy
from tierkv.host.slabs import plan_slabs
from tierkv.host.slots import SlotView
from tierkv.types import Chunks, Keys, Offsets, Space

Key = tuple[int, int]

SPACE = Space(bytes(16), bytes(range(16)))

BUILT_IN: list[type[Policy]] = [LRUPolicy, ARCPolicy, S3FIFOPolicy]


# ── making things ────────────────────────────────────────────────────────────────────────────────────────────────────


def block_hash(number: int) -> bytes:
    """32 bytes that are as good as random, as block hashes are; the last ones tell the number."""
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=24).digest() + number.to_bytes(8, "big")


def chunks(*numbers: int, group: int = 0, space: Space = SPACE) -> Chunks:
    return key_tools.make_chunks(space, group, [block_hash(number) for number in numbers])


def numbers_of(keys: Keys, group: int = 0, space: Space = SPACE) -> list[int]:
    """The numbers that ``chunks`` made these keys of."""
    tails = keys ^ key_tools.group_mask(space, group)
    return [int.from_bytes(tail.tobytes()[-8:], "big") for tail in tails.astype("<u8")]


def make_cache(
    memory_bytes: int,
    chunk_bytes: Sequence[int],
    make_policy: Callable[[SlotView], Policy] = LRUPolicy,
) -> HostCache:
    """A host cache all of whose memory is ready."""
    cache = HostCache(plan_slabs(memory_bytes, chunk_bytes), chunk_bytes, make_policy)
    cache.grow(cache.plan.region_bytes)
    return cache


def cache_of(num_slots: int, make_policy: Callable[[SlotView], Policy] = LRUPolicy) -> HostCache:
    """A host cache for chunks of one size."""
    return make_cache(num_slots * 4096, [4096], make_policy)


def put(cache: HostCache, batch: Chunks) -> Offsets:
    """Reserve and commit; the slots of those that got one, and -1."""
    slots = cache.reserve(batch).slots
    cache.commit(slots[slots >= 0])
    return slots


# ── the policies ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Entry:
    """size: of the chunk · batch: of which number it was put into its list, for those of one batch are equally old."""

    size: int
    batch: int
    uses: int = 0


class List(OrderedDict[Key, Entry]):
    """Oldest first. Knows its bytes, since the twins would take minutes for a trace if they added them up each time."""

    nbytes = 0

    def append(self, key: Key, entry: Entry) -> None:
        assert key not in self
        self[key] = entry
        self.nbytes += entry.size

    def remove(self, key: Key) -> Entry:
        entry = self.pop(key)
        self.nbytes -= entry.size
        return entry

    def remove_oldest(self) -> None:
        self.remove(next(iter(self)))


def nbytes(*lists: List) -> int:
    return sum(entries.nbytes for entries in lists)


class Twin:
    """Ranks chunks as a ``Policy`` does, but by keys. ``lists`` names its parts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.batch = 0

    def inserted(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        raise NotImplementedError

    def accessed(self, keys: Sequence[Key]) -> None:
        raise NotImplementedError

    def removed(self, keys: Sequence[Key], evicted: bool) -> None:
        raise NotImplementedError

    def victims(self, count: int, size: int, pinned: frozenset[Key]) -> list[Key]:
        """``size``: only chunks of that size; if negative, of any, and those of -``size`` before equally old ones."""
        raise NotImplementedError

    def lists(self) -> dict[str, List]:
        raise NotImplementedError


def sort(keys: list[Key], entries: List, size: int) -> None:
    """Oldest first, if they are of several sizes."""
    if size < 0:
        keys.sort(key=lambda key: (entries[key].batch, entries[key].size != -size, entries[key].size))


def candidates(entries: List, size: int, pinned: frozenset[Key]) -> list[Key]:
    """What of a list may go, best victim first. ``size``: as in ``Twin.victims``."""
    found = [key for key, entry in entries.items() if key not in pinned and (size < 0 or size == entry.size)]
    sort(found, entries, size)
    return found


class TwinLRU(Twin):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.order = List()

    def inserted(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        self.batch += 1
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            self.order.append(key, Entry(size, self.batch))

    def accessed(self, keys: Sequence[Key]) -> None:
        self.inserted(keys, [self.order.remove(key).size for key in keys])

    def removed(self, keys: Sequence[Key], evicted: bool) -> None:
        for key in keys:
            self.order.remove(key)

    def victims(self, count: int, size: int, pinned: frozenset[Key]) -> list[Key]:
        return candidates(self.order, size, pinned)[:count]

    def lists(self) -> dict[str, List]:
        return {"order": self.order}


class TwinARC(Twin):
    """Figure 4 of the paper, with what ``policies/arc.py`` says is different."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1 = List()
        self.t2 = List()
        self.b1 = List()
        self.b2 = List()
        self.p = 0.0

    def inserted(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        self.batch += 1
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            if key in self.b1:
                self.p = min(self.capacity, self.p + max(nbytes(self.b2) / nbytes(self.b1), 1) * size)
                self.b1.remove(key)
                self.t2.append(key, Entry(size, self.batch))
            elif key in self.b2:
                self.p = max(0, self.p - max(nbytes(self.b1) / nbytes(self.b2), 1) * size)
                self.b2.remove(key)
                self.t2.append(key, Entry(size, self.batch))
            else:
                self.t1.append(key, Entry(size, self.batch))
            self.bound_ghosts()

    def accessed(self, keys: Sequence[Key]) -> None:
        self.batch += 1
        for key in reversed(keys):
            entry = (self.t1 if key in self.t1 else self.t2).remove(key)
            self.t2.append(key, Entry(entry.size, self.batch))

    def removed(self, keys: Sequence[Key], evicted: bool) -> None:
        for key in keys:
            used, ghosts = (self.t1, self.b1) if key in self.t1 else (self.t2, self.b2)
            entry = used.remove(key)
            if evicted:
                ghosts.append(key, entry)
                self.bound_ghosts()

    def bound_ghosts(self) -> None:
        while self.b1 and nbytes(self.t1, self.b1) > self.capacity:
            self.b1.remove_oldest()
        while self.b2 and (
            nbytes(self.b1, self.b2) > self.capacity
            or nbytes(self.t1, self.t2, self.b1, self.b2) > 2 * self.capacity
        ):  # fmt: skip
            self.b2.remove_oldest()

    def victims(self, count: int, size: int, pinned: frozenset[Key]) -> list[Key]:
        t1, t2 = (candidates(entries, size, pinned) for entries in (self.t1, self.t2))
        t1_bytes, chosen = nbytes(self.t1), []
        for _ in range(min(count, len(t1) + len(t2))):
            from_t1 = bool(t1) and (t1_bytes > self.p or not t2)
            chosen.append(t1.pop(0) if from_t1 else t2.pop(0))
            if from_t1:
                t1_bytes -= self.t1[chosen[-1]].size
        return chosen

    def lists(self) -> dict[str, List]:
        return {"T1": self.t1, "T2": self.t2, "B1": self.b1, "B2": self.b2}


class TwinS3FIFO(Twin):
    """Algorithm 1 of the paper, with what ``policies/s3fifo.py`` says is different."""

    def __init__(self, capacity: int, uses_for_main: int = 1) -> None:
        super().__init__(capacity)
        self.small = List()
        self.main = List()
        self.ghosts = List()
        self.aim = int(0.1 * capacity)
        self.uses_for_main = uses_for_main

    def inserted(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        self.batch += 1
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            known = key in self.ghosts
            if known:
                self.ghosts.remove(key)
            (self.main if known else self.small).append(key, Entry(size, self.batch))

    def accessed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            entry = self.small.get(key) or self.main[key]
            entry.uses = min(3, entry.uses + 1)

    def removed(self, keys: Sequence[Key], evicted: bool) -> None:
        for key in keys:
            if key in self.main:
                self.main.remove(key)
                continue
            entry = self.small.remove(key)
            if evicted:
                while self.ghosts and nbytes(self.ghosts) + entry.size > self.capacity - self.aim:
                    self.ghosts.remove_oldest()
                self.ghosts.append(key, entry)

    def victims(self, count: int, size: int, pinned: frozenset[Key]) -> list[Key]:
        self.batch += 1
        small, main = (candidates(entries, size, pinned) for entries in (self.small, self.main))
        small_bytes, chosen = nbytes(self.small), []
        while len(chosen) < count and (small or main):
            if small and (small_bytes >= self.aim or not main):
                key = small.pop(0)
                small_bytes -= self.small[key].size
                if self.small[key].uses < self.uses_for_main:
                    chosen.append(key)
                else:
                    self.main.append(key, Entry(self.small.remove(key).size, self.batch))
                    main.append(key)
            else:
                key = main.pop(0)
                if not self.main[key].uses:
                    chosen.append(key)
                else:
                    entry = self.main.remove(key)
                    self.main.append(key, Entry(entry.size, self.batch, entry.uses - 1))
                    main.append(key)
            sort(main, self.main, size)
        return chosen

    def lists(self) -> dict[str, List]:
        return {"S": self.small, "M": self.main, "G": self.ghosts}


TWIN_OF: dict[type[Policy], type[Twin]] = {LRUPolicy: TwinLRU, ARCPolicy: TwinARC, S3FIFOPolicy: TwinS3FIFO}


# ── the host cache ───────────────────────────────────────────────────────────────────────────────────────────────────


class TwinCache:
    """So many slots of one size, without pins."""

    def __init__(self, num_slots: int, twin: Twin) -> None:
        self.num_slots = num_slots
        self.twin = twin
        self.resident: set[Key] = set()

    def request(self, keys: Sequence[Key]) -> int:
        """Look up the prefix, use it, put in the rest; how many leading chunks were there."""
        hits = next((i for i, key in enumerate(keys) if key not in self.resident), len(keys))
        if hits:
            self.twin.accessed(keys[:hits])
        rest = [key for key in keys[hits:] if key not in self.resident]
        missing = len(self.resident) + len(rest) - self.num_slots
        if missing > 0:
            gone = self.twin.victims(missing, 1, frozenset())
            self.twin.removed(gone, True)
            self.resident.difference_update(gone)
        rest = rest[: self.num_slots - len(self.resident)]
        if rest:
            self.twin.inserted(rest, [1] * len(rest))
        self.resident.update(rest)
        return hits


def request(cache: HostCache, batch: Chunks) -> int:
    """What ``TwinCache.request`` does, with a host cache."""
    hits, _ = cache.lookup_prefix(batch.keys)
    slots = cache.find(batch.keys)
    cache.touch(slots[:hits])
    rest = np.flatnonzero(slots < 0)
    if len(rest):
        put(cache, batch.take(rest))
    return hits


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def walk(ends: Any, older: Any, newer: Any, which: int) -> list[int]:
    """The members of a list, oldest first; the links lead back the same way."""
    members = []
    at = int(ends[which, OLDEST])
    while at >= 0:
        members.append(at)
        assert len(members) <= len(newer), "a ring"
        at = int(newer[at])
    back = []
    at = int(ends[which, NEWEST])
    while at >= 0 and len(back) <= len(members):
        back.append(at)
        at = int(older[at])
    assert back == members[::-1]
    return members


def lists_of(policy: Policy) -> dict[str, list[list[int]]]:
    """The slots that a built-in policy ranks: by name of the list, by size class, oldest first."""
    records, classes = policy.slots.state.records, range(len(policy.slots.class_bytes))
    names = {LRUPolicy: ("order",), ARCPolicy: ("T1", "T2"), S3FIFOPolicy: ("S", "M")}[type(policy)]
    ends: Any = policy._ends  # type: ignore[attr-defined]
    return {
        name: [walk(ends, records["older"], records["newer"], len(names) * c + part) for c in classes]
        for part, name in enumerate(names)
    }


def ghosts_of(policy: Policy) -> dict[str, list[tuple[int, int]]]:
    """The ghosts of a built-in policy as (second word of the key, size): by name of the list, oldest first."""
    names = {LRUPolicy: (), ARCPolicy: ("B1", "B2"), S3FIFOPolicy: ("G",)}[type(policy)]
    if not names:
        return {}
    ghosts: Any = policy._ghosts  # type: ignore[attr-defined]
    records, sizes = ghosts.records, policy.slots.class_bytes
    return {
        name: [
            (int(records["word"][g]), int(sizes[records["kind"][g] >> 2]))
            for g in walk(ghosts.ends, records["older"], records["newer"], which)
        ]
        for which, name in enumerate(names)
    }


def as_keys(keys: Iterable[Any]) -> list[Key]:
    return [(int(word0), int(word1)) for word0, word1 in keys]


class Shadow:
    """Puts a twin beside the policy of a host cache: whatever the policy is told or asked, the twin is, too.

    Each answer of the policy must be the twin's, and ``check`` compares all lists.
    """

    def __init__(self, cache: HostCache) -> None:
        self.policy = cache.policy
        self.view = cache.policy.slots
        self.twin = TWIN_OF[type(cache.policy)](self.view.capacity_bytes)
        self.slot_of: dict[Key, int] = {}
        self.victims_checked = 0
        for name in ("inserted", "accessed", "removed", "victims"):
            setattr(self.policy, name, self._wrap(name, getattr(self.policy, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        ours = getattr(self, f"_{name}")

        def both(*args: Any) -> Any:
            expected = ours(*args)
            got = real(*args)
            if name == "victims":
                assert got.dtype == np.int64 and got.tolist() == expected
                self.victims_checked += len(expected)
            return got

        return both

    def _keys(self, slots: Offsets) -> list[Key]:
        return as_keys(self.view.keys(slots))

    def _inserted(self, slots: Offsets) -> None:
        keys = self._keys(slots)
        self.twin.inserted(keys, self.view.class_bytes[self.view.size_classes(slots)].tolist())
        self.slot_of.update(zip(keys, slots.tolist(), strict=True))

    def _accessed(self, slots: Offsets) -> None:
        self.twin.accessed(self._keys(slots))

    def _removed(self, slots: Offsets, evicted: bool) -> None:
        keys = self._keys(slots)
        self.twin.removed(keys, evicted)
        for key in keys:
            del self.slot_of[key]

    def _victims(self, count: int, size_class: int) -> list[int]:
        slots = np.array(list(self.slot_of.values()), np.int64)
        busy = np.flatnonzero(~self.view.evictable(slots))
        names = list(self.slot_of)
        first = self.view.class_bytes[ANY - size_class if size_class < 0 else size_class]
        size = -int(first) if size_class < 0 else int(first)
        chosen = self.twin.victims(count, size, frozenset(names[i] for i in busy.tolist()))
        return [self.slot_of[key] for key in chosen]

    def check(self) -> None:
        """All lists, their order and their bytes are the twin's."""
        expected = self.twin.lists()
        sizes = self.view.class_bytes.tolist()
        for name, by_class in lists_of(self.policy).items():
            for size, slots in zip(sizes, by_class, strict=True):
                mine = [key for key, entry in expected[name].items() if entry.size == size]
                assert self._keys(np.array(slots, np.int64)) == mine, name
        for name, ghosts in ghosts_of(self.policy).items():
            assert ghosts == [(key[1], entry.size) for key, entry in expected[name].items()], name
        policy: Any = self.policy
        if isinstance(self.twin, TwinARC):
            assert policy._p[0] == self.twin.p
            assert policy._nbytes.tolist() == [nbytes(self.twin.t1), nbytes(self.twin.t2)]
            assert policy._ghosts.nbytes[:2].tolist() == [nbytes(self.twin.b1), nbytes(self.twin.b2)]
            assert nbytes(self.twin.t1, self.twin.b1) <= self.twin.capacity or not self.twin.b1
            assert nbytes(self.twin.b1, self.twin.b2) <= self.twin.capacity
        elif isinstance(self.twin, TwinS3FIFO):
            assert policy._nbytes.tolist() == [nbytes(self.twin.small), nbytes(self.twin.main)]
            assert policy._ghosts.nbytes[0] == nbytes(self.twin.ghosts)


def trace(path: Path) -> list[list[int]]:
    """The requests of a trace: the numbers of each one's chunks."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]
