"""Where one rank's pages of one group lie within a chunk."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierkv.layout import canonical
from tierkv.layout.spec import GroupSpec
from tierkv.types import Offsets


class GroupPacking:
    """The places of one rank's pages in a chunk of ``group``, as ``canonical`` specifies.

    page_bytes: ``(pages,)`` int64, bytes of each page. share_offset: where this rank's share starts in the chunk.

    Thread safety: immutable.
    """

    def __init__(self, group: GroupSpec, rank: int, ranks: int) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks}")
        self.group = group
        self.rank = rank
        self.ranks = ranks
        self.block_bytes = group.block_bytes
        self.share_bytes = group.blocks_per_chunk * self.block_bytes
        self.share_offset = rank * self.share_bytes
        self.chunk_bytes = ranks * self.share_bytes
        sizes = [page.page_bytes for page in group.pages]
        self.page_bytes: Offsets = np.array(sizes, np.int64)
        self._page_offsets: Offsets = np.array(canonical.page_offsets(sizes), np.int64)
        self.page_bytes.flags.writeable = self._page_offsets.flags.writeable = False

    def host_offsets(self, slot_offsets: Offsets, positions: Offsets) -> Offsets:
        """Where the pages of ``n`` blocks lie in the host region.

        Args:
            slot_offsets: ``(n,)`` int64, the byte at which each block's slot starts.
            positions: ``(n,)`` int64, each block's place within its chunk, below ``blocks_per_chunk``.

        Returns:
            ``(n, pages)`` int64 byte offsets in the region.
        """
        blocks: npt.NDArray[np.int64] = slot_offsets + positions * self.block_bytes + self.share_offset
        return blocks[:, np.newaxis] + self._page_offsets

    def __repr__(self) -> str:
        return f"<GroupPacking group {self.group.group}, rank {self.rank} of {self.ranks}, {self.chunk_bytes} bytes>"
