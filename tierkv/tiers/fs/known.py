"""What a process knows to be there: hints, so that a lookup of thousands of chunks need not ask the file system."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from tierkv.types import Flags

Words = npt.NDArray[np.uint64]

#: So many words are kept in a set before they are sorted in among the others.
_MOST_ADDED = 1 << 16


class Known:
    """A set of chunks, each by the first word of its key: 8 bytes a chunk, most of them in one sorted array.

    It is a hint: another process may have removed a chunk that is here, or stored one that is not.

    Thread safety: any method may be called by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sorted: Words = np.empty(0, np.uint64)
        self._added: set[int] = set()
        self._removed: set[int] = set()

    def has(self, words: Words) -> Flags:
        """For each of ``words``, ``(n,)`` uint64, whether it is known to be there."""
        with self._lock:
            found = np.zeros(len(words), np.bool_)
            if len(self._sorted):
                places = np.searchsorted(self._sorted, words)
                found = self._sorted[np.minimum(places, len(self._sorted) - 1)] == words
            if self._added or self._removed:
                each = words.tolist()
                found |= np.fromiter((word in self._added for word in each), np.bool_, len(each))
                found &= np.fromiter((word not in self._removed for word in each), np.bool_, len(each))
            return found

    def add(self, word: int) -> None:
        with self._lock:
            self._removed.discard(word)
            self._added.add(word)
            if len(self._added) >= _MOST_ADDED:
                self._merge()

    def remove(self, word: int) -> None:
        with self._lock:
            self._added.discard(word)
            self._removed.add(word)

    def begin_replacing(self) -> None:
        """From here on until ``replace``, what is added and removed is kept apart: a walk may have seen it or not."""
        with self._lock:
            self._merge()

    def replace(self, words: Words) -> None:
        """A walk has found ``words``; what was added or removed since ``begin_replacing`` comes on top."""
        ordered = np.sort(words)
        with self._lock:
            self._sorted = ordered

    def __len__(self) -> int:
        """How many there are, about."""
        return len(self._sorted) + len(self._added)

    def _merge(self) -> None:
        words = np.concatenate([self._sorted, np.fromiter(self._added, np.uint64, len(self._added))])
        if self._removed:
            words = words[~np.isin(words, np.fromiter(self._removed, np.uint64, len(self._removed)))]
        words.sort(kind="stable")  # quick, as most of it is sorted
        self._sorted, self._added, self._removed = words, set(), set()
