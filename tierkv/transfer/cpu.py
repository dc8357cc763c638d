"""Copies where the KV cache is in host memory itself: memcpy, a whole batch without the GIL.

There is no queue of device work to wait for: what a CPU computes is in memory when ``submit`` is called.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from tierkv.errors import TransferError
from tierkv.layout import offsets
from tierkv.layout.mapping import as_table
from tierkv.transfer.engine import DeviceGroup, HostMemory, checked_starts
from tierkv.transfer.fifo import FifoEngine
from tierkv.transfer.plan import BlockCopies, Transfer
from tierkv.types import Offsets

#: Descriptors made at once: enough that making them is nothing beside copying, and no more than a megabyte of them.
_BATCH = 1 << 15


class CpuCopyEngine(FifoEngine):
    """Copies with ``tierkv.layout.offsets``, whose kernels are compiled at construction.

    Where there are cores to spare, the blocks of a transfer are shared out among several threads.

    Thread safety: as ``CopyEngine``.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory, *, threads: int | None = None) -> None:
        """
        Args:
            threads: that copy a transfer together; None for one for every four cores, at most four: more of the
                engine's cores would cost it more than the copies gain.
        """
        offsets.warm_up()
        for group in groups:
            if group.device.type != "cpu":
                raise TransferError(f"the CPU engine cannot copy from a device of type {group.device.type!r}")
        self._tables = [as_table(group.pieces) for group in groups]
        self._runs = [sum(piece.runs for piece in group.pieces) for group in groups]
        self._threads_each = threads or max(1, min(4, len(os.sched_getaffinity(0)) // 4))
        self._pool = _started_pool(2 * (self._threads_each - 1)) if self._threads_each > 1 else None
        super().__init__(groups, region)

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(self) -> None:
        return None

    def _copy(self, transfer: Transfer, begun: None) -> tuple[int, float]:
        started = time.perf_counter()
        # Everything is checked before the first byte moves.
        starts = [checked_starts(copies, self.groups, self.region.size) for copies in transfer.copies]
        nbytes = 0
        for copies, where in zip(transfer.copies, starts, strict=True):
            nbytes += self._share_out(copies, where, transfer.store)
        return nbytes, time.perf_counter() - started

    def _share_out(self, copies: BlockCopies, starts: Offsets, store: bool) -> int:
        """Copy all of ``copies``; a part of the blocks on this thread, and one on each that helps."""
        # A copy: kernels are compiled for plain arrays, not again for read-only or strided ones.
        blocks = np.array(copies.blocks, np.int64)
        bounds = np.ceil(np.linspace(0, len(blocks), self._threads_each + 1)).astype(int).tolist()
        parts = [(copies.group, blocks[a:b], starts[a:b], store) for a, b in itertools.pairwise(bounds) if a < b]
        if self._pool is None or len(parts) < 2:
            return sum(self._copy_blocks(*part) for part in parts)
        helped: list[Future[int]] = []
        try:
            for part in parts[1:]:
                helped.append(self._pool.submit(self._copy_blocks, *part))
            nbytes = self._copy_blocks(*parts[0])
        finally:  # also after an error, no byte moves once this has returned
            wait(helped)
        return nbytes + sum(part.result() for part in helped)

    def _copy_blocks(self, group: int, blocks: Offsets, starts: Offsets, store: bool) -> int:
        table, runs = self._tables[group], self._runs[group]
        step = max(1, _BATCH // runs)
        out = np.empty((3, min(step, len(blocks)) * runs), np.int64)
        nbytes = 0
        for at in range(0, len(blocks), step):
            last = at + step
            used = offsets.copy_descriptors(blocks[at:last], starts[at:last], table, self.region.address, store, out)
            device, host, sizes = out[:, :used]
            source, target = (device, host) if store else (host, device)
            nbytes += int(offsets.copy_many(source, target, sizes))
        return nbytes


def _started_pool(threads: int) -> ThreadPoolExecutor:
    """A pool all of whose threads run: one that cannot start is met now, and not between the parts of a transfer."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tierkv-copy-part")
    together = threading.Barrier(threads)
    try:
        wait([pool.submit(together.wait) for _ in range(threads)])
    except BaseException:
        together.abort()
        pool.shutdown()
        raise
    return pool
