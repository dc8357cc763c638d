"""Copies between a CUDA device and the host region, by streams and events.

This engine has never run on a GPU: it is right by construction only, and the contract tests skip it where there is
none. Everything that decides which bytes move is shared with the CPU engine or tested on CPU tensors.

One stream a direction, so that stores and loads overlap each other and the computation. ``submit`` records an event on
the stream that is current for the caller; the direction's thread makes its own stream wait for that event, enqueues
the copies, and waits for an event behind them. Enqueueing costs some microseconds a page, which is why it happens on
that thread and not in ``submit``.

The region is registered with the driver (page-locked), since only then copies are asynchronous and at full speed.
Where that fails, copies still are right, only slower: see ``registered``.

``Tensor.record_stream`` is not needed: it keeps the allocator from reusing a tensor's memory while another stream still
works on it. The only device tensors here are views of the KV cache, which outlives this engine, and no temporary is
made: both sides of each copy are contiguous bytes of the same dtype, so it is one ``cudaMemcpyAsync``. That blocks of
the cache are not reused too early is the caller's part (``wait``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from tierkv.transfer.engine import DeviceGroup, HostMemory, checked_host_offsets
from tierkv.transfer.fifo import FifoEngine
from tierkv.transfer.plan import Run, Transfer, runs

_logger = logging.getLogger(__name__)

# cudaError_t, where a value has its own meaning for us.
_SUCCESS = 0
_ALREADY_REGISTERED = 712


class CudaCopyEngine(FifoEngine):
    """Copies page by page, with runs of blocks that touch on both sides merged.

    registered: whether this engine has page-locked the region (and will undo it in ``close``).

    Thread safety: as ``CopyEngine``.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory) -> None:
        self._device = groups[0].device
        self._host = torch.frombuffer(region.view, dtype=torch.int8)
        # One dtype on both sides: a copy that converts would need a temporary.
        self._pages = [[page.view(torch.int8) for page in group.pages] for group in groups]
        with torch.cuda.device(self._device):
            self._streams = {store: _new_stream() for store in (True, False)}
            self.registered = _register(region, self._device)
        super().__init__(groups, region)

    def close(self) -> None:
        was_closed = self._closed
        super().close()  # both threads have ended: no copy runs any more
        if was_closed:
            return
        if self.registered:
            self.registered = False
            with torch.cuda.device(self._device):
                _cudart().cudaHostUnregister(self.region.address)
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
                    nbytes += copy_runs(page, self._host, page_runs, to_host=transfer.store)
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


def copy_runs(page: torch.Tensor, host: torch.Tensor, page_runs: Sequence[Run], *, to_host: bool) -> int:
    """Enqueue the copies of ``page_runs`` on the current stream; returns the bytes that they move.

    Args:
        page: ``(num_blocks, page_bytes)`` int8. host: ``(region size,)`` int8.
    """
    page_bytes = int(page.shape[1])
    nbytes = 0
    for run in page_runs:
        size = run.blocks * page_bytes
        # A run of several blocks has no gaps (see ``runs``), so it can be viewed as one piece.
        several = page[run.first : run.first + run.blocks]
        device_bytes = several.view(size) if run.blocks > 1 else page[run.first]
        host_bytes = host[run.host_offset : run.host_offset + size]
        target, source = (host_bytes, device_bytes) if to_host else (device_bytes, host_bytes)
        target.copy_(source, non_blocking=True)
        nbytes += size
    return nbytes


def _register(region: HostMemory, device: torch.device) -> bool:
    """Page-lock the region; whether that was done here."""
    code = int(_cudart().cudaHostRegister(region.address, region.size, 0))
    if code == _SUCCESS:
        return True
    if code != _ALREADY_REGISTERED:
        _logger.warning(
            "the host region of %d bytes cannot be page-locked (CUDA error %d): copies will be slower; "
            "check the limit on locked memory (ulimit -l) and the memory that is free",
            region.size,
            code,
        )
    # The runtime remembers the error and the next kernel launch, of anybody, would report it: launch one here.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


# torch has no types for these.


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _new_event() -> torch.cuda.Event:
    # blocking: whoever waits sleeps, rather than spinning on a processor that the engine needs.
    return torch.cuda.Event(enable_timing=True, blocking=True)


def _cudart() -> Any:
    return torch.cuda.cudart()
