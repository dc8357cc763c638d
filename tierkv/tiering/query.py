"""What a request asks of the manager."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.keys import GroupChunks
from tierkv.types import Chunks, RequestContext, Space


@dataclass(frozen=True, slots=True)
class Query:
    """A request's question: how much of its prefix can be served?

    chunks: for each group, the request's complete chunks from its first token on. Those that are not looked at need not
        be converted.
    local: tokens that are on the device already. limit: the largest useful boundary.
    """

    context: RequestContext
    space: Space
    chunks: tuple[Chunks | GroupChunks, ...]
    local: int
    limit: int

    @property
    def versions(self) -> list[int]:
        """By group: what is known of a chunk is of no use if it is another one by now."""
        return [chunks.version for chunks in self.chunks]

    def same_as(self, other: Query) -> bool:
        return (
            self.local == other.local
            and self.limit == other.limit
            and self.space == other.space
            and self.versions == other.versions
            and [len(c) for c in self.chunks] == [len(c) for c in other.chunks]
        )
