"""Copies between a CUDA device and the host region, by streams and events.

This engine has never run on a GPU: it is right by construction only, and the contract tests skip it where there is
none. Everything that decides which bytes move is shared with the CPU engine or tested on CPU tensors.

One stream a direction, so that stores and loads overlap each other and the computation. ``submit`` records an event on
the stream that is current for the caller; the direction's thread makes its own stream wait for that event, enqueues
the copies, and waits for an event behind them. Enqueueing costs some microseconds a page, which is why it happens on
that thread and not in ``submit``.

The region is registered with the driver (page-locked), since only then copies are asynchronous and at full speed.
That takes seconds for 10 GB, so it is done in pieces in the background (``tierkv.transfer.pin``), and no copy crosses
from one piece to the next. Copies of what is not registered, or cannot be, still are right, only slower: see
``registered_bytes``.

``Tensor.record_stream`` is not needed: it keeps the allocator from reusing a tensor's memory while another stream still
works on it. The only device tensors here are views of the KV cache, which outlives this engine, and no temporary is
made: both sides of each copy are contiguous bytes of the same dtype, so it is one ``cudaMemcpyAsync``. That blocks of
the cache are not reused too early is the caller's part (``wait``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tierkv.errors import TransferError
from tierkv.transfer.engine import DeviceGroup, HostMemory, checked_host_offsets
from tierkv.transfer.fifo import FifoEngine
from tierkv.transfer.pin import PIECE_BYTES, Pinner, cut
from tierkv.transfer.plan import Run, Transfer, runs

# cudaError_t, where a value has its own meaning for us.
_SUCCESS = 0
_ALREADY_REGISTERED = 712


class CudaCopyEngine(FifoEngine):
    """Copies page by page, with runs of blocks that touch on both sides merged.

    Thread safety: as ``CopyEngine``; ``registered_bytes`` may be read by any thread.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory, *, piece_bytes: int = PIECE_BYTES) -> None:
        """
        Args:
            piece_bytes: of the region, registered at once; a multiple of the page size.
        """
        self._device = groups[0].device
        self._host = torch.frombuffer(region.view, dtype=torch.int8)
        # One dtype on both sides: a copy that converts would need a temporary.
        self._pages = [[page.view(torch.int8) for page in group.pages] for group in groups]
        self._piece_bytes = piece_bytes
        with torch.cuda.device(self._device):
            self._streams = {store: _new_stream() for store in (True, False)}
        self._pinner = Pinner(region, self._register, self._unregister, piece_bytes=piece_bytes)
        super().__init__(groups, region)

    @property
    def registered_bytes(self) -> int:
        """How much of the region this engine has page-locked so far; what others have, ``close`` does not undo."""
        return self._pinner.registered_bytes

    def close(self) -> None:
        was_closed = self._closed
        super().close()  # both threads have ended: no copy runs any more
        if was_closed:
            return
        self._pinner.close()
        self._host = torch.empty(0, dtype=torch.int8)  # the view of the region is given back

    def _begin(self) -> torch.cuda.Event:
        event = _new_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _copy(self, transfer: Transfer, begun: torch.cuda.Event) -> tuple[int, float]:
        plan = self._plan(transfer)  # everything is checked before the first byte moves
        stream = self._streams[transfer.store]
        start, end = _new_event(), _new_event()
        nbytes = 0
        # Inference mode is a thread's own; without it, a KV cache that was allocated in it must not be written.
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(begun)
            start.record(stream)
            try:
                for page, page_runs in plan:
                    nbytes += copy_runs(page, self._host, page_runs, self._piece_bytes, to_host=transfer.store)
            finally:
                # Also after an error: what was enqueued before it must not move bytes after the report.
                end.record(stream)
                end.synchronize()
        return nbytes, start.elapsed_time(end) / 1000

    def _plan(self, transfer: Transfer) -> list[tuple[torch.Tensor, list[Run]]]:
        """For each page of each group, which runs to copy."""
        plan = []
        for copies in transfer.copies:
            host_offsets = checked_host_offsets(copies, self.groups, self.region.size)
            for page, offsets in zip(self._pages[copies.group], host_offsets.T, strict=True):
                touching = page.stride(0) == page.shape[1]
                plan.append((page, runs(copies.blocks, offsets, int(page.shape[1]), touching)))
        return plan

    # On the pinning thread. An error that the runtime remembers there is found by nobody.

    def _register(self, address: int, nbytes: int) -> bool:
        with torch.cuda.device(self._device):
            code = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if code not in (_SUCCESS, _ALREADY_REGISTERED):
            raise TransferError(f"cudaHostRegister: CUDA error {code}")
        return code == _SUCCESS

    def _unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            code = int(_cudart().cudaHostUnregister(address))
        if code != _SUCCESS:
            raise TransferError(f"cudaHostUnregister: CUDA error {code}")


def copy_runs(
    page: torch.Tensor, host: torch.Tensor, page_runs: Sequence[Run], piece_bytes: int, *, to_host: bool
) -> int:
    """Enqueue the copies of ``page_runs`` on the current stream; returns the bytes that they move.

    Args:
        page: ``(num_blocks, page_bytes)`` int8. host: ``(region size,)`` int8.
        piece_bytes: no single copy crosses a multiple of this in ``host``.
    """
    page_bytes = int(page.shape[1])
    nbytes = 0
    for run in page_runs:
        size = run.blocks * page_bytes
        # A run of several blocks has no gaps (see ``runs``), so it can be viewed as one piece.
        several = page[run.first : run.first + run.blocks]
        device_bytes = several.view(size) if run.blocks > 1 else page[run.first]
        bounds = cut(run.host_offset, run.host_offset + size, piece_bytes)
        for start, end in itertools.pairwise(bounds):
            host_bytes = host[start:end]
            part = device_bytes[start - run.host_offset : end - run.host_offset] if len(bounds) > 2 else device_bytes
            target, source = (host_bytes, part) if to_host else (part, host_bytes)
            target.copy_(source, non_blocking=True)
        nbytes += size
    return nbytes


# torch has no types for these.


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _new_event() -> torch.cuda.Event:
    # blocking: whoever waits sleeps, rather than spinning on a processor that the engine needs.
    return torch.cuda.Event(enable_timing=True, blocking=True)


def _cudart() -> Any:
    return torch.cuda.cudart()
