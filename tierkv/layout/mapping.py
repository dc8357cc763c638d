"""A rank's page as the device keeps it ⇄ its share of the canonical page: strided loops over pieces, as values.

Whatever order a device has its dimensions in, whatever lies between them, a view of the memory in the canonical order
(block, head, token, bytes) is a strided array. A *piece* is such an array on the one side and its place in a block of a
chunk on the other, with the dimensions that both sides agree on folded into one run of bytes. A page that a device
keeps as the canonical layout wants it is a single run; one that it keeps with the tokens outermost is a run a cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tierkv.errors import TransferError, UnsupportedError
from tierkv.layout.packing import Share
from tierkv.types import Offsets

#: Dimensions of a piece beside the blocks and the bytes: heads, kernel blocks and tokens, at most.
MAX_DIMS = 3


class View(NamedTuple):
    """Bytes on a device: those of a share, or a part of each of its cells.

    address: of the first byte. shape: ``(blocks, …, bytes)``, in between what makes up the share's heads and cells,
    in the canonical order. strides: in bytes.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Dim(NamedTuple):
    """A loop: how many turns, and the bytes from one to the next on each side."""

    turns: int
    device: int
    host: int


class Piece(NamedTuple):
    """One strided copy of each block.

    address, block_stride: on the device. offset: in the block of the chunk. dims: the loops, outermost first.
    nbytes: of a run, the innermost. replica, replicas: see ``Share``.
    """

    address: int
    block_stride: int
    offset: int
    dims: tuple[Dim, ...]
    nbytes: int
    replica: int
    replicas: int

    @property
    def runs(self) -> int:
        """How many runs a block has."""
        return math.prod(dim.turns for dim in self.dims)


def pieces_of(share: Share, parts: Sequence[View]) -> list[Piece]:
    """The copies between a share and the device.

    Args:
        parts: what a cell consists of, in order: one view where keys and values are packed, two where they are apart.

    Raises:
        TransferError: the views are not those of the share.
        UnsupportedError: there are more dimensions than ``MAX_DIMS`` that do not fold.
    """
    cell = share.plane.cell_bytes
    if sum(view.shape[-1] for view in parts) != cell:
        raise TransferError(f"{share.plane}: parts of {[v.shape[-1] for v in parts]} bytes, expected {cell} together")
    pieces, at = [], share.offset
    for view in parts:
        counts = view.shape[1:-1]
        if len(view.shape) < 2 or math.prod(counts) != share.heads * share.plane.cells:
            raise TransferError(
                f"{share.plane}: a view of shape {view.shape}, expected (blocks, {share.heads} heads × "
                f"{share.plane.cells} cells, bytes)"
            )
        if view.shape[-1] > 1 and view.strides[-1] != 1:
            raise TransferError(f"{share.plane}: the bytes of a cell are {view.strides[-1]} apart")
        host = [cell * math.prod(counts[i + 1 :]) for i in range(len(counts))]
        dims = [Dim(*dim) for dim in zip(counts, view.strides[1:-1], host, strict=True)]
        folded, nbytes = fold(dims, view.shape[-1])
        if len(folded) > MAX_DIMS:
            raise UnsupportedError(f"{share.plane}: strides {view.strides} of shape {view.shape} are too many loops")
        pieces.append(Piece(view.address, view.strides[0], at, folded, nbytes, share.replica, share.replicas))
        at += view.shape[-1]
    return pieces


def fold(dims: Iterable[Dim], nbytes: int) -> tuple[tuple[Dim, ...], int]:
    """The same copy with as few loops, and runs as long, as can be.

    Args:
        dims: the loops, outermost first. nbytes: of a run.
    """
    folded: list[Dim] = []  # innermost first
    for dim in reversed([dim for dim in dims if dim.turns != 1]):
        if not folded and dim.device == dim.host == nbytes:
            nbytes *= dim.turns
        elif (
            folded
            and dim.device == folded[-1].turns * folded[-1].device
            and (dim.host == folded[-1].turns * folded[-1].host)
        ):
            folded[-1] = folded[-1]._replace(turns=dim.turns * folded[-1].turns)
        else:
            folded.append(dim)
    return tuple(reversed(folded)), nbytes


def as_table(pieces: Sequence[Piece]) -> Offsets:
    """``pieces`` as the kernels take them: ``(pieces, 15)`` int64, the fields in order, each loop's three together."""
    rows = []
    for piece in pieces:
        dims = [Dim(1, 0, 0)] * (MAX_DIMS - len(piece.dims)) + list(piece.dims)
        loops = [number for dim in dims for number in dim]
        rows.append(
            [piece.address, piece.block_stride, piece.offset, *loops, piece.nbytes, piece.replica, piece.replicas]
        )
    return np.array(rows, np.int64).reshape(len(rows), 6 + 3 * MAX_DIMS)
