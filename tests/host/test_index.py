"""The hash table against a dictionary, and the lists against deques."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config as numba_config
from twins import walk

from tierkv.host.index import delete, find, home, insert, make_table
from tierkv.host.lists import make_ends, push, unlink

EXAMPLES, LONG = (60, 2_000) if numba_config.DISABLE_JIT else (400, 30_000)

Key = tuple[int, int]


class Index:
    """A table beside a dictionary. The numbers are those of the places that hold the keys."""

    def __init__(self, capacity: int) -> None:
        self.table = make_table(capacity)
        self.words = np.zeros((2, capacity), np.uint64)
        self.free = list(range(capacity))
        self.known: dict[Key, int] = {}

    def find(self, key: Key) -> int:
        return int(find(self.table, self.words[0], self.words[1], np.uint64(key[0]), np.uint64(key[1])))

    def insert(self, key: Key) -> None:
        number = self.free.pop()
        self.words[:, number] = key
        insert(self.table, np.uint64(key[0]), np.int64(number))
        self.known[key] = number

    def delete(self, key: Key) -> None:
        number = self.known.pop(key)
        delete(self.table, np.uint64(key[0]), np.int64(number))
        self.words[:, number] = 0xDEAD  # nothing of it is looked at any more
        self.free.append(number)

    def check(self, absent: list[Key]) -> None:
        for key, number in self.known.items():
            assert self.find(key) == number
        for key in absent:
            assert key in self.known or self.find(key) == -1
        assert np.count_nonzero(self.table) == len(self.known)


def first_word(tag: int, low: int = 0) -> int:
    return tag << 32 | low


#: Tags at the ends of the table and in its middle, so that many keys belong in one place, and runs go around the end.
TAGS = [0, 1, 2, 2**31, 2**32 - 2**29, 2**32 - 2, 2**32 - 1]
keys = st.tuples(
    st.builds(first_word, st.sampled_from(TAGS) | st.integers(0, 2**32 - 1), st.integers(0, 1)), st.integers(0, 2)
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(capacity=st.integers(1, 24), ops=st.lists(keys, max_size=120), everything=st.lists(keys, max_size=10))
def test_the_table_is_a_dictionary(capacity: int, ops: list[Key], everything: list[Key]) -> None:
    """Each key goes in if it is not there and there is a place, else out."""
    index = Index(capacity)
    for key in ops:
        if key in index.known:
            index.delete(key)
        elif index.free:
            index.insert(key)
        index.check(everything)
    for key in list(index.known):
        index.delete(key)
        index.check(everything)
    assert not index.table.any()


@pytest.mark.parametrize("capacity", [1, 2, 3, 50, 500])
@pytest.mark.parametrize("tags", ["random", "one", "last", "few"])
def test_full_to_the_last_place_and_through_many_generations(capacity: int, tags: str) -> None:
    rng = random.Random(capacity)
    choose = {
        "random": lambda: rng.getrandbits(32),
        "one": lambda: 2**31,
        "last": lambda: 2**32 - 1,
        "few": lambda: rng.choice(TAGS),
    }[tags]
    index = Index(capacity)
    rounds = min(LONG, LONG * 20 // capacity) if tags == "random" else min(LONG, LONG * 2 // capacity)
    for number in range(rounds):
        while index.free:
            index.insert((first_word(choose(), rng.getrandbits(32)), len(index.known) + number * capacity))
        for key in rng.sample(list(index.known), rng.randint(1, min(capacity, 20))):
            index.delete(key)
        if number % 100 == 0:
            index.check([(first_word(choose()), -1 % 2**64) for _ in range(5)])
    index.check([])


def test_keys_that_differ_in_one_word_only() -> None:
    index = Index(8)
    for key in ((5, 7), (5, 8), (first_word(0, 6), 7), (first_word(9, 5), 7)):
        index.insert(key)
    index.check([(5, 9), (7, 5), (first_word(9, 6), 7)])
    index.delete((5, 7))
    index.check([(5, 7)])


def test_every_tag_has_its_home_within_the_table() -> None:
    for capacity in (1, 2, 1000, 2**20):
        table = make_table(capacity)
        homes = [int(home(table, np.uint64(tag))) for tag in (0, 1, 2**16, 2**31, 2**32 - 1)]
        assert homes == sorted(homes) and homes[0] == 0 and homes[-1] == len(table) - 1
        assert table.size > capacity  # a search for what is not there ends
        assert table.ctypes.data % 64 == 0 and table[0].nbytes == 64  # a bucket is a cache line


@settings(max_examples=EXAMPLES, deadline=None)
@given(ops=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=80))
def test_lists_are_deques(ops: list[tuple[int, int]]) -> None:
    """A member that is in no list joins one; one that is in a list leaves it."""
    ends = make_ends(3)
    older, newer = np.full(8, 99, np.int32), np.full(8, 99, np.int32)
    known: list[deque[int]] = [deque() for _ in range(3)]
    for which, member in ops:
        at = next((n for n, members in enumerate(known) if member in members), None)
        if at is None:
            push(ends, older, newer, which, member)
            known[which].append(member)
        else:
            unlink(ends, older, newer, at, member)
            known[at].remove(member)
        for n, members in enumerate(known):
            assert walk(ends, older, newer, n) == list(members)
