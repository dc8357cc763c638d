"""Where one rank's planes of one group lie within a chunk."""

from __future__ import annotations

from typing import NamedTuple

from tierkv.errors import UnsupportedError
from tierkv.layout.spec import GroupSpec, Plane
from tierkv.types import Offsets


class Share(NamedTuple):
    """A rank's part of one plane within a block of a chunk: whole heads, contiguous.

    offset: its first byte, from the first of the block. heads: how many. plane: of which they are.
    replica, replicas: on how many ranks these heads are, and which of those this rank is.
    """

    offset: int
    heads: int
    plane: Plane
    replica: int
    replicas: int

    @property
    def nbytes(self) -> int:
        return self.heads * self.plane.head_bytes


class GroupPacking:
    """The places of one rank's shares in a chunk of ``group``, as ``canonical`` specifies.

    shares: for each page, for each of its planes.

    Thread safety: immutable.
    """

    def __init__(self, group: GroupSpec, rank: int, ranks: int) -> None:
        """
        Raises:
            UnsupportedError: a plane's heads cannot be spread evenly over the ranks, nor the ranks over its heads.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks}")
        self.group = group
        self.rank = rank
        self.ranks = ranks
        self.block_bytes = group.block_bytes
        self.chunk_bytes = group.blocks_per_chunk * self.block_bytes
        shares, at = [], 0
        for page in group.pages:
            of_page = []
            for plane in page.planes:
                of_page.append(_share(plane, at, rank, ranks, page.layer))
                at += plane.nbytes
            shares.append(tuple(of_page))
        self.shares = tuple(shares)

    def block_offsets(self, slot_offsets: Offsets, positions: Offsets) -> Offsets:
        """Where ``n`` blocks begin in the host region.

        Args:
            slot_offsets: ``(n,)`` int64, the byte at which each block's slot starts.
            positions: ``(n,)`` int64, each block's place within its chunk, below ``blocks_per_chunk``.

        Returns:
            ``(n,)`` int64 byte offsets in the region.
        """
        offsets: Offsets = slot_offsets + positions * self.block_bytes
        return offsets

    def __repr__(self) -> str:
        return f"<GroupPacking group {self.group.group}, rank {self.rank} of {self.ranks}, {self.chunk_bytes} bytes>"


def can_share(heads: int, ranks: int) -> bool:
    """Whether ``heads`` can be spread over ``ranks``: evenly, or each on several."""
    return heads % ranks == 0 or ranks % heads == 0


def _share(plane: Plane, offset: int, rank: int, ranks: int, layer: str) -> Share:
    if not can_share(plane.heads, ranks):
        raise UnsupportedError(f"layer {layer}: {plane.heads} heads on {ranks} ranks; supported: one divides the other")
    replicas = max(1, ranks // plane.heads)
    first = rank * plane.heads // ranks
    return Share(offset + first * plane.head_bytes, max(1, plane.heads // ranks), plane, rank % replicas, replicas)
