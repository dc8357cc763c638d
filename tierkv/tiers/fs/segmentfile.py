"""The files of the layout ``segments``: opened by one owner, preallocated, and what is read and written in them.

Writes go through the page cache, which is quicker than direct I/O where space is written again and again. Reads take
what is in the page cache from there, and the rest with direct I/O where that works: straight into host memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from tierkv.errors import ConfigError, RecordError
from tierkv.tiers import record
from tierkv.tiers.fs.geometry import NUM_FILES, PAGE, WRITTEN_AT, Geometry, Where, encode_written_at, table_end
from tierkv.tiers.fs.pagecache import PageCache
from tierkv.tiers.fs.recordfile import FILE_MODE, make_directory
from tierkv.tiers.headers import HEADER, Headers, raw_bytes
from tierkv.types import Flags, Offsets

#: One call reads or writes so many bytes at most, or one payload, and so many payloads (IOV_MAX is 1024).
_MOST_BYTES = 2 << 20
_MOST_PARTS = 512
#: How often a slab's time of writing is brought up to date, at most.
_WRITTEN_EVERY_MS = 1000

#: No room for that many bytes, or for files of that size.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Slots from ``first`` to ``last`` - 1 of some that are sorted: one behind the other on disk.
Run = tuple[int, int]


class SegmentFiles:
    """Reads and writes by what ``Geometry.where`` says.

    Thread safety: any method may be called by any thread; ``close`` when no other is running.
    """

    def __init__(self, directory: str, geometry: Geometry, view: memoryview, *, direct: bool) -> None:
        """Lock the directory, which is made if it is missing, and preallocate the files.

        Args:
            view: the memory that payloads are read into and written from.
            direct: read past the page cache what is not in it, where that works.

        Raises:
            ConfigError: ``root_dir``: in use, or cannot be used. ``capacity_bytes``: the disk has less.
        """
        self._directory = directory
        self._geometry = geometry
        self._view = view
        self._address = np.frombuffer(view, np.uint8).ctypes.data
        self._page_cache = PageCache()
        #: What memory, lengths and offsets must be multiples of for direct I/O.
        self.alignment = 0
        self._written_at = np.zeros(geometry.num_slabs, np.int64)
        self._fds: list[int] = []
        self._direct: list[int] = []
        try:
            make_directory(directory)
            self._lock = [lock(directory)]
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            self._open(directory)
            if direct:
                self._open_direct(directory)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _unusable(directory, error) from error
            raise

    def close(self) -> None:
        """Close the files, and let others have them. Again: nothing."""
        open_fds = [*self._fds, *self._direct, *self._lock]
        self._fds, self._direct, self._lock = [], [], []
        for fd in open_fds:
            os.close(fd)

    def __repr__(self) -> str:
        return f"SegmentFiles({self._directory!r}, alignment={self.alignment})"

    def runs(self, where: Where, lengths: Offsets) -> list[Run]:
        """Cut slots that are sorted into runs."""
        if not len(lengths):
            return []
        slabs, headers, places = where.slabs, where.headers, where.places
        apart = (headers[1:] != headers[:-1] + record.HEADER_BYTES) | (places[1:] != places[:-1] + lengths[:-1])
        apart |= slabs[1:] != slabs[:-1]
        ends = [*(np.flatnonzero(apart) + 1).tolist(), len(lengths)]
        step = max(1, min(_MOST_PARTS, _MOST_BYTES // max(1, int(lengths.max()))))
        runs, first = [], 0
        for end in ends:
            runs += [(at, min(at + step, end)) for at in range(first, end, step)]
            first = end
        return runs

    def write_headers(self, where: Where, runs: Sequence[Run], headers: Headers | None) -> None:
        """Write the headers of slots, or zeros."""
        raw = raw_bytes(np.zeros(len(where.headers), HEADER) if headers is None else headers)
        for first, last in runs:
            part = raw[first * record.HEADER_BYTES : last * record.HEADER_BYTES]
            _write_all(self._fds[where.files[first]], [part], int(where.headers[first]))

    def read_headers(self, where: Where, runs: Sequence[Run]) -> tuple[Headers, dict[Run, OSError]]:
        """The headers of slots; and for runs that could not be read, why: theirs are zeros."""
        headers, failures = np.zeros(len(where.headers), HEADER), {}
        raw = raw_bytes(headers)
        for first, last in runs:
            part = raw[first * record.HEADER_BYTES : last * record.HEADER_BYTES]
            try:
                _read_all(self._fds[where.files[first]], [part], int(where.headers[first]))
            except RecordError:  # somebody has cut the file
                part[:] = bytes(len(part))
            except OSError as error:
                part[:] = bytes(len(part))
                if last - first == 1:
                    failures[first, last] = error.with_traceback(None)
                else:  # one that cannot be read is no reason to lose its neighbours
                    for i in range(first, last):
                        one, failed = self.read_headers(where.take(np.array([i])), [(0, 1)])
                        headers[i] = one[0]
                        if failed:
                            failures[i, i + 1] = failed[0, 1]
        return headers, failures

    def write_payloads(self, where: Where, runs: Sequence[Run], offsets: Offsets, lengths: Offsets) -> None:
        """Write the payloads of slots from where they are in memory."""
        for first, last in runs:
            with self._slices(offsets[first:last], lengths[first:last]) as parts:
                _write_all(self._fds[where.files[first]], parts, int(where.places[first]))

    def read_payloads(self, where: Where, run: Run, offsets: Offsets, lengths: Offsets) -> None:
        """Read the payloads of one run to where they belong in memory.

        Raises:
            OSError, RecordError: they could not be read; in the memory is whatever was.
        """
        first, last = run
        file, position = int(where.files[first]), int(where.places[first])
        with self._slices(offsets[first:last], lengths[first:last]) as parts:
            wanted = int(lengths[first:last].sum())
            aligned = self._is_aligned(position, offsets[first:last], lengths[first:last])
            if aligned and not self._page_cache.has(self._fds[file], position, wanted):
                try:
                    if os.preadv(self._direct[file], parts, position) == wanted:
                        return
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self.alignment = 0
            _read_all(self._fds[file], parts, position)

    def flush(self, where: Where) -> None:
        """Wait until what was written to the files of these slots is on the disk."""
        for file in np.unique(where.files).tolist():
            os.fdatasync(self._fds[file])

    def format(self, slab: int, size_class: int, *, flush: bool) -> None:
        """Cut ``slab`` up for ``size_class``, empty."""
        geometry = self._geometry
        file, start = geometry.slab_at(slab)
        fd = self._fds[file]
        table = bytes(table_end(geometry.slots_in(size_class)) - PAGE)
        for position, data in ((start, bytes(PAGE)), (start + PAGE, table)):
            _write_all(fd, [memoryview(data)], position)
            if flush:
                os.fdatasync(fd)
        _write_all(fd, [memoryview(geometry.encode_slab_header(slab, size_class, _now_ms()))], start)

    def note_written(self, slab: int) -> None:
        """Records were written to ``slab``: keep its time, now and then."""
        now = _now_ms()
        if now - int(self._written_at[slab]) >= _WRITTEN_EVERY_MS:
            self._written_at[slab] = now
            file, start = self._geometry.slab_at(slab)
            os.pwrite(self._fds[file], encode_written_at(now), start + WRITTEN_AT)

    def maybe_written(self) -> Flags:
        """Which slabs were written to, as far as the file system can tell."""
        flags = np.zeros(self._geometry.num_slabs, np.bool_)
        for file, fd in enumerate(self._fds):
            position, size = 0, self._geometry.file_bytes(file)
            while position < size:
                try:
                    found = os.lseek(fd, position, os.SEEK_DATA)
                except OSError as error:
                    if error.errno != errno.ENXIO:  # ENXIO: no more data
                        flags[file::NUM_FILES] = True
                    break
                number = found // self._geometry.slab_bytes
                flags[file + number * NUM_FILES] = True
                position = (number + 1) * self._geometry.slab_bytes
        return flags

    def read(self, slab: int, at: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of ``slab`` from ``at`` on."""
        file, start = self._geometry.slab_at(slab)
        _read_all(self._fds[file], [into], start + at)

    def _open(self, directory: str) -> None:
        before: list[int] = []
        sizes = [self._geometry.file_bytes(file) for file in range(NUM_FILES)]
        try:
            for file, size in enumerate(sizes):
                path = os.path.join(directory, f"segments-{file}.tkv")
                self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
                if not file:
                    _claim(self._fds[0], directory)  # whoever removes the file ``lock`` lets nobody else in
                found = os.fstat(self._fds[file]).st_size
                foreign = self._geometry.is_foreign(partial(_page, self._fds[file]), found)
                before.append(0 if foreign else min(size, found))
                os.ftruncate(self._fds[file], before[file])
            self._see_that_there_is_room(directory, sizes)
            for fd, size in zip(self._fds, sizes, strict=True):
                if size:
                    os.posix_fallocate(fd, 0, size)
        except OSError as error:
            for fd, size in zip(self._fds, before, strict=False):  # give back what was taken in vain
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
            if error.errno not in _NO_ROOM:
                raise
            raise ConfigError(
                "capacity_bytes",
                f"{sum(sizes)} bytes cannot be had ({error.strerror})",
                f"what there is room for; {_free_bytes(directory)} bytes are free now",
            ) from error

    def _see_that_there_is_room(self, directory: str, sizes: Sequence[int]) -> None:
        """Rather than find out by taking all there is, which others would feel."""
        missing = sum(sizes) - sum(os.fstat(fd).st_blocks * 512 for fd in self._fds)
        if missing > _free_bytes(directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open_direct(self, directory: str) -> None:
        """Open the files for direct I/O, and see what that wants; without it, ``alignment`` stays 0."""
        try:
            for file in range(NUM_FILES):
                path = os.path.join(directory, f"segments-{file}.tkv")
                self._direct.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError:
            return
        with mmap.mmap(-1, 2 * PAGE) as memory, memoryview(memory) as view:
            for alignment in (record.HEADER_BYTES, PAGE):
                with contextlib.suppress(OSError), view[alignment : 2 * alignment] as part:
                    if os.preadv(self._direct[0], [part], alignment) == alignment:
                        self.alignment = alignment
                        return

    def _is_aligned(self, position: int, offsets: Offsets, lengths: Offsets) -> bool:
        if not self.alignment:
            return False
        together = int(np.bitwise_or.reduce((offsets + self._address) | lengths)) | position
        return together % self.alignment == 0

    @contextlib.contextmanager
    def _slices(self, offsets: Offsets, lengths: Offsets) -> Iterator[list[memoryview]]:
        """Parts of the memory. To be released by ``with``: while one lives, the region cannot be unmapped."""
        view = self._view
        parts = [view[o : o + n] for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True)]
        try:
            yield parts
        finally:
            for part in parts:
                part.release()


