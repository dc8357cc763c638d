"""Key → number, in an open-addressing hash table: kernels over one array.

An entry is one word: the upper half of the key's first word as its *tag*, and the number + 1; 0 is an empty entry. A
key belongs where its tag, taken as a fraction, falls in the table, or in the next empty entry behind that (linear
probing). Keys are hashes already, so their bits are as good as random. What is deleted closes the gap behind it: no
tombstones.

A probe of a key that is there costs two cache misses, the table's and that of the record with the whole key; of one
that is not, mostly one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.host.jit import Int, inlined

Table = npt.NDArray[np.uint64]
Words = npt.NDArray[np.uint64]
Word = Any  # one of these

#: Entries for each number that the table must hold.
_SPARSENESS = 1.75

#: What stands for no number.
NONE = np.int64(-1)

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


def make_table(capacity: int) -> Table:
    """An empty table for ``capacity`` numbers, which is below 2**31."""
    assert 0 < capacity < 2**31
    return np.zeros(int(capacity * _SPARSENESS) + 8, np.uint64)


def _home(table: Table, tag: np.uint64) -> Int:
    """Where an entry with ``tag`` belongs."""
    return np.int64((tag * np.uint64(table.shape[0])) >> _HALF)


def _find(table: Table, words0: Words, words1: Words, word0: Word, word1: Word) -> Int:
    """The number of the key (``word0``, ``word1``), or -1. ``words0[n]`` and ``words1[n]`` are the key of number n."""
    tag = word0 >> _HALF
    at = home(table, tag)
    while True:
        entry = table[at]
        if entry == _ZERO:
            return NONE
        if entry >> _HALF == tag:
            number = np.int64(entry & _LOW) - 1
            if words0[number] == word0 and words1[number] == word1:
                return number
        at += 1
        if at == table.shape[0]:
            at = 0


def _fetch(table: Table, word0: Word) -> Word:
    """An entry from where a key belongs. To read those of many keys one after another has the processor wait for all of
    them at once, and a probe of each then finds them in its cache."""
    return table[home(table, word0 >> _HALF)]


def _insert(table: Table, word0: Word, number: Int) -> None:
    """Add a key that is not there. ``word0``: its first word."""
    tag = word0 >> _HALF
    at = home(table, tag)
    while table[at] != _ZERO:
        at += 1
        if at == table.shape[0]:
            at = 0
    table[at] = (tag << _HALF) | np.uint64(number + 1)


def _delete(table: Table, word0: Word, number: Int) -> None:
    """Take out the key of ``number``, which is there; entries behind it move up so that no gap separates them."""
    size = table.shape[0]
    tag = word0 >> _HALF
    gone = (tag << _HALF) | np.uint64(number + 1)
    gap = home(table, tag)
    while table[gap] != gone:
        gap += 1
        if gap == size:
            gap = 0
    at = gap
    while True:
        at += 1
        if at == size:
            at = 0
        entry = table[at]
        if entry == _ZERO:
            break
        # An entry may move to the gap if that is not before the place where it belongs.
        behind_home = at - home(table, entry >> _HALF)
        behind_gap = at - gap
        if behind_home < 0:
            behind_home += size
        if behind_gap < 0:
            behind_gap += size
        if behind_home >= behind_gap:
            table[gap] = entry
            gap = at
    table[gap] = _ZERO


home = inlined(_home)
find = inlined(_find)
fetch = inlined(_fetch)
insert = inlined(_insert)
delete = inlined(_delete)
