"""The file system tier. See ``root`` for what lies where, ``files`` for how it is written and read."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar

from msgspec import Meta

from tierkv.config import Positive, TierConfig
from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.fs.files import holds_record, read_record, write_atomically
from tierkv.tiers.fs.root import Root, record_path
from tierkv.tiers.io import ABSENT, IoPool, one_by_one
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
    """A file per chunk, content-addressed, under a root that can be shared.

    Thread safety: as every tier. Processes need no lock between them: a record appears whole, by a
    rename, and two that write the same chunk write the same bytes.
    """

    Config: ClassVar[type[TierConfig]] = FsTierConfig
    hit_source: ClassVar[str] = "disk"
    medium: Medium | None = "STORAGE"

    def __init__(self, config: FsTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._fsync = config.fsync
        self._root = Root(config.root_dir)
        self._root.prepare(context.namespace, context.description)
        self.locality = config.locality
        if config.enable_kv_events:
            logger.info("tier %s: enable_kv_events is accepted and has no effect", context.name)
        # Last: no thread may be left behind by a constructor that raises.
        self._pool = IoPool(context.name, config.n_read_threads, config.n_write_threads, context.wake)

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        return _has_record(self._root.of_record(name))

    def lookup_batch(self, chunks: Chunks, request: RequestContext) -> Sequence[bool]:
        """As ``lookup``, with one system call a chunk."""
        directory = self._root.of_space(chunks.space)
        groups = chunks.groups.tolist()
        return [
            _has_record(record_path(directory, group, hash_.tobytes()))
            for group, hash_ in zip(groups, chunks.hashes, strict=True)
        ]

    def submit_store(self, job: StoreJob) -> None:
        self._pool.write(job.job_id, len(job.chunks), one_by_one(partial(self._store, job)))

    def submit_load(self, job: LoadJob) -> None:
        self._pool.read(job.job_id, len(job.chunks), one_by_one(partial(self._load, job)))

    def get_finished_jobs(self) -> list[JobResult]:
        return self._pool.get_finished()

    def close(self) -> None:
        self._pool.close()

    def __repr__(self) -> str:
        return f"FsTier({self.context.name!r}, root_dir={self._root.path!r}, {self._pool!r})"

    def _store(self, job: StoreJob, index: int) -> None:
        name, length = job.chunks.name(index), int(job.lengths[index])
        path = self._root.of_record(name)
        if holds_record(path, name, length):
            return
        header = record.encode_header(name, length, int(job.checksums[index]))
        with self._slice(int(job.offsets[index]), length) as payload:
            write_atomically(path, [header, payload], self._root.temporary, self._fsync)

    def _load(self, job: LoadJob, index: int) -> int:
        name = job.chunks.name(index)
        path = self._root.of_record(name)
        try:
            with self._slice(int(job.offsets[index]), int(job.lengths[index])) as payload:
                return read_record(path, name, payload)
        except RecordError as error:
            # Never serve it again. Should another process just have replaced it, a good record is lost: no harm.
            if error.reason != ABSENT:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    def _slice(self, offset: int, length: int) -> memoryview:
        """A part of the region. To be released by ``with``: while it lives, the region cannot be unmapped."""
        assert offset >= 0 and offset + length <= len(self.context.view), "a job's chunk lies within the region"
        return self.context.view[offset : offset + length]


def _has_record(path: str) -> bool:
    """Whether a file with more than a header is there; an OSError means that the tier cannot tell."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > record.HEADER_BYTES
