"""How the region is cut up for several sizes of chunks, and how it is shared between them when the mix shifts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import BUILT_IN, chunks, make_cache, put

from tierkv.host.cache import HostCache
from tierkv.host.policies.base import Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.host.policies.s3fifo import S3FIFOPolicy
from tierkv.host.slabs import SLOT_ALIGNMENT, SlabPlan, plan_slabs, region_size, slot_bytes, smallest_region
from tierkv.host.slots import READY, make_division, slab_of
from tierkv.types import Chunks, Offsets

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

chunk_sizes = st.lists(st.integers(1, 20 * MIB) | st.sampled_from(range(4096, 400 * KIB, 4096)), min_size=1, max_size=5)


def places(plan: SlabPlan, size_class: int, slab: int) -> list[tuple[int, int]]:
    """(start, end) of each slot of a slab of that class."""
    slots = slab * plan.slots_per_slab + np.arange(plan.slots_in(slab, size_class), dtype=np.int64)
    starts = plan.offsets(slots, np.full(len(slots), size_class, np.int64))
    return [(start, start + plan.class_bytes[size_class]) for start in starts.tolist()]


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=500, deadline=None)
@given(divisor=st.integers(1, 2**31 - 1), near=st.integers(0, 2**31 - 1), off=st.sampled_from([-1, 0, 1]))
def test_slabs_are_found_by_multiplication(divisor: int, near: int, off: int) -> None:
    division = make_division(divisor)
    for slot in (near, near // divisor * divisor + off, 2**31 - 1):
        if 0 <= slot < 2**31:
            assert slab_of(division, np.int64(slot)) == slot // divisor


@settings(max_examples=200, deadline=None)
@given(sizes=chunk_sizes, times=st.floats(1, 300))
def test_slots_of_any_plan_lie_apart_in_their_slab(sizes: list[int], times: float) -> None:
    memory = int(smallest_region(sizes) * times)
    plan = plan_slabs(memory, sizes)
    assert plan.region_bytes <= memory and region_size(plan) < plan.region_bytes + 4096 * 16
    assert plan.class_bytes == tuple(sorted({slot_bytes(size) for size in sizes}))
    assert plan.num_slabs >= len(plan.class_bytes), "each class can have one"
    for slab in {0, plan.num_slabs // 2, plan.num_slabs - 1}:
        end_of_slab = min((slab + 1) * plan.slab_bytes, plan.region_bytes)
        for size_class in range(len(plan.class_bytes)):
            slots = places(plan, size_class, slab)
            assert slots, "each slab can be of each class"
            assert slots[0][0] >= slab * plan.slab_bytes and slots[-1][1] <= end_of_slab
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(slots))
            assert all(start % SLOT_ALIGNMENT == 0 for start, _ in slots)
            assert len(slots) <= plan.slots_per_slab
            assert slab * plan.slots_per_slab + len(slots) <= plan.num_slots


@settings(max_examples=300, deadline=None)
@given(sizes=chunk_sizes, times=st.floats(128, 5000))
def test_little_is_wasted_whatever_the_mix(sizes: list[int], times: float) -> None:
    """What no slot can have: what is left of the region, and at the end of slabs, if all were of the worst class."""
    memory = int(max(map(slot_bytes, sizes)) * times)
    plan = plan_slabs(memory, sizes)
    for size_class, size in enumerate(plan.class_bytes):
        slots = sum(
            plan.slots_in(slab, size_class) * times
            for slab, times in ((0, plan.num_slabs - 1), (plan.num_slabs - 1, 1))
        )
        assert slots * size >= 0.9 * memory, plan
    if len(plan.class_bytes) > 1 and times > 500:
        assert plan.num_slabs >= 32, "slabs are small against the region"


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 20 * MIB), groups=st.integers(1, 60), times=st.integers(1, 3000))
def test_groups_of_one_size_share_a_class(size: int, groups: int, times: int) -> None:
    memory = slot_bytes(size) * times
    plan = plan_slabs(memory, [size] * groups)
    assert plan == plan_slabs(memory, [size])
    assert plan.class_bytes == (slot_bytes(size),) and plan.num_slots == times and plan.region_bytes == memory


def test_slabs_are_not_too_large_to_be_ready_soon() -> None:
    for sizes in ([2 * MIB], [2 * MIB, 3 * MIB + 4096], [100 * KIB, 7 * MIB]):
        assert plan_slabs(200 * GIB, sizes).slab_bytes <= 64 * MIB


def test_groups_of_one_size_use_what_the_others_leave() -> None:
    cache = make_cache(64 * 512, [512] * 5)
    for group in range(5):
        assert (put(cache, chunks(*range(64), group=group)) >= 0).all()
    assert cache.ready == 64 and cache.policy_faults == 0


# ── shifting mixes ───────────────────────────────────────────────────────────────────────────────────────────────────

RATIOS = [(1.0, 3.7), (1.0, 10.0), (1.0, 3.7, 10.0)]


class Mix:
    """A host cache that is filled with chunks of one group or another."""

    def __init__(self, ratios: tuple[float, ...], policy_type: type[Policy], slabs: int = 40) -> None:
        self.sizes = tuple(int(ratio * 8 * KIB) for ratio in ratios)
        self.cache = make_cache(slabs * 2 * slot_bytes(max(self.sizes)), self.sizes, policy_type)
        self.rng = random.Random(1)
        self.next = 0
        self.held = np.zeros(0, np.int64)

    def insert(self, shares: dict[int, float], volume: float, touch: bool = False) -> None:
        """Put in new chunks of about ``volume`` times the region's bytes; ``shares``: of the bytes, by group."""
        left = volume * self.cache.plan.region_bytes
        while left > 0:
            batch = []
            for group, share in shares.items():
                # So many that the bytes of all batches together have these shares.
                count = share * 4 * max(self.sizes) / self.sizes[group]
                whole = int(count) + (self.rng.random() < count % 1)
                batch += [chunks(n, group=group) for n in range(self.next, self.next + whole)]
                self.next += whole
                left -= whole * self.sizes[group]
            if batch:
                slots = put(self.cache, Chunks.concat(batch))
                if touch:
                    self.cache.touch(slots[slots >= 0])

    def pin_some(self, share: float) -> None:
        """Pin that share of the ready slots."""
        records = self.cache._state.records
        ready = np.flatnonzero(self.cache._view.evictable(np.arange(len(records))))
        self.held = np.array(self.rng.sample(ready.tolist(), int(share * len(ready))), np.int64)
        self.cache.pin(self.held)

    def unpin(self) -> None:
        self.cache.unpin(self.held)

    def full(self) -> float:
        return self.cache.bytes_ready / self.cache.plan.region_bytes

    def share(self, group: int) -> float:
        """Of the bytes that are ready."""
        return ready_bytes(self.cache, group) / self.cache.bytes_ready


