"""The host cache: what each call promises, by example. ``test_cache_model`` tries everything together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import config as numba_config
from twins import BUILT_IN, SPACE, cache_of, chunks, make_cache, numbers_of, put

from tierkv import keys as key_tools
from tierkv.errors import ConfigError
from tierkv.host.cache import ABSENT, NOT_WRITING, READY, WRITING, HostCache
from tierkv.host.policies.arc import ARCPolicy
from tierkv.host.policies.base import Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.host.slabs import plan_slabs
from tierkv.types import Chunks, Offsets, Space

OTHER_SPACE = Space(bytes(16), bytes(15) + b"\1")


def reserve(cache: HostCache, *numbers: int) -> list[int]:
    return cache.reserve(chunks(*numbers)).slots.tolist()


def test_a_chunk_is_writing_then_ready() -> None:
    cache = cache_of(4)
    batch = chunks(1, 2)
    slots, evicted = cache.reserve(batch)
    assert slots.dtype == np.int64 and sorted(slots) == [0, 1] and evicted.shape == (0, 2)
    assert list(cache.states(batch.keys)) == [WRITING, WRITING]
    assert list(cache.find(chunks(2, 3, 1).keys)) == [slots[1], -1, slots[0]]
    assert (cache.free, cache.writing, cache.ready, cache.dead, cache.pinned) == (2, 2, 0, 0, 2)
    assert cache.commit(slots[:1]).tolist() == [True]
    found, states = cache.locate(chunks(1, 2, 3).keys)
    assert found.tolist() == [*slots, -1] and states.tolist() == [READY, WRITING, ABSENT]
    assert (cache.free, cache.writing, cache.ready, cache.dead, cache.pinned) == (2, 1, 1, 0, 1)
    assert (len(cache), cache.evictable, cache.bytes_ready) == (2, 1, 4096)
    for count in ("2 free", "1 ready", "1 writing", "0 dead", "1 pinned", "0 faults"):
        assert count in repr(cache)


def test_empty_batches_do_nothing() -> None:
    cache = cache_of(2)
    nothing, none, verdicts = chunks(), np.zeros(0, np.int64), np.zeros(0, np.int16)
    assert cache.reserve(nothing).slots.shape == cache.find(nothing.keys).shape == (0,)
    assert cache.states(nothing.keys).shape == cache.commit(none).shape == (0,)
    assert cache.lookup_prefix(nothing.keys) == (0, 0)
    for call in (cache.abort, cache.pin, cache.unpin, cache.touch, cache.forget, cache.offset, cache.checksums):
        call(none)
    assert cache.hold(nothing.keys, none, 0, 0).missing.shape == (0,) and cache.let_go(none) == 0
    assert cache.first_gap(nothing.keys, none, verdicts, 0, 0) == (0, 0, 0)
    assert cache.last_gap(nothing.keys, none, verdicts, 0, 0) == (-1, 0, 0)
    assert cache.room(np.zeros(0, np.int32))
    cache.clear()
    assert cache.free == 2


def test_the_prefix_ends_at_the_first_that_is_absent() -> None:
    cache = cache_of(8)
    put(cache, chunks(1, 2))
    reserve(cache, 3)
    put(cache, chunks(4, 6))
    assert cache.lookup_prefix(chunks(1, 2, 3, 4, 5, 6).keys) == (2, 4)
    assert cache.lookup_prefix(chunks(1, 2).keys) == (2, 2)
    assert cache.lookup_prefix(chunks(5, 1).keys) == (0, 0)


def test_keys_that_may_not_be_written_are_read() -> None:
    cache = cache_of(2)
    put(cache, chunks(1))
    keys = chunks(1, 2).keys.copy()
    keys.flags.writeable = False
    assert cache.lookup_prefix(keys) == (1, 1) and list(cache.find(keys)) == [0, -1]
    assert list(cache.find(np.asfortranarray(keys)[::-1])) == [-1, 0]


def test_reserve_evicts_the_least_recently_used_and_says_which() -> None:
    cache = cache_of(4)
    put(cache, chunks(1, 2))
    put(cache, chunks(3, 4))
    cache.touch(cache.find(chunks(1).keys))
    slots, evicted = cache.reserve(chunks(5, 6))
    cache.commit(slots)
    assert numbers_of(evicted) == [2, 4]  # of (3, 4), the tail goes first
    assert evicted.tolist() == chunks(2, 4).keys.tolist()
    assert list(cache.states(chunks(1, 2, 3, 4, 5, 6).keys)) == [READY, ABSENT, READY, ABSENT, READY, READY]


def test_touching_passes_over_what_is_not_ready() -> None:
    cache = cache_of(3)
    slots = np.concatenate([put(cache, chunks(1)), cache.reserve(chunks(2)).slots, put(cache, chunks(3))])
    dead = slots[2:]
    cache.pin(dead)
    cache.forget(dead)
    cache.touch(slots)
    assert cache.policy.victims(3, 0).tolist() == [slots[0]]


def test_the_head_of_a_batch_is_served_first_when_there_is_no_room() -> None:
    cache = cache_of(3)
    cache.pin(put(cache, chunks(1, 2)))
    slots = reserve(cache, 3, 4, 5)
    assert slots[0] >= 0 and slots[1:] == [-1, -1]
    assert list(cache.states(chunks(3, 4).keys)) == [WRITING, ABSENT]
    assert reserve(cache, 6) == [-1]


def test_what_is_there_already_gets_no_slot() -> None:
    cache = cache_of(4)
    there = put(cache, chunks(1, 2))
    slots, evicted = cache.reserve(chunks(3, 1, 3, 4))
    assert (slots >= 0).tolist() == [True, False, False, True] and not len(evicted)
    assert cache.find(chunks(1, 2).keys).tolist() == there.tolist()
    assert reserve(cache, 3, 4) == [-1, -1]  # being written is there, too
    assert cache.ready == 2 and cache.writing == 2


def test_a_pinned_slot_is_never_evicted() -> None:
    cache = cache_of(2)
    slots = put(cache, chunks(1, 2))
    cache.pin(slots[[0, 0]])
    cache.unpin(slots[[0]])
    again, evicted = cache.reserve(chunks(3, 4))
    assert (again >= 0).tolist() == [True, False]
    assert numbers_of(evicted) == [2]
    cache.unpin(slots[[0]])
    assert reserve(cache, 4) != [-1]


def test_abort_forgets_at_once_and_frees_when_the_waiters_are_gone() -> None:
    cache = cache_of(2)
    slots = cache.reserve(chunks(1)).slots
    cache.pin(slots)
    cache.abort(slots)
    assert list(cache.states(chunks(1).keys)) == [ABSENT]
    assert (cache.free, cache.dead, cache.pinned) == (1, 1, 1)
    second = reserve(cache, 1)  # the name is free again, the slot is not
    assert second[0] != slots[0]
    cache.unpin(slots)
    assert (cache.free, cache.dead, cache.writing) == (1, 0, 1)


def test_a_slot_forgotten_while_it_is_written_is_freed_by_its_writer() -> None:
    cache = cache_of(2)
    slots = cache.reserve(chunks(1, 2)).slots
    cache.forget(slots[:1])
    assert (cache.writing, cache.dead, cache.free) == (1, 1, 0)
    assert reserve(cache, 3) == [-1]
    assert cache.commit(slots).tolist() == [False, True]
    assert (cache.ready, cache.dead, cache.free) == (1, 0, 1)


def test_a_dead_slot_stays_until_its_last_reader_has_gone_even_if_its_writer_is_done() -> None:
    cache = cache_of(1)
    slots = cache.reserve(chunks(1)).slots
    cache.pin(slots)
    cache.forget(slots)
    assert cache.commit(slots).tolist() == [False]
    assert (cache.dead, cache.pinned, cache.free) == (1, 1, 0)
    assert cache.name(int(slots[0])) == chunks(1).name(0)
    cache.unpin(slots)
    assert (cache.dead, cache.pinned, cache.free) == (0, 0, 1)


def test_forget_frees_what_nobody_holds() -> None:
    cache = cache_of(3)
    slots = put(cache, chunks(1, 2, 3))
    cache.pin(slots[1:])
    cache.forget(slots[[0, 0, 1, 2]])
    assert (cache.free, cache.dead, cache.ready) == (1, 2, 0)
    assert cache.name(int(slots[1])) == chunks(2).name(0)  # a reader may still ask
    cache.forget(slots[1:])  # again: nothing
    cache.unpin(slots[1:])
    assert cache.free == 3


def test_clear_forgets_everything() -> None:
    cache = cache_of(3)
    put(cache, chunks(1))
    writing = cache.reserve(chunks(2)).slots
    cache.clear()
    assert len(cache) == 0 and (cache.free, cache.dead) == (2, 1)
    cache.abort(writing)
    assert cache.free == 3


def test_each_slot_carries_its_name_checksum_and_place() -> None:
    cache = make_cache(4 * 4096, [4096] * 4)
    slots = cache.reserve(chunks(1, 2, group=3)).slots
    assert list(cache.checksums(slots)) == [0, 0]
    cache.commit(slots)
    cache.set_checksums(slots, np.array([1, 2**64 - 1], np.uint64))
    assert list(cache.checksums(slots)) == [1, 2**64 - 1]
    assert list(cache.offset(slots)) == [4096 * slot for slot in slots]
    got, expected = cache.chunks(slots[::-1]), chunks(2, 1, group=3)
    assert got.space == SPACE and np.array_equal(got.hashes, expected.hashes)
    assert np.array_equal(got.keys, expected.keys) and np.array_equal(got.groups, expected.groups)
    cache.forget(slots)
    assert list(cache.checksums(cache.reserve(chunks(5)).slots)) == [0]  # not the former chunk's


def test_names_of_several_groups_and_spaces() -> None:
    cache = make_cache(64 * 1024, [512, 512, 3000])
    parts = [chunks(n, group=n % 3) for n in range(6)]
    slots = put(cache, Chunks.concat(parts))
    others = put(cache, chunks(1, group=1, space=OTHER_SPACE))
    mixed = cache.chunks(slots[[5, 1, 3, 2]])
    assert mixed.groups.tolist() == [2, 1, 0, 2]
    for index, number in enumerate((5, 1, 3, 2)):
        assert mixed.name(index) == parts[number].name(0)
    assert cache.name(int(others[0])) == chunks(1, group=1, space=OTHER_SPACE).name(0)
    with pytest.raises(AssertionError):
        cache.chunks(np.concatenate([slots, others]))


def test_what_is_there_since_an_earlier_life_is_ready_at_once() -> None:
    cache = HostCache(plan_slabs(16 * 4096, [4096]), [4096], LRUPolicy)
    cache.add_slabs(np.array([3, 5]), 0)
    assert (cache.free, cache.ready) == (2, 0)
    there = put(cache, chunks(1))
    assert there.tolist() == [5]
    cache.add_slabs(np.array([7, 2, 4]), 0)
    restored = cache.restore(chunks(2, 1, 3, 2), np.array([4, 2, 7, 3]))
    assert restored.tolist() == [True, False, True, False]
    assert cache.find(chunks(1, 2, 3).keys).tolist() == [5, 4, 7]
    assert (cache.free, cache.ready, cache.evictable, cache.pinned) == (2, 3, 3, 0)
    assert cache.name(7) == chunks(3).name(0) and cache.checksums(there).tolist() == [0]
    assert cache.policy.victims(3, 0).tolist() == [5, 7, 4], "newer than what was there, its head newest"
    assert sorted(put(cache, chunks(4, 5)).tolist()) == [2, 3]
    with pytest.raises(AssertionError):
        cache.restore(chunks(9), there)


def test_slabs_that_are_added_are_taken_after_those_that_wait() -> None:
    cache = HostCache(plan_slabs(16 * 4096, [4096]), [4096], LRUPolicy)
    for slabs in ([3, 1], [0], [9, 8]):
        cache.add_slabs(np.array(slabs))
    assert cache.free == 5
    assert [put(cache, chunks(n)).tolist() for n in range(5)] == [[3], [1], [0], [9], [8]]
    assert cache.reserve(chunks(6)).evicted.tolist() == chunks(0).keys.tolist()


def test_numbers_of_spaces_are_given_again_when_their_last_slot_is_free() -> None:
    """A long life with many generations: what stands for a space and a group must not grow without end."""
    cache = cache_of(4)
    kept = put(cache, chunks(1))
    cache.pin(kept)
    cache.forget(kept)  # dead, and still has a name
    for generation in range(1, 200):
        space = Space(bytes(16), generation.to_bytes(16, "big"))
        batch = chunks(1, 2, space=space)
        slots = put(cache, batch)
        assert cache.chunks(slots).space == space and cache.name(int(slots[1])) == batch.name(1)
        cache.clear()
    assert len(cache._owners) <= 64
    assert cache.name(int(kept[0])) == chunks(1).name(0)


@pytest.mark.parametrize("size", [16, 20, 32, 64])
def test_hashes_of_any_length(size: int) -> None:
    cache = cache_of(4)
    batch = key_tools.make_chunks(SPACE, 0, [bytes([n]) * size for n in range(3)])
    slots = put(cache, batch)
    assert np.array_equal(cache.chunks(slots).hashes, batch.hashes)
    with pytest.raises(AssertionError):
        cache.reserve(key_tools.make_chunks(SPACE, 0, [bytes([9]) * (size + 1)]))


def test_memory_comes_in_pieces() -> None:
    plan = plan_slabs(1024 * 512, [512])
    cache = HostCache(plan, [512], LRUPolicy)
    assert cache.free == 0 and not cache.room(np.zeros(1, np.int32)) and reserve(cache, 1) == [-1]
    cache.grow(plan.slab_bytes - 1)
    assert cache.free == 0
    cache.grow(2 * plan.slab_bytes)
    cache.grow(plan.slab_bytes)  # never less than before
    assert cache.free == 2 * plan.slots_per_slab
    slots = put(cache, chunks(*range(cache.free + 1)))
    assert (slots >= 0).sum() == 2 * plan.slots_per_slab and cache.offset(slots[:-1]).max() < 2 * plan.slab_bytes
    cache.grow(plan.region_bytes)
    assert cache.free + cache.ready == plan.num_slots
    cache.grow(10 * plan.region_bytes)
    assert cache.free + cache.ready == plan.num_slots == 1024


def test_holding_is_pinning_that_follows_the_index() -> None:
    cache = cache_of(8)
    batch = chunks(*range(6))
    slots = put(cache, batch.slice(0, 2))
    writing = cache.reserve(batch.slice(3, 4)).slots
    held = np.full(6, -1, np.int64)
    missing, count = cache.hold(batch.keys, held, 0, 5)
    assert missing.tolist() == [2, 4] and count == 1
    assert held.tolist() == [*slots, -1, *writing, -1, -1]
    assert cache.pinned == 3
    assert cache.hold(batch.keys, held, 0, 5).missing.tolist() == [2, 4]  # no second pins
    cache.forget(slots[:1])
    again = put(cache, batch.slice(0, 1))
    assert again[0] != slots[0] and cache.dead == 1
    assert cache.hold(batch.keys, held, 0, 3).missing.tolist() == [2]  # the new slot, and not number 3 any more
    assert held.tolist() == [again[0], slots[1], -1, -1, -1, -1]
    assert cache.dead == 0 and cache.pinned == 3
    cache.commit(writing)
    assert cache.pinned == 2
    assert cache.let_go(held) == 2 and cache.let_go(held) == 0
    assert cache.pinned == 0 and held.tolist() == [-1] * 6


def test_the_gaps_of_what_can_be_counted_on() -> None:
    cache = cache_of(8)
    batch = chunks(*range(6))
    put(cache, batch.slice(0, 1))
    cache.reserve(batch.slice(1, 3))
    #                    READY WRITING  WRITING      elsewhere  absent  absent
    verdicts = np.array([-1, -1, NOT_WRITING, 0, -1, -2], np.int16)

    def first_gap(first: int, last: int) -> int:
        return cache.first_gap(batch.keys, np.full(6, -1, np.int64), verdicts, first, last).chunk

    def last_gap(first: int, last: int) -> int:
        return cache.last_gap(batch.keys, np.full(6, -1, np.int64), verdicts, first, last).chunk

    assert [first_gap(first, 6) for first in range(7)] == [2, 2, 2, 4, 4, 5, 6]
    assert [last_gap(0, last) for last in range(7)] == [-1, -1, -1, 2, 2, 4, 5]
    assert first_gap(0, 2) == 2 and last_gap(3, 4) == 2


@pytest.mark.parametrize("gone", ["dead", "free"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_slot_that_still_has_the_key_is_no_hit(gone: str, backward: bool) -> None:
    """Chunks that lie side by side are found by that; a slot in between whose chunk has left the index is passed by."""
    cache = cache_of(8)
    batch = chunks(*range(5))
    slots = put(cache, batch)
    assert abs(np.diff(slots)).tolist() == [1, 1, 1, 1]
    lost = slots[[1 if backward else 3]]
    if gone == "dead":
        cache.pin(lost)
    cache.forget(lost)
    held, verdicts = np.full(5, -1, np.int64), np.full(5, -1, np.int16)
    look = cache.last_gap if backward else cache.first_gap
    assert look(batch.keys, held, verdicts, 0, 5).chunk == (1 if backward else 3)
    again = put(cache, batch.slice(1, 2) if backward else batch.slice(3, 4))
    found = look(batch.keys, held, verdicts, 0, 5)
    assert found == (-1 if backward else 5, 2, 0) and held[1 if backward else 3] == again[0]


@pytest.mark.parametrize("half", [0, 8])
def test_the_next_slot_may_hold_a_chunk_whose_key_is_half_the_same(half: int) -> None:
    cache = cache_of(8)

    def batch(*tails: bytes) -> Chunks:
        return key_tools.make_chunks(SPACE, 0, [bytes(16) + tail for tail in tails])

    first, second, third = (bytes([number]) * 16 for number in (1, 2, 3))
    like_third = third[:half] + bytes([4]) * 8 + third[half + 8 :]
    slots = put(cache, batch(first, second, third))
    assert abs(np.diff(slots)).tolist() == [1, 1]
    held, verdicts = np.full(3, -1, np.int64), np.full(3, -1, np.int16)
    assert cache.first_gap(batch(first, second, like_third).keys, held, verdicts, 0, 3).chunk == 2


def test_what_is_passed_on_the_way_to_a_gap_is_held() -> None:
    cache = cache_of(8)
    batch = chunks(*range(4))
    slots = put(cache, batch.slice(0, 3))
    held, verdicts = np.full(4, -1, np.int64), np.array([-1, 0, -1, -1], np.int16)
    assert cache.first_gap(batch.keys, held, verdicts, 0, 4) == (3, 2, 1)
    assert held.tolist() == [slots[0], -1, slots[2], -1] and cache.pinned == 2
    assert cache.last_gap(batch.keys, held, verdicts, 0, 3) == (-1, 0, 1)  # no second pins
    cache.forget(slots[[0]])  # dead, and not here anew
    assert cache.first_gap(batch.keys, held, verdicts, 0, 4) == (0, -1, 0)
    assert held.tolist() == [-1, -1, slots[2], -1]
    again = put(cache, batch.slice(0, 1))
    assert cache.first_gap(batch.keys, held, verdicts, 0, 4) == (3, 1, 1)
    assert held.tolist() == [again[0], -1, slots[2], -1]


def test_room_is_what_reserve_could_find() -> None:
    cache = cache_of(4)
    one = np.zeros(1, np.int32)
    slots = put(cache, chunks(1, 2, 3))
    assert cache.room(one.repeat(4)) and not cache.room(one.repeat(5))
    cache.pin(slots[:2])
    assert cache.room(one.repeat(2)) and not cache.room(one.repeat(3))
    cache.forget(slots[:2])
    assert cache.room(one.repeat(2)) and not cache.room(one.repeat(3))
    cache.unpin(slots[:2])
    assert cache.room(one.repeat(4))


def test_misuse_is_an_assertion() -> None:
    cache = cache_of(4)
    slots = put(cache, chunks(1))
    free = np.array([3])
    for wrong in (
        lambda: cache.commit(slots),
        lambda: cache.abort(slots),
        lambda: cache.unpin(slots),
        lambda: cache.commit(free),
        lambda: cache.pin(free),
        lambda: cache.forget(free),
        lambda: cache.name(3),
    ):
        with pytest.raises(AssertionError):
            wrong()
    writing = cache.reserve(chunks(7)).slots
    with pytest.raises(AssertionError):
        cache.unpin(writing)  # the writer's pin is the writer's
    cache.forget(writing)
    with pytest.raises(AssertionError):
        cache.unpin(writing)
    cache.abort(writing)


class Foolish(Policy):
    """Does everything wrong, in the way that ``mischief`` says."""

    mischief: Callable[[int], Any] = staticmethod(lambda count: [])

    def inserted(self, slots: Offsets) -> None:
        raise ValueError("inserted")

    def accessed(self, slots: Offsets) -> None:
        raise KeyError("accessed")

    def removed(self, slots: Offsets, evicted: bool) -> None:
        raise TypeError("removed")

    def victims(self, count: int, size_class: int) -> Offsets:
        victims: Offsets = self.mischief(count)
        return victims


def _raise(count: int) -> Any:
    raise RuntimeError("victims")


def _endless(count: int) -> Any:
    while True:
        yield 77


@pytest.mark.parametrize(
    ("mischief", "faults"),
    [
        (_raise, 2),  # raised, then too few
        (_endless, 4),  # one more than was asked for is read
        (lambda count: [], 1),
        (lambda count: np.empty(0, np.int64), 1),
        (lambda count: None, 2),
        (lambda count: [0, 77, 2], 3),  # pinned, foreign; then too few
        (lambda count: np.array([2, 2]), 2),  # doubled; then too few
        (lambda count: [[], "2", None], 4),
        (lambda count: [-1, 2.0], 3),
        (lambda count: np.array([2, 1, 3]), 1),  # too many
    ],
)
def test_a_bad_policy_is_counted_and_lru_steps_in(mischief: Callable[[int], Any], faults: int) -> None:
    cache = cache_of(4, Foolish)
    policy = cache.policy
    assert isinstance(policy, Foolish)
    slots = put(cache, chunks(1, 2, 3, 4))
    assert slots.tolist() == [0, 1, 2, 3]
    cache.touch(slots[2:3])
    cache.pin(slots[:1])
    before = cache.policy_faults
    assert before == 2  # inserted and accessed raised
    policy.mischief = mischief
    again, evicted = cache.reserve(chunks(5, 6))
    assert (again >= 0).all()
    gone = numbers_of(evicted)
    assert len(set(gone)) == 2 and 1 not in gone
    if 3 not in gone:
        assert gone == [4, 2]  # least recently used
    assert cache.policy_faults == before + faults + 1  # and removed raised


def test_a_victim_of_another_size_is_refused() -> None:
    cache = make_cache(16 * 1024, [512, 1024], Foolish)
    policy = cache.policy
    assert isinstance(policy, Foolish)
    small = put(cache, chunks(1, 2))
    cache.pin(small)  # so that their slab stays
    large = put(cache, chunks(*range(100, 115), group=1))
    cache.unpin(small[1:])
    cache.touch(small)  # so that nothing is owed to the large ones
    assert (large >= 0).all()
    before = cache.policy_faults
    policy.mischief = lambda count: [int(small[1]), int(large[0])]
    _, evicted = cache.reserve(chunks(500, group=1))
    assert evicted.tolist() == chunks(100, group=1).keys.tolist()
    assert cache.policy_faults == before + 2  # the small one is refused, and removed raised


def test_a_policy_of_the_users_must_not_build_on_a_built_in_one() -> None:
    """They would fight for the same links with the order that steps in for a user's policy."""

    class Mine(ARCPolicy):
        pass

    with pytest.raises(ConfigError, match="Mine is derived from ARCPolicy"):
        cache_of(4, Mine)


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_the_built_in_policies_make_no_faults(policy_type: type[Policy]) -> None:
    cache = cache_of(16, policy_type)
    for start in range(0, 300, 3):
        batch = chunks(*[n % 40 for n in range(start, start + 5)])
        slots = cache.find(batch.keys)
        cache.touch(slots[slots >= 0])
        put(cache, batch.take(np.flatnonzero(slots < 0)))
    assert cache.policy_faults == 0 and cache.ready == 16


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_the_index_takes_at_most_100_bytes_a_slot(policy_type: type[Policy]) -> None:
    """With the 32-byte hashes of the engine, and all ghosts that a policy may keep; checksums are not counted."""
    cache = cache_of(50_000, policy_type)
    put(cache, chunks(1))
    assert cache.index_bytes / cache.num_slots <= 100


