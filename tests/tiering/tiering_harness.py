"""A manager with a plain device beside it: chunks have known bytes, which are checked when they come back."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from tierkv.config import CacheConfig, parse
from tierkv.host.slabs import smallest_region
from tierkv.keys import GroupNamespace, Namespace, make_chunks
from tierkv.layout.spec import GroupSpec, LayerPage, ModelSpec
from tierkv.tiering.build import open_manager
from tierkv.tiering.manager import LoadPlan, StoreTicket
from tierkv.tiering.query import Query
from tierkv.types import ChunkName, Chunks, RequestContext

TOKENS = 4  # of a block
WAIT_S = 20.0


def group(index: int = 0, kind: str = "full", window: int = 0, page: int = 256, blocks: int = 1) -> GroupSpec:
    return GroupSpec(
        group=index,
        kind=kind,
        tokens_per_block=TOKENS,
        blocks_per_chunk=blocks,
        window=window,
        pages=(LayerPage.opaque(f"layer.{index}", page),),
    )


def namespace(groups: Sequence[GroupSpec], label: str = "") -> Namespace:
    return Namespace(
        model="test",
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
            for g in groups
        ),
        layout="canonical-1",
        cache_namespace=label,
    )


def hashes(text: str, count: int) -> list[bytes]:
    """The block hashes of a prompt named ``text``: prompts ``a``, ``ab``, ``ac`` share what they share of letters.

    Letter i stands for chunk i; the last one goes on.
    """
    named = [text[: min(i + 1, len(text))] + f":{i}" for i in range(count)]
    return [xxhash.xxh3_128_digest(n.encode()) * 2 for n in named]


@functools.lru_cache(1 << 14)
def content(name: ChunkName, size: int) -> bytes:
    """What the device computes for a chunk: known from its name alone."""
    seed = int.from_bytes(xxhash.xxh3_64_digest(name.block_hash + bytes([name.group]) + name.space.generation), "big")
    return np.random.default_rng(seed).bytes(size)


class Bench:
    """A manager, its region, and what a scheduler and workers would do with them. Prompts are counted in blocks."""

    def __init__(
        self,
        groups: Sequence[GroupSpec] = (group(),),
        slots: int = 16,
        tiers: Sequence[dict[str, Any]] = (),
        label: str = "",
        **fields: Any,
    ) -> None:
        self.model = ModelSpec(tuple(groups), 1)
        # Slots of the largest chunk; waiting requests may have all of them unless a test says otherwise.
        size = max(smallest_region([self.model.chunk_bytes(i)]) for i in range(len(groups)))
        raw = {"cpu_bytes_to_use": slots * size, "promotion_share": 1.0, "secondary_tiers": list(tiers), **fields}
        self.config: CacheConfig = parse(raw)
        self.manager, self.region = open_manager(self.config, self.model, namespace(groups, label), align=TOKENS)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.manager.close()
        self.region.close()

    def chunks(self, text: str, count: int) -> tuple[Chunks, ...]:
        """For each group, the complete chunks of a prompt of ``count`` blocks."""
        named = hashes(text, count)
        return tuple(
            make_chunks(self.manager.space, g.group, named[g.blocks_per_chunk - 1 :: g.blocks_per_chunk])
            for g in self.model.groups
        )

    def store(self, text: str, count: int, request_id: str = "s", ok: bool = True) -> int:
        """Compute and store a prompt's chunks; how many were taken."""
        batch = Chunks.concat(self.chunks(text, count))
        ticket = self.manager.begin_store(batch, request_id)
        if ticket is None:
            return 0
        self.copy(batch, ticket)
        self.manager.finish_store(ticket, ok)
        return len(ticket.slots)

    def copy(self, batch: Chunks, ticket: StoreTicket) -> None:
        """Do what the workers do for a store of ``batch``."""
        for index, offset in zip(ticket.indices.tolist(), ticket.offsets.tolist(), strict=True):
            name = batch.name(index)
            size = self.model.chunk_bytes(name.group)
            self.region.view[offset : offset + size] = content(name, size)

    def query(self, text: str, count: int, request_id: str, local: int = 0, limit: int | None = None) -> Query:
        top = count * TOKENS if limit is None else limit
        return Query(RequestContext(request_id), self.manager.space, self.chunks(text, count), local, top)

    def ask(self, text: str, count: int, request_id: str, local: int = 0, limit: int | None = None) -> int | None:
        """One question, in tokens."""
        return self.manager.lookup(self.query(text, count, request_id, local, limit))

    def boundary(self, text: str, count: int, request_id: str, local: int = 0, limit: int | None = None) -> int:
        """Ask until there is an answer."""
        end = time.monotonic() + WAIT_S
        while (answer := self.ask(text, count, request_id, local, limit)) is None:
            assert time.monotonic() < end, f"no answer: {self.manager!r}"
            time.sleep(0.001)
        return answer

    def load(self, text: str, count: int, request_id: str, local: int = 0) -> int:
        """Find, load, and check every byte; the boundary."""
        boundary = self.boundary(text, count, request_id, local)
        if boundary == local:
            self.manager.release(request_id)
            return boundary
        plan = self.manager.begin_load(request_id)
        assert plan is not None and plan.boundary == boundary
        self.check(plan, self.chunks(text, count), local)
        self.manager.finish_load(request_id, True)
        return boundary

    def check(self, plan: LoadPlan, named: Sequence[Chunks], local: int) -> None:
        """Every byte that the workers would load, of a request with the chunks ``named``."""
        for chunks, offsets, spec in zip(named, plan.offsets, self.model.groups, strict=True):
            first = max(local, spec.first_needed_token(plan.boundary)) // spec.tokens_per_chunk
            for index in range(first, -(-plan.boundary // spec.tokens_per_chunk)):
                size = self.model.chunk_bytes(spec.group)
                offset = int(offsets[index])
                assert offset >= 0
                assert bytes(self.region.view[offset : offset + size]) == content(chunks.name(index), size)

    def settle(self) -> None:
        """Wait until no tier has a job."""
        end = time.monotonic() + WAIT_S
        while not self.manager.idle:
            assert time.monotonic() < end, f"not idle: {self.manager!r}"
            time.sleep(0.001)

    def settle_stores(self) -> None:
        """Wait until tiers have no store; a load may go on."""
        manager = self.manager
        wait_until(lambda: not manager._cascades.queued and all(job.load for job in list(manager._jobs._jobs.values())))

    def forget_host(self) -> None:
        """Empty the host cache; tiers keep what they have."""
        self.manager.reset("host")

    def assert_at_rest(self) -> None:
        self.settle()
        counts = self.manager.counts()
        assert counts["slots_pinned"] == counts["slots_writing"] == counts["jobs"] == counts["requests"] == 0


def memory(**fields: Any) -> dict[str, Any]:
    return {"type": "memory", **fields}


def fs(root: Path, **fields: Any) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), **fields}


def wait_until(condition: Callable[[], Any], timeout: float = WAIT_S) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
