"""The byte format of a chunk: golden bytes, written out by hand. A change here is a new format version."""

from __future__ import annotations

import itertools

import numpy as np
import xxhash

from tierkv.layout import canonical
from tierkv.layout.packing import GroupPacking
from tierkv.layout.spec import GroupSpec, LayerPage, ModelSpec

HEADS, TOKENS, HEAD_SIZE = 2, 2, 2  # one byte an element
PAGE = HEADS * TOKENS * 2 * HEAD_SIZE  # K and V
# Each byte names what it is: 0x80 for a value, then block, layer, head, token and element, a bit each.
GOLDEN = bytes.fromhex(
    "0001808102038283 0405848506078687"  # block 0, layer 0: head 0 (token 0: K K V V, token 1), head 1
    "08098889 0a0b8a8b 0c0d8c8d 0e0f8e8f"  # block 0, layer 1
    "10119091 12139293 14159495 16179697"  # block 1, layer 0
    "18199899 1a1b9a9b 1c1d9c9d 1e1f9e9f"  # block 1, layer 1
)
GOLDEN_CHECKSUM = 0x5733CA143A8CE6D8


def spec(blocks: int, pages: int = 2) -> GroupSpec:
    return GroupSpec(0, "full", TOKENS, blocks, 0, tuple(LayerPage(f"layer.{i}", PAGE) for i in range(pages)))


def page(block: int, layer: int) -> bytes:
    places = itertools.product(range(HEADS), range(TOKENS), (0, 0x80), range(HEAD_SIZE))
    return bytes(kv | block << 4 | layer << 3 | head << 2 | token << 1 | element for head, token, kv, element in places)


def test_golden_bytes() -> None:
    assert canonical.assemble([[[page(b, layer) for layer in range(2)] for b in range(2)]]) == GOLDEN
    assert canonical.checksum(GOLDEN) == GOLDEN_CHECKSUM == xxhash.xxh3_64_intdigest(GOLDEN)
    assert canonical.checksum(memoryview(bytearray(GOLDEN))) == GOLDEN_CHECKSUM
    assert ModelSpec((spec(2),)).chunk_bytes(0) == len(GOLDEN)


def test_each_page_lies_where_the_packing_says() -> None:
    packing = GroupPacking(spec(2), 0, 1)
    where = packing.host_offsets(np.array([100, 100]), np.array([0, 1])) - 100
    for block, layer in itertools.product(range(2), range(2)):
        at = int(where[block, layer])
        assert GOLDEN[at : at + PAGE] == page(block, layer)


def test_a_chunk_of_n_blocks_is_n_chunks_of_one_block() -> None:
    blocks = [[page(b, layer) for layer in range(2)] for b in range(2)]
    assert canonical.assemble([blocks]) == b"".join(canonical.assemble([[block]]) for block in blocks)
    one, two = GroupPacking(spec(1), 0, 1), GroupPacking(spec(2), 0, 1)
    zero = np.array([0])
    single = one.host_offsets(np.array([one.chunk_bytes]), zero)
    assert np.array_equal(two.host_offsets(zero, np.array([1])), single)


def test_ranks_are_outermost() -> None:
    whole = canonical.assemble([[[page(b, 0)] for b in range(2)], [[page(b, 1)] for b in range(2)]])
    for rank, block in itertools.product(range(2), range(2)):
        packing = GroupPacking(spec(2, pages=1), rank, 2)
        at = int(packing.host_offsets(np.array([0]), np.array([block]))[0, 0])
        assert whole[at : at + PAGE] == page(block, rank)
        assert packing.chunk_bytes == len(whole)


def test_the_layout_names_the_topology_where_the_bytes_depend_on_it() -> None:
    assert canonical.layout_name(ModelSpec((spec(2),))) == "canonical-1"
    assert canonical.layout_name(ModelSpec((spec(2),), ranks=4)) == "topology:v1/tp4"
