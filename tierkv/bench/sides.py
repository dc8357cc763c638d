"""The two things that are compared, each behind the calls that the engine's scheduler makes in a step.

Both get what the engine has: a ``list[bytes]`` of 32-byte block hashes a request. tierkv's side does all that its
connector does with them, under the lock and with metrics and trace as configured. vLLM's side gets its best case: its
keys are made beforehand, it keeps no statistics of the connector, and its example tier moves no bytes.
"""

from __future__ import annotations

import abc
import itertools
import mmap
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tierkv.bench import BenchError, require
from tierkv.bench.report import Stopwatch
from tierkv.config import parse
from tierkv.host.slabs import slot_bytes
from tierkv.keys import GroupNamespace, Namespace, RequestChunks
from tierkv.layout.spec import FULL, SLIDING_WINDOW, GroupSpec, LayerPage, ModelSpec
from tierkv.tiering.build import open_manager
from tierkv.tiering.query import Query
from tierkv.types import Chunks, RequestContext

#: Tokens of a chunk; a chunk is one block of one group, and one block hash.
TOKENS = 16

#: The eviction policies that vLLM has, too.
VLLM_POLICIES = ("lru", "arc")

#: How long tiers may take to come to rest between two measurements.
_REST_S = 600.0

_INSTALL = "to install: pip install 'tierkv[vllm]'"


@dataclass(frozen=True, slots=True)
class Request:
    """A request. ``state``: what the side has made of it before it is first asked."""

    request_id: str
    hashes: list[bytes]
    state: Any


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a side is made of.

    slots: chunks that fit in the host. page_bytes: of a chunk of one group.
    windows: a group for each: tokens that a query sees, 0 for all.
    tier: "", "memory" (of vLLM: its example tier, which keeps no bytes) or "fs".
    root_dir: below it each side has a directory for its fs tier.
    fs_fields: of tierkv's fs tier, beside where it is.
    load_delay_s: what each load takes longer than it does.
    """

    slots: int
    page_bytes: int = 512
    policy: str = "lru"
    windows: tuple[int, ...] = (0,)
    tier: str = ""
    root_dir: str = ""
    fs_fields: Mapping[str, Any] = field(default_factory=dict)
    load_delay_s: float = 0.0


class Side(abc.ABC):
    """One implementation. What may be timed: ``store``, ``ask``, ``load``, ``finish`` and ``end_step``.

    Thread safety: none.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def request(self, hashes: list[bytes]) -> Request:
        """A new request, its keys made: once a request, whatever it is asked afterwards."""
        return self._request(f"{self.name}-{next(self._numbers)}", hashes)

    def unnamed(self, hashes: list[bytes]) -> Request:
        """A new request whose keys are made when it is asked, if this side can do that."""
        return self.request(hashes)

    @abc.abstractmethod
    def _request(self, request_id: str, hashes: list[bytes]) -> Request: ...

    @abc.abstractmethod
    def store(self, request: Request, first: int, last: int) -> None:
        """The device has computed chunks ``first`` to ``last`` - 1 (of each group), and then: has copied them.

        Raises:
            BenchError: not all of them were taken.
        """

    @abc.abstractmethod
    def ask(self, request: Request) -> int | None:
        """How many chunks of its prefix can be loaded; None: ask again in the next step."""

    @abc.abstractmethod
    def load(self, request: Request, count: int) -> None:
        """``count`` chunks, as ``ask`` has said, are loaded, and then: are on the device.

        Raises:
            BenchError: they were not there.
        """

    @abc.abstractmethod
    def finish(self, request: Request) -> None:
        """The request has ended."""

    def end_step(self) -> None:  # noqa: B027 - not every side has something to do
        """What is done at the end of each step."""

    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether a tier has something to do."""

    @abc.abstractmethod
    def forget_host(self) -> None:
        """Empty the host; the tier keeps what it has."""

    @abc.abstractmethod
    def reads(self) -> int:
        """Chunks that the tier was asked to load so far."""

    @abc.abstractmethod
    def evicted(self) -> int:
        """Chunks evicted from the host so far."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def rest(self, watch: Stopwatch | None = None, step_s: float = 0.001) -> None:
        """Step on until the tier has nothing to do; ``watch`` takes the time of the calls that each step makes."""
        watch = Stopwatch() if watch is None else watch
        end = time.monotonic() + _REST_S
        while self.busy():
            if time.monotonic() > end:
                raise BenchError(f"{self.name}: the tier has not come to rest within {_REST_S:.0f} s")
            time.sleep(step_s)
            with watch:
                self.end_step()


