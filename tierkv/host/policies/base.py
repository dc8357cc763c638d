"""The interface of an eviction policy, built in or a user's own.

A policy ranks the chunks of the host cache that are ready. It never removes one: it is asked for victims, and told
what was removed. The cache checks every victim of a policy that is not built in: one that is pinned, named twice or not
there is refused and counted, and least-recently-used order steps in. So a policy can be wrong, but it cannot break the
cache.
"""

from __future__ import annotations

import abc

from tierkv.host.slots import SlotView
from tierkv.types import Offsets

#: Stands for every size class; ``ANY - c``, too, but then chunks of class c come before others that are equally cold.
#: A user's policy is only asked for victims of one class.
ANY = -1


class Policy(abc.ABC):
    """Ranks chunks for eviction. Chunks are named by their slots: ``(n,)`` int64.

    A chunk keeps its slot as long as it is ready; whoever must know it again after that (a ghost list) takes its key
    from ``slots.keys``. Chunks may differ in size (``slots.class_bytes``); a policy counts bytes.

    Batches are given head first: the first one is that of the first tokens. A chunk is of no use without those before
    it, so an implementation must make the head of a batch outlive its tail.

    Thread safety: called under the manager's lock, by one thread at a time.
    """

    def __init__(self, slots: SlotView) -> None:
        """``slots``: to be read, never written."""
        self.slots = slots

    @abc.abstractmethod
    def inserted(self, slots: Offsets) -> None:
        """The chunks in ``slots`` are ready from now on; none of them was before."""

    @abc.abstractmethod
    def accessed(self, slots: Offsets) -> None:
        """One request used the chunks in ``slots``, which are ready and distinct: one access to each."""

    @abc.abstractmethod
    def removed(self, slots: Offsets, evicted: bool) -> None:
        """The chunks are gone: evicted for room (best victim first), or forgotten because they are not valid now.

        Their keys and size classes can still be read.
        """

    @abc.abstractmethod
    def victims(self, count: int, size_class: int) -> Offsets:
        """Up to ``count`` distinct slots that are evictable, best victim first, of one size class or of ``ANY``.

        Removes nothing: what is really evicted is told by ``removed``. Fewer than ``count`` are given only when no more
        are evictable.
        """
