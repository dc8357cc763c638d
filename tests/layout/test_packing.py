"""Pages in a chunk: no two share a byte, and together they fill it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.layout.packing import GroupPacking
from tierkv.layout.spec import GroupSpec, LayerPage


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    blocks=st.integers(1, 4),
    ranks=st.integers(1, 3),
    slot_offset=st.integers(0, 1 << 40),
)
def test_the_pages_of_all_ranks_tile_the_chunk(sizes: list[int], blocks: int, ranks: int, slot_offset: int) -> None:
    group = GroupSpec(0, "full", 16, blocks, 0, tuple(LayerPage(str(i), size) for i, size in enumerate(sizes)))
    taken = []
    for rank in range(ranks):
        packing = GroupPacking(group, rank, ranks)
        assert packing.chunk_bytes == ranks * blocks * sum(sizes)
        offsets = packing.host_offsets(np.full(blocks, slot_offset), np.arange(blocks))
        assert offsets.shape == (blocks, len(sizes)) and offsets.dtype == np.int64
        taken += [(int(at), size) for row in offsets for at, size in zip(row, sizes, strict=True)]
    taken.sort()
    assert taken[0][0] == slot_offset
    ends = [at + size for at, size in taken]
    assert [at for at, _ in taken[1:]] == ends[:-1]
    assert ends[-1] == slot_offset + ranks * blocks * sum(sizes)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    group = GroupSpec(0, "full", 16, 1, 0, (LayerPage("a", 8),))
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank"):
            GroupPacking(group, rank, 2)