WARM = """
import numpy as np
from numba.core.dispatcher import Dispatcher
from twins import BUILT_IN, chunks, make_cache
from tierkv.host.slabs import plan_slabs
from tierkv.host import cache, ghosts, lists, slots
from tierkv.host.policies import arc, cursors, lru, s3fifo
from test_policies import run

def compiled():
    modules = (ghosts, lists, slots, arc, cursors, lru, s3fifo)
    kernels = {n: k for m in modules for n, k in vars(m).items() if isinstance(k, Dispatcher)}
    return {(name, str(args)) for name, kernel in kernels.items() for args in kernel.signatures}

for policy in BUILT_IN:
    cache.warm_up(policy)
before = compiled()
assert len(before) > 20
for policy in BUILT_IN:
    for sizes in ((512,), (512, 2048)):
        some = [("use", list(range(n, n + 5))) for n in range(60)]
        more = [(what, [3, 55, 56]) for what in ("pin", "forget", "unpin", "use", "reserve", "finish", "use", "ask")]
        run(make_cache(8192, sizes, policy), len(sizes), some + more)
for policy in BUILT_IN:
    restored = cache.HostCache(plan_slabs(8192, [512]), [512], policy)
    restored.add_slabs(np.array([2, 3]), 0)
    assert restored.restore(chunks(1, 2), np.array([3, 2])).all()
assert compiled() == before, compiled() - before
"""


@pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="nothing is compiled")
def test_once_warmed_up_nothing_is_compiled_any_more() -> None:
    program = f"import sys; sys.path[:0] = {sys.path!r}\n{WARM}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