def ready_bytes(cache: HostCache, group: int) -> int:
    size_class = int(cache._class_of_group[group])
    return int(cache._state.counts[size_class, 2] * cache.plan.class_bytes[size_class])


class Silent(Policy):
    """Never names a victim: least-recently-used order decides."""

    def inserted(self, slots: Offsets) -> None:
        pass

    def accessed(self, slots: Offsets) -> None:
        pass

    def removed(self, slots: Offsets, evicted: bool) -> None:
        pass

    def victims(self, count: int, size_class: int) -> Offsets:
        return np.empty(0, np.int64)


POLICIES = [*BUILT_IN, Silent]


@pytest.mark.parametrize("policy_type", POLICIES)
@pytest.mark.parametrize("ratios", RATIOS)
def test_when_the_mix_shifts_so_does_the_memory(ratios: tuple[float, ...], policy_type: type[Policy]) -> None:
    mix = Mix(ratios, policy_type)
    for group in (*range(len(ratios)), 0, len(ratios) - 1):
        mix.insert({group: 1.0}, 2)
        assert mix.full() >= 0.9 and mix.share(group) >= 0.9, (group, mix.full(), mix.share(group))


@pytest.mark.parametrize("policy_type", POLICIES)
@pytest.mark.parametrize("ratios", RATIOS)
@pytest.mark.parametrize("pinned", [0.01, 0.3])
def test_pins_are_in_the_way_only_as_long_as_they_are_held(
    ratios: tuple[float, ...], policy_type: type[Policy], pinned: float
) -> None:
    mix = Mix(ratios, policy_type)
    former = 0
    mix.insert({former: 1.0}, 1.5)
    for group in (len(ratios) - 1, 0):
        mix.pin_some(pinned)
        held = mix.held
        names = [mix.cache.name(slot) for slot in held.tolist()]
        mix.insert({group: 1.0}, 2)
        assert mix.full() >= 0.9 and mix.cache.pinned == len(held)
        assert [mix.cache.name(slot) for slot in held.tolist()] == names
        assert pinned > 0.1 or mix.share(group) >= 0.2, "slabs without pins move"
        mix.unpin()
        mix.insert({group: 1.0}, 2)
        assert mix.full() >= 0.9 and mix.share(group) >= 0.9, (group, mix.full(), mix.share(group))
        former = group