class TierKV(Side):
    """The manager, as the connector opens and calls it."""

    name = "tierkv"

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        model = _model(setup)
        config = parse(
            {
                "cpu_bytes_to_use": setup.slots * slot_bytes(setup.page_bytes),
                "eviction_policy": setup.policy,
                "promotion_share": 1.0,  # all that fits: vLLM knows no such bound
                "secondary_tiers": _tiers(setup),
            }
        )
        self._groups = tuple(range(len(model.groups)))
        self.manager, self._region = open_manager(config, model, _namespace(model), align=TOKENS)
        try:
            self._wait_for_memory(setup.slots)
        except BaseException:
            self.close()
            raise

    def _wait_for_memory(self, slots: int) -> None:
        """The host region is made present in the background; a benchmark wants all of it."""
        end = time.monotonic() + _REST_S
        while (free := self.manager.counts()["slots_free"]) < slots:
            if time.monotonic() > end:
                raise BenchError(f"{self.name}: only {free} of {slots} slots are there after {_REST_S:.0f} s")
            time.sleep(0.001)

    def _request(self, request_id: str, hashes: list[bytes]) -> Request:
        named = RequestChunks(self.manager.space, self._groups, (1,) * len(self._groups))
        named.extend(hashes)
        for chunks in named.chunks:
            chunks.upto(len(chunks))
        return Request(request_id, hashes, named)

    def unnamed(self, hashes: list[bytes]) -> Request:
        """A new request of which nothing was looked at yet, as the connector has it: keys are made when needed."""
        named = RequestChunks(self.manager.space, self._groups, (1,) * len(self._groups))
        return Request(f"{self.name}-{next(self._numbers)}", hashes, named)

    def store(self, request: Request, first: int, last: int) -> None:
        named: RequestChunks = request.state
        named.extend(request.hashes)
        batch = Chunks.concat([chunks.take(range(first, last)) for chunks in named.chunks])
        ticket = self.manager.begin_store(batch, request.request_id)
        taken = 0 if ticket is None else len(ticket.slots)
        if ticket is None or taken != len(batch):
            raise BenchError(f"{self.name}: {taken} of {len(batch)} chunks stored")
        self.manager.finish_store(ticket, True)

    def ask(self, request: Request) -> int | None:
        named: RequestChunks = request.state
        named.extend(request.hashes)
        limit = len(request.hashes) * TOKENS
        query = Query(RequestContext(request.request_id), named.space, named.chunks, 0, limit)
        boundary = self.manager.lookup(query)
        return None if boundary is None else boundary // TOKENS

    def load(self, request: Request, count: int) -> None:
        plan = self.manager.begin_load(request.request_id)
        if plan is None or plan.boundary != count * TOKENS:
            raise BenchError(f"{self.name}: the prefix that was announced is not there")
        self.manager.finish_load(request.request_id, True)

    def finish(self, request: Request) -> None:
        self.manager.finish_request(request.request_id)

    def busy(self) -> bool:
        return not self.manager.idle

    def forget_host(self) -> None:
        self.manager.reset("host")

    def reads(self) -> int:
        return self.manager.counts()["promotions"]

    def evicted(self) -> int:
        return self.manager.counts()["evictions"]

    def index_bytes(self) -> int:
        """What index, policy and ghosts occupy."""
        return self.manager._cache.index_bytes

    def close(self) -> None:
        self.manager.close()
        self._region.close()


