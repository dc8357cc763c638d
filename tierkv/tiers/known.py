"""What a process knows to be there: hints, so that a lookup of thousands of chunks need not ask the storage."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from tierkv.types import Flags

Words = npt.NDArray[np.uint64]

#: So many words are kept in a set before they become a sorted array.
_MOST_ADDED = 4096


class Known:
    """A set of chunks, each by the first word of its key: 8 bytes a chunk, in a few sorted arrays.

    It is a hint: another process may have removed a chunk that is here, or stored one that is not.

    Thread safety: any method may be called by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Sorted arrays, each more than twice as large as the next; before a walk began, and since.
        self._before: list[Words] = []
        self._since: list[Words] = []
        self._added: set[int] = set()
        #: What was removed, of the former and of all.
        self._removed_before: set[int] = set()
        self._removed: set[int] = set()
        #: Whether a walk is under way.
        self._replacing = False

    def has(self, words: Words) -> Flags:
        """For each of ``words``, ``(n,)`` uint64, whether it is known to be there."""
        found = np.zeros(len(words), np.bool_)
        with self._lock:
            each = words.tolist() if self._added or self._removed or self._removed_before else []
            before, since = list(self._before), list(self._since)
            if self._added:
                found |= np.fromiter((word in self._added for word in each), np.bool_, len(each))
            gone_before = np.fromiter((word in self._removed_before for word in each), np.bool_, len(each))
            gone = np.fromiter((word in self._removed for word in each), np.bool_, len(each))
        old = _among(before, words)
        if len(each):
            old &= ~gone_before
        found |= _among(since, words) | old
        return found & ~gone if len(each) else found

    def add(self, word: int) -> None:
        with self._lock:
            self._removed.discard(word)
            self._added.add(word)
            if len(self._added) >= _MOST_ADDED:
                self._sort_in()

    def add_all(self, words: Words) -> None:
        """As ``add``, many."""
        ordered = np.sort(words)
        with self._lock:
            if self._removed:
                self._removed.difference_update(words.tolist())
            if len(ordered):
                self._since.append(ordered)
                self._merge(self._since)

    def remove(self, word: int) -> None:
        with self._lock:
            self._added.discard(word)
            one = np.array([word], np.uint64)
            if self._replacing or _among(self._since, one)[0] or _among(self._before, one)[0]:
                self._removed.add(word)

    def begin_replacing(self) -> None:
        """From here on until ``replace``, what is added and removed is kept apart: a walk may have seen it or not."""
        with self._lock:
            self._sort_in()
            gone = np.fromiter(self._removed_before, np.uint64, len(self._removed_before))
            still = gone[~_among(self._since, gone)]  # what was added again is there, whatever was before
            self._before += self._since
            self._merge(self._before)  # there may be many, where walk after walk comes to no end
            self._since = []
            self._removed_before = self._removed | set(still.tolist())
            self._removed = set()
            self._replacing = True

    def end_replacing(self, words: Words) -> None:
        """A walk has come to no end. Until then it has found ``words``."""
        with self._lock:
            gone = np.fromiter(self._removed, np.uint64, len(self._removed))
            self._replacing = False
        self.add_all(words[~np.isin(words, gone)])

    def replace(self, words: Words) -> None:
        """A walk has found ``words``; what was added or removed since ``begin_replacing`` comes on top."""
        ordered = np.sort(words)
        with self._lock:
            self._before = [ordered]
            self._removed_before = set()
            self._replacing = False

    def __len__(self) -> int:
        """How many there are, about."""
        return sum(map(len, self._before)) + sum(map(len, self._since)) + len(self._added)

    def _sort_in(self) -> None:
        """The added ones become a sorted array; those that are not much larger are merged with it."""
        if not self._added:
            return
        self._since.append(np.sort(np.fromiter(self._added, np.uint64, len(self._added))))
        self._added = set()
        self._merge(self._since)

    def _merge(self, runs: list[Words]) -> None:
        """Merge the last of ``runs`` with those before it that are not much larger."""
        run = runs.pop() if runs else np.empty(0, np.uint64)
        while runs and len(runs[-1]) <= 2 * len(run):
            run = np.concatenate([runs.pop(), run])
            run.sort(kind="stable")  # quick, as it is two sorted halves; and it lets go of the interpreter
        if len(run):
            runs.append(run)


def _among(runs: list[Words], words: Words) -> Flags:
    """Which of ``words`` are in one of the sorted ``runs``."""
    found = np.zeros(len(words), np.bool_)
    for run in runs:
        places = np.searchsorted(run, words)
        found |= run[np.minimum(places, len(run) - 1)] == words if len(run) else False
    return found
