"""The file system tier. See ``layouts`` for how records can lie there, ``root`` for where."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from tierkv.config import TierConfig
from tierkv.keys import make_chunks
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.fs.config import FsTierConfig
from tierkv.tiers.fs.files import FilesLayout
from tierkv.tiers.fs.layouts import Layout
from tierkv.tiers.fs.root import Root
from tierkv.tiers.fs.segments import SegmentsLayout
from tierkv.tiers.io import IoPool
from tierkv.types import ChunkName, Chunks, Flags, JobResult, LoadJob, Medium, RequestContext, StoreJob

logger = logging.getLogger(__name__)


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
        make_layout = FilesLayout if config.layout == "files" else SegmentsLayout
        self._layout: Layout = make_layout(root, config, context)
        threads = (config.n_read_threads, config.n_write_threads)
        try:
            self._pool = IoPool(context.name, *threads, context.wake, self._layout.most_chunks)
        except BaseException:  # nothing may be left behind by a constructor that raises
            self._layout.close()
            raise

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        return bool(self._layout.has(make_chunks(name.space, name.group, [name.block_hash]))[0])

    def lookup_batch(self, chunks: Chunks, request: RequestContext, required: Flags | None = None) -> Sequence[bool]:
        answers: list[bool] = self._layout.has(chunks, required).tolist()
        return answers

    def submit_store(self, job: StoreJob) -> None:
        self._pool.write(job.job_id, len(job.chunks), partial(self._layout.store, job))

    def submit_load(self, job: LoadJob) -> None:
        self._pool.read(job.job_id, len(job.chunks), partial(self._layout.load, job))

    def get_finished_jobs(self) -> list[JobResult]:
        return self._pool.get_finished()

    def close(self) -> None:
        self._layout.stop()
        self._pool.close()
        self._layout.close()

    def __repr__(self) -> str:
        return f"FsTier({self.context.name!r}, {self._layout!r}, {self._pool!r})"
