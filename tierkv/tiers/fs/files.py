"""The layout ``files``: a file per chunk, content-addressed, under a root that can be shared."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from functools import partial

import numpy as np

from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.tiers.fs.recordfile import holds_record, read_record, write_atomically
from tierkv.tiers.fs.root import Root, record_path
from tierkv.tiers.io import ABSENT, Outcome, one_by_one
from tierkv.types import Chunks, Flags, LoadJob, StoreJob


class FilesLayout:
    """See ``Layout``.

    Thread safety: as every layout. Processes need no lock between them: a record appears whole, by a
    rename, and two that write the same chunk write the same bytes.
    """

    def __init__(self, root: Root, view: memoryview, *, fsync: bool) -> None:
        self._root = root
        self._view = view
        self._fsync = fsync

    def has(self, chunks: Chunks) -> Flags:
        directory = self._root.of_space(chunks.space)
        found = np.zeros(len(chunks), np.bool_)
        for i, (group, hash_) in enumerate(zip(chunks.groups.tolist(), chunks.hashes, strict=True)):
            found[i] = _has_record(record_path(directory, group, hash_.tobytes()))
        return found

    def store(self, job: StoreJob, part: range) -> Iterable[Outcome]:
        return one_by_one(partial(self._store, job))(part)

    def load(self, job: LoadJob, part: range) -> Iterable[Outcome]:
        return one_by_one(partial(self._load, job))(part)

    def close(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"FilesLayout(root_dir={self._root.path!r})"

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
        assert offset >= 0 and offset + length <= len(self._view), "a job's chunk lies within the region"
        return self._view[offset : offset + length]


def _has_record(path: str) -> bool:
    """Whether a file with more than a header is there; an OSError means that the tier cannot tell."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > record.HEADER_BYTES
