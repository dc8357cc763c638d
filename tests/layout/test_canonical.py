"""The byte format of a chunk: golden bytes, written out by hand. A change here is a new format version."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash

from tierkv.layout import canonical
from tierkv.layout.packing import GroupPacking
from tierkv.layout.spec import GroupSpec, LayerPage, ModelSpec, Plane

HEADS, TOKENS, HEAD_SIZE = 2, 2, 2  # one byte an element
PLANE = Plane("kv", HEADS, TOKENS, 2 * HEAD_SIZE)
# Each byte names what it is: 0x80 for a value, then block, layer, head, token and element, a bit each.
GOLDEN = bytes.fromhex(
    "0001808102038283 0405848506078687"  # block 0, layer 0: head 0 (token 0: K K V V, token 1), head 1
    "08098889 0a0b8a8b 0c0d8c8d 0e0f8e8f"  # block 0, layer 1
    "10119091 12139293 14159495 16179697"  # block 1, layer 0
    "18199899 1a1b9a9b 1c1d9c9d 1e1f9e9f"  # block 1, layer 1
)
GOLDEN_CHECKSUM = 0x5733CA143A8CE6D8


def spec(blocks: int, pages: int = 2) -> GroupSpec:
    return GroupSpec(0, "full", TOKENS, blocks, 0, tuple(LayerPage(f"layer.{i}", (PLANE,)) for i in range(pages)))


def head(block: int, layer: int, number: int) -> bytes:
    places = itertools.product(range(TOKENS), (0, 0x80), range(HEAD_SIZE))
    return bytes(kv | block << 4 | layer << 3 | number << 2 | token << 1 | element for token, kv, element in places)


def page(block: int, layer: int) -> bytes:
    return head(block, layer, 0) + head(block, layer, 1)


def test_golden_bytes() -> None:
    assert canonical.assemble([[[page(b, layer)] for layer in range(2)] for b in range(2)]) == GOLDEN
    assert canonical.checksum(GOLDEN) == GOLDEN_CHECKSUM == xxhash.xxh3_64_intdigest(GOLDEN)
    assert canonical.checksum(memoryview(bytearray(GOLDEN))) == GOLDEN_CHECKSUM
    assert ModelSpec((spec(2),)).chunk_bytes(0) == len(GOLDEN)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_share_lies_where_the_packing_says(ranks: int) -> None:
    for rank in range(ranks):
        packing = GroupPacking(spec(2), rank, ranks)
        assert packing.chunk_bytes == len(GOLDEN)
        starts = packing.block_offsets(np.array([100, 100]), np.array([0, 1])) - 100
        for block, layer in itertools.product(range(2), range(2)):
            (share,) = packing.shares[layer]
            at = int(starts[block]) + share.offset
            heads = range(2) if ranks == 1 else [rank * 2 // ranks]
            assert GOLDEN[at : at + share.nbytes] == b"".join(head(block, layer, number) for number in heads)


def test_a_chunk_of_n_blocks_is_n_chunks_of_one_block() -> None:
    blocks = [[[page(b, layer)] for layer in range(2)] for b in range(2)]
    assert canonical.assemble(blocks) == b"".join(canonical.assemble([block]) for block in blocks)
    one, two = GroupPacking(spec(1), 0, 1), GroupPacking(spec(2), 0, 1)
    zero = np.array([0])
    assert one.shares == two.shares
    assert one.block_offsets(np.array([one.chunk_bytes]), zero) == two.block_offsets(zero, np.array([1]))


def test_the_ranks_are_the_heads_of_an_opaque_page() -> None:
    whole = canonical.assemble([[[b"rank 0" + b"rank 1"]]])
    group = GroupSpec(0, "full", TOKENS, 1, 0, (LayerPage.opaque("a", 6, ranks=2),))
    for rank in range(2):
        ((share,),) = GroupPacking(group, rank, 2).shares
        assert whole[share.offset : share.offset + share.nbytes] == b"rank %d" % rank
    assert ModelSpec((group,), 2).opaque_layers == ("a",)
    assert ModelSpec((spec(1),), 2).opaque_layers == ()
