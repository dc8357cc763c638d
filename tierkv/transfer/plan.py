"""What to copy: plain values that travel, pickled, from the scheduler to every worker, and pure functions of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierkv.types import Offsets


@dataclass(frozen=True, eq=False)
class BlockCopies:
    """``n`` blocks of one group. Every rank copies its own share of them; of what several hold, it stores its turns.

    group: an index into the worker's groups.
    blocks: ``(n,)`` int64 device block ids.
    slot_offsets: ``(n,)`` int64, the byte of the host region at which the block's slot starts.
    positions: ``(n,)`` int64, the block's place within its chunk.
    """

    group: int
    blocks: Offsets
    slot_offsets: Offsets
    positions: Offsets

    def __len__(self) -> int:
        return len(self.blocks)

    @classmethod
    def of(
        cls, group: int, blocks: Sequence[int], slot_offsets: Sequence[int], positions: Sequence[int]
    ) -> BlockCopies:
        """From sequences of the same length."""
        return cls(group, np.array(blocks, np.int64), np.array(slot_offsets, np.int64), np.array(positions, np.int64))


@dataclass(frozen=True, eq=False)
class Transfer:
    """One job: device → host if ``store``, else host → device. The arrays are not changed after it was made."""

    job_id: int
    store: bool
    copies: tuple[BlockCopies, ...]

    @property
    def num_blocks(self) -> int:
        return sum(len(copies) for copies in self.copies)


class Run(NamedTuple):
    """``blocks`` blocks from block ``first`` on, and the byte of the region where the first one's page starts."""

    first: int
    blocks: int
    host_offset: int


def runs(blocks: Offsets, host_offsets: Offsets, page_bytes: int, touching: bool) -> list[Run]:
    """The copies of one page of ``n`` blocks, with neighbours merged where they touch on both sides.

    Args:
        blocks: ``(n,)`` device block ids.
        host_offsets: ``(n,)`` where the page of each block lies in the region.
        touching: whether the page of block b + 1 follows that of block b on the device without a gap.
    """
    if not len(blocks):
        return []
    merged = (np.diff(blocks) == 1) & (np.diff(host_offsets) == page_bytes) & touching
    starts = np.concatenate([[0], np.flatnonzero(~merged) + 1])
    counts = np.diff(np.append(starts, len(blocks)))
    return [
        Run(*run) for run in zip(blocks[starts].tolist(), counts.tolist(), host_offsets[starts].tolist(), strict=True)
    ]
