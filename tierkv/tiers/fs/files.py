"""The layout ``files``: a file per chunk, content-addressed, under a root that can be shared."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from tierkv.errors import ConfigError, RecordError
from tierkv.tiers import record
from tierkv.tiers.base import TierContext
from tierkv.tiers.fs.config import FsTierConfig
from tierkv.tiers.fs.direct import Reader
from tierkv.tiers.fs.ledger import Ledger
from tierkv.tiers.fs.recordfile import create, holds_record, make_directory, read_record, write_new, write_over
from tierkv.tiers.fs.room import Room
from tierkv.tiers.fs.root import FULL, Root
from tierkv.tiers.fs.survey import Survey, word_of
from tierkv.tiers.io import ABSENT, MOST_CHUNKS, Outcome, one_by_one
from tierkv.tiers.known import Known
from tierkv.tiers.paths import record_path
from tierkv.types import Chunks, Flags, LoadJob, StoreJob

logger = logging.getLogger(__name__)

#: Chunks of fewer bytes are small; and how long a thread waits for its turn at them.
_SMALL_BYTES = 128 << 10
_TURN_S = 0.05


class FilesLayout:
    """See ``Layout``.

    Thread safety: as every layout. Processes need a lock between them for the ledger alone: a record appears whole, by
    a rename, and two that write the same chunk write the same bytes.
    """

    def __init__(self, root: Root, config: FsTierConfig, context: TierContext) -> None:
        self.most_chunks = MOST_CHUNKS
        self._root = root
        self._view = context.view
        self._fsync = config.fsync
        self._known = Known()
        self._turns = threading.Lock()
        self._reader = Reader(context.view, direct=config.direct_reads)
        bounded = config.capacity_bytes is not None or config.min_free_bytes > 0
        self._ledger = Ledger(root, config.capacity_bytes, config.min_free_bytes)
        self._keeps_ledger = self._open_ledger(bounded)
        try:
            self._room = Room(
                root,
                self._ledger,
                context.namespace,
                capacity_bytes=config.capacity_bytes,
                bounded=bounded,
                generation_ttl_s=config.generation_ttl_s,
                tier=context.name,
                on_walk=self._note_walk,
                on_removed=self._note_removed,
            )
        except BaseException:  # no thread to be had
            self._ledger.close()
            raise

    def has(self, chunks: Chunks, required: Flags | None = None) -> Flags:
        """What is known to be there need not be looked for; what is not known may have come from another process."""
        words = chunks.keys[:, 0]
        found = self._known.has(words)
        directory = self._root.of_space(chunks.space)
        for i in np.flatnonzero(~found).tolist():
            path = record_path(directory, int(chunks.groups[i]), chunks.hashes[i].tobytes())
            if _has_record(path):
                found[i] = True
                self._known.add(int(words[i]))
            elif required is not None and required[i]:
                break
        return found

    def store(self, job: StoreJob, part: range) -> Iterable[Outcome]:
        self._room.use(job.chunks.space)
        with self._turn(job, part):
            yield from one_by_one(partial(self._store, job))(part)

    def load(self, job: LoadJob, part: range) -> Iterable[Outcome]:
        self._room.use(job.chunks.space)
        with self._turn(job, part):
            yield from one_by_one(partial(self._load, job))(part)

    def stop(self) -> None:
        self._room.stop()

    def close(self) -> None:
        self._room.close()
        self._ledger.close()

    def __repr__(self) -> str:
        return (
            f"FilesLayout(root_dir={self._root.path!r}, direct_reads={self._reader.direct}, known={len(self._known)}, "
            f"{self._room!r}, {self._ledger!r})"
        )

    # ── storing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _store(self, job: StoreJob, index: int) -> None:
        name, length = job.chunks.name(index), int(job.lengths[index])
        path = self._root.of_record(name)
        there = holds_record(path, name, length)
        if not there:
            if there is not None:
                self._remove(path)  # what is no record of this chunk
            header = record.encode_header(name, length, int(job.checksums[index]))
            try:
                with self._slice(int(job.offsets[index]), length) as payload:
                    self._write(path, [header, payload], record.HEADER_BYTES + length)
            except FileExistsError:
                if not holds_record(path, name, length):
                    raise
        self._known.add(int(job.chunks.keys[index, 0]))

    def _write(self, path: str, parts: list[bytes | memoryview], nbytes: int) -> None:
        """Make the file ``path``, whole, with room for it taken before. Nothing is left behind where that fails."""
        taken = self._ledger.size_of(nbytes)
        temporary = os.path.join(self._temporary, Ledger.temporary_name(taken))
        reused = self._take(taken, temporary)
        try:
            if reused:
                write_over(temporary, parts, self._ledger.block_bytes, self._fsync)
            else:
                write_new(create(temporary), parts, self._fsync)
            if os.path.lexists(path):  # another process was quicker
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if self._keeps_ledger:
                self._ledger.give_back(taken)
            raise
        if self._keeps_ledger:
            self._ledger.made(taken)

    def _rename(self, temporary: str, path: str) -> None:
        for _ in range(3):  # who tidies up may remove the directory before there is something in it
            try:
                return os.rename(temporary, path)
            except FileNotFoundError:
                self._make_directory(os.path.dirname(path))
        return os.rename(temporary, path)

    def _make_directory(self, path: str) -> None:
        """Make a record's directory and what is missing above it: at most its space's and its namespace's."""
        each = self._ledger.directory_bytes
        self._take(3 * each, None)
        made = 0
        try:
            missing = [directory for directory in _up(path, 3) if not os.path.exists(directory)]
            make_directory(path)
            made = len(missing)
        finally:
            if self._keeps_ledger:
                self._ledger.made(made * each)
                self._ledger.give_back((3 - made) * each)

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, job: LoadJob, index: int) -> int:
        name = job.chunks.name(index)
        path = self._root.of_record(name)
        try:
            with self._slice(int(job.offsets[index]), int(job.lengths[index])) as payload:
                return read_record(path, name, payload, self._reader)
        except RecordError as error:
            self._known.remove(int(job.chunks.keys[index, 0]))
            # Never serve it again. Should another process just have replaced it, a good record is lost: no harm.
            if error.reason != ABSENT:
                self._remove(path)
            raise

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _turn(self, job: StoreJob | LoadJob, part: range) -> Iterator[None]:
        """Threads take turns at small chunks, unless a turn takes long.

        A small chunk is a dozen calls of a few microseconds each on a local disk. Threads that make them at the same
        time hand the interpreter to each other after each one, which takes longer than the calls.
        """
        small = int(job.lengths[part].max()) < _SMALL_BYTES
        mine = small and self._turns.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            if mine:
                self._turns.release()

    def _open_ledger(self, bounded: bool) -> bool:
        """Whether the ledger is kept. Without bounds it need not be: other processes' bounds are only less exact.

        Raises:
            ConfigError: there is a bound, and no ledger can be kept here.
        """
        try:
            self._ledger.open()
        except OSError as error:
            if error.errno in FULL:
                return True  # it is opened when there is room
            if bounded:
                problem = f"needs a ledger, which cannot be kept below {self._root.path!r} ({error.strerror})"
                raise ConfigError(
                    "capacity_bytes", problem, "a root on a file system whose files can be locked (flock)"
                ) from error
            logger.warning("files below %s cannot be locked (%s): no ledger is kept", self._root.path, error)
            return False
        return True

    def _take(self, nbytes: int, temporary: str | None) -> bool:
        """As ``Room.take``."""
        if not self._keeps_ledger:
            return False
        self._ledger.open()
        return self._room.take(nbytes, temporary)

    @property
    def _temporary(self) -> str:
        return self._ledger.temporary if self._keeps_ledger else self._root.temporary

    def _remove(self, path: str) -> None:
        """Remove a file that is in a record's place, if there is one."""
        with contextlib.suppress(OSError):
            nbytes = os.stat(path, follow_symlinks=False).st_size
            os.unlink(path)
            if self._keeps_ledger:
                self._ledger.open()
                self._ledger.removed(self._ledger.size_of(nbytes))

    def _note_walk(self, found: Survey | None) -> None:
        if found is None:
            self._known.begin_replacing()
        else:
            self._known.replace(found.known_words)

    def _note_removed(self, path: str) -> None:
        word = word_of(path)
        if word is not None:
            self._known.remove(word)

    def _slice(self, offset: int, length: int) -> memoryview:
        """A part of the region. To be released by ``with``: while it lives, the region cannot be unmapped."""
        assert offset >= 0 and offset + length <= len(self._view), "a job's chunk lies within the region"
        return self._view[offset : offset + length]


def _has_record(path: str) -> bool:
    """Whether a file with more than a header is there; an OSError means that the tier cannot tell."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > record.HEADER_BYTES


def _up(path: str, count: int) -> Iterable[str]:
    """``path`` and the directories above it, ``count`` in all."""
    for _ in range(count):
        yield path
        path = os.path.dirname(path)
