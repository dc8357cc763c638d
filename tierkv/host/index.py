"""Key → number, in an open-addressing hash table: kernels over one array.

The table consists of *buckets* of eight entries, each bucket one cache line. An entry is one word: the upper half of
the key's first word as its *tag*, and the number + 1; 0 is an empty entry. A key belongs into the bucket where its tag,
taken as a fraction, falls in the table, or into the next bucket behind that which is not full. Keys are hashes already,
so their bits are as good as random. What is deleted from a full bucket is replaced by what had to go on to the next
ones: no tombstones, and whoever finds a bucket that is not full has come to the end.

The entries of a bucket are looked at all together, with no decision in between: the place of a key within its bucket is
random, and a branch that depends on it costs more than to look at all eight.

A probe of a key that is there costs two cache misses, the table's and that of the record with the whole key; of one
that is not, mostly one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.host.jit import Int, inlined, jit

#: ``(buckets, 8)``.
Table = npt.NDArray[np.uint64]
Words = npt.NDArray[np.uint64]
Word = Any  # one of these

#: Entries for each number that the table must hold: one bucket in ten is full then.
_SPARSENESS = 1.75

_WIDTH = 8
_CACHE_LINE = 64

#: What stands for no number.
NONE = np.int64(-1)

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ZERO = np.uint64(0)


def make_table(capacity: int) -> Table:
    """An empty table for ``capacity`` numbers, which is below 2**31."""
    assert 0 < capacity < 2**31
    buckets = int(capacity * _SPARSENESS) // _WIDTH + 1
    words = np.zeros((buckets + 1) * _WIDTH, np.uint64)
    skipped = -words.ctypes.data % _CACHE_LINE // words.itemsize
    return words[skipped : skipped + buckets * _WIDTH].reshape(buckets, _WIDTH)


def _home(table: Table, tag: np.uint64) -> Int:
    """The bucket where an entry with ``tag`` belongs."""
    return np.int64((tag * np.uint64(table.shape[0])) >> _HALF)


def _next_bucket(table: Table, bucket: Int) -> Int:
    return 0 if bucket + 1 == table.shape[0] else bucket + 1


def _find(table: Table, words0: Words, words1: Words, word0: Word, word1: Word) -> Int:
    """The number of the key (``word0``, ``word1``), or -1. ``words0[n]`` and ``words1[n]`` are the key of number n."""
    tag = word0 >> _HALF
    bucket = home(table, tag)
    while True:
        place, empty = -1, 0
        for i in range(_WIDTH):
            entry = table[bucket, i]
            if entry >> _HALF == tag:
                place = i
            empty += entry == _ZERO  # counted: of a search the compiler would make branches
        if place >= 0:
            number = np.int64(table[bucket, place] & _LOW) - 1
            if number >= 0 and words0[number] == word0 and words1[number] == word1:
                return number
            for i in range(_WIDTH):  # another key with that tag is here, and perhaps this one, too
                number = np.int64(table[bucket, i] & _LOW) - 1
                if number >= 0 and words0[number] == word0 and words1[number] == word1:
                    return number
        if empty > 0:
            return NONE
        bucket = next_bucket(table, bucket)


def _fetch(table: Table, word0: Word) -> Word:
    """An entry from where a key belongs. To read those of many keys one after another has the processor wait for all of
    them at once, and a probe of each then finds them in its cache."""
    return table[home(table, word0 >> _HALF), 0]


def _fetch_next(table: Table, word0: Word) -> Word:
    """After ``fetch``: an entry from the bucket behind that if the first one is full, so that a probe may go on there.

    Places are taken from the last one on: a bucket whose first one is taken is mostly full.
    """
    bucket = home(table, word0 >> _HALF)
    behind = bucket + (table[bucket, 0] != _ZERO)
    return table[0 if behind == table.shape[0] else behind, 0]


def _is_full(table: Table, bucket: Int) -> bool:
    empty = 0
    for i in range(_WIDTH):
        empty += table[bucket, i] == _ZERO
    return empty == 0


def _seek(table: Table, bucket: Int, entry: Word) -> tuple[Int, Int, Int]:
    """From ``bucket`` on, the bucket and the place of ``entry``, and how many places are empty in that bucket."""
    while True:
        place, empty = -1, 0
        for i in range(_WIDTH):
            if table[bucket, i] == entry:
                place = i
            empty += table[bucket, i] == _ZERO
        if place >= 0:
            return bucket, place, empty
        bucket = next_bucket(table, bucket)


def _insert(table: Table, word0: Word, number: Int) -> None:
    """Add a key that is not there. ``word0``: its first word."""
    tag = word0 >> _HALF
    bucket, place, _ = seek(table, home(table, tag), _ZERO)
    table[bucket, place] = (tag << _HALF) | np.uint64(number + 1)


def _add(table: Table, words0: Words, words1: Words, word0: Word, word1: Word, number: Int) -> Int:
    """As ``find``; a key that is not there is added, with ``number``. The number of the key."""
    tag = word0 >> _HALF
    bucket = home(table, tag)
    while True:
        place, alike = -1, 0
        for i in range(_WIDTH):
            entry = table[bucket, i]
            if entry == _ZERO:
                place = i
            alike += entry >> _HALF == tag
        if alike > 0:
            known = find(table, words0, words1, word0, word1)
            if known >= 0:
                return known
        if place >= 0:
            table[bucket, place] = (tag << _HALF) | np.uint64(number + 1)
            return number
        bucket = next_bucket(table, bucket)


def _delete(table: Table, word0: Word, number: Int) -> None:
    """Take out the key of ``number``, which is there."""
    tag = word0 >> _HALF
    bucket, place, empty = seek(table, home(table, tag), (tag << _HALF) | np.uint64(number + 1))
    table[bucket, place] = _ZERO
    if empty == 0:
        refill(table, bucket, place)


def _refill(table: Table, bucket: Int, place: Int) -> None:
    """``place`` is empty in ``bucket``, which was full: what had to go on for that comes back, as far as there is any.

    That empties a place further on, which is filled likewise.
    """
    buckets = table.shape[0]
    at, full = bucket, True
    while full:
        at = next_bucket(table, at)
        full = is_full(table, at)
        for i in range(_WIDTH):
            entry = table[at, i]
            # It may move back if its home is not behind the bucket with the empty place.
            behind_home = (at - home(table, entry >> _HALF)) % buckets
            if entry != _ZERO and behind_home >= (at - bucket) % buckets:
                table[bucket, place] = entry
                table[at, i] = _ZERO
                bucket, place = at, i
                break


home = inlined(_home)
next_bucket = inlined(_next_bucket)
find = inlined(_find)
fetch = inlined(_fetch)
fetch_next = inlined(_fetch_next)
is_full = inlined(_is_full)
seek = inlined(_seek)
insert = inlined(_insert)
add = inlined(_add)
refill = jit(_refill)
delete = inlined(_delete)
