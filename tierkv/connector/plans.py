"""Planning as pure functions: which device blocks go where, and which are about to be overwritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tierkv.layout.spec import GroupSpec
from tierkv.transfer.plan import BlockCopies
from tierkv.types import Offsets

#: The engine's null block: a place in a block table that holds nothing, such as one behind a sliding window.
NULL_BLOCK = 0


def storable_chunks(group: GroupSpec, blocks: Sequence[int], first: int, last: int) -> Sequence[int]:
    """Those of the chunks ``first`` to ``last`` - 1 whose blocks are all on the device, ascending."""
    size = group.blocks_per_chunk
    last = min(last, len(blocks) // size)
    if NULL_BLOCK not in blocks[first * size : last * size]:
        return range(first, max(first, last))
    return [chunk for chunk in range(first, last) if NULL_BLOCK not in blocks[chunk * size : (chunk + 1) * size]]


class Chosen(NamedTuple):
    """Some chunks of several groups: ``(n,)`` each. order: their places when those of one group follow another's.

    owners: the group of each. numbers: its number there.
    """

    order: Offsets
    owners: Offsets
    numbers: Offsets


def by_position(groups: Sequence[GroupSpec], chosen: Sequence[Sequence[int]]) -> Chosen:
    """The chunks ``chosen[n]`` of each group n, by the token they end with.

    What is stored in this order is evicted from the end of the prompt on, in all groups alike.
    """
    owners = np.repeat(np.arange(len(groups)), [len(chunks) for chunks in chosen])
    numbers = np.concatenate([np.asarray(chunks, np.int64) for chunks in chosen])
    sizes = np.array([group.tokens_per_chunk for group in groups], np.int64)
    order = np.argsort((numbers + 1) * sizes[owners], kind="stable")
    return Chosen(order, owners[order], numbers[order])


def sparse_table(blocks: Mapping[int, int]) -> list[int]:
    """A block table with these places, and null blocks elsewhere."""
    table = [NULL_BLOCK] * (max(blocks, default=-1) + 1)
    for place, block in blocks.items():
        table[place] = block
    return table


def store_copies(
    index: int, group: GroupSpec, blocks: Sequence[int], chunks: Sequence[int], offsets: Offsets
) -> BlockCopies:
    """Copy whole chunks: chunk ``chunks[i]`` of a request to the slot at byte ``offsets[i]``.

    Args:
        index: the group's place among those that are offloaded.
        blocks: the request's block table in this group.
    """
    size = group.blocks_per_chunk
    table = np.asarray(blocks, np.int64)
    places = np.asarray(chunks, np.int64)[:, None] * size + np.arange(size)
    return BlockCopies(
        group=index,
        blocks=table[places.ravel()],
        slot_offsets=np.repeat(np.asarray(offsets, np.int64), size),
        positions=np.tile(np.arange(size, dtype=np.int64), len(chunks)),
    )


def load_copies(
    index: int, group: GroupSpec, blocks: Sequence[int], local: int, boundary: int, offsets: Offsets
) -> BlockCopies | None:
    """Copy the blocks between ``local`` and ``boundary`` tokens, which need not start or end with a chunk.

    Args:
        blocks: the request's block table in this group, null blocks where the engine wants nothing.
        offsets: for each chunk of the request, the byte offset of its slot, or -1.

    Returns:
        None if the engine wants a block of a chunk that is not there.
    """
    table = np.asarray(blocks, np.int64)
    places = np.arange(local // group.tokens_per_block, -(-boundary // group.tokens_per_block))
    if places.size and places[-1] >= len(table):
        return None
    places = places[table[places] != NULL_BLOCK]
    chunks = places // group.blocks_per_chunk
    if places.size and (chunks[-1] >= len(offsets) or (offsets[chunks] < 0).any()):
        return None
    return BlockCopies(
        group=index,
        blocks=table[places],
        slot_offsets=offsets[chunks] if places.size else np.empty(0, np.int64),
        positions=places % group.blocks_per_chunk,
    )


def written_blocks(tables: Sequence[Sequence[int]], block_sizes: Sequence[int], computed: int) -> Iterator[int]:
    """The blocks of ``tables`` (one table a group) that the engine may write from token ``computed`` on."""
    for table, size in zip(tables, block_sizes, strict=True):
        for block in table[computed // size :]:
            if block != NULL_BLOCK:
                yield block
