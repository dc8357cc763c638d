"""Copies where the KV cache is in host memory itself: memcpy, a whole batch without the GIL.

There is no queue of device work to wait for: what a CPU computes is in memory when ``submit`` is called.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

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

    Thread safety: as ``CopyEngine``.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory) -> None:
        offsets.warm_up()
        for group in groups:
            if group.device.type != "cpu":
                raise TransferError(f"the CPU engine cannot copy from a device of type {group.device.type!r}")
        self._tables = [as_table(group.pieces) for group in groups]
        self._runs = [sum(piece.runs for piece in group.pieces) for group in groups]
        super().__init__(groups, region)

    def _begin(self) -> None:
        return None

    def _copy(self, transfer: Transfer, begun: None) -> tuple[int, float]:
        started = time.perf_counter()
        # Everything is checked before the first byte moves.
        starts = [checked_starts(copies, self.groups, self.region.size) for copies in transfer.copies]
        nbytes = 0
        for copies, where in zip(transfer.copies, starts, strict=True):
            nbytes += self._copy_blocks(copies, where, transfer.store)
        return nbytes, time.perf_counter() - started

    def _copy_blocks(self, copies: BlockCopies, starts: Offsets, store: bool) -> int:
        table, runs = self._tables[copies.group], self._runs[copies.group]
        # A copy: kernels are compiled for plain arrays, not again for read-only or strided ones.
        blocks = np.array(copies.blocks, np.int64)
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
