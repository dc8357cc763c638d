"""Reads that go around the page cache, where that is possible and not slower.

What lies in the page cache is read from there, at the speed of memory: chunks that were just written, mostly. What does
not is read past it: with several threads that is faster than through it, and takes no memory from anybody. For small
files the calls that this takes cost more than they save.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from tierkv.tiers import record
from tierkv.tiers.fs.pagecache import PageCache

#: What O_DIRECT asks of addresses, offsets and lengths, on most devices; where that does not do, reads are not direct.
ALIGNMENT: Final = 512

#: Files of fewer bytes are read through the page cache.
LEAST_BYTES: Final = 128 << 10


class Reader:
    """Reads files from their start: a header of ``record.HEADER_BYTES``, and a payload behind it.

    Thread safety: any method may be called by any thread.
    """

    def __init__(self, view: memoryview, *, direct: bool) -> None:
        """
        Args:
            view: the memory that payloads are read into.
            direct: read past the page cache, until it turns out that this cannot be done here.
        """
        address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0
        self.direct = direct and address % ALIGNMENT == 0
        self._page_cache = PageCache()
        self._local = threading.local()

    @property
    def header(self) -> memoryview:
        """The calling thread's buffer for a header; what is in it stays until the thread's next read."""
        buffer: memoryview | None = getattr(self._local, "header", None)
        if buffer is None:
            buffer = self._local.header = memoryview(mmap.mmap(-1, mmap.PAGESIZE))[: record.HEADER_BYTES]
        return buffer

    def read(self, fd: int, parts: Sequence[memoryview]) -> int:
        """Fill ``parts``, in order, from the start of the file; how many bytes there were.

        ``fd`` may be changed to bypass the page cache.
        """
        nbytes = sum(map(len, parts))
        large = nbytes >= LEAST_BYTES and nbytes % ALIGNMENT == 0
        if self.direct and large and not self._page_cache.has(fd, 0, nbytes):
            try:
                if _read_directly(fd, parts) == nbytes:
                    return nbytes
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
        return _read_all(fd, parts)


def _read_directly(fd: int, parts: Sequence[memoryview]) -> int:
    """As ``Reader.read``, with one call past the page cache; fewer bytes where that did not get them all."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        return os.preadv(fd, parts, 0)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _read_all(fd: int, parts: Sequence[memoryview]) -> int:
    """Fill ``parts`` from the start of the file; one call reads at most 2 GiB, so there may be several."""
    done, left = 0, list(parts)
    while left and (count := os.preadv(fd, left, done)):
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left and count:
            left[0] = left[0][count:]
    return done
