"""How the kernels of this package are compiled, and kept on disk between processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

#: An integer within a kernel, of whatever width.
Int = Any

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])

# With the GIL held: a kernel takes microseconds, and to get the GIL back from a thread that computes takes five
# milliseconds.
# Without Numba's runtime a kernel cannot allocate, and counts no references: with it, each array that a loop hands to
# an inlined kernel costs two atomic operations, which made these loops ten times slower.
_OPTIONS: dict[str, Any] = {"nogil": False, "_nrt": False}


def _digest_of_sources() -> str:
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _digest_of_sources()


def jit(kernel: _Kernel) -> _Kernel:
    """``kernel``, compiled when it is first called with each combination of types. It must not allocate.

    Numba looks at a kernel's own file only to see whether what it has on disk is of today. Kernels call those of other
    files here, so the name under which each is kept says what all of them were.
    """
    kernel.__qualname__ = f"{kernel.__qualname__}-{_SOURCES}"
    try:
        compiled: _Kernel = numba.njit(cache=True, **_OPTIONS)(kernel)
    except RuntimeError:  # no directory that can be written
        compiled = numba.njit(**_OPTIONS)(kernel)
    return compiled


def inlined(kernel: _Kernel) -> _Kernel:
    """``kernel``, for use in other kernels: a part of each of them."""
    compiled: _Kernel = numba.njit(inline="always", **_OPTIONS)(kernel)
    return compiled