class Vllm(Side):
    """A manager of vLLM's, as its ``OffloadingConnectorScheduler`` calls it."""

    name = "vllm"

    def __init__(self, setup: Setup) -> None:
        """Without a tier vLLM's ``CPUOffloadingManager``, else its ``TieringOffloadingManager``.

        Raises:
            MissingExtraError: vLLM is not installed.
        """
        super().__init__()
        import_vllm()
        from vllm.v1.kv_offload import base

        self._base = base
        self._groups = range(len(setup.windows))
        self._tier: Any = None
        self._evicted = 0
        if setup.tier:
            self.manager, self._tier = vllm_tiering(setup)
        else:
            from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

            self.manager = CPUOffloadingManager(num_chunks=setup.slots, cache_policy=setup.policy)

    def _request(self, request_id: str, hashes: list[bytes]) -> Request:
        # Its keys are objects of their own, as those of each request are: their hashes are not known yet.
        make_key = self._base.make_offload_key
        keys = [[make_key(block_hash, group) for block_hash in hashes] for group in self._groups]
        context = self._base.ReqContext(req_id=request_id)
        self.manager.on_new_request(context)
        return Request(request_id, hashes, (keys, context))

    def store(self, request: Request, first: int, last: int) -> None:
        keys, context = request.state
        batch = [key for group in keys for key in group[first:last]]
        output = self.manager.prepare_store(batch, context)
        taken = 0 if output is None else len(output.keys_to_store)
        if taken != len(batch):
            raise BenchError(f"{self.name}: {taken} of {len(batch)} chunks stored")
        self._evicted += len(output.evicted_keys)
        self.manager.complete_store(output.keys_to_store, context)

    def ask(self, request: Request) -> int | None:
        keys, context = request.state
        counts = [self._ask(group, context) for group in keys]
        known = [count for count in counts if count is not None]
        return min(known) if len(known) == len(counts) else None

    def _ask(self, keys: Sequence[Any], context: Any) -> int | None:
        """The leading keys that are there, asked for one by one. A chunk that is under way does not end the prefix."""
        miss, hit = self._base.LookupResult.MISS, self._base.LookupResult.HIT
        lookup = self.manager.lookup
        count, waiting = 0, False
        for key in keys:
            result = lookup(key, context)
            if result is miss:
                break
            if result is not hit:
                waiting = True
            count += 1
        return None if waiting else count

    def load(self, request: Request, count: int) -> None:
        keys, context = request.state
        chosen = [key for group in keys for key in group[:count]]
        self.manager.prepare_load(chosen, context)
        self.manager.complete_load(chosen, context)

    def finish(self, request: Request) -> None:
        # Here, once a request, its policies learn of what the request has used.
        self.manager.on_request_finished(request.state[1])

    def end_step(self) -> None:
        self.manager.on_schedule_end(self._base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def busy(self) -> bool:
        return bool(self.manager.has_pending_work())

    def forget_host(self) -> None:
        self.manager.reset_cache()

    def reads(self) -> int:
        return int(self._tier.reads)

    def evicted(self) -> int:
        return self._evicted

    def close(self) -> None:
        self.manager.shutdown()


def import_vllm() -> None:
    """Import what of vLLM is needed; what it has to say goes to standard error.

    Raises:
        MissingExtraError: it is not installed.
    """
    require(["vllm"], _INSTALL)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm.v1.kv_offload.tiering.spec  # noqa: F401 - takes seconds: not within a measurement


def open_sides(setup: Setup, against_vllm: bool) -> list[Side]:
    """tierkv's, and vLLM's if it is wanted and has the policy."""
    sides: list[Side] = [TierKV(setup)]
    if against_vllm and setup.policy in VLLM_POLICIES:
        try:
            sides.append(Vllm(setup))
        except BaseException:
            sides[0].close()
            raise
    return sides


def some_hashes(count: int, rng: np.random.Generator) -> list[bytes]:
    """``count`` block hashes as the engine has them: 32 bytes each, as random as SHA-256's."""
    raw = rng.bytes(32 * count)
    return [raw[i : i + 32] for i in range(0, len(raw), 32)]


def _tiers(setup: Setup) -> list[dict[str, Any]]:
    if not setup.tier:
        return []
    tier: dict[str, Any] = {"type": setup.tier}
    if setup.tier == "fs":
        tier["root_dir"] = os.path.join(setup.root_dir, TierKV.name)
        tier.update(setup.fs_fields)
    if setup.load_delay_s:
        faults = "tierkv.testing.faults:LatencyTier"
        tier = {"type": "latency", "module_path": faults, "inner": tier, "load_delay_s": setup.load_delay_s}
    return [tier]


def _model(setup: Setup) -> ModelSpec:
    return ModelSpec(
        tuple(
            GroupSpec(
                group=number,
                kind=SLIDING_WINDOW if window else FULL,
                tokens_per_block=TOKENS,
                blocks_per_chunk=1,
                window=window,
                pages=(LayerPage.opaque(f"layer.{number}", setup.page_bytes),),
            )
            for number, window in enumerate(setup.windows)
        )
    )


def _namespace(model: ModelSpec) -> Namespace:
    return Namespace(
        model="bench",
        weights="none",
        kv_dtype="uint8",
        hash_algorithm="sha256",
        hash_seed="",
        hash_block_size=TOKENS,
        groups=tuple(
            GroupNamespace(
                kind=g.kind,
                tokens_per_block=g.tokens_per_block,
                tokens_per_chunk=g.tokens_per_chunk,
                window=g.window,
                layers=tuple(p.layer for p in g.pages),
                pages=tuple(map(str, g.pages)),
                cells=("uint8",),
            )
            for g in model.groups
        ),
        layout="canonical-1",
    )


def vllm_tiering(setup: Setup) -> tuple[Any, Any]:
    """vLLM's manager with its primary tier, and the one secondary tier below it."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    spec = TieringOffloadingSpec(_vllm_config(setup))
    primary = spec.get_manager().primary_tier
    try:
        view = primary.get_kv_memoryview()
        if setup.tier == "fs":
            if setup.load_delay_s:
                raise BenchError("a delay of vLLM's fs tier is not measured")
            root_dir = os.path.join(setup.root_dir, Vllm.name)
            tier = SecondaryTierFactory.create_secondary_tier({"type": "fs", "root_dir": root_dir}, view, spec)
        else:
            tier = _delayed_tier(setup.load_delay_s)(spec, view, "example")
    except BaseException:
        primary.shutdown()
        raise
    return TieringOffloadingManager(primary, [tier]), tier


def _vllm_config(setup: Setup) -> Any:
    from vllm.v1.kv_offload import config

    page = -(-setup.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # as it would do itself
    return config.OffloadingConfig(
        groups=tuple(
            config.OffloadingGroupConfig(tokens_per_block=TOKENS, layer_names=(f"layer.{n}",), group_id=n)
            for n in range(len(setup.windows))
        ),
        worker_kv_bytes_per_block=page,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": setup.slots * page, "eviction_policy": setup.policy},
        engine_id=f"tierkv-bench-{uuid.uuid4().hex}",
        model=config.OffloadingModelConfig(name="bench", dtype="uint8"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        parallel=config.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


def _delayed_tier(load_delay_s: float) -> type[Any]:
    """vLLM's example tier, which counts loads, and reports each ``load_delay_s`` later than it would."""
    from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager

    class DelayedTier(ExampleSecondaryTierManager):  # type: ignore[misc] # Any, where vLLM's types are not looked at
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.reads = 0
            self._due: dict[int, float] = {}

        def submit_load(self, job_metadata: Any) -> None:
            self.reads += len(job_metadata.keys)
            self._due[job_metadata.job_id] = time.monotonic() + load_delay_s
            super().submit_load(job_metadata)

        def get_finished_jobs(self) -> list[Any]:
            now = time.monotonic()
            finished = list(super().get_finished_jobs())
            self.completed_jobs = [r for r in finished if now < self._due.get(r.job_id, 0.0)]
            return [r for r in finished if now >= self._due.get(r.job_id, 0.0)]

    return DelayedTier
