"""The scheduler half: asks the manager, plans stores and loads, keeps the fences.

Called by the engine's scheduler, in this order within a step: ``matched_tokens`` and ``allocated`` for
requests that wait, then ``plan_step``; ``take_report`` when the step's output is back; ``finished`` when a
request ends. Nothing here waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from tierkv.connector import plans
from tierkv.connector.config import Deployment
from tierkv.connector.metadata import Geometry, StepPlan, StepReport
from tierkv.keys import RequestChunks
from tierkv.layout.spec import STATE
from tierkv.params import TransferParams, read_params
from tierkv.tiering.query import Query
from tierkv.transfer.plan import BlockCopies, Transfer
from tierkv.types import Chunks, Offsets, RequestContext

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from tierkv.host.region import Region
    from tierkv.tiering.manager import StoreTicket, TieringManager

logger = init_logger(__name__)


@dataclass(slots=True)
class RequestState:
    """One request.

    named: its complete chunks by group. stored: by group, the next one to be considered for a store.
    local: tokens that were on the device when it was admitted. stale: they may be of another space; nothing is stored.
    computed: tokens whose KV is there once the steps that were planned have run; the engine's own count also has what
    another connector may yet fail to load.

    A request keeps the space that it was admitted in: what it has computed since belongs to that one.
    """

    request: Request
    params: TransferParams
    context: RequestContext
    named: RequestChunks
    stored: list[int] = field(default_factory=list)
    local: int = 0
    stale: bool = False
    computed: int = 0
    loading: bool = False
    sources: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RankWork:
    """A job that every rank does its part of. ``ok``: no rank has failed so far."""

    ranks_left: int
    ok: bool = True

    def reported(self, ranks: int, ok: bool) -> bool:
        """``ranks`` more have ended their part; whether all have now."""
        self.ranks_left -= ranks
        self.ok &= ok
        return self.ranks_left <= 0


@dataclass(slots=True)
class StoreWork(RankWork):
    """A store that workers have been, or will be, told of. ``blocks``: the device blocks that it reads."""

    ticket: StoreTicket
    blocks: list[int]


@dataclass(slots=True)
class LoadWork(RankWork):
    request_id: str


class SchedulerHalf:
    """Thread safety: none; the engine's scheduler thread calls it."""

    def __init__(self, deployment: Deployment, manager: TieringManager, region: Region) -> None:
        self.manager = manager
        self._deployment = deployment
        self._region = region
        self._groups = deployment.model.groups
        self._ranks = deployment.model.ranks
        #: The engine's groups of states, and tokens of their chunks.
        self._state_groups = {
            i: g.tokens_per_chunk for g, i in zip(self._groups, deployment.group_ids, strict=True) if g.kind == STATE
        }
        self._geometry = Geometry.of(deployment.model)
        self._requests: dict[str, RequestState] = {}
        self._ids = itertools.count(1)
        self._stores: dict[int, StoreWork] = {}
        self._loads: dict[int, LoadWork] = {}
        #: Device block → the stores that still read it.
        self._readers: dict[int, set[int]] = {}
        self._written: set[int] = set()
        self._device_is_stale = False
        #: How often the workers have been asked for a name of their weights, and whether that is to be done or awaited.
        self._asks = 0
        self._must_ask = deployment.extended
        self._unanswered = 0
        self._plan = self._empty_plan()

    # ---- a request's prefix

    def new_request(self, request: Request) -> None:
        params = read_params(request.kv_transfer_params)
        context = RequestContext(request.request_id, request.kv_transfer_params or {}, params.load_tiers)
        self._requests[request.request_id] = RequestState(request, params, context, self._name_chunks())

    def matched_tokens(self, request: Request, local: int) -> int | None:
        """Tokens beyond the ``local`` ones that can be loaded now; None: not known yet."""
        if not self._knows_generation():
            return None
        state = self._requests[request.request_id]
        self._admit(state, local)
        # A device's hit may end within a block (of states); nothing that begins there can be loaded.
        if request.skip_reading_prefix_cache or local % self._deployment.align:
            return 0
        # The last token is always computed: its logits are wanted.
        limit = request.num_tokens - 1
        if state.params.max_load_tokens is not None:
            limit = min(limit, local + state.params.max_load_tokens)
        query = Query(state.context, state.named.space, state.named.chunks, local, limit)
        boundary = self.manager.lookup(query)
        return None if boundary is None else boundary - local

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Device blocks are there for ``external`` tokens that ``matched_tokens`` has announced."""
        request_id = request.request_id
        state = self._requests[request_id]
        tables = [[b.block_id for b in blocks.blocks[i]] for i in range(len(self._deployment.block_sizes))]
        if self._readers:  # without external tokens of ours, another connector may still load into these blocks
            self._written.update(plans.written_blocks(tables, self._deployment.block_sizes, state.local))
        if external == 0:
            self.manager.release(request_id)
            return
        boundary = state.local + external
        plan = self.manager.begin_load(request_id)
        copies: list[BlockCopies | None] = [None]
        if plan is not None and boundary <= plan.boundary:
            copies = [
                plans.load_copies(n, group, tables[i], state.local, boundary, plan.offsets[n])
                for n, (group, i) in enumerate(zip(self._groups, self._deployment.group_ids, strict=True))
            ]
        planned = tuple(c for c in copies if c is not None)
        if len(planned) < len(copies):  # what was announced is gone: a reset came in between
            self.manager.finish_load(request_id, ok=False)
            self._plan.failed_loads.append(request_id)
            return
        job_id = next(self._ids)
        self._loads[job_id] = LoadWork(request_id, ranks_left=self._ranks)
        self._plan.loads.append((request_id, Transfer(job_id, False, planned)))
        state.loading = True
        state.sources = plan.sources if plan is not None and boundary == plan.boundary else {}
        state.stored = [boundary // g.tokens_per_chunk for g in self._groups]

    def hit_sources(self, request_id: str) -> dict[str, int]:
        """Tokens of the load that ``allocated`` has planned, by source; empty if the engine has cut it short."""
        return self._requests[request_id].sources

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """The request has ended; its blocks are freed right after, so what is still to be stored is fenced."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        # Never the last sampled token, whose KV nobody computes.
        state.computed = min(state.computed, request.num_computed_tokens, request.num_tokens - 1)
        if not state.loading:
            self._store(state, tables)
        self.manager.finish_request(request.request_id)

    # ---- a step

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        self._note_written(output)
        flush = {job for block in self._written if block in self._readers for job in self._readers[block]}
        self._written.clear()
        block_state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None:
                state.computed = state.request.num_computed_tokens + scheduled
        named = block_state.boundary_state_offloads if self._state_groups and block_state is not None else {}
        for request_id in {**output.num_scheduled_tokens, **named}:
            state = self._requests.get(request_id)
            if state is None or block_state is None:
                continue
            states = self._states_of(named.get(request_id, ()))
            if states or self._has_new_chunk(state):
                tables = block_state.get_block_ids(request_id)
                if tables is not None:
                    self._store(state, tables, states)
        plan, self._plan = self._plan, self._empty_plan()
        plan.flush = flush
        return plan

    def take_report(self, report: StepReport) -> None:
        """Jobs that workers have ended (a job has ended when every rank has said so), and what they were told."""
        if report.names:
            self._take_names(report.names)
        self._unanswered -= report.answers.get(self._asks, 0)
        for job_id, ranks in report.ranks.items():
            if job_id in self._stores:
                self._end_store(job_id, ranks, report.ok[job_id])
            elif job_id in self._loads:
                self._end_load(job_id, ranks, report.ok[job_id])

    @property
    def busy(self) -> bool:
        """Whether the engine must step on so that device transfers end."""
        return bool(self._stores or self._loads or self._plan.failed_loads)

    def reset(self, device_is_empty: bool = True) -> None:
        """Forget everything. The engine may give the device's memory away next, without another step.

        Args:
            device_is_empty: whether the device's own prefix cache was reset, too. The engine resets this
                cache even if that failed because requests were running.
        """
        self._forget_transfers(device_is_empty)
        self._must_ask = self._deployment.extended
        self.manager.reset()

    def invalidate(self, name: str | None, device_is_empty: bool) -> None:
        """The weights have changed to those of ``name``. Arguments as those of ``reset``."""
        self._forget_transfers(device_is_empty)
        self.manager.invalidate(name)

    def close(self) -> None:
        self.manager.close()
        self._region.close()

    # ---- inside

    def _empty_plan(self) -> StepPlan:
        return StepPlan(self._region.handle, self._geometry)

    def _forget_transfers(self, device_is_empty: bool) -> None:
        self._device_is_stale = not device_is_empty
        self._plan.cancel.update(self._stores)
        self._plan.revoke.update(self._loads)

    def _knows_generation(self) -> bool:
        """Whether all workers have said if their weights were given a name since the last reset.

        They are asked in the step in which a request wants to know: not before, since an engine may still step while
        it is paused for an update of its weights.
        """
        if self._must_ask:
            self._must_ask = False
            self._asks += 1
            self._unanswered = self._ranks
            self._plan.ask = self._asks
        return self._unanswered <= 0

    def _take_names(self, names: Sequence[str | None]) -> None:
        """The workers were told that their weights have changed."""
        if len(set(names)) > 1:
            logger.error("The workers' weights were given different names (%s): nothing is shared.", names)
        name = names[0] if len(set(names)) == 1 else None
        # Without a reset that is still to be answered, the device may have what the weights before have computed.
        awaited = self._must_ask or self._unanswered > 0
        self.invalidate(name, device_is_empty=awaited and not self._device_is_stale)

    def _admit(self, state: RequestState, local: int) -> None:
        """The request starts, or starts again: from here on it computes in the present space."""
        if state.named.space != self.manager.space:
            state.named = self._name_chunks()
        state.local = local
        state.computed = 0
        state.loading = False
        # What the device has kept from before a reset is not of the present space, whatever its hashes say, and neither
        # is what attends to it. (A hit within a block, which states allow, is not told us.)
        state.stale = self._device_is_stale and bool(local or self._state_groups)
        state.stored = [0 for _ in self._groups]
        state.named.extend(state.request.block_hashes)

    def _name_chunks(self) -> RequestChunks:
        groups = [group.group for group in self._groups]
        return RequestChunks(self.manager.space, groups, self._deployment.hashes_per_chunk)

    def _storable_tokens(self, state: RequestState) -> int:
        request = state.request
        limit = request.num_prompt_tokens if self._deployment.config.offload_prompt_only else request.num_tokens
        if state.params.max_offload_tokens is not None:
            limit = min(limit, state.params.max_offload_tokens)
        return min(state.computed, int(limit))

    def _has_new_chunk(self, state: RequestState) -> bool:
        tokens = self._storable_tokens(state)
        return any(tokens // g.tokens_per_chunk > done for g, done in zip(self._groups, state.stored, strict=True))

    def _states_of(self, named: Iterable[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
        """The states that this step leaves at the ends of blocks: engine's group → chunk → device block.

        A block table does not say what a block of states holds: it may be the state in mid-block of a request that goes
        on. The engine names those that hold what their place says: group, block, and tokens up to there.
        """
        states: dict[int, dict[int, int]] = {}
        for i, block, boundary in named:
            size = self._state_groups.get(i)
            if size is not None and block != plans.NULL_BLOCK and boundary % size == 0:
                states.setdefault(i, {})[boundary // size - 1] = block
        return states

    def _store(
        self,
        state: RequestState,
        tables: Sequence[Sequence[int]],
        states: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
    ) -> None:
        """Plan to store the chunks that are complete now. ``states``: see ``_states_of``."""
        if state.stale:
            return
        if self._state_groups:
            tables = list(tables)
            for i in self._state_groups:
                tables[i] = plans.sparse_table(states.get(i, {}))
        tokens = self._storable_tokens(state)
        state.named.extend(state.request.block_hashes)
        first_store = not any(state.stored)
        chosen: list[Sequence[int]] = []
        for n, (group, i) in enumerate(zip(self._groups, self._deployment.group_ids, strict=True)):
            last = min(tokens // group.tokens_per_chunk, len(state.named.chunks[n]))
            first = state.stored[n] if state.stored else last
            if group.kind == STATE:  # the engine names each once, and may do so late
                first = 0
            chosen.append(plans.storable_chunks(group, tables[i], first, last) if last > first else [])
            if state.stored:
                state.stored[n] = max(first, last)
        if not any(chosen):
            return
        order, owners, numbers = plans.by_position(self._groups, chosen)
        batch = Chunks.concat([c.take(which) for c, which in zip(state.named.chunks, chosen, strict=True) if which])
        if sum(map(bool, chosen)) > 1:
            batch = batch.take(order)
        ticket = self.manager.begin_store(batch, state.request.request_id)
        if first_store:
            self._touch_states(state)
        if ticket is not None:
            self._add_store(ticket, owners[ticket.indices], numbers[ticket.indices], tables)

    def _touch_states(self, state: RequestState) -> None:
        """The request goes on from states of the device's: nobody offers them again, as is done with all else."""
        for n, group in enumerate(self._groups):
            if group.kind == STATE and state.local and state.local % group.tokens_per_chunk == 0:
                last = state.local // group.tokens_per_chunk
                self.manager.touch(state.named.chunks[n].slice(last - 1, last))

    def _add_store(
        self, ticket: StoreTicket, owners: Offsets, numbers: Offsets, tables: Sequence[Sequence[int]]
    ) -> None:
        """Plan the copies of ``ticket``. owners, numbers: the group of each of its chunks, and its number there."""
        copies, blocks = [], []
        for n, (group, i) in enumerate(zip(self._groups, self._deployment.group_ids, strict=True)):
            mine = owners == n
            if mine.any():
                chunks = numbers[mine].tolist()
                copies.append(plans.store_copies(n, group, tables[i], chunks, ticket.offsets[mine]))
                blocks.extend(copies[-1].blocks.tolist())
        job_id = next(self._ids)
        self._stores[job_id] = StoreWork(ticket, blocks, ranks_left=self._ranks)
        for block in blocks:
            self._readers.setdefault(block, set()).add(job_id)
        self._plan.stores.append(Transfer(job_id, True, tuple(copies)))

    def _note_written(self, output: SchedulerOutput) -> None:
        """Collect the blocks that this step may write: what was stored from them before must be done first."""
        if not self._readers:
            return
        sizes = self._deployment.block_sizes
        for new in output.scheduled_new_reqs:
            self._written.update(plans.written_blocks(new.block_ids, sizes, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for request_id, tables, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if tables is not None:
                resumed = request_id in cached.resumed_req_ids
                self._written.update(plans.written_blocks(tables, sizes, computed if resumed else 0))
        for copy in output.kv_cache_block_copies or ():
            self._written.add(copy.dst_block_id)
        # Also of requests that are not in the output: preempted after they were given their blocks.
        self._written.update(output.new_block_ids_to_zero or ())

    def _end_store(self, job_id: int, ranks: int, ok: bool) -> None:
        work = self._stores[job_id]
        if not work.reported(ranks, ok):
            return
        del self._stores[job_id]
        for block in work.blocks:
            readers = self._readers[block]
            readers.discard(job_id)
            if not readers:
                del self._readers[block]
        self.manager.finish_store(work.ticket, work.ok)

    def _end_load(self, job_id: int, ranks: int, ok: bool) -> None:
        work = self._loads[job_id]
        if not work.reported(ranks, ok):
            return
        del self._loads[job_id]
        self.manager.finish_load(work.request_id, work.ok)
        state = self._requests.get(work.request_id)
        if state is not None:
            state.loading = False
        else:
            self.manager.finish_request(work.request_id)
