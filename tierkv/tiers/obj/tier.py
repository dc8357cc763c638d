"""The object store tier: an object per chunk, named as ``tierkv.tiers.paths`` says, which is one record.

Whether an object is there is asked (HEAD) only when it is not known: from a listing, which a thread makes now and then,
or from what was read, written or asked for before. An object that is there is not sent again; one that is not is
written under the condition that it still is not. What a record is not, or what is damaged, is never loaded, and
written anew by the next store of the chunk; nothing is removed, so leave to delete objects is not needed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections.abc import AsyncIterator, Sequence
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
from tierkv.tiers.obj.bucket import Bucket, Found
from tierkv.tiers.obj.calls import CallPool
from tierkv.tiers.obj.config import ObjTierConfig
from tierkv.tiers.obj.verdicts import Verdicts
from tierkv.tiers.paths import DESCRIPTION, RECORD, KeyWords, description_text, record_path, space_path
from tierkv.types import ChunkName, Chunks, Flags, JobResult, LoadJob, Medium, RequestContext, Space, StoreJob

logger = logging.getLogger(__name__)

#: The first objects of a question are asked for in such a number, then in twice as many each time.
_FIRST_ASKED = 8
#: To list a page of objects is as much work as to ask for so many one by one, or so stores charge for it.
_PAGE, _PAGE_WORTH = 1000, 12
#: A listing of a space may take so long.
_LIST_S = 300.0


class ObjTier(Tier):
    """Records as objects in a bucket.

    Thread safety: as every tier. Jobs are done on the thread of ``Calls``, and lookup threads wait for calls
    there; ``tierkv-<tier>-list-0`` lists.
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
        #: How many names the last complete listing of the space had. None: there is none yet.
        self._names: int | None = None
        self._failures = 0
        self._listing = threading.Lock()
        self._bucket = Bucket(config, context.name, max(context.deadlines.load_s, context.deadlines.store_s))
        n_reads, n_writes = config.n_read_connections, config.n_write_connections
        if config.io_threads is not None:
            n_reads = n_writes = config.io_threads
        self._jobs = CallPool(context.name, self._bucket.calls, n_reads, n_writes, context.wake)
        self._thread: threading.Thread | None = None
        try:
            self._check(context)
            if config.list_interval_s:
                self._thread = threading.Thread(target=self._run, name=f"tierkv-{context.name}-list-0", daemon=True)
                self._thread.start()
        except BaseException:  # nothing may be left behind by a constructor that raises
            self._jobs.close()
            self._bucket.close()
            raise

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        return self.lookup_batch(make_chunks(name.space, name.group, [name.block_hash]), request)[0]

    def lookup_batch(self, chunks: Chunks, request: RequestContext, required: Flags | None = None) -> Sequence[bool]:
        """As ``BatchLookup`` has it. What nothing is known of is asked for, or listed if that is less work."""
        self._use(chunks.space)
        until = time.monotonic() + self.context.deadlines.lookup_s
        words = chunks.keys[:, 0]
        there, absent = self._verdicts.of(words)
        end = _first(absent, required)
        unknown = np.flatnonzero(~there[:end] & ~absent[:end])
        asked, step = 0, min(_FIRST_ASKED, self._n_lookups)
        while asked < len(unknown):
            if asked and self._list_is_cheaper(len(unknown) - asked) and self._list_now(chunks.space, until):
                there[unknown[asked:]] = self._verdicts.known.has(words[unknown[asked:]])
                break
            part = unknown[asked : asked + step]
            found = self._ask(chunks, part, until)
            there[part] = found
            asked += len(part)
            step = min(2 * step, self._n_lookups)
            if _first(~found, None if required is None else required[part]) < len(part):
                break
        behind = _first(~there, required)
        there[behind:] = False
        if not there.any():
            self._verdicts.likely_absent(words[behind:])
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
        if self._thread is not None:
            self._thread.join()
        self._bucket.close()

    def __repr__(self) -> str:
        return f"ObjTier({self.context.name!r}, {self._bucket.url!r}, {self._verdicts!r}, {self._jobs!r})"

    # ── storing and loading ──────────────────────────────────────────────────────────────────────────────────────────

    async def _store(self, job: StoreJob, index: int) -> None:
        name, length = job.chunks.name(index), int(job.lengths[index])
        word, verdicts = int(job.chunks.keys[index, 0]), self._verdicts
        path, nbytes = self._path(name), record.HEADER_BYTES + length
        refused = verdicts.was_refused(word)
        if not refused and verdicts.known.has(job.chunks.keys[index : index + 1, 0])[0]:
            return
        found: Found | None = None
        if refused or not verdicts.was_absent(word):
            found = await self._bucket.objects.find(path)
        for _ in range(2):
            if found is not None and found.nbytes == nbytes and (not refused or verdicts.is_another(word, found.e_tag)):
                return verdicts.there(word)
            header = record.encode_header(name, length, int(job.checksums[index]))
            with self._slice(int(job.offsets[index]), length) as payload:
                if await self._bucket.objects.write(path, [header, payload], replace=found is not None):
                    return verdicts.good(word)
            # Somebody was quicker; or it is something else.
            found = await self._bucket.objects.find(path)
        raise RemoteError("busy", "others write and remove it at the same time")

    async def _load(self, job: LoadJob, index: int) -> int:
        name, word = job.chunks.name(index), int(job.chunks.keys[index, 0])
        found: Found | None = None
        try:
            expected = record.HEADER_BYTES + int(job.lengths[index])
            found, pieces = await self._bucket.objects.read(self._path(name), expected)
            async with contextlib.aclosing(pieces):
                checksum = await self._take(job, index, found.nbytes, pieces)
        except RecordError as error:
            if found is None:
                assert error.reason == ABSENT
                self._verdicts.absent(word)
            else:
                self._verdicts.refused(word, found.e_tag)
            raise
        self._verdicts.good(word)
        return checksum

    async def _take(self, job: LoadJob, index: int, size: int, pieces: AsyncIterator[memoryview]) -> int:
        """Take a record of ``size`` bytes into the region, and verify it."""
        name, length = job.chunks.name(index), int(job.lengths[index])
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
        found = self._bucket.find_all([self._path(chunks.name(i)) for i in which.tolist()], until)
        there = np.zeros(len(which), np.bool_)
        for n, (word, each) in enumerate(zip(chunks.keys[which, 0].tolist(), found, strict=True)):
            if each is None:
                self._verdicts.absent(word)
            elif each.nbytes > record.HEADER_BYTES:
                there[n] = True
                self._verdicts.there(word)
        return there

    def _list_is_cheaper(self, count: int) -> bool:
        """Whether to list the space is less work than to ask for ``count`` objects; for all we know of it."""
        return self._names is not None and count > _PAGE_WORTH * (1 + self._names // _PAGE)

    def _list_now(self, space: Space, until: float) -> bool:
        """As ``_list``; but it may take half the time that there is, and does not matter if it fails."""
        now = time.monotonic()
        try:
            return self._list(space, now + (until - now) / 2)
        except RemoteError as error:
            self._note_failure(error)
            return False

    def _list(self, space: Space, until: float) -> bool:
        """Note what is there of ``space``. Whether that is all, and of the space that is in use.

        Not if another thread is about to.
        """
        if not self._listing.acquire(blocking=False):
            return False
        known, words, of, names = self._verdicts.known, array("Q"), KeyWords(space), 0
        whole = False
        try:
            known.begin_replacing()
            refused = self._verdicts.any_refused
            with contextlib.closing(self._bucket.pages(space_path(space), until)) as pages:
                for page in pages:
                    names += len(page)
                    for each in page:
                        file_name = each.path.rpartition("/")[2]
                        if each.nbytes > record.HEADER_BYTES and RECORD.fullmatch(file_name):
                            words.append(of.of(file_name))
                            if refused:
                                self._verdicts.is_another(words[-1], each.e_tag)
            whole = True
        finally:
            found: Words = np.frombuffer(words, np.uint64) if words else np.empty(0, np.uint64)
            if whole:
                known.replace(found)
            else:
                known.end_replacing(found)
            self._listing.release()
        self._names = names
        return space == self._space

    def _use(self, space: Space) -> None:
        """``space`` is in use from now on: list it soon, if that was another one."""
        if space != self._space:
            with self._changed:
                self._space, self._names = space, None
                self._changed.notify_all()

    def _run(self) -> None:
        """List the space that is in use: when it has changed, and now and then."""
        listed: Space | None = None
        until = 0.0
        while True:
            with self._changed:
                while not self._closed and (self._space is None or self._space == listed):
                    left = until - time.monotonic()
                    if self._space is not None and left <= 0:
                        break
                    self._changed.wait(None if self._space is None else left)
                if self._closed:
                    return
                space = self._space
            assert space is not None
            listed = space
            begun = time.monotonic()
            try:
                self._list(space, begun + _LIST_S)
            except TierClosedError:
                return
            except (RemoteError, RecordError) as error:
                self._note_failure(error)
            # However short the interval is, a listing is not all that is done.
            until = time.monotonic() + max(self._list_interval_s, time.monotonic() - begun)

    def _note_failure(self, error: Exception) -> None:
        """Log the first, second, fourth … listing that failed."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            logger.warning(
                "tier %s: %s cannot be listed (%d times so far): %s",
                self.context.name,
                self._bucket.url,
                self._failures,
                str(error),
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


def _first(flags: Flags, required: Flags | None) -> int:
    """The first of ``flags`` that is set and required; their number if there is none, or nothing is required."""
    if required is None:
        return len(flags)
    where = np.flatnonzero(flags & required)
    return int(where[0]) if len(where) else len(flags)


def _copy(piece: memoryview, target: memoryview) -> None:
    """By numpy, which lets other threads run meanwhile."""
    with target:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(piece, np.uint8))
