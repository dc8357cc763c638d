"""The worker half: knows the device's pages of one rank, submits transfers, reports how they ended."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.logger import init_logger

from tierkv.connector import compat
from tierkv.connector.config import Deployment
from tierkv.connector.metadata import Geometry, StepPlan, StepReport
from tierkv.errors import TierKVError, UnsupportedError
from tierkv.host.region import Region
from tierkv.layout.packing import GroupPacking
from tierkv.layout.spec import OPAQUE, LayerPage
from tierkv.transfer.engine import CopyEngine, DeviceGroup, Parts, make_engine
from tierkv.transfer.plan import Transfer

logger = init_logger(__name__)


def device_parts(page: LayerPage, cache: torch.Tensor, num_blocks: int) -> tuple[Parts, ...]:
    """The planes of one layer as bytes on the device, in the canonical order, each in one part.

    Args:
        cache: as the engine gives it: ``(kernel blocks, heads, tokens, elements)`` with any strides; a block is one
            kernel block or several that follow each other.

    Raises:
        UnsupportedError: the pages of ``cache`` are not what ``page`` says.
    """
    (plane,) = page.planes
    if cache.dim() != 4 or cache.shape[0] % num_blocks or cache.stride(-1) != 1:
        raise UnsupportedError(
            f"layer {page.layer}: a KV cache of shape {tuple(cache.shape)}, strides {cache.stride()}, for {num_blocks} "
            "blocks; supported: (blocks, heads, tokens, elements), the elements of a token contiguous"
        )
    if plane.name == OPAQUE:
        return (_whole_pages(page.layer, cache, num_blocks, plane.cell_bytes),)
    blocks = cache.view(torch.int8).unflatten(0, (num_blocks, -1)).transpose(1, 2)
    if plane.cells == 1 and blocks.shape[2] == 1 and blocks[0, 0].is_contiguous():
        blocks = blocks.flatten(2).unsqueeze(2).unsqueeze(2)  # a head's tokens as one cell, in whatever order they are
    shape = (plane.cells, plane.cell_bytes)
    if (blocks.shape[2] * blocks.shape[3], blocks.shape[4]) != shape:
        raise UnsupportedError(
            f"layer {page.layer}: a head's share of a block has cells of the shape {tuple(blocks.shape[2:])}, expected "
            f"{plane.cells} of {plane.cell_bytes} bytes"
        )
    return ((blocks,),)


def _whole_pages(layer: str, cache: torch.Tensor, num_blocks: int, page_bytes: int) -> Parts:
    """The pages as they lie: int8, ``(num_blocks, page_bytes)``."""
    size = cache.element_size()
    if cache.shape[0] != num_blocks or not cache[0].is_contiguous() or cache[0].numel() * size != page_bytes:
        raise UnsupportedError(
            f"layer {layer}: a block of shape {tuple(cache.shape[1:])}, strides {cache.stride()[1:]}, is not one "
            f"dense page of {page_bytes} bytes; supported: the LBHNC and BLHNC layouts"
        )
    view = torch.empty(0, dtype=torch.int8, device=cache.device)
    return (
        view.set_(
            cache.untyped_storage(),
            cache.storage_offset() * size,
            (num_blocks, page_bytes),
            (cache.stride(0) * size, 1),
        ),
    )


class WorkerHalf:
    """One rank. Thread safety: none; the worker's main thread calls it, in the order of the methods."""

    def __init__(self, deployment: Deployment, num_blocks: int, rank: int) -> None:
        self._deployment = deployment
        self._num_blocks = num_blocks
        self._rank = rank
        self._groups: list[DeviceGroup] = []
        self._engine: CopyEngine | None = None
        self._region: Region | None = None
        #: Stores of the step before: its forward pass has written their blocks by now.
        self._deferred: list[Transfer] = []
        self._loading: dict[int, str] = {}
        self._revoked: set[int] = set()
        self._failed_loads: list[str] = []
        self._report = StepReport()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """The device's KV cache, by layer.

        Raises:
            UnsupportedError: a layer's pages cannot be offloaded.
        """
        model = self._deployment.model
        for spec in model.groups:
            planes = [device_parts(page, caches[page.layer], self._num_blocks) for page in spec.pages]
            self._groups.append(DeviceGroup(GroupPacking(spec, self._rank, model.ranks), planes))
        # Not imported with this module: see ``shield_numba``.
        from tierkv.layout.offsets import warm_up

        compat.shield_numba()
        warm_up()  # compiles the copy kernels now, not within the first step

    def before_forward(self, plan: StepPlan) -> None:
        """Submit the stores of the step before; finish those whose blocks this step may write."""
        engine = self._open(plan)
        if plan.ask:
            self._report.answers[plan.ask] = 1
        self._drop_cancelled(plan)
        flushed = [t for t in plan.stores if t.job_id in plan.flush]
        plan.stores = [t for t in plan.stores if t.job_id not in plan.flush]
        for transfer in [*self._deferred, *flushed]:
            engine.submit(transfer)
        self._deferred = []
        if plan.flush:
            engine.wait(plan.flush)

    def start_loads(self, plan: StepPlan) -> None:
        engine = self._open(plan)
        self._revoked |= plan.revoke & self._loading.keys()
        self._failed_loads += plan.failed_loads
        for request_id, transfer in plan.loads:
            self._loading[transfer.job_id] = request_id
            engine.submit(transfer)

    def after_forward(self, plan: StepPlan) -> None:
        """Keep this step's stores for the start of the next, so that they do not delay sampling."""
        self._deferred += plan.stores
        plan.stores = []

    def take_finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them whose loads have failed."""
        done, failed = set(self._failed_loads), set(self._failed_loads)
        self._failed_loads = []
        for result in self._engine.get_finished() if self._engine is not None else ():
            ok = result.ok and result.job_id not in self._revoked
            self._revoked.discard(result.job_id)
            if not result.ok:
                logger.error("%s %d failed: %s", "store" if result.store else "load", result.job_id, result.error)
            self._report.add(result.job_id, ok)
            request_id = self._loading.pop(result.job_id, None)
            if request_id is not None:
                done.add(request_id)
                if not ok:
                    failed.add(request_id)
        return done, failed

    def invalidate(self, name: str | None) -> None:
        """This rank's weights have changed; the scheduler half learns of it with the next report."""
        self._report.names = [name]

    def take_report(self) -> StepReport | None:
        """What has happened since the last call, for the scheduler half."""
        if not self._report:
            return None
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._region is not None:
            self._region.close()

    def _open(self, plan: StepPlan) -> CopyEngine:
        """The copy engine; the region is opened by the first plan, which says where it is."""
        if self._engine is None:
            model = self._deployment.model
            expected = Geometry.of(model)
            if plan.geometry != expected:
                raise TierKVError(f"the scheduler's geometry {plan.geometry} is not this worker's, {expected}")
            self._region = Region.open(plan.region)
            self._region.populate()
            self._engine = make_engine(self._groups, self._region)
        return self._engine

    def _drop_cancelled(self, plan: StepPlan) -> None:
        for transfer in [*self._deferred, *plan.stores]:
            if transfer.job_id in plan.cancel:
                self._report.add(transfer.job_id, ok=False)
        self._deferred = [t for t in self._deferred if t.job_id not in plan.cancel]
        plan.stores = [t for t in plan.stores if t.job_id not in plan.cancel]
        plan.flush -= plan.cancel