@pytest.mark.parametrize("policy_type", POLICIES)
@pytest.mark.parametrize("ratios", RATIOS)
def test_a_mix_has_the_memory_in_its_own_shares(ratios: tuple[float, ...], policy_type: type[Policy]) -> None:
    mix = Mix(ratios, policy_type)
    last = len(ratios) - 1
    for shares in ({0: 0.5, last: 0.5}, {0: 0.2, last: 0.8}, {0: 0.9, last: 0.1}):
        mix.insert(shares, 3)
        assert mix.full() >= 0.9
        for group, share in shares.items():
            assert abs(mix.share(group) - share) <= 0.15, (shares, mix.share(group))


@pytest.mark.parametrize("ratios", RATIOS)
@pytest.mark.parametrize("forgotten", [1.0, 0.5])
def test_what_was_forgotten_is_room_for_others(ratios: tuple[float, ...], forgotten: float) -> None:
    """Also if each slab has something left."""
    mix = Mix(ratios, LRUPolicy)
    mix.insert({0: 1.0}, 1.5)
    mix.pin_some(forgotten)
    mix.unpin()
    mix.cache.forget(mix.held)
    assert mix.full() <= 1 - 0.9 * forgotten
    mix.insert({1: 1.0}, 1 if forgotten == 1 else 1.5)
    assert mix.full() >= 0.9 and mix.share(1) >= 0.9


@pytest.mark.parametrize("policy_type", POLICIES)
def test_what_is_used_stays_and_what_is_cold_goes(policy_type: type[Policy]) -> None:
    """The memory goes to the sizes that are used, not to those that come most."""
    mix = Mix((1.0, 3.7), policy_type)
    mix.insert({0: 1.0}, 0.5)
    hot = np.flatnonzero(mix.cache._view.evictable(np.arange(mix.cache.num_slots)))[: mix.cache.plan.slots_per_slab * 3]
    keys = mix.cache._view.keys(hot)
    for _ in range(40):
        found = mix.cache.find(keys)
        mix.cache.touch(found[found >= 0])
        mix.insert({1: 1.0}, 0.1)
    assert mix.full() >= 0.9 and mix.share(1) >= 0.7
    assert (mix.cache.find(keys) >= 0).mean() >= (0.9 if policy_type is not S3FIFOPolicy else 0.8)


