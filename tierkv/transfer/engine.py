"""The interface of a copy engine, and the checks before raw addresses are used.

Order, which every engine keeps:

* A store reads its blocks after all device work that was submitted before ``submit``.
* A load writes its blocks after all device work that was submitted before ``submit``.
* Stores keep their order among themselves, and so do loads; a store and a load do not wait for each other. Whoever
  stores and loads the same block or slot waits for the report in between.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from tierkv.errors import TransferError, UnsupportedError
from tierkv.layout.packing import GroupPacking
from tierkv.transfer.plan import BlockCopies, Transfer
from tierkv.types import Offsets

if TYPE_CHECKING:
    import torch


class HostMemory(Protocol):
    """The host region, as far as copies need it (``tierkv.host.region.Region`` is one).

    view: writable, one byte an item. address: where it is mapped in this process. size: bytes.
    """

    @property
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...


class TransferResult(NamedTuple):
    """The one report of a transfer.

    nbytes: bytes copied by this rank; 0 when not ok, although some may have been copied.
    seconds: of copying alone, without the waiting before it. error: why not ok, for people.
    """

    job_id: int
    store: bool
    ok: bool
    nbytes: int
    seconds: float
    error: str = ""


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """One group's device memory on this rank.

    pages: for each layer of ``packing.group.pages``, an int8 view of shape ``(num_blocks, page_bytes)`` with strides
    ``(block_stride, 1)``: row b is the page of block b.

    Raises:
        TransferError: the views are not like that.
    """

    packing: GroupPacking
    pages: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        specs = self.packing.group.pages
        where = f"group {self.packing.group.group}"
        if len(self.pages) != len(specs):
            raise TransferError(f"{where}: {len(self.pages)} views for {len(specs)} layers")
        for spec, view in zip(specs, self.pages, strict=True):
            shape = tuple(view.shape)
            if len(shape) != 2 or shape[1] != spec.page_bytes or view.element_size() != 1:
                raise TransferError(
                    f"{where}, {spec.layer}: expected bytes of shape (blocks, {spec.page_bytes}), got {shape}"
                )
            if view.stride(1) != 1 or (shape[0] > 1 and view.stride(0) < spec.page_bytes):
                raise TransferError(f"{where}, {spec.layer}: strides {view.stride()} do not keep pages whole and apart")
            if view.device != self.pages[0].device or shape[0] != self.num_blocks:
                raise TransferError(f"{where}, {spec.layer}: another device or number of blocks than the first layer")

    @property
    def num_blocks(self) -> int:
        return int(self.pages[0].shape[0])

    @property
    def device(self) -> torch.device:
        return self.pages[0].device


class CopyEngine(abc.ABC):
    """Copies this rank's pages between device blocks and the host region.

    Thread safety: ``submit``, ``get_finished``, ``wait`` and ``close`` are called by one thread, the worker's.
    """

    def __init__(self, groups: Sequence[DeviceGroup], region: HostMemory) -> None:
        """``groups[i]`` is what ``BlockCopies.group == i`` means. The region outlives the engine's ``close``."""
        self.groups = tuple(groups)
        self.region = region

    @abc.abstractmethod
    def submit(self, transfer: Transfer) -> None:
        """Start ``transfer`` and return at once. Never raises for the transfer's sake: that is reported.

        The job id is not that of a transfer which is not reported yet.
        """

    @abc.abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """The transfers that have ended since the last call, each exactly once. Never blocks."""

    @abc.abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when none of these jobs copies any more; ids that are not known have ended already.

        Their results still come by ``get_finished``.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what was submitted and stop; again does nothing. Results can still be collected.

        A transfer that is submitted afterwards is reported as failed.
        """


def make_engine(groups: Sequence[DeviceGroup], region: HostMemory) -> CopyEngine:
    """The engine for the device that the groups' tensors are on.

    Raises:
        UnsupportedError: there is none for that type of device, or the groups are on several devices.
    """
    devices = {group.device for group in groups}
    if len(devices) != 1:
        raise UnsupportedError(
            f"the KV cache must be on one device, not on {len(devices)}: {sorted(map(str, devices))}"
        )
    kind = devices.pop().type
    if kind == "cpu":
        from tierkv.transfer.cpu import CpuCopyEngine

        return CpuCopyEngine(groups, region)
    if kind == "cuda":
        from tierkv.transfer.cuda import CudaCopyEngine

        return CudaCopyEngine(groups, region)
    raise UnsupportedError(f"no copies for devices of type {kind!r}; there are for: cpu, cuda")


def checked_host_offsets(copies: BlockCopies, groups: Sequence[DeviceGroup], region_size: int) -> Offsets:
    """``(n, pages)`` host offsets of ``copies``, after all that could lead outside of either memory is ruled out.

    Raises:
        TransferError: a group, block, position or slot that does not exist.
    """
    if not 0 <= copies.group < len(groups):
        raise TransferError(f"group index {copies.group} is not below {len(groups)}")
    group = groups[copies.group]
    packing = group.packing
    for name in ("blocks", "slot_offsets", "positions"):
        array = getattr(copies, name)
        if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.shape != (len(copies.blocks),):
            raise TransferError(f"{name}: expected {len(copies.blocks)} int64 numbers, got {array!r}")
    _within(copies.blocks, group.num_blocks, "device block")
    _within(copies.positions, packing.group.blocks_per_chunk, "position within the chunk")
    _within(copies.slot_offsets, region_size - packing.chunk_bytes + 1, "slot offset")
    return packing.host_offsets(copies.slot_offsets, copies.positions)


def _within(numbers: Offsets, bound: int, what: str) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= bound):
        wrong = numbers[(numbers < 0) | (numbers >= bound)][0]
        raise TransferError(f"{what} {wrong} is not in 0 … {bound - 1}")
