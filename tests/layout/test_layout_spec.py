"""Sizes and windows of groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import UnsupportedError
from tierkv.layout.spec import GroupSpec, LayerPage, ModelSpec, Plane

PAGES = (LayerPage("a", (Plane("kv", 2, 3, 4), Plane("scales", 2, 3, 4))), LayerPage.opaque("b", 8, ranks=2))


def group(kind: str = "full", window: int = 0, pages: tuple[LayerPage, ...] = PAGES) -> GroupSpec:
    return GroupSpec(2, kind, tokens_per_block=16, blocks_per_chunk=4, window=window, pages=pages)


def test_sizes() -> None:
    spec = ModelSpec((group(), group(pages=PAGES[:1])), ranks=2)
    assert spec.groups[0].tokens_per_chunk == 64
    assert spec.groups[0].block_bytes == 64
    assert list(map(str, spec.groups[0].pages)) == ["kv[2][3][4]+scales[2][3][4]", "opaque[2][1][8]"]
    assert [spec.chunk_bytes(i) for i in (0, 1)] == [4 * 64, 4 * 48]


@given(
    kind=st.sampled_from(["full", "mla", "sliding_window", "chunked_local"]),
    window=st.integers(1, 40),
    at=st.integers(0, 200),
)
def test_the_first_needed_token_is_the_first_that_is_attended_to(kind: str, window: int, at: int) -> None:
    def attends(token: int) -> bool:
        if kind == "sliding_window":
            return token > at - window  # window - 1 tokens before it, and itself
        if kind == "chunked_local":
            return token // window == at // window
        return True

    windowed = kind in ("sliding_window", "chunked_local")
    spec = group(kind, window if windowed else 0)
    assert spec.first_needed_token(at) == next(token for token in range(at + 1) if attends(token))


def test_of_states_the_block_that_ends_at_the_boundary_is_needed() -> None:
    spec = GroupSpec(0, "state", 16, 1, 0, PAGES)
    assert [spec.first_needed_token(16 * n) for n in range(4)] == [0, 0, 16, 32]
    assert spec.windowed and not group().windowed
    with pytest.raises(ValueError, match="one block, not 4"):
        group("state")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'mamba'; known: full"):
        group("mamba")
    for kind, window in (("full", 4), ("mla", 4), ("sliding_window", 0), ("chunked_local", 0)):
        with pytest.raises(ValueError, match="window"):
            group(kind, window)
    for pages in ((), (LayerPage("a", ()),), (LayerPage.opaque("a", 0),)):
        with pytest.raises(ValueError, match="page"):
            group(pages=pages)
    with pytest.raises(ValueError, match="ranks"):
        ModelSpec((group(),), ranks=0)
