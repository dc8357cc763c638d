"""``TierKVConnector``: vLLM's interface, handed on to the scheduler half or the worker half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.connector import compat
from tierkv.connector.config import log_notes, make_namespace, read_deployment
from tierkv.connector.metadata import StepPlan, StepReport
from tierkv.connector.scheduler import SchedulerHalf
from tierkv.connector.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in tiers. Loads and stores are asynchronous; device blocks are never held for a store.

    Raises (when it is made):
        ConfigError: ``kv_connector_extra_config`` cannot be used; names the field and what is accepted.
        UnsupportedError: the model, its parallelism or vLLM's release is not supported.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        note = compat.check_version()
        deployment = read_deployment(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._block_pool: BlockPool | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerHalf(deployment, kv_cache_config.num_blocks, vllm_config.parallel_config.rank)
            return
        if note:
            logger.warning(note)
        log_notes(deployment, vllm_config)
        namespace = make_namespace(deployment, vllm_config, kv_cache_config)
        if not namespace.trusted:
            logger.warning("Block hashes by %s can be made to collide on purpose.", namespace.hash_algorithm)
        # Not imported with this module: see ``shield_numba``.
        compat.shield_numba()
        from tierkv.tiering.build import open_manager

        manager, region = open_manager(deployment.config, deployment.model, namespace, align=deployment.align)
        logger.info("Namespace %s; host memory: %r.", namespace.digest.hex(), region)
        self._scheduler = SchedulerHalf(deployment, manager, region)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is dropped is a later miss, nothing worse."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads outermost within a block, so that a rank's share of the canonical page is contiguous."""
        return "LBHNC"

    def invalidate(self, name: str | None = None) -> None:
        """The weights have changed to those that ``name`` stands for: what was stored before is not served again.

        Engines that are told the same name share what they compute from then on. None: share it with nobody.

        Either half may be told. The scheduler half acts at once. A worker passes it on with the next step, so all
        workers are to be told before the next request (``WorkerExtension``).
        """
        if self._worker is not None:
            self._worker.invalidate(name)
        else:
            self.scheduler_half.invalidate(name, device_is_empty=self._device_is_empty())

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # ---- scheduler half

    @property
    def scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "only in the scheduler's process"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        self.scheduler_half.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler_half.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler_half.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        named: dict[CacheHitSource, int] = {}
        for name, tokens in self.scheduler_half.hit_sources(request.request_id).items():
            source = compat.hit_source(name)
            named[source] = named.get(source, 0) + tokens
        if sum(named.values()) != num_external_tokens:  # cut short, or not ours
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        return named

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_half.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self.scheduler_half.take_report(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Always False: stores are fenced, so the blocks are free at once."""
        self.scheduler_half.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.scheduler_half.busy

    def reset_cache(self) -> bool | None:
        self.scheduler_half.reset(self._device_is_empty())
        return True

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def _device_is_empty(self) -> bool:
        return self._block_pool is None or compat.device_cache_is_empty(self._block_pool)

    # ---- worker half

    @property
    def worker_half(self) -> WorkerHalf:
        assert self._worker is not None, "only in a worker's process"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_half.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepPlan)
        self.worker_half.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker_half.start_loads(self._step_plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request is scheduled when its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Stores are submitted by the step, not by the layer."""

    def wait_for_save(self) -> None:
        self.worker_half.after_forward(self._step_plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, failed = self.worker_half.take_finished_loads()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_half.take_report()

    def _step_plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