def lock(directory: str) -> int:
    """The descriptor of the directory's lock, which is held until it is closed, or this process has ended."""
    fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        _claim(fd, directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _claim(fd: int, directory: str) -> None:
    """Lock ``fd``.

    Raises:
        ConfigError: ``root_dir``: somebody else has.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            "root_dir",
            f"{directory!r} is in use by another process",
            "a directory of one's own, or the layout files, which can be shared",
        ) from None


def _unusable(directory: str, error: OSError) -> ConfigError:
    return ConfigError("root_dir", f"{directory!r} cannot be used ({error.strerror})", "a directory on a local disk")


def _free_bytes(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _page(fd: int, position: int) -> bytes:
    """The page at ``position``; nothing if it cannot be read: the slab there is given up when it is its turn."""
    try:
        return os.pread(fd, PAGE, position)
    except OSError:
        return b""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _write_all(fd: int, parts: Sequence[memoryview], position: int) -> None:
    _continue(lambda rest, at: os.pwritev(fd, rest, at), parts, position)


def _read_all(fd: int, parts: Sequence[memoryview], position: int) -> None:
    _continue(lambda rest, at: os.preadv(fd, rest, at), parts, position)


def _continue(call: Callable[[list[memoryview], int], int], parts: Sequence[memoryview], position: int) -> None:
    """Read or write ``parts`` whole, by as many calls as it takes.

    Raises:
        RecordError: ``truncated``: the file ends before.
    """
    rest = [part for part in parts if len(part)]
    owned: list[memoryview] = []
    try:
        while rest:
            count = call(rest, position)
            if not count:
                raise RecordError("truncated", f"nothing at {position}")
            position += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                owned.append(rest[0][count:])
                rest[0] = owned[-1]
    finally:
        for part in owned:
            part.release()
