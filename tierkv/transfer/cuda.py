"""Copies between a CUDA device and the host region, by streams and events.

This engine has never run on a GPU: it is right by construction only, and the contract tests skip it where there is
none. Everything that decides which bytes move is shared with the CPU engine or tested on CPU tensors.

One stream a direction, so that stores and loads overlap each other and the computation. ``submit`` records an event on
the stream that is current for the caller; the direction's thread makes its own stream wait for that event, enqueues
the copies, and waits for an event behind them. Enqueueing costs some microseconds a copy, which is why it happens on
that thread and not in ``submit``. What is enqueued in which order, ``tierkv.transfer.order`` says; which copies these
are, and what is gathered on the device first, ``tierkv.transfer.staging``.

The region is registered with the driver (page-locked), since only then copies are asynchronous and at full speed.
That takes seconds for 10 GB, so it is done in pieces in the background (``tierkv.transfer.pin``), and no copy crosses
from one piece to the next. Copies of what is not registered, or cannot be, still are right, only slower: see
``registered_bytes``.

``Tensor.record_stream`` is not needed: it keeps the allocator from reusing a tensor's memory while another stream still
works on it. The device tensors here are views of the KV cache, which outlives this engine, and staging buffers, which
one stream alone uses: the one that they were allocated for. Both sides of each copy between the device and the host are
contiguous bytes of the same dtype, so that it is one ``cudaMemcpyAsync``. That blocks of the cache are not reused too
early is the caller's part (``wait``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tierkv.errors import TransferError
from tierkv.transfer import order
from tierkv.transfer.engine import DeviceGroup, HostMemory, checked_starts
from tierkv.transfer.fifo import FifoEngine
from tierkv.transfer.pin import PIECE_BYTES, Pinner, cut
from tierkv.transfer.plan import Run, Transfer, runs
from tierkv.transfer.staging import Planes, planes_of
from tierkv.types import Offsets

# cudaError_t, where a value has its own meaning for us.
_SUCCESS = 0
_ALREADY_REGISTERED = 712

#: Bytes that are staged at a time, in each direction; putting them in order takes as much again. A block is whole.
STAGED_BYTES = 32 << 20


class CudaCopyEngine(FifoEngine):
    """Copies whole runs of planes, or staged blocks; what touches on both sides is one copy.

    Thread safety: as ``CopyEngine``; ``registered_bytes`` may be read by any thread.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory, *, piece_bytes: int = PIECE_BYTES) -> None:
        """
        Args:
            piece_bytes: of the region, registered at once; a multiple of the page size.
        """
        self._device = groups[0].device
        self._host = torch.frombuffer(region.view, dtype=torch.int8)
        self._planes = [planes_of(group) for group in groups]
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
        # Everything is checked before the first byte moves.
        starts = [checked_starts(copies, self.groups, self.region.size) for copies in transfer.copies]
        moves = [
            _Moves(planes, *_turns(planes, copies.blocks, where, transfer.store), transfer.store)
            for copies, where in zip(transfer.copies, starts, strict=True)
            for planes in self._planes[copies.group]
        ]
        events = {order.BEGUN: begun, order.START: _new_event(), order.END: _new_event()}
        stream = self._streams[transfer.store]
        # Inference mode is a thread's own; without it, a KV cache that was allocated in it must not be written.
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(stream):
            ending = order.ending()
            operations = order.operations(transfer.store, [m.part for m in moves])
            try:
                for operation in operations[: -len(ending)]:
                    self._do(operation, moves, events, stream)
            finally:
                for operation in ending:
                    self._do(operation, moves, events, stream)
        return sum(m.nbytes for m in moves), events[order.START].elapsed_time(events[order.END]) / 1000

    def _do(
        self,
        operation: order.Operation,
        moves: Sequence[_Moves],
        events: dict[str, torch.cuda.Event],
        stream: torch.cuda.Stream,
    ) -> None:
        match operation:
            case order.Wait(event):
                stream.wait_event(events[event])
            case order.Record(event):
                events[event].record(stream)
            case order.Join(event):
                events[event].synchronize()
            case order.Moving(number, first, last):
                self._move(operation, moves[number], first, last)

    def _move(self, operation: order.Moving, moves: _Moves, first: int, last: int) -> None:
        """Enqueue one operation on the current stream."""
        planes, where = moves.planes, moves.starts[first:last]
        if isinstance(operation, order.Direct):
            assert planes.direct is not None
            for rows, offset in planes.direct:
                touching = rows.stride(0) == rows.shape[1]
                moves.nbytes += self._copy_rows(rows, moves.blocks, where + offset, touching, moves.store)
            return
        if moves.index is None:
            numbers = torch.from_numpy(np.array(moves.blocks))
            # From page-locked memory, whose allocator knows when it was read: else this thread would wait for that.
            numbers = numbers.pin_memory() if self._device.type == "cuda" else numbers
            moves.index = numbers.to(self._device, non_blocking=True)
        index = moves.index[first:last]
        if isinstance(operation, order.Gather):
            moves.rows = planes.gather(index)
        elif isinstance(operation, order.Fill):
            moves.rows = torch.empty((last - first, planes.nbytes), dtype=torch.int8, device=self._device)
        assert moves.rows is not None
        if isinstance(operation, order.Unload | order.Fill):
            rows_in_order = np.arange(last - first)
            for span in planes.spans:
                part = moves.rows[:, span.staged : span.staged + span.nbytes]
                moves.nbytes += self._copy_rows(
                    part, rows_in_order, where + span.offset, part.is_contiguous(), moves.store
                )
        elif isinstance(operation, order.Scatter):
            planes.scatter(moves.rows, index)
        if isinstance(operation, order.Unload | order.Scatter):
            moves.rows = None  # so that the next turn gets this memory again

    def _copy_rows(
        self, rows: torch.Tensor, numbers: Offsets, host_offsets: Offsets, touching: bool, store: bool
    ) -> int:
        found = runs(numbers, host_offsets, int(rows.shape[1]), touching)
        return copy_runs(rows, self._host, found, self._piece_bytes, to_host=store)

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


class _Moves:
    """Some planes of a transfer on their way: the blocks, where each begins in the region, and what is staged now."""

    def __init__(self, planes: Planes, blocks: Offsets, starts: Offsets, store: bool) -> None:
        at_a_time = 0 if planes.direct is not None else max(1, STAGED_BYTES // planes.nbytes)
        self.planes, self.blocks, self.starts, self.store = planes, blocks, starts, store
        self.part = order.Part(len(blocks), at_a_time)
        self.index: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None
        self.nbytes = 0


def _turns(planes: Planes, blocks: Offsets, starts: Offsets, store: bool) -> tuple[Offsets, Offsets]:
    """Those of the blocks that this rank copies: all, or of a store, its own turns."""
    if not store:
        return blocks, starts
    mine = planes.mine(blocks)
    return blocks[mine], starts[mine]


def copy_runs(
    page: torch.Tensor, host: torch.Tensor, page_runs: Sequence[Run], piece_bytes: int, *, to_host: bool
) -> int:
    """Enqueue the copies of ``page_runs`` on the current stream; returns the bytes that they move.

    Args:
        page: ``(rows, bytes)`` int8. host: ``(region size,)`` int8.
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
