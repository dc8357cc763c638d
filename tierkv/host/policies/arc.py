"""ARC, the adaptive replacement cache.

N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", Proceedings of the 2nd USENIX
Conference on File and Storage Technologies (FAST '03), 2003. The names T1, T2, B1, B2, p and c are those of its
figure 4.

T1 holds chunks that were used once lately, T2 those that were used more often; B1 and B2 are *ghosts*: the keys of
chunks that were evicted from T1 and T2. A ghost that comes back says which of the two was too small, and moves ``p``,
the size that T1 aims at. So a long scan of new prompts does not push out what is used again and again.

Where this differs from the paper, and why:

* Eviction comes before insertion here (a slot is reserved, written, then committed), so ``p`` is adapted when the
  chunk is committed, and the paper's tie-break "x is in B2 and |T1| = p" is left out: x is not known at eviction.
* Pinned chunks are skipped; when the list that should give a victim has none, the other one gives it.
* Chunks come in batches, used tail first, so that the head is the more recent one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from tierkv.host.policies.base import Policy

_List = OrderedDict[bytes, None]  # least recently used first


class ARCPolicy(Policy):
    """Adaptive between recency and frequency. Ghosts are bounded: all four lists together hold at most 2c keys.

    Thread safety: as ``Policy``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1: _List = OrderedDict()
        self._t2: _List = OrderedDict()
        self._b1: _List = OrderedDict()
        self._b2: _List = OrderedDict()
        self._p = 0.0

    def inserted(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._b1:  # case II of the paper: T1 was too small
                self._p = min(float(self.capacity), self._p + max(len(self._b2) / len(self._b1), 1.0))
                del self._b1[key]
                self._t2[key] = None
            elif key in self._b2:  # case III: T2 was too small
                self._p = max(0.0, self._p - max(len(self._b1) / len(self._b2), 1.0))
                del self._b2[key]
                self._t2[key] = None
            elif key not in self._t2:  # case IV
                self._t1[key] = None
                self._t1.move_to_end(key)
        self._bound_ghosts()

    def accessed(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # case I
            if key in self._t1:
                del self._t1[key]
                self._t2[key] = None
            elif key in self._t2:
                self._t2.move_to_end(key)

    def removed(self, keys: Sequence[bytes], evicted: bool) -> None:
        for key in keys:
            for used, ghosts in ((self._t1, self._b1), (self._t2, self._b2)):
                if key in used:
                    del used[key]
                    if evicted:
                        ghosts[key] = None
        self._bound_ghosts()

    def victims(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        found: list[bytes] = []
        t1_size = len(self._t1)
        t1 = _evictable(self._t1, evictable)
        t2 = _evictable(self._t2, evictable)
        while len(found) < count:
            # REPLACE of the paper: T1 gives while it is larger than it aims to be.
            key = next(t1, None) if t1_size > self._p else None
            if key is not None:
                t1_size -= 1
            else:
                key = next(t2, None)
            if key is None:
                key = next(t1, None)
                if key is None:
                    break
                t1_size -= 1
            found.append(key)
        return found

    def _bound_ghosts(self) -> None:
        """The paper's invariants: |T1| + |B1| <= c, and all four lists together hold at most 2c."""
        while self._b1 and len(self._t1) + len(self._b1) > self.capacity:
            self._b1.popitem(last=False)
        resident = len(self._t1) + len(self._t2)
        while self._b2 and resident + len(self._b1) + len(self._b2) > 2 * self.capacity:
            self._b2.popitem(last=False)

    def __repr__(self) -> str:
        sizes = f"T1 {len(self._t1)}, T2 {len(self._t2)}, B1 {len(self._b1)}, B2 {len(self._b2)}"
        return f"<ARCPolicy {sizes}, p {self._p:.2f} of {self.capacity}>"


def _evictable(keys: _List, evictable: Callable[[bytes], bool]) -> Iterator[bytes]:
    return (key for key in keys if evictable(key))
