"""The layout ``segments``: many chunks in a few large preallocated files, for a disk of one's own and one owner.

``geometry`` is the format. Which chunk is where is known in memory, by a ``HostCache`` whose region is the disk: it
gives out slots, keeps the order of use and evicts. After a restart a thread reads the tables of headers and puts what
is of this namespace into the index again, the slabs written last being the most recently used ones.

Why places are written over and over, rather than segments appended to and the oldest reclaimed: what goes is what was
not used for the longest time, wherever it lies. On the conversation trace of Mooncake, of whose chunks 36.6 % can be
hit, that is 27.9 % instead of 24.8 % with room for 10 % of the distinct chunks, and 34.5 % instead of 31.3 % with room
for 20 %. And it costs no speed: chunks that were stored together are evicted together, so that the places of those that
come instead, sorted, are few runs. With chunks of 16 tokens, what is stored at a time (up to 128) is 3 to 4 runs of 33
to 47 chunks. Writes all over the disk are slower than one behind the other, but not if each is of that size (through
the page cache, to ext4 on a virtual disk of 2 GB/s):

==================================== =============== ==============
calls                                to the cache    to the disk
==================================== =============== ==============
2 MiB, one after the other           6.6 … 7.4 GB/s  1.9 … 2.1 GB/s
1 MiB, anywhere                      5.5 … 5.9 GB/s  1.95 … 2.05 GB/s
128 KiB, anywhere                    2.2 … 2.4 GB/s  1.7 … 1.8 GB/s
16 KiB, anywhere                     0.3 … 2.9 GB/s  0.3 … 0.8 GB/s
==================================== =============== ==============
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tierkv.errors import ConfigError, RecordError
from tierkv.host.cache import READY, HostCache, warm_up
from tierkv.host.policies.lru import LRUPolicy
from tierkv.tiers import headers as header_tools
from tierkv.tiers import record
from tierkv.tiers.base import TierContext
from tierkv.tiers.fs.config import FsTierConfig
from tierkv.tiers.fs.geometry import Where, make_geometry
from tierkv.tiers.fs.restore import Restore
from tierkv.tiers.fs.root import Root
from tierkv.tiers.fs.segmentfile import SegmentFiles
from tierkv.tiers.headers import Headers
from tierkv.tiers.io import ABSENT, MOST_CHUNKS, Outcome
from tierkv.types import KEY_BYTES, Chunks, Flags, LoadJob, Offsets, StoreJob

#: The reason of chunks for which there is no room: all is in use at this moment, or not restored yet.
CAPACITY = "capacity"

#: Little is restored before the engine is ready: it is waited for this long.
START_S = 0.25

#: For how long a slot is given to nobody where writing failed; and so many failures in a row are not the places'.
_BAD_S = 60.0
_MOST_FAILURES = 4

#: Slots that are touched in one go, which holds the GIL.
_TOUCHED_AT_ONCE = 1024


class SegmentsLayout:
    """See ``Layout``.

    Thread safety: as every layout. One lock is around every call of the host cache, and never held during I/O. What is
    read is pinned, and what is written is reserved, so that nothing else happens to its slot meanwhile.
    """

    def __init__(self, root: Root, config: FsTierConfig, context: TierContext) -> None:
        """Take possession of ``root.segments`` and begin to restore what is there.

        Raises:
            ConfigError: ``root_dir`` or ``capacity_bytes`` cannot be used.
        """
        capacity_bytes = _check(config, context)
        warm_up(LRUPolicy)
        # What a part costs is as much as of ten chunks: small chunks are taken in larger parts.
        self.most_chunks = max(MOST_CHUNKS, min(128, (2 << 20) // max(context.chunk_bytes)))
        self._view = context.view
        self._fsync = config.fsync
        self._geometry = make_geometry(capacity_bytes, context.chunk_bytes)
        self._class_of_group: Offsets = np.array(self._geometry.class_of_group, np.int64)
        self._room: Offsets = np.array(self._geometry.place_bytes, np.int64)[self._class_of_group]
        self._files = SegmentFiles(root.segments, self._geometry, context.view, direct=config.direct_reads)
        self._lock = threading.Lock()
        self._uses = _Uses()
        self._formatting = threading.Lock()
        #: The size class that each slab is cut up for on disk, or -1.
        self._formatted: Offsets = np.full(self._geometry.num_slabs, -1, np.int64)
        #: Slots where writing failed, and when to try again.
        self._bad: deque[tuple[float, Offsets]] = deque()
        self._num_bad, self._most_bad = 0, self._geometry.plan.num_slots // 8
        try:
            self._cache = HostCache(self._geometry.plan, self._geometry.slot_bytes_of_group, LRUPolicy)
            self._restore = Restore(context, self._geometry, self._files, self._lock, self._cache, self._formatted)
            self._restore.start()
        except BaseException:
            self._files.close()
            raise
        self._restore.ended.wait(START_S)

    def has(self, chunks: Chunks, required: Flags | None = None) -> Flags:
        with self._lock:
            found: Flags = self._cache.states(chunks.keys) == READY
        return found

    def store(self, job: StoreJob, part: range) -> Sequence[Outcome]:
        slots: Offsets = np.full(len(part), -1, np.int64)
        try:
            return self._store(job, part, slots)
        finally:
            self._use(("store", job.job_id), len(job.chunks), part, slots)

    def load(self, job: LoadJob, part: range) -> Sequence[Outcome]:
        rows = slice(part.start, part.stop)
        chunks, offsets, lengths = job.chunks.slice(part.start, part.stop), job.offsets[rows], job.lengths[rows]
        with self._lock:
            slots, states = self._cache.locate(chunks.keys)
            slots[states != READY] = -1
            pinned = slots[slots >= 0]
            self._cache.pin(pinned)
        outcomes: list[Outcome] = [RecordError(ABSENT)] * len(part)
        try:
            here = _sorted(slots)
            batch = self._batch(slots[here], chunks.take(here), offsets[here], lengths[here])
            for i, outcome in zip(here.tolist(), self._read(batch), strict=True):
                outcomes[i] = outcome
        finally:
            with self._lock:
                self._cache.unpin(pinned)
            # What cannot be read must not stay because it is asked for.
            slots[[not isinstance(outcome, int) for outcome in outcomes]] = -1
            self._use(("load", job.job_id), len(job.chunks), part, slots)
        return outcomes

    def stop(self) -> None:
        self._restore.stop()

    def close(self) -> None:
        self._restore.close()
        self._files.close()

    def __repr__(self) -> str:
        with self._lock:
            return f"SegmentsLayout({self._files!r}, restored={self._restore.ended.is_set()}, {self._cache!r})"

    # ── storing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _store(self, job: StoreJob, part: range, found: Offsets) -> Sequence[Outcome]:
        """As ``store``. ``found`` receives the slot of each chunk that is there afterwards."""
        chunks, lengths = job.chunks.slice(part.start, part.stop), job.lengths[part.start : part.stop]
        outcomes: list[Outcome] = [None] * len(part)
        fitting = self._fitting(chunks, lengths)
        if len(fitting) < len(part):
            for i in set(range(len(part))).difference(fitting.tolist()):
                outcomes[i] = RecordError("length", f"{lengths[i]} bytes, more than any chunk of its group has")
            chunks, lengths = chunks.take(fitting), lengths[fitting]
        numbers = fitting + part.start
        headers = header_tools.encode(chunks, lengths, job.checksums[numbers])
        self._restore.begun.wait()
        with self._lock:
            self._give_another_try()
            known, states = self._cache.locate(chunks.keys)
            if (states == READY).any():  # what is there must not go for the rest of the batch
                self._cache.touch(np.unique(known[states == READY]))
            reserved = self._cache.reserve(_indexed(chunks)).slots
            there = self._cache.find(chunks.keys)
        failures: dict[int, BaseException] = {}
        try:
            for i in fitting[there < 0].tolist():
                outcomes[i] = RecordError(CAPACITY)
            new = _sorted(reserved)
            batch = self._batch(reserved[new], chunks.take(new), job.offsets[numbers[new]], lengths[new])
            failures = self._write_what_can_be(batch, headers[new])
        except BaseException as error:  # nobody knows what was written
            failures = dict.fromkeys(reserved[reserved >= 0].tolist(), error.with_traceback(None))
        finally:
            self._end_writing(reserved[reserved >= 0], failures)
        for i, slot in zip(fitting.tolist(), there.tolist(), strict=True):
            if slot in failures:  # a twin of the same batch, too
                outcomes[i] = failures[slot]
        there[np.isin(there, list(failures))] = -1
        found[fitting] = there
        return outcomes

    def _write_what_can_be(self, batch: _Batch, headers: Headers) -> dict[int, BaseException]:
        """Write records, one by one if not all of them can be written; the slots where that failed, and why."""
        try:
            self._write(batch, headers)
            return {}
        except OSError as error:
            if len(batch.slots) == 1:
                return {int(batch.slots[0]): error.with_traceback(None)}
        failures: dict[int, BaseException] = {}
        for i in range(len(batch.slots)):
            failures |= self._write_what_can_be(batch.take(np.array([i])), headers[i : i + 1])
            if len(failures) == _MOST_FAILURES == i + 1:  # it is not the places
                return dict.fromkeys(batch.slots.tolist(), failures[int(batch.slots[0])])
        return failures

    def _end_writing(self, slots: Offsets, failures: dict[int, BaseException]) -> None:
        """Reserved ``slots`` are written but for ``failures``, whose slots are given to nobody for a while.

        A slot that is free is the first to be taken again: one place that cannot be written would fail every store. If
        nothing could be written, it is not the places.
        """
        bad = np.array(list(failures), np.int64)
        with self._lock:
            self._cache.commit(slots[~np.isin(slots, bad)])
            self._restore.note_stored(slots)
            if not len(bad):
                return
            if len(bad) == len(slots) or self._num_bad + len(bad) > self._most_bad:
                self._cache.abort(bad)
            else:
                self._cache.forget(bad)
                self._bad.append((time.monotonic() + _BAD_S, bad))
                self._num_bad += len(bad)

    def _give_another_try(self) -> None:
        """Slots where writing failed some time ago are free again. Under the lock."""
        while self._bad and self._bad[0][0] <= time.monotonic():
            slots = self._bad.popleft()[1]
            self._num_bad -= len(slots)
            self._cache.abort(slots)

    def _fitting(self, chunks: Chunks, lengths: Offsets) -> Offsets:
        """The numbers of those of ``chunks`` that a slot of their group has room for."""
        last = len(self._room) - 1
        fitting: Offsets = np.flatnonzero(
            (chunks.groups <= last) & (lengths <= self._room[np.minimum(chunks.groups, last)])
        )
        return fitting

    def _write(self, batch: _Batch, headers: Headers) -> None:
        """Write records into reserved slots. Whenever it ends, each header on disk is that of what is in its place."""
        files, where = self._files, batch.where
        slabs = dict(zip(where.slabs.tolist(), self._class_of_group[batch.chunks.groups].tolist(), strict=True))
        for slab, size_class in slabs.items():
            self._format(slab, size_class)
        runs = files.runs(where, batch.lengths)
        files.write_headers(where, runs, None)
        if self._fsync:
            files.flush(where)
        files.write_payloads(where, runs, batch.offsets, batch.lengths)
        if self._fsync:
            files.flush(where)
        files.write_headers(where, runs, headers)
        for slab in slabs:
            files.note_written(slab)

    def _format(self, slab: int, size_class: int) -> None:
        """Have ``slab``, of which the caller has reserved a slot, cut up for ``size_class``."""
        if self._formatted[slab] == size_class:
            return
        with self._formatting:
            if self._formatted[slab] != size_class:
                self._formatted[slab] = -1
                self._files.format(slab, size_class, flush=self._fsync)
                self._formatted[slab] = size_class

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, batch: _Batch) -> list[int | BaseException]:
        """Read and verify what is in pinned slots. What is refused is forgotten, and its header erased."""
        files = self._files
        headers, failures = files.read_headers(batch.where, files.runs(batch.where, batch.lengths))
        outcomes: list[int | BaseException] = [*header_tools.check(headers, batch.chunks, batch.lengths)]
        for (first, last), failure in failures.items():
            outcomes[first:last] = [failure] * (last - first)
        good = np.array([i for i, outcome in enumerate(outcomes) if isinstance(outcome, int)], np.int64)
        rest = batch.take(good)
        for first, last in files.runs(rest.where, rest.lengths):
            run = good[first:last].tolist()
            checksums = headers["payload_checksum"][run].tolist()
            for i, outcome in zip(run, self._read_run(rest, first, last, checksums), strict=True):
                outcomes[i] = outcome
        refused = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, RecordError)]
        if refused:
            self._refuse(batch.take(np.array(refused, np.int64)))
        return outcomes

    def _read_run(self, batch: _Batch, first: int, last: int, checksums: list[int]) -> list[int | BaseException]:
        """The payloads ``first`` to ``last`` - 1, which are one run, and whose headers say ``checksums``."""
        try:
            self._files.read_payloads(batch.where, (first, last), batch.offsets, batch.lengths)
        except (OSError, RecordError) as error:
            if last - first == 1:
                return [error.with_traceback(None)]
            # One place that cannot be read is no reason to lose its neighbours.
            return [
                self._read_run(batch, i, i + 1, checksums[i - first : i - first + 1])[0] for i in range(first, last)
            ]
        outcomes: list[int | BaseException] = []
        starts, lengths = batch.offsets[first:last].tolist(), batch.lengths[first:last].tolist()
        for start, length, checksum in zip(starts, lengths, checksums, strict=True):
            with self._view[start : start + length] as payload:
                found = record.payload_checksum(payload)
            try:
                record.check_checksum(checksum, found)
                outcomes.append(found)
            except RecordError as error:
                outcomes.append(error.with_traceback(None))
        return outcomes

    def _refuse(self, batch: _Batch) -> None:
        """Never serve what is in these pinned slots again."""
        with self._lock:
            self._cache.forget(batch.slots)
        with contextlib.suppress(OSError):
            self._files.write_headers(batch.where, self._files.runs(batch.where, batch.lengths), None)

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _batch(self, slots: Offsets, chunks: Chunks, offsets: Offsets, lengths: Offsets) -> _Batch:
        where = self._geometry.where(slots, self._class_of_group[chunks.groups])
        return _Batch(slots, chunks, where, offsets, lengths)

    def _use(self, job: tuple[str, int], count: int, part: range, slots: Offsets) -> None:
        """The chunks in ``slots``, -1 where there is none, are a part of the ``count`` that ``job`` uses."""
        with self._lock:
            used = self._uses.add(job, count, part, slots)
            for first in reversed(range(0, len(used), _TOUCHED_AT_ONCE)):
                self._cache.touch(used[first : first + _TOUCHED_AT_ONCE])


class _Batch(NamedTuple):
    """Some slots in ascending order, the chunks that are or will be there, and where their payloads are in memory."""

    slots: Offsets
    chunks: Chunks
    where: Where
    offsets: Offsets
    lengths: Offsets

    def take(self, which: Offsets) -> _Batch:
        """Those numbered ``which``, ascending."""
        if len(which) == len(self.slots):
            return self
        chunks, where = self.chunks.take(which), self.where.take(which)
        return _Batch(self.slots[which], chunks, where, self.offsets[which], self.lengths[which])


class _Uses:
    """The slots that jobs use, until all parts of a job are known.

    A job is one access, its head newer than its tail; its parts are done by several threads, in any order.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], tuple[Offsets, int]] = {}

    def add(self, job: tuple[str, int], count: int, part: range, slots: Offsets) -> Offsets:
        """Note a part; with the last one, the job's slots, distinct, head first."""
        used, left = self._open.pop(job, (np.full(count, -1, np.int64), count))
        used[part.start : part.stop] = slots
        if left > len(part):
            self._open[job] = used, left - len(part)
            return used[:0]
        used = used[used >= 0]
        firsts = np.unique(used, return_index=True)[1]
        return used if len(firsts) == len(used) else used[np.sort(firsts)]


def _check(config: FsTierConfig, context: TierContext) -> int:
    """``capacity_bytes``, if the configuration is one for segments."""
    if not context.chunk_bytes:
        raise ConfigError("layout", "segments must be told the sizes of chunks, and is not", "files")
    if config.capacity_bytes is None:
        raise ConfigError("capacity_bytes", "missing; the layout segments takes its space at the start", "bytes")
    if config.min_free_bytes:
        raise ConfigError("min_free_bytes", "the layout segments takes its space at the start", "0")
    return config.capacity_bytes


def _sorted(slots: Offsets) -> Offsets:
    """The numbers of those that are slots, in the slots' order."""
    order = np.argsort(slots)
    numbers: Offsets = order[np.searchsorted(slots, 0, sorter=order) :]
    return numbers


def _indexed(chunks: Chunks) -> Chunks:
    """``chunks`` without what the index need not keep: the full names are in the headers."""
    return Chunks(chunks.space, chunks.keys, chunks.groups, chunks.hashes[:, -KEY_BYTES:])
