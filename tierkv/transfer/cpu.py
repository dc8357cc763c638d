"""Copies where the KV cache is in host memory itself: memcpy, a whole batch without the GIL.

There is no queue of device work to wait for: what a CPU computes is in memory when ``submit`` is called.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tierkv.errors import TransferError
from tierkv.layout import offsets
from tierkv.transfer.engine import DeviceGroup, HostMemory, checked_host_offsets
from tierkv.transfer.fifo import FifoEngine
from tierkv.transfer.plan import BlockCopies, Transfer
from tierkv.types import Offsets


class CpuCopyEngine(FifoEngine):
    """Copies with ``tierkv.layout.offsets.copy_many``, which is compiled at construction.

    Thread safety: as ``CopyEngine``.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory) -> None:
        offsets.warm_up()
        self._addresses = [_addresses(group) for group in groups]
        super().__init__(groups, region)

    def _begin(self) -> None:
        return None

    def _copy(self, transfer: Transfer, begun: None) -> tuple[int, float]:
        started = time.perf_counter()
        # Everything is checked before the first byte moves.
        descriptors = [self._describe(copies) for copies in transfer.copies]
        nbytes = 0
        for device, host, sizes in descriptors:
            source, target = (device, host) if transfer.store else (host, device)
            nbytes += int(offsets.copy_many(source, target, sizes))
        return nbytes, time.perf_counter() - started

    def _describe(self, copies: BlockCopies) -> Offsets:
        """``(3, m)``: device addresses, host addresses and sizes of the ``m`` copies to make."""
        host_offsets = checked_host_offsets(copies, self.groups, self.region.size)
        bases, strides, page_bytes = self._addresses[copies.group]
        # A copy: kernels are compiled for plain arrays, not again for read-only or strided ones.
        blocks = np.array(copies.blocks, np.int64)
        out = np.empty((3, host_offsets.size), np.int64)
        used = offsets.copy_descriptors(blocks, host_offsets, bases, strides, page_bytes, self.region.address, out)
        return out[:, :used]


def _addresses(group: DeviceGroup) -> tuple[Offsets, Offsets, Offsets]:
    """For each page: where that of block 0 is, the bytes from one block to the next, and its size."""
    if group.device.type != "cpu":
        raise TransferError(f"the CPU engine cannot copy from a device of type {group.device.type!r}")
    bases = np.array([page.data_ptr() for page in group.pages], np.int64)
    strides = np.array([page.stride(0) for page in group.pages], np.int64)
    return bases, strides, np.array(group.packing.page_bytes, np.int64)
