"""LRU, ARC and S3-FIFO, decision by decision, against the slow twins."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config as numba_config
from twins import BUILT_IN, Shadow, cache_of, chunks, ghosts_of, lists_of, make_cache, numbers_of, put

from tierkv import keys as key_tools
from tierkv import registry
from tierkv.host.cache import HostCache
from tierkv.host.ghosts import add_ghost, find_ghost, make_ghosts, oldest_ghost, remove_ghost
from tierkv.host.policies.arc import ARCPolicy
from tierkv.host.policies.base import ANY, Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.host.policies.s3fifo import S3FIFOPolicy
from tierkv.types import Chunks

NUM_NAMES = 14
EXAMPLES, LONG = (25, 150) if numba_config.DISABLE_JIT else (100, 1000)

batches = st.lists(st.integers(0, NUM_NAMES - 1), max_size=5, unique=True)
steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "use", "reserve", "finish", "forget", "pin", "unpin", "ask"]), batches
    ),
    max_size=60,
)  # fmt: skip
#: Chunk sizes of the groups, and bytes of memory.
ONE_SIZE = st.tuples(st.just((512,)), st.integers(1, 8).map(lambda slots: 512 * slots))
MANY_SIZES = st.tuples(
    st.sampled_from([(512, 1024), (2560, 512, 1024), (700, 5000), (1536, 1536, 512)]),
    st.integers(16, 60).map(lambda kib: 1024 * kib),
)


def batch_of(groups: int, numbers: list[int]) -> Chunks:
    """A batch in which chunk ``n`` is one of group ``n % groups``."""
    parts = [chunks(n, group=n % groups) for n in numbers]
    return Chunks.concat(parts) if parts else chunks()


def run(cache: HostCache, groups: int, steps: list[tuple[str, list[int]]]) -> int:
    """Use a host cache beside a ``Shadow``, which compares each decision; how many victims there were."""
    shadow = Shadow(cache)
    writing: list[int] = []
    pinned: list[int] = []
    for what, numbers in steps:
        slots = cache.find(batch_of(groups, numbers).keys)
        here = slots[slots >= 0]
        if what in ("use", "reserve"):
            cache.touch(here)
            new = cache.reserve(batch_of(groups, [n for n, slot in zip(numbers, slots, strict=True) if slot < 0])).slots
            new = new[new >= 0]
            if what == "use":
                cache.commit(new)
            else:
                writing += new.tolist()
        elif what == "finish" and writing:
            cache.commit(np.array(writing[:2]))
            del writing[:2]
        elif what == "forget":
            cache.forget(here)
        elif what == "pin":
            cache.pin(here)
            pinned += here.tolist()
        elif what == "unpin":
            cache.unpin(np.array(pinned[: len(numbers)], np.int64))
            del pinned[: len(numbers)]
        elif what == "ask":
            for size_class in [ANY, *range(len(cache.plan.class_bytes))]:
                cache.policy.victims(len(numbers) ** 3, size_class)
        shadow.check()
    assert cache.policy_faults == 0
    return shadow.victims_checked


@pytest.mark.parametrize("policy_type", BUILT_IN)
@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=ONE_SIZE, steps=steps)
def test_every_decision_is_that_of_the_slow_twin(
    policy_type: type[Policy], shape: tuple[tuple[int, ...], int], steps: list[tuple[str, list[int]]]
) -> None:
    run(make_cache(shape[1], shape[0], policy_type), 1, steps)


@pytest.mark.parametrize("policy_type", BUILT_IN)
@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=MANY_SIZES, steps=steps)
def test_with_several_sizes_too(
    policy_type: type[Policy], shape: tuple[tuple[int, ...], int], steps: list[tuple[str, list[int]]]
) -> None:
    """Also when slabs move: whatever is evicted of a slab leaves a ghost or none, as in the twin."""
    run(make_cache(shape[1], shape[0], policy_type), len(shape[0]), steps)


@pytest.mark.parametrize("sizes", [(512,), (2560, 512, 1024), (700, 5000)])
@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_a_long_random_use(policy_type: type[Policy], sizes: tuple[int, ...]) -> None:
    rng = random.Random(len(sizes))
    what = ["use"] * 20 + ["reserve", "finish", "finish", "forget", "pin", "unpin", "unpin", "ask"]
    steps = []
    for _ in range(LONG):
        start = rng.randrange(120) if rng.random() < 0.5 else int(rng.expovariate(0.1)) % 120
        steps.append((rng.choice(what), list(range(start, start + rng.randint(1, 6)))))
    cache = make_cache(40 * max(sizes) if len(sizes) == 1 else 16 * max(sizes), sizes, policy_type)
    assert run(cache, len(sizes), steps) > LONG


def fill(policy_type: type[Policy], num_slots: int) -> tuple[HostCache, np.ndarray]:
    cache = cache_of(num_slots, policy_type)
    return cache, put(cache, chunks(*range(num_slots)))


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_the_head_of_a_batch_outlives_its_tail(policy_type: type[Policy]) -> None:
    cache, slots = fill(policy_type, 4)
    assert cache.policy.victims(4, ANY).tolist() == slots[::-1].tolist()
    cache.touch(slots)
    assert cache.policy.victims(4, 0).tolist() == slots[::-1].tolist()


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_asking_for_victims_again_gives_the_same(policy_type: type[Policy]) -> None:
    cache, slots = fill(policy_type, 8)
    cache.touch(slots[2:4])
    cache.pin(slots[6:7])
    first = cache.policy.victims(5, 0).tolist()
    assert len(set(first)) == 5 and slots[6] not in first
    assert cache.policy.victims(5, 0).tolist() == first
    assert cache.policy.victims(0, 0).tolist() == []
    assert sorted(cache.policy.victims(100, 0)) == sorted(set(slots.tolist()) - {int(slots[6])})


def test_what_is_used_again_outlives_a_scan_but_not_with_lru() -> None:
    kept = {}
    for policy_type in BUILT_IN:
        cache = cache_of(40, policy_type)
        hot = chunks(*range(20))
        cache.touch(put(cache, hot))
        for number in range(100, 500):  # a long scan, each chunk once
            put(cache, chunks(number))
        kept[policy_type] = int((cache.find(hot.keys) >= 0).sum())
    assert kept == {LRUPolicy: 0, ARCPolicy: 20, S3FIFOPolicy: 20}


def test_s3fifo_keeps_the_small_queue_at_its_share_of_the_bytes() -> None:
    cache = cache_of(50, S3FIFOPolicy)
    for number in range(50):
        cache.touch(put(cache, chunks(number)))
    for number in range(100, 200):
        put(cache, chunks(number))
    policy: Any = cache.policy
    assert policy._nbytes.tolist() == [5 * 4096, 45 * 4096]


def test_a_chunk_that_comes_back_while_its_ghost_is_there_is_known() -> None:
    for policy_type, part in ((ARCPolicy, "T2"), (S3FIFOPolicy, "M")):
        cache, _ = fill(policy_type, 4)
        gone = numbers_of(cache.reserve(chunks(10)).evicted)
        assert gone == [3]
        back = put(cache, chunks(3))
        assert lists_of(cache.policy)[part] == [back.tolist()]


def test_what_is_forgotten_leaves_no_ghost() -> None:
    for policy_type in (ARCPolicy, S3FIFOPolicy):
        cache, slots = fill(policy_type, 4)
        cache.forget(slots)
        assert not any(ghosts_of(cache.policy).values())


def test_arc_remembers_the_newest_ghosts_when_it_has_all_it_may_have() -> None:
    """With T2 full and as many ghosts as chunks, each new eviction takes the place of the oldest ghost."""
    cache = cache_of(4, ARCPolicy)
    for start in range(0, 40, 4):
        batch = chunks(*range(start, start + 4))
        cache.touch(put(cache, batch))
    ghosts = ghosts_of(cache.policy)
    kept = {number for part in ghosts.values() for number in numbers_of_words([word for word, _ in part])}
    assert kept == {32, 33, 34, 35}


def numbers_of_words(words: list[int]) -> list[int]:
    return numbers_of(np.array([[0, word] for word in words], np.uint64).reshape(-1, 2))


def test_arc_aims_at_no_more_than_everything_for_t1_and_no_less_than_nothing() -> None:
    cache = cache_of(8, ARCPolicy)
    shadow = Shadow(cache)
    policy: Any = cache.policy

    def evict(*numbers: int) -> None:
        cache._evict(cache.find(chunks(*numbers).keys))

    cache.touch(put(cache, chunks(*range(8))))
    evict(0, 1, 2, 3, 4)  # of T2
    for number in (10, 11):  # T1 was too small by far, twice
        put(cache, chunks(number))
        evict(number)
        put(cache, chunks(number))
        shadow.check()
    assert policy._p[0] == policy.slots.capacity_bytes
    evict(10, 11)
    put(cache, chunks(20, 21, 22, 23))
    evict(20, 21, 22, 23)
    left = numbers_of_words([word for word, _ in ghosts_of(policy)["B2"]])
    assert len(left) == 4
    for number in left:  # T2 was
        put(cache, chunks(number))
        shadow.check()
    assert policy._p[0] == 0


def test_ages_are_right_across_the_wrap_of_the_stamps() -> None:
    cache = make_cache(64 * 1024, (512, 1024), LRUPolicy)
    policy: Any = cache.policy
    policy._now = 2**32 - 3
    order = []
    for number in range(6):
        order += put(cache, chunks(number, group=number % 2)).tolist()
    assert policy._now > 2**32
    assert policy.victims(6, ANY).tolist() == order


def test_two_keys_that_ghosts_cannot_tell_apart() -> None:
    sizes = np.array([512], np.int64)
    ghosts = make_ghosts(3, 2)
    assert add_ghost(ghosts, 0, np.uint64(7), 0, sizes) and add_ghost(ghosts, 1, np.uint64(7), 0, sizes)
    assert add_ghost(ghosts, 0, np.uint64(8), 0, sizes)
    assert not add_ghost(ghosts, 1, np.uint64(10), 0, sizes)  # no place
    assert ghosts.nbytes[:2].tolist() == [1024, 512]
    remove_ghost(ghosts, oldest_ghost(ghosts, 0), sizes)
    other = find_ghost(ghosts, np.uint64(7))
    assert other == oldest_ghost(ghosts, 1) and find_ghost(ghosts, np.uint64(8)) >= 0
    remove_ghost(ghosts, other, sizes)
    assert find_ghost(ghosts, np.uint64(7)) == -1
    assert add_ghost(ghosts, 1, np.uint64(10), 0, sizes)
    assert ghosts.nbytes[:2].tolist() == [512, 512]


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_the_repr_shows_the_counts(policy_type: type[Policy]) -> None:
    cache, _ = fill(policy_type, 4)
    assert policy_type.__name__ in repr(cache.policy) and str(4 * 4096) in repr(cache)


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_the_registry_finds_it(policy_type: type[Policy]) -> None:
    name = policy_type.__name__.removesuffix("Policy").lower()
    assert registry.load("policy", name, field="eviction_policy") is policy_type


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_keys_that_share_a_word(policy_type: type[Policy]) -> None:
    """Hashes that agree in half of the key, on purpose: chunks are told apart all the same."""
    for half in (0, 8):
        cache = cache_of(8, policy_type)
        hashes = []
        for number in range(20):
            tail = bytearray(16)
            tail[half : half + 8] = (number + 1).to_bytes(8, "little")
            hashes.append(bytes(16) + bytes(tail))
        batch = key_tools.make_chunks(chunks(0).space, 0, hashes)
        for number in range(20):
            one = batch.slice(number, number + 1)
            put(cache, one)
            cache.touch(cache.find(one.keys))
        assert cache.ready == 8
        slots = cache.find(batch.keys)
        assert (slots >= 0).sum() == 8
        for number in np.flatnonzero(slots >= 0).tolist():
            assert cache.name(int(slots[number])) == batch.name(number)
