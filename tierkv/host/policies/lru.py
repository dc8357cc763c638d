"""Least recently used: the chunk that was not used for the longest time goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tierkv.host.policies.base import Policy


class LRUPolicy(Policy):
    """Evicts in the order of last use; within one batch, the tail before the head.

    Thread safety: as ``Policy``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def inserted(self, keys: Sequence[bytes]) -> None:
        # The head is used last of the batch, so that it outlives the tail.
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)

    def accessed(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def removed(self, keys: Sequence[bytes], evicted: bool) -> None:
        for key in keys:
            self._order.pop(key, None)

    def victims(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        found: list[bytes] = []
        if count <= 0:
            return found
        for key in self._order:
            if evictable(key):
                found.append(key)
                if len(found) == count:
                    break
        return found

    def __repr__(self) -> str:
        return f"<LRUPolicy {len(self._order)} of {self.capacity}>"
