"""The interface of an eviction policy, built in or a user's own.

A policy ranks the chunks of the host cache that are ready. It never removes one: it is asked for victims, and told
what was removed. The cache checks every victim: one that is pinned, named twice or not there is refused and counted,
and least-recently-used order steps in. So a policy can be wrong, but it cannot break the cache.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence


class Policy(abc.ABC):
    """Ranks chunks for eviction. Keys are ``bytes`` of 16.

    Batches are given head first: the first key is that of the first tokens. A chunk is of no use without those
    before it, so an implementation must make the head of a batch outlive its tail.

    Thread safety: called under the manager's lock, by one thread at a time.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: how many chunks the host cache has room for."""
        self.capacity = capacity

    @abc.abstractmethod
    def inserted(self, keys: Sequence[bytes]) -> None:
        """``keys`` are ready from now on; none of them was before."""

    @abc.abstractmethod
    def accessed(self, keys: Sequence[bytes]) -> None:
        """One request used the chunks ``keys``, which are ready and distinct: one access to each."""

    @abc.abstractmethod
    def removed(self, keys: Sequence[bytes], evicted: bool) -> None:
        """``keys`` are gone: evicted for room (best victim first), or forgotten because they are not valid now."""

    @abc.abstractmethod
    def victims(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        """Up to ``count`` distinct ready keys for which ``evictable(key)`` is true, best victim first.

        Changes nothing: what is really evicted is told by ``removed``. Fewer than ``count`` are given only when no
        more are evictable.
        """
