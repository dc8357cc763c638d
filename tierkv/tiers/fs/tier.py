"""The file system tier. See ``layouts`` for how records can lie there, ``root`` for where."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar

from msgspec import Meta

from tierkv.config import Positive, TierConfig
from tierkv.keys import make_chunks
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.fs.files import FilesLayout
from tierkv.tiers.fs.layouts import Layout
from tierkv.tiers.fs.root import Root
from tierkv.tiers.io import IoPool
from tierkv.types import ChunkName, Chunks, JobResult, LoadJob, Locality, Medium, RequestContext, StoreJob

logger = logging.getLogger(__name__)


class FsTierConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """root_dir: where records lie; made if missing. Processes and hosts that share it share chunks.

    n_read_threads, n_write_threads: how many chunks are read, and written, at the same time.
    fsync: flush each record before it becomes visible, so that a power cut leaves no torn one (which
        would be noticed at its load).
    locality: whether the root is this host's, for requests that choose (``kv_load_tiers``). None: does not say.
    enable_kv_events: accepted for vLLM's sake; not used yet.
    """

    root_dir: Annotated[str, Meta(min_length=1)]
    n_read_threads: Positive = 8
    n_write_threads: Positive = 4
    fsync: bool = False
    enable_kv_events: bool = False
    locality: Locality | None = None


class FsTier(Tier):
    """Records below a directory.

    Thread safety: as every tier.
    """

    Config: ClassVar[type[TierConfig]] = FsTierConfig
    hit_source: ClassVar[str] = "disk"
    medium: Medium | None = "STORAGE"

    def __init__(self, config: FsTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.locality = config.locality
        if config.enable_kv_events:
            logger.info("tier %s: enable_kv_events is accepted and has no effect", context.name)
        root = Root(config.root_dir)
        root.prepare(context.namespace, context.description)
        self._layout: Layout = FilesLayout(root, context.view, fsync=config.fsync)
        # Last: no thread may be left behind by a constructor that raises.
        self._pool = IoPool(context.name, config.n_read_threads, config.n_write_threads, context.wake)

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        return bool(self._layout.has(make_chunks(name.space, name.group, [name.block_hash]))[0])

    def lookup_batch(self, chunks: Chunks, request: RequestContext) -> Sequence[bool]:
        answers: list[bool] = self._layout.has(chunks).tolist()
        return answers

    def submit_store(self, job: StoreJob) -> None:
        self._pool.write(job.job_id, len(job.chunks), partial(self._layout.store, job))

    def submit_load(self, job: LoadJob) -> None:
        self._pool.read(job.job_id, len(job.chunks), partial(self._layout.load, job))

    def get_finished_jobs(self) -> list[JobResult]:
        return self._pool.get_finished()

    def close(self) -> None:
        self._pool.close()
        self._layout.close()

    def __repr__(self) -> str:
        return f"FsTier({self.context.name!r}, {self._layout!r}, {self._pool!r})"
