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
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from tierkv.errors import TransferError, UnsupportedError
from tierkv.layout.mapping import Piece, View, pieces_of
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


#: What holds one plane's share on the device: a view a part of its cells. Each is int8, ``(blocks, …, bytes)`` in the
#: canonical order, with whatever strides.
Parts = tuple["torch.Tensor", ...]


class DeviceGroup:
    """One group's device memory on this rank.

    planes: for each layer of ``packing.group.pages``, for each of its planes, the parts.
    pieces: in the same order, how each is copied.
    """

    def __init__(self, packing: GroupPacking, planes: Sequence[Sequence[Parts]]) -> None:
        """
        Raises:
            TransferError: the views are not those of this rank's shares. UnsupportedError: see ``pieces_of``.
        """
        self.packing = packing
        self.planes = tuple(tuple(map(tuple, page)) for page in planes)
        specs, where = packing.group.pages, f"group {packing.group.group}"
        if [len(page) for page in self.planes] != [len(shares) for shares in packing.shares]:
            raise TransferError(f"{where}: views of {len(self.planes)} layers for {len(specs)} layers and their planes")
        views = [part for page in self.planes for parts in page for part in parts]
        self.device, self.num_blocks = views[0].device, int(views[0].shape[0])
        for view in views:
            if view.element_size() != 1 or view.dim() < 2:
                raise TransferError(
                    f"{where}: expected bytes of shape (blocks, …, bytes), got {view.dtype}, {view.shape}"
                )
            if view.device != self.device or view.shape[0] != self.num_blocks:
                raise TransferError(f"{where}: another device or number of blocks than the first view's")
            _check_apart(view, where)
        self.pieces: list[Piece] = []
        for spec, page, shares in zip(specs, self.planes, packing.shares, strict=True):
            try:
                for share, parts in zip(shares, page, strict=True):
                    self.pieces += pieces_of(share, [view_of(part) for part in parts])
            except TransferError as error:
                raise TransferError(f"{where}, {spec.layer}: {error}") from error


def view_of(part: torch.Tensor) -> View:
    """Where ``part`` is, as numbers."""
    return View(part.data_ptr(), tuple(part.shape), part.stride())


def _check_apart(view: torch.Tensor, where: str) -> None:
    """No two elements of ``view`` share a byte, as far as that can be told from its strides."""
    within = 1
    for stride, count in sorted(zip(view.stride(), view.shape, strict=True)):
        if count > 1:
            if stride < within:
                raise TransferError(f"{where}: strides {view.stride()} of shape {tuple(view.shape)} overlap")
            within = stride * count


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


def checked_starts(copies: BlockCopies, groups: Sequence[DeviceGroup], region_size: int) -> Offsets:
    """Where each block of ``copies`` begins in the region, after all that could lead outside of either memory is
    ruled out: ``(n,)`` int64.

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
    return packing.block_offsets(copies.slot_offsets, copies.positions)


def _within(numbers: Offsets, bound: int, what: str) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= bound):
        wrong = numbers[(numbers < 0) | (numbers >= bound)][0]
        raise TransferError(f"{what} {wrong} is not in 0 … {bound - 1}")
