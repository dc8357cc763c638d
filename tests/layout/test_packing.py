"""Shares of a chunk: no two of one rank share a byte, and all ranks' together fill it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import UnsupportedError
from tierkv.layout.packing import GroupPacking
from tierkv.layout.spec import GroupSpec, LayerPage, Plane

PLANES = st.builds(Plane, st.just("kv"), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.integers(1, 5))


@given(
    pages=st.lists(st.lists(PLANES, min_size=1, max_size=3), min_size=1, max_size=4),
    blocks=st.integers(1, 4),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_the_shares_of_all_ranks_tile_the_block(pages: list[list[Plane]], blocks: int, ranks: int) -> None:
    layers = tuple(LayerPage(str(i), tuple(planes)) for i, planes in enumerate(pages))
    group = GroupSpec(0, "full", 16, blocks, 0, layers)
    holders: list[list[tuple[int, int]]] = [[] for _ in range(group.block_bytes)]
    for rank in range(ranks):
        packing = GroupPacking(group, rank, ranks)
        assert packing.chunk_bytes == blocks * group.block_bytes
        for share in (share for page in packing.shares for share in page):
            for byte in range(share.offset, share.offset + share.nbytes):
                holders[byte].append((share.replica, share.replicas))
    # Each byte is on as many ranks as they say, and each of those has a turn of its own.
    for found in holders:
        assert {replicas for _, replicas in found} == {len(found)}
        assert sorted(replica for replica, _ in found) == list(range(len(found)))


def test_a_rank_that_does_not_exist_is_refused() -> None:
    group = GroupSpec(0, "full", 16, 1, 0, (LayerPage.opaque("a", 8, 2),))
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank"):
            GroupPacking(group, rank, 2)


def test_heads_that_cannot_be_spread_evenly_are_refused() -> None:
    for heads, ranks in ((3, 2), (2, 3), (4, 6)):
        group = GroupSpec(0, "full", 16, 1, 0, (LayerPage("a", (Plane("kv", heads, 16, 8),)),))
        with pytest.raises(UnsupportedError, match=f"{heads} heads on {ranks} ranks"):
            GroupPacking(group, 0, ranks)
