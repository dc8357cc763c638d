"""The copy kernels against slow twins, compiled and not."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.layout import offsets


def slow_descriptors(
    blocks: list[int], host: list[list[int]], bases: list[int], strides: list[int], sizes: list[int], host_base: int
) -> list[tuple[int, int, int]]:
    """Every page as one copy, then neighbours merged, one at a time."""
    copies = []
    for block, row in zip(blocks, host, strict=True):
        for base, stride, size, at in zip(bases, strides, sizes, row, strict=True):
            copies.append((base + block * stride, host_base + at, size))
    merged: list[tuple[int, int, int]] = []
    for device, at, size in copies:
        if merged and merged[-1][0] + merged[-1][2] == device and merged[-1][1] + merged[-1][2] == at:
            first = merged.pop()
            merged.append((first[0], first[1], first[2] + size))
        else:
            merged.append((device, at, size))
    return merged


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), count=st.integers(0, 6))
def test_descriptors_are_those_of_the_slow_twin(data: st.DataObject, sizes: list[int], count: int) -> None:
    pages = len(sizes)
    strides = [size + data.draw(st.integers(0, 1)) for size in sizes]
    bases = data.draw(st.lists(st.integers(0, 4), min_size=pages, max_size=pages))
    blocks = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    row = st.lists(st.integers(0, 8), min_size=pages, max_size=pages)
    host = data.draw(st.lists(row, min_size=count, max_size=count))
    out = np.zeros((3, count * pages), np.int64)
    places = np.array(host, np.int64).reshape(count, pages)
    device = [np.array(numbers, np.int64) for numbers in (bases, strides, sizes)]
    used = offsets.copy_descriptors(np.array(blocks, np.int64), places, device[0], device[1], device[2], 1000, out)
    assert list(zip(*out[:, :used].tolist(), strict=True)) == slow_descriptors(
        blocks, host, bases, strides, sizes, 1000
    )


@pytest.mark.parametrize(("strides", "merged"), [([8], 1), ([12], 4)])
def test_blocks_that_touch_on_both_sides_are_one_copy(strides: list[int], merged: int) -> None:
    blocks, host = np.arange(4), np.arange(4).reshape(4, 1) * 8
    out = np.zeros((3, 4), np.int64)
    size = np.array([8])
    assert offsets.copy_descriptors(blocks, host, np.array([64]), np.array(strides), size, 0, out) == merged


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
