"""Strided views against their canonical order: a piece moves the bytes that a plain loop over indices moves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.errors import TransferError, UnsupportedError
from tierkv.layout.mapping import Dim, View, as_table, fold, pieces_of
from tierkv.layout.packing import Share
from tierkv.layout.spec import Plane


def strided(shape: tuple[int, ...], order: tuple[int, ...], padding: int) -> tuple[int, ...]:
    """Strides of ``shape`` with the dimensions kept in ``order``, and ``padding`` bytes behind each of the first."""
    strides, size = [0] * len(shape), 1
    for position, dim in enumerate(reversed(order)):
        strides[dim] = size + (padding if position == len(order) - 1 else 0)
        size = strides[dim] * shape[dim]
    return tuple(strides)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), counts=st.lists(st.integers(1, 3), min_size=1, max_size=3), cell=st.integers(1, 3))
def test_the_runs_are_those_of_a_plain_loop(data: st.DataObject, counts: list[int], cell: int) -> None:
    order = (*data.draw(st.permutations(range(len(counts) + 1))), len(counts) + 1)
    shape = (3, *counts, cell)
    strides = strided(shape, order, data.draw(st.integers(0, 2)))
    share = Share(100, counts[0], Plane("kv", counts[0], math.prod(counts[1:]), cell), 0, 1)
    (piece,) = pieces_of(share, [View(1000, shape, strides)])
    moved = []
    for turns in itertools.product(*(range(dim.turns) for dim in piece.dims)):
        device = piece.address + sum(t * dim.device for t, dim in zip(turns, piece.dims, strict=True))
        host = piece.offset + sum(t * dim.host for t, dim in zip(turns, piece.dims, strict=True))
        moved += [(device + i, host + i) for i in range(piece.nbytes)]
    plain = [
        1000 + sum(i * s for i, s in zip(index, strides[1:], strict=True))
        for index in itertools.product(*map(range, shape[1:]))
    ]
    assert sorted(moved, key=lambda pair: pair[1]) == list(zip(plain, range(100, 100 + len(plain)), strict=True))
    assert piece.block_stride == strides[0]
    assert piece.runs * piece.nbytes == len(plain)


def test_what_both_sides_agree_on_is_one_run() -> None:
    heads = Share(0, 4, Plane("kv", 4, 16, 8), 0, 1)
    (whole,) = pieces_of(heads, [View(0, (9, 4, 16, 8), (512, 128, 8, 1))])
    assert (whole.dims, whole.nbytes) == ((), 512)
    (tokens_outermost,) = pieces_of(heads, [View(0, (9, 4, 16, 8), (512, 8, 32, 1))])
    assert (tokens_outermost.dims, tokens_outermost.nbytes) == ((Dim(4, 8, 128), Dim(16, 32, 8)), 8)
    (kernel_blocks,) = pieces_of(heads, [View(0, (9, 4, 2, 8, 8), (512, 64, 256, 8, 1))])
    assert (kernel_blocks.dims, kernel_blocks.nbytes) == ((Dim(4, 64, 128), Dim(2, 256, 64)), 64)


def test_loops_that_continue_each_other_are_one() -> None:
    assert fold([Dim(2, 60, 12), Dim(3, 20, 4)], 1) == ((Dim(6, 20, 4),), 1)
    assert fold([Dim(2, 60, 16), Dim(3, 20, 4)], 1) == ((Dim(2, 60, 16), Dim(3, 20, 4)), 1)
    assert fold([Dim(1, 7, 9), Dim(3, 4, 4)], 4) == ((), 12)
    assert fold([], 5) == ((), 5)


def test_keys_and_values_apart_are_two_pieces() -> None:
    share = Share(64, 2, Plane("kv", 2, 4, 6), 1, 2)
    keys, values = pieces_of(share, [View(0, (9, 2, 4, 4), (32, 16, 4, 1)), View(5000, (9, 2, 4, 2), (16, 8, 2, 1))])
    assert (keys.offset, keys.dims, keys.nbytes) == (64, (Dim(8, 4, 6),), 4)
    assert (values.offset, values.dims, values.nbytes) == (68, (Dim(8, 2, 6),), 2)
    assert {(piece.replica, piece.replicas) for piece in (keys, values)} == {(1, 2)}
    assert as_table([keys, values]).tolist() == [
        [0, 32, 64, 1, 0, 0, 1, 0, 0, 8, 4, 6, 4, 1, 2],
        [5000, 16, 68, 1, 0, 0, 1, 0, 0, 8, 2, 6, 2, 1, 2],
    ]


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((9, 2, 4, 5), (40, 20, 5, 1), "expected 6 together"),
        ((9, 2, 3, 6), (36, 18, 6, 1), "2 heads × 4 cells"),
        ((9, 2, 4, 6), (96, 48, 12, 2), "2 apart"),
        ((6,), (1,), "2 heads × 4 cells"),
    ],
)
def test_views_of_something_else_are_refused(shape: tuple[int, ...], strides: tuple[int, ...], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        pieces_of(Share(0, 2, Plane("kv", 2, 4, 6), 0, 1), [View(0, shape, strides)])


def test_too_many_loops_are_refused() -> None:
    shape = (1, 2, 2, 2, 2, 1)
    with pytest.raises(UnsupportedError, match="too many loops"):
        pieces_of(Share(0, 2, Plane("kv", 2, 8, 1), 0, 1), [View(0, shape, (0, 1, 2, 4, 8, 1))])
    assert np.array_equal(as_table([]).shape, (0, 15))
