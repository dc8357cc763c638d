"""The host cache: what each call promises, by example. ``test_cache_model`` tries everything together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tierkv import keys as key_tools
from tierkv.host.cache import ABSENT, READY, WRITING, HostCache
from tierkv.host.policies.arc import ARCPolicy
from tierkv.host.policies.base import Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.types import Chunks, Space

SPACE = Space(bytes(16), bytes(range(16)))


def chunks(*numbers: int, group: int = 0, space: Space = SPACE) -> Chunks:
    return key_tools.make_chunks(space, group, [number.to_bytes(32, "big") for number in numbers])


def cache_of(num_slots: int, policy_type: type[Policy] = LRUPolicy) -> HostCache:
    return HostCache(num_slots, 4096, policy_type(num_slots))


def put(cache: HostCache, *numbers: int) -> Any:
    slots = cache.reserve(chunks(*numbers))
    cache.commit(slots[slots >= 0])
    return slots


def numbers_of(names: Iterable[Any]) -> list[int]:
    return [int.from_bytes(name.block_hash, "big") for name in names]


def test_a_chunk_is_writing_then_ready() -> None:
    cache = cache_of(4)
    batch = chunks(1, 2)
    slots = cache.reserve(batch)
    assert slots.dtype == np.int64 and sorted(slots) == [0, 1]
    assert list(cache.states(batch.keys)) == [WRITING, WRITING]
    assert list(cache.find(chunks(2, 3, 1).keys)) == [slots[1], -1, slots[0]]
    assert (cache.free, cache.writing, cache.ready, cache.dead, cache.pinned) == (2, 2, 0, 0, 2)
    assert cache.commit(slots[:1]).tolist() == [True]
    assert list(cache.states(chunks(1, 2, 3).keys)) == [READY, WRITING, ABSENT]
    assert (cache.free, cache.writing, cache.ready, cache.dead, cache.pinned) == (2, 1, 1, 0, 1)
    for count in ("2 free", "1 ready", "1 writing", "0 dead", "1 pinned"):
        assert count in repr(cache)


def test_empty_batches_do_nothing() -> None:
    cache = cache_of(2)
    nothing = chunks()
    assert cache.reserve(nothing).shape == cache.find(nothing.keys).shape == cache.states(nothing.keys).shape == (0,)
    assert cache.lookup_prefix(nothing.keys) == (0, 0)
    none = np.zeros(0, np.int64)
    assert cache.commit(none).shape == (0,)
    for call in (cache.abort, cache.pin, cache.unpin, cache.forget, cache.offset, cache.checksums):
        call(none)
    cache.touch(nothing.keys)
    cache.clear()
    assert cache.free == 2 and cache.take_evicted() == []


def test_the_prefix_ends_at_the_first_that_is_absent() -> None:
    cache = cache_of(8)
    put(cache, 1, 2)
    cache.reserve(chunks(3))
    put(cache, 4, 6)
    assert cache.lookup_prefix(chunks(1, 2, 3, 4, 5, 6).keys) == (2, 4)
    assert cache.lookup_prefix(chunks(1, 2).keys) == (2, 2)
    assert cache.lookup_prefix(chunks(5, 1).keys) == (0, 0)


def test_reserve_evicts_the_least_recently_used_and_says_which() -> None:
    cache = cache_of(4)
    put(cache, 1, 2)
    put(cache, 3, 4)
    cache.touch(chunks(1).keys)
    put(cache, 5, 6)
    evicted = cache.take_evicted()
    assert numbers_of(evicted) == [2, 4]  # of (3, 4), the tail goes first
    assert evicted[0] == chunks(2).name(0)
    assert cache.take_evicted() == []
    assert list(cache.states(chunks(1, 2, 3, 4, 5, 6).keys)) == [READY, ABSENT, READY, ABSENT, READY, READY]


def test_the_head_of_a_batch_is_served_first_when_there_is_no_room() -> None:
    cache = cache_of(3)
    cache.pin(put(cache, 1, 2))
    slots = cache.reserve(chunks(3, 4, 5))
    assert slots[0] >= 0 and list(slots[1:]) == [-1, -1]
    assert list(cache.states(chunks(3, 4).keys)) == [WRITING, ABSENT]
    assert list(cache.reserve(chunks(6))) == [-1]


def test_a_pinned_slot_is_never_evicted() -> None:
    cache = cache_of(2)
    slots = put(cache, 1, 2)
    cache.pin(slots[[0, 0]])
    cache.unpin(slots[[0]])
    assert list(cache.reserve(chunks(3, 4)) >= 0) == [True, False]
    assert numbers_of(cache.take_evicted()) == [2]
    cache.unpin(slots[[0]])
    assert list(cache.reserve(chunks(4)) >= 0) == [True]


def test_abort_forgets_at_once_and_frees_when_the_waiters_are_gone() -> None:
    cache = cache_of(2)
    slots = cache.reserve(chunks(1))
    cache.pin(slots)
    cache.abort(slots)
    assert list(cache.states(chunks(1).keys)) == [ABSENT]
    assert (cache.free, cache.dead, cache.pinned) == (1, 1, 1)
    second = cache.reserve(chunks(1))  # the name is free again, the slot is not
    assert second[0] != slots[0]
    cache.unpin(slots)
    assert (cache.free, cache.dead, cache.writing) == (1, 0, 1)


def test_a_slot_forgotten_while_it_is_written_is_freed_by_its_writer() -> None:
    cache = cache_of(2)
    slots = cache.reserve(chunks(1, 2))
    cache.forget(slots[:1])
    assert (cache.writing, cache.dead, cache.free) == (1, 1, 0)
    assert list(cache.reserve(chunks(3))) == [-1]
    assert cache.commit(slots).tolist() == [False, True]
    assert (cache.ready, cache.dead, cache.free) == (1, 0, 1)


def test_forget_frees_what_nobody_holds() -> None:
    cache = cache_of(3)
    slots = put(cache, 1, 2, 3)
    cache.pin(slots[1:])
    cache.forget(slots)
    assert (cache.free, cache.dead, cache.ready) == (1, 2, 0)
    assert cache.name(int(slots[1])) == chunks(2).name(0)  # a reader may still ask
    cache.forget(slots[1:])  # again: nothing
    cache.unpin(slots[1:])
    assert cache.free == 3
    assert cache.take_evicted() == []  # forgotten is not evicted


def test_clear_forgets_everything() -> None:
    cache = cache_of(3)
    put(cache, 1)
    writing = cache.reserve(chunks(2))
    cache.clear()
    assert len(cache) == 0 and (cache.free, cache.dead) == (2, 1)
    cache.abort(writing)
    assert cache.free == 3


def test_each_slot_carries_its_name_checksum_length_and_place() -> None:
    cache = cache_of(4)
    slots = cache.reserve(chunks(1, 2, group=3))
    assert list(cache.checksums(slots)) == [0, 0]
    cache.commit(slots, np.array([100, 200], np.int64))
    cache.set_checksums(slots, np.array([1, 2**64 - 1], np.uint64))
    assert list(cache.checksums(slots)) == [1, 2**64 - 1]
    assert list(cache.lengths(slots)) == [100, 200]
    assert list(cache.offset(slots)) == [4096 * slot for slot in slots]
    got, expected = cache.chunks(slots[::-1]), chunks(2, 1, group=3)
    assert got.space == SPACE and np.array_equal(got.hashes, expected.hashes)
    assert np.array_equal(got.keys, expected.keys) and np.array_equal(got.groups, expected.groups)
    cache.forget(slots)
    assert list(cache.checksums(cache.reserve(chunks(5)))) == [0]  # not the former chunk's


def test_misuse_is_an_assertion() -> None:
    cache = cache_of(4)
    slots = put(cache, 1)
    free = np.array([3])
    for wrong in (
        lambda: cache.reserve(chunks(1)),
        lambda: cache.reserve(chunks(2, 2)),
        lambda: cache.commit(slots),
        lambda: cache.abort(slots),
        lambda: cache.pin(free),
        lambda: cache.forget(free),
        lambda: cache.name(3),
    ):
        with pytest.raises(AssertionError):
            wrong()
    writing = cache.reserve(chunks(7))
    with pytest.raises(AssertionError):
        cache.unpin(writing)  # the writer's pin is the writer's


class Foolish(Policy):
    """Does everything wrong, in the way that ``mischief`` says."""

    mischief: Callable[[int], Any] = staticmethod(lambda count: [])

    def inserted(self, keys: Sequence[bytes]) -> None:
        raise ValueError("inserted")

    def accessed(self, keys: Sequence[bytes]) -> None:
        raise KeyError("accessed")

    def removed(self, keys: Sequence[bytes], evicted: bool) -> None:
        raise TypeError("removed")

    def victims(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        victims: list[bytes] = self.mischief(count)
        return victims


def _raise(count: int) -> Any:
    raise RuntimeError("victims")


def _endless(count: int) -> Any:
    while True:
        yield b"?" * 16


def _raw(number: int) -> bytes:
    return chunks(number).keys.tobytes()


@pytest.mark.parametrize(
    ("mischief", "faults"),
    [
        (_raise, 2),  # raised, then too few
        (_endless, 4),  # one more than was asked for is read
        (lambda count: [], 1),
        (lambda count: None, 2),
        (lambda count: [_raw(1), b"foreign", _raw(3)], 3),  # pinned, foreign; then too few
        (lambda count: [_raw(3), _raw(3)], 2),  # doubled; then too few
        (lambda count: [[], 7, None], 4),
        (lambda count: [_raw(3), _raw(2), _raw(4)], 1),  # too many
    ],
)
def test_a_bad_policy_is_counted_and_lru_steps_in(mischief: Callable[[int], Any], faults: int) -> None:
    policy = Foolish(4)
    cache = HostCache(4, 4096, policy)
    slots = put(cache, 1, 2, 3, 4)
    cache.touch(chunks(3).keys)
    cache.pin(slots[:1])
    before = cache.policy_faults
    assert before == 2  # inserted and accessed raised
    policy.mischief = mischief
    assert (cache.reserve(chunks(5, 6)) >= 0).all()
    gone = numbers_of(cache.take_evicted())
    assert len(set(gone)) == 2 and 1 not in gone
    if 3 not in gone:
        assert gone == [4, 2]  # least recently used
    assert cache.policy_faults == before + faults + 1  # and removed raised


@pytest.mark.parametrize("policy_type", [LRUPolicy, ARCPolicy])
def test_the_built_in_policies_make_no_faults(policy_type: type[Policy]) -> None:
    cache = cache_of(16, policy_type)
    for start in range(0, 300, 3):
        batch = [n % 40 for n in range(start, start + 5)]
        present = cache.states(chunks(*batch).keys) != ABSENT
        cache.touch(chunks(*batch).keys)
        put(cache, *[n for n, there in zip(batch, present, strict=True) if not there])
    assert cache.policy_faults == 0 and cache.ready == 16
