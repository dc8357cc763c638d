"""Kernels: which bytes a copy moves, and the moving.

Addresses are raw: nothing here checks them. Whoever calls has made sure that every range lies in memory that is mapped
and stays so (``tierkv.transfer.engine`` validates a transfer first).

Each kernel is a plain loop, compiled at the bottom of the file; ``warm_up`` compiles for the types that are used, so
that no running step pays for it. With ``NUMBA_DISABLE_JIT=1`` they run as they stand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np

from tierkv.layout.mapping import MAX_DIMS
from tierkv.types import Offsets

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])

# Addresses are passed as integers of a pointer's size: compiled code does not turn an integer into a void pointer.
# A handle of its own, so that these types are not set for everybody else's memcpy. C code releases no GIL by itself:
# compiled, the whole loop runs without it; not compiled, ctypes releases it for each call.
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
_memcpy.restype = ctypes.c_size_t


def _copy_many(src: Offsets, dst: Offsets, sizes: Offsets) -> int:
    """memcpy ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``, for each i in order; returns the bytes copied.

    All three are ``(n,)`` int64. A source and its destination do not overlap. Runs without the GIL.
    """
    total = 0
    for i in range(sizes.shape[0]):
        _memcpy(dst[i], src[i], sizes[i])
        total += sizes[i]
    return total


def _copy_descriptors(
    blocks: Offsets, starts: Offsets, table: Offsets, host_base: int, store: bool, out: Offsets
) -> int:
    """The copies that move ``n`` blocks, with neighbours that touch on both sides merged.

    Args:
        blocks: ``(n,)`` int64 device block ids. starts: ``(n,)`` int64, where each begins in the host region.
        table: ``(pieces, 15)`` int64, from ``mapping.as_table``.
        host_base: the address of the host region.
        store: of pieces that several ranks hold, only this rank's blocks: they take turns.
        out: ``(3, n × runs of all pieces)`` int64, receives device addresses, host addresses and sizes.

    Returns:
        how many columns of ``out`` are used. Copies come in the order of ``blocks``, then of pieces, then of runs.
    """
    count = 0
    for i in range(blocks.shape[0]):
        for p in range(table.shape[0]):
            if store and blocks[i] % table[p, 14] != table[p, 13]:
                continue
            size = table[p, 12]
            device_0 = table[p, 0] + blocks[i] * table[p, 1]
            host_0 = host_base + starts[i] + table[p, 2]
            for a in range(table[p, 3]):
                device_1, host_1 = device_0 + a * table[p, 4], host_0 + a * table[p, 5]
                for b in range(table[p, 6]):
                    device_2, host_2 = device_1 + b * table[p, 7], host_1 + b * table[p, 8]
                    for c in range(table[p, 9]):
                        device, host = device_2 + c * table[p, 10], host_2 + c * table[p, 11]
                        last = count - 1
                        if count > 0 and out[0, last] + out[2, last] == device and out[1, last] + out[2, last] == host:
                            out[2, last] += size
                        else:
                            out[0, count] = device
                            out[1, count] = host
                            out[2, count] = size
                            count += 1
    return count


def warm_up() -> None:
    """Compile every kernel. Takes a second or two, once a process; again it takes no time."""
    one = np.ones(1, np.int64)
    source, target = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    zero, out = np.zeros(1, np.int64), np.zeros((3, 1), np.int64)
    copy_descriptors(zero, zero, np.ones((1, 6 + 3 * MAX_DIMS), np.int64), 0, True, out)
    copy_many(np.array([source.ctypes.data]), np.array([target.ctypes.data]), one)
    assert target[0] == 1


def _jit(kernel: _Kernel) -> _Kernel:
    compiled: _Kernel = numba.njit(nogil=True)(kernel)
    return compiled


# Not cached on disk: code that holds a C function's address cannot be, and the directory may not be writable.
copy_many = _jit(_copy_many)
copy_descriptors = _jit(_copy_descriptors)
