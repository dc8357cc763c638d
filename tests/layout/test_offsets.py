"""The copy kernels against slow twins, compiled and not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.layout import offsets
from tierkv.layout.mapping import Dim, Piece, as_table


def slow_descriptors(
    blocks: list[int], starts: list[int], pieces: list[Piece], host_base: int, store: bool
) -> list[tuple[int, int, int]]:
    """Every run as one copy, then neighbours merged, one at a time."""
    copies = []
    for block, start in zip(blocks, starts, strict=True):
        for piece in pieces:
            if store and block % piece.replicas != piece.replica:
                continue
            for turns in itertools.product(*(range(dim.turns) for dim in piece.dims)):
                device = piece.address + block * piece.block_stride
                host = host_base + start + piece.offset
                for turn, dim in zip(turns, piece.dims, strict=True):
                    device, host = device + turn * dim.device, host + turn * dim.host
                copies.append((device, host, piece.nbytes))
    merged: list[tuple[int, int, int]] = []
    for device, at, size in copies:
        if merged and merged[-1][0] + merged[-1][2] == device and merged[-1][1] + merged[-1][2] == at:
            first = merged.pop()
            merged.append((first[0], first[1], first[2] + size))
        else:
            merged.append((device, at, size))
    return merged


DIMS = st.lists(st.builds(Dim, st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)), max_size=3).map(tuple)
PIECES = st.integers(1, 3).flatmap(
    lambda replicas: st.builds(
        Piece,
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 8),
        DIMS,
        st.integers(1, 3),
        st.integers(0, replicas - 1),
        st.just(replicas),
    )
)
PLACES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), max_size=6)


@settings(max_examples=300, deadline=None)
@given(places=PLACES, pieces=st.lists(PIECES, min_size=1, max_size=3), store=st.booleans())
def test_descriptors_are_those_of_the_slow_twin(
    places: list[tuple[int, int]], pieces: list[Piece], store: bool
) -> None:
    blocks, starts = [b for b, _ in places], [s for _, s in places]
    out = np.zeros((3, len(places) * sum(piece.runs for piece in pieces)), np.int64)
    arrays = np.array(blocks, np.int64), np.array(starts, np.int64), as_table(pieces)
    used = offsets.copy_descriptors(*arrays, 1000, store, out)
    found = list(zip(*out[:, :used].tolist(), strict=True))
    assert found == slow_descriptors(blocks, starts, pieces, 1000, store)


@pytest.mark.parametrize(("stride", "merged"), [(8, 1), (12, 4)])
def test_blocks_that_touch_on_both_sides_are_one_copy(stride: int, merged: int) -> None:
    out = np.zeros((3, 4), np.int64)
    table = as_table([Piece(64, stride, 0, (), 8, 0, 1)])
    assert offsets.copy_descriptors(np.arange(4), np.arange(4) * 8, table, 0, True, out) == merged


@settings(max_examples=100, deadline=None)
@given(copies=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.integers(0, 10)), max_size=8))
def test_copy_many_is_that_of_the_slow_twin(copies: list[tuple[int, int, int]]) -> None:
    source = np.arange(100, dtype=np.uint8)
    target, expected = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    for src, dst, size in copies:
        expected[dst : dst + size] = source[src : src + size]
    src_at, dst_at, sizes = np.array(copies, np.int64).reshape(-1, 3).T.copy()
    total = offsets.copy_many(source.ctypes.data + src_at, target.ctypes.data + dst_at, sizes)
    assert total == sizes.sum()
    assert np.array_equal(target, expected)


def test_the_kernels_run_uncompiled_too() -> None:
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        pytest.skip("this run is not compiled itself")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_warm_up_compiles_what_is_used() -> None:
    offsets.warm_up()
    for kernel in (offsets.copy_many, offsets.copy_descriptors):
        signatures = getattr(kernel, "signatures", None)
        if signatures is None:
            pytest.skip("compilation is off")
        assert signatures
