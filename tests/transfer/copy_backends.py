"""The copy engines that can run here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")

from tierkv.host.region import Region  # noqa: E402
from tierkv.transfer.engine import CopyEngine, DeviceGroup, make_engine  # noqa: E402

#: What the CUDA engine registers at once.
PIECE_BYTES = 1 << 12
NAMES = ("cpu", "cpu-threads", "cuda", "cuda-stand-in")


class Backend(NamedTuple):
    """Where the device memory is, and what makes the engine."""

    device: str
    make: Callable[[Sequence[DeviceGroup], Region], CopyEngine]


def open_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Each engine on its device; and the CUDA engine's own code on CPU tensors, where streams and events do nothing.

    The stand-in shows that the code runs and moves the right bytes, not that it waits for a device as it should.
    """
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here (torch.cuda is not available)")
    if name == "cpu-threads":
        return Backend("cpu", three_threads)
    if name != "cuda-stand-in":
        return Backend(name, make_engine)
    replace_cuda(monkeypatch)
    return Backend("cpu", cuda_in_small_pieces)


def three_threads(groups: Sequence[DeviceGroup], region: Region) -> CopyEngine:
    """More than most transfers of these tests have blocks for."""
    from tierkv.transfer.cpu import CpuCopyEngine

    return CpuCopyEngine(groups, region, threads=3)


def cuda_in_small_pieces(groups: Sequence[DeviceGroup], region: Region) -> CopyEngine:
    """Chunks of these tests cross from one piece to the next."""
    from tierkv.transfer.cuda import CudaCopyEngine

    return CudaCopyEngine(groups, region, piece_bytes=PIECE_BYTES)


def replace_cuda(
    monkeypatch: pytest.MonkeyPatch, register: Callable[[int, int, int], int] = lambda address, nbytes, flags: 0
) -> Mock:
    """Make the CUDA engine run on CPU tensors; returns the stand-in for the CUDA runtime.

    Args:
        register: ``cudaHostRegister``; returns a ``cudaError_t``.
    """
    from tierkv.transfer import cuda

    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    event = Mock(**{"elapsed_time.return_value": 0.0})
    runtime = Mock(**{"cudaHostRegister.side_effect": register, "cudaHostUnregister.return_value": 0})
    for name, stand_in in (("_new_stream", Mock()), ("_new_event", event), ("_cudart", runtime)):
        monkeypatch.setattr(cuda, name, lambda stand_in=stand_in: stand_in)
    return runtime
