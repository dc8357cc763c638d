"""The object store tier: an object per chunk, named as ``tierkv.tiers.paths`` says, which is one record.

Whether an object is there is asked (HEAD) only when it is not known: from a listing, which a thread makes now and then,
or from what was read, written or asked for before. An object that is there is not sent again; one that is not is
written under the condition that it still is not. What a record is not, or what is damaged, is never loaded, and
written anew by the next store of the chunk; nothing is removed, so leave to delete objects is not needed.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tierkv.config import TierConfig
from tierkv.errors import RecordError, RemoteError, TierClosedError
from tierkv.keys import make_chunks
from tierkv.tiers import record
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.io import ABSENT
from tierkv.tiers.known import Words
from tierkv.tiers.obj.bucket import Bucket
from tierkv.tiers.obj.calls import CallPool
from tierkv.tiers.obj.config import ObjTierConfig
from tierkv.tiers.obj.verdicts import Verdicts
from tierkv.tiers.paths import DESCRIPTION, RECORD, KeyWords, description_text, record_path, space_path
from tierkv.types import ChunkName, Chunks, Flags, JobResult, LoadJob, Medium, RequestContext, Space, StoreJob

logger = logging.getLogger(__name__)

#: The first objects of a question are asked for in such a number, then in twice as many each time.
_FIRST_ASKED = 8
#: To list a page of objects is as much work as to ask for so many one by one, or so stores charge for it.
_PAGE_WORTH = 12
#: A listing of a space may take so long.
_LIST_S = 300.0


class ObjTier(Tier):
    """Records as objects in a bucket.

    Thread safety: as every tier. Jobs are done on the thread of ``Calls``, where lookup threads wait for calls; one more,
    ``tierkv-<tier>-list-0``, lists.
    """

    Config: ClassVar[type[TierConfig]] = ObjTierConfig
    hit_source: ClassVar[str] = "external_unspecified"
    medium: Medium | None = "STORAGE"

    def __init__(self, config: ObjTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.locality = config.locality
        self.stores = config.mode != "read"
        if config.enable_kv_events:
            logger.info("tier %s: enable_kv_events is accepted and has no effect", context.name)
        self._n_lookups = config.n_lookup_connections
        self._list_interval_s = config.list_interval_s
        self._verdicts = Verdicts()
        self._changed = threading.Condition()
        self._space: Space | None = None
        self._closed = False
        #: Of the last complete listing of the space: its pages. None: there is none yet.
        self._pages: int | None = None
        self._listing = threading.Lock()
        self._bucket = Bucket(config, context.name, max(context.deadlines.load_s, context.deadlines.store_s))
        n_reads, n_writes = config.n_read_connections, config.n_write_connections
        if config.io_threads is not None:
            n_reads = n_writes = config.io_threads
        self._jobs = CallPool(context.name, self._bucket.calls, n_reads, n_writes, context.wake)
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{context.name}-list-0", daemon=True)
        try:
            self._check(context)
            self._thread.start()
        except BaseException:  # nothing may be left behind by a constructor that raises
            self._jobs.close()
            self._bucket.close()
            raise

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        return self.lookup_batch(make_chunks(name.space, name.group, [name.block_hash]), request)[0]

    def lookup_batch(self, chunks: Chunks, request: RequestContext) -> Sequence[bool]:
        """Once all that were asked for together are absent, so are those behind them, as far as is known."""
        self._use(chunks.space)
        until = time.monotonic() + self.context.deadlines.lookup_s
        words = chunks.keys[:, 0]
        there, absent = self._verdicts.of(words)
        unknown = np.flatnonzero(~there & ~absent)
        asked, step = 0, min(_FIRST_ASKED, self._n_lookups)
        while asked < len(unknown):
            if asked and self._list_is_cheaper(len(unknown) - asked) and self._list(chunks.space, until):
                there[unknown[asked:]] = self._verdicts.known.has(words[unknown[asked:]])
                break
            part = unknown[asked : asked + step]
            found = self._ask(chunks, part, until)
            there[part] = found
            asked += len(part)
            if not found.any():
                self._verdicts.likely_absent(words[unknown[asked:]])
                break
            step = min(2 * step, self._n_lookups)
        answers: list[bool] = there.tolist()
        return answers

    def submit_store(self, job: StoreJob) -> None:
        until = time.monotonic() + self.context.deadlines.store_s
        self._jobs.write(job.job_id, len(job.chunks), partial(self._store, job), until)

    def submit_load(self, job: LoadJob) -> None:
        until = time.monotonic() + self.context.deadlines.load_s
        self._jobs.read(job.job_id, len(job.chunks), partial(self._load, job), until)

    def get_finished_jobs(self) -> list[JobResult]:
        return self._jobs.get_finished()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._bucket.stop()
        self._jobs.close()
        self._thread.join()
        self._bucket.close()

    def __repr__(self) -> str:
        return f"ObjTier({self.context.name!r}, {self._bucket.url!r}, {self._verdicts!r}, {self._jobs!r})"

    # ── storing and loading ──────────────────────────────────────────────────────────────────────────────────────────

    async def _store(self, job: StoreJob, index: int) -> None:
        name, length = job.chunks.name(index), int(job.lengths[index])
        word = int(job.chunks.keys[index, 0])
        refused = self._verdicts.was_refused(word)
        if not refused and self._verdicts.known.has(job.chunks.keys[index : index + 1, 0])[0]:
            return
        path, objects = self._path(name), self._bucket.objects
        replace = refused
        if not (refused or self._verdicts.was_absent(word)):
            found = await objects.size(path)
            if found == record.HEADER_BYTES + length:
                self._verdicts.there(word)
                return
            replace = found is not None  # no record of this chunk
        header = record.encode_header(name, length, int(job.checksums[index]))
        with self._slice(int(job.offsets[index]), length) as payload:
            await objects.write(path, [header, payload], replace=replace)
        self._verdicts.written(word)

    async def _load(self, job: LoadJob, index: int) -> int:
        word = int(job.chunks.keys[index, 0])
        try:
            checksum = await self._read(job, index)
        except RecordError as error:
            if error.reason == ABSENT:
                self._verdicts.absent(word)
            else:
                self._verdicts.refused(word)
            raise
        self._verdicts.there(word)
        return checksum

    async def _read(self, job: LoadJob, index: int) -> int:
        name, length = job.chunks.name(index), int(job.lengths[index])
        size, pieces = await self._bucket.objects.read(self._path(name), record.HEADER_BYTES + length)
        with self._slice(int(job.offsets[index]), length) as payload:
            header: record.Header | None = None
            head, done = b"", 0
            async for piece in pieces:
                if header is None:
                    missing = record.HEADER_BYTES - len(head)
                    head, piece = head + bytes(piece[:missing]), piece[missing:]
                    if len(head) < record.HEADER_BYTES:
                        continue
                    header = record.decode_header(head)
                    record.check(header, name, length)
                    record.check_size(header, size)
                if done + len(piece) > length:
                    raise RecordError("length", f"more than {length} bytes")
                _copy(piece, payload[done : done + len(piece)])
                done += len(piece)
            if header is None:
                header = record.decode_header(head)  # says that it is too short
            record.check_size(header, record.HEADER_BYTES + done)
            return record.check_payload(header, payload)

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, chunks: Chunks, which: npt.NDArray[np.intp], until: float) -> Flags:
        """Which of the chunks ``which`` have an object with more than a header in it."""
        sizes = self._bucket.sizes([self._path(chunks.name(i)) for i in which.tolist()], until)
        found = np.array([size is not None and size > record.HEADER_BYTES for size in sizes], np.bool_)
        for i, there in zip(which.tolist(), found.tolist(), strict=True):
            word = int(chunks.keys[i, 0])
            if there:
                self._verdicts.there(word)
            else:
                self._verdicts.absent(word)
        return found

    def _list_is_cheaper(self, count: int) -> bool:
        """Whether to list the space is less work than to ask for ``count`` objects; for all we know of it."""
        return self._pages is not None and count > _PAGE_WORTH * (self._pages + 1)

    def _list(self, space: Space, until: float) -> bool:
        """Note what is there of ``space``. Whether that is all, and of the space that is in use."""
        if not self._listing.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        try:
            self._verdicts.known.begin_replacing()
            words, of, pages = array("Q"), KeyWords(space), 0
            for page in self._bucket.list(space_path(space), until):
                pages += 1
                for each in page:
                    file_name = each.path.rpartition("/")[2]
                    if each.nbytes > record.HEADER_BYTES and RECORD.fullmatch(file_name):
                        words.append(of.of(file_name))
            found: Words = np.frombuffer(words, np.uint64) if words else np.empty(0, np.uint64)
            self._verdicts.known.replace(found)
            self._pages = pages
            return space == self._space
        finally:
            self._listing.release()

    def _use(self, space: Space) -> None:
        """``space`` is in use from now on: list it soon, if that was another one."""
        if space != self._space:
            with self._changed:
                self._space, self._pages = space, None
                self._changed.notify_all()

    def _run(self) -> None:
        """List the space that is in use: when it has changed, and now and then."""
        listed: Space | None = None
        failures = 0
        while True:
            with self._changed:
                if self._space is None or self._space == listed:
                    self._changed.wait(self._list_interval_s or None)
                if self._closed:
                    return
                space = self._space
            if space is None:
                continue
            listed = space
            if not self._list_interval_s:
                continue
            try:
                self._list(space, time.monotonic() + _LIST_S)
            except TierClosedError:
                return
            except (RemoteError, RecordError) as error:
                failures += 1
                if failures & (failures - 1) == 0:
                    logger.warning(
                        "tier %s: %s cannot be listed (%d times so far): %s",
                        self.context.name,
                        self._bucket.url,
                        failures,
                        error,
                    )

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, context: TierContext) -> None:
        directory = context.namespace.hex()
        description = (f"{directory}/{DESCRIPTION}", description_text(context.description)) if self.stores else None
        config = self.config
        assert isinstance(config, ObjTierConfig)
        self._bucket.check(directory, description, time.monotonic() + config.connect_timeout_s + config.timeout_s)

    def _path(self, name: ChunkName) -> str:
        return record_path(space_path(name.space), name.group, name.block_hash)

    def _slice(self, offset: int, length: int) -> memoryview:
        """A part of the region. To be released by ``with``: while it lives, the region cannot be unmapped."""
        assert offset >= 0 and offset + length <= len(self.context.view), "a job's chunk lies within the region"
        return self.context.view[offset : offset + length]


def _copy(piece: memoryview, target: memoryview) -> None:
    """By numpy, which lets other threads run meanwhile."""
    with target:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(piece, np.uint8))
