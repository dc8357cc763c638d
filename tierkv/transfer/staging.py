"""How the CUDA engine moves a group's planes: as they lie, or gathered on the device first.

A DMA transfer costs some microseconds before its first byte moves, as long as some 100 KiB take at the speed of the
bus. So planes that lie on the device as in a chunk, in runs of ``DIRECT_BYTES`` and more, are copied as they lie, a
transfer a run and no detour. Everything else is gathered into a staging buffer first, by a few kernels at the speed
of the device's memory, in the order of the chunk: then what of a block is contiguous in the chunk is one transfer,
which is all of it without tensor parallelism. Loads go the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tierkv.layout.mapping import pieces_of
from tierkv.layout.packing import Share
from tierkv.transfer.engine import DeviceGroup, Parts, view_of
from tierkv.types import Offsets

#: Runs of fewer bytes are gathered.
DIRECT_BYTES = 256 << 10


class Span(NamedTuple):
    """Bytes of a block that are contiguous in the chunk and in the staging buffer.

    offset: in the block of the chunk. staged: in the block's row of the staging buffer.
    """

    offset: int
    staged: int
    nbytes: int


class Planes:
    """Planes of one group that the same ranks hold, and so the same blocks are stored of.

    direct: for each plane, ``(num_blocks, bytes)`` of it and its offset in the block of the chunk; None: to be staged.
    spans: of a block. nbytes: of a block's row in the staging buffer.

    Thread safety: immutable.
    """

    def __init__(self, planes: Sequence[tuple[Share, Parts]]) -> None:
        self._replica, self._replicas = planes[0][0].replica, planes[0][0].replicas
        self._planes: list[tuple[Parts, int, Share]] = []
        self.spans: list[Span] = []
        self.nbytes = 0
        for share, parts in planes:
            self._planes.append((parts, self.nbytes, share))
            last = self.spans[-1] if self.spans else None
            if last is not None and last.offset + last.nbytes == share.offset:
                self.spans[-1] = last._replace(nbytes=last.nbytes + share.nbytes)
            else:
                self.spans.append(Span(share.offset, self.nbytes, share.nbytes))
            self.nbytes += share.nbytes
        self.direct = self._direct()

    def mine(self, blocks: Offsets) -> Offsets:
        """Which of ``blocks`` this rank stores, as indices: ranks that hold the same take turns."""
        mine: Offsets = (blocks % self._replicas == self._replica).nonzero()[0]
        return mine

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """The blocks at ``index`` as in a chunk: int8, ``(n, nbytes)``."""
        count = len(index)
        rows = torch.empty((count, self.nbytes), dtype=torch.int8, device=index.device)
        for parts, cells in self._cells(rows):
            at = 0
            for part in parts:
                size = part.shape[-1]
                cells[..., at : at + size] = part.index_select(0, index).view(count, -1, size)
                at += size
        return rows

    def scatter(self, rows: torch.Tensor, index: torch.Tensor) -> None:
        """The way back: ``rows``, as ``gather`` made them, to the blocks at ``index``."""
        count = len(index)
        for parts, cells in self._cells(rows):
            at = 0
            for part in parts:
                size = part.shape[-1]
                part.index_copy_(0, index, cells[..., at : at + size].reshape(count, *part.shape[1:]))
                at += size

    def _cells(self, rows: torch.Tensor) -> list[tuple[Parts, torch.Tensor]]:
        """For each plane its parts, and its cells within ``rows``: ``(n, cells, bytes)``."""
        return [
            (parts, rows[:, at : at + share.nbytes].unflatten(1, (-1, share.plane.cell_bytes)))
            for parts, at, share in self._planes
        ]

    def _direct(self) -> list[tuple[torch.Tensor, int]] | None:
        direct = []
        for parts, _, share in self._planes:
            (piece, *others) = pieces_of(share, [view_of(part) for part in parts])
            if others or piece.dims or piece.nbytes < DIRECT_BYTES:
                return None
            part = parts[0]
            whole = part.as_strided((part.shape[0], piece.nbytes), (part.stride(0), 1), part.storage_offset())
            direct.append((whole, share.offset))
        return direct


def planes_of(group: DeviceGroup) -> list[Planes]:
    """The planes of ``group``, by the ranks that hold the same."""
    alike: dict[tuple[int, int], list[tuple[Share, Parts]]] = {}
    for shares, page in zip(group.packing.shares, group.planes, strict=True):
        for share, parts in zip(shares, page, strict=True):
            alike.setdefault((share.replica, share.replicas), []).append((share, parts))
    return [Planes(planes) for planes in alike.values()]