def test_a_batch_that_is_larger_than_everything_ends() -> None:
    for policy_type in POLICIES:
        mix = Mix((1.0, 3.7, 10.0), policy_type)
        for group in (0, 2, 1, 0):
            slots = put(mix.cache, chunks(*range(1000, 3000), group=group))
            held = int((slots >= 0).sum())
            assert held and (slots[:held] >= 0).all() and mix.share(group) >= 0.9
        batch = Chunks.concat([chunks(*range(5000, 6000), group=group) for group in range(3)])
        put(mix.cache, batch)
        assert mix.full() >= 0.9


def test_a_class_that_has_nothing_gets_something_even_if_all_slabs_hold_pins() -> None:
    """As soon as one of them is free of pins, without anybody's asking twice."""
    mix = Mix((1.0, 10.0), LRUPolicy)
    mix.insert({0: 1.0}, 1.5)
    cache, per_slab = mix.cache, mix.cache.plan.slots_per_slab
    first_of_each = np.arange(cache.plan.num_slabs, dtype=np.int64) * per_slab
    cache.pin(first_of_each)
    one = chunks(1_000_000, group=1)
    assert not cache.room(one.groups) and cache.reserve(one).slots[0] == -1
    assert cache.bytes_ready >= 0.9 * cache.plan.region_bytes, "one slab is emptied for it, not more"
    cache.reserve(one)
    assert cache.bytes_ready >= 0.9 * cache.plan.region_bytes
    cache.unpin(first_of_each)
    assert cache.room(one.groups) and put(cache, one)[0] >= 0


def test_a_slab_that_was_emptied_for_a_class_is_not_taken_by_another() -> None:
    mix = Mix((1.0, 10.0), LRUPolicy)
    mix.insert({0: 1.0}, 1.5)
    cache = mix.cache
    first_of_each = np.arange(cache.plan.num_slabs, dtype=np.int64) * cache.plan.slots_per_slab
    cache.pin(first_of_each)
    one = chunks(1_000_000, group=1)
    assert cache.reserve(one).slots[0] == -1
    cache.unpin(first_of_each)
    put(cache, chunks(*range(2_000_000, 2_000_005)))  # these come first
    cache.pin(first_of_each[cache._state.records["state"][first_of_each] == READY])
    assert put(cache, one)[0] >= 0


def test_what_can_be_evicted_in_a_slab_that_is_given_up_is_no_room_in_its_class() -> None:
    mix = Mix((1.0, 10.0), LRUPolicy)
    mix.insert({0: 1.0}, 1.5)
    cache, per_slab = mix.cache, mix.cache.plan.slots_per_slab
    two_of_each = np.arange(cache.num_slots, dtype=np.int64)
    two_of_each = two_of_each[two_of_each % per_slab < 2]
    cache.pin(two_of_each)
    assert cache.reserve(chunks(1_000_000, group=1)).slots[0] == -1
    given_up = int(np.flatnonzero(cache._state.slabs[3])[0])
    cache.unpin(np.array([given_up * per_slab]))
    count = (cache.plan.num_slabs - 1) * (per_slab - 2)
    assert cache.evictable == count + 1
    batch = chunks(*range(2_000_000, 2_000_001 + count))
    assert not cache.room(batch.groups) and cache.room(batch.groups[1:])
    assert (cache.reserve(batch).slots >= 0).tolist() == [True] * count + [False]


def test_the_last_slab_which_may_be_smaller_is_not_counted_on() -> None:
    """Of the slabs that a class can spare, a whole one goes if one is needed."""
    plan = SlabPlan(region_bytes=3 * 10240 + 5120, slab_bytes=10240, class_bytes=(512, 2560))
    cache = HostCache(plan, plan.class_bytes, LRUPolicy)
    cache.grow(plan.region_bytes)
    assert (put(cache, chunks(*range(70))) >= 0).all()
    batch = Chunks.concat([chunks(*range(100, 150)), chunks(*range(4), group=1)])
    assert cache.room(batch.groups)
    assert (cache.reserve(batch).slots >= 0).all()
