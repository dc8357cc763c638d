"""Make the pages of the host region present, in the background, so that an engine starts before they are.

The first touch of a page costs the kernel far more than copying it: it finds the page, zeroes it and maps it. With
hundreds of GB that takes minutes, which must come neither before the first request nor out of the requests.

The thread has the priority of any other, and that is measured: while it makes a piece present it holds the lock on the
process's address space, and between two pieces the GIL. With the lowest priority, on a machine whose processors were
all busy, it held that lock without being given a processor, and an ``mmap`` of another thread, which is what a large
``malloc`` is, waited for seconds; at this priority it waits no longer than a piece takes. The same wait is why pieces
are small.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierkv.host import memory

if TYPE_CHECKING:
    from tierkv.host.region import Region

_logger = logging.getLogger(__name__)

#: Some milliseconds each. What a larger one would save is below a hundredth.
PIECE_BYTES = 16 << 20


class Populator:
    """A thread, ``tierkv-populate-0``, that makes a region's pages present from byte 0 on.

    It never changes what a page holds, so that the region may be in use meanwhile; who wants to be served by present
    memory alone uses the first ``ready_bytes``. What the system refuses ends it, logged, with what is ready by then.

    ready_bytes: how much is present, from byte 0 on. Grows only.
    seconds: how long it took until all was present; 0.0 until then.
    error: why it stopped before all was present, for people; empty if it did not. ``close`` is no error.

    Thread safety: the attributes may be read by any thread; the populating thread alone writes them. ``close`` and
    ``wait`` may be called by any thread but that one.
    """

    def __init__(self, region: Region, on_ready: Callable[[int], object], *, piece_bytes: int = PIECE_BYTES) -> None:
        """To be called by ``Region.populate`` alone, whose ``close`` ends the thread. The thread starts here.

        Args:
            on_ready: called on the thread after each piece, with ``ready_bytes``.
            piece_bytes: a multiple of the page size.
        """
        self.ready_bytes = 0
        self.seconds = 0.0
        self.error = ""
        self._region = region
        self._on_ready = on_ready
        self._piece_bytes = piece_bytes
        self._advise = True
        self._stop = threading.Event()
        # A daemon: a process that ends without close() must not hang on it.
        self._thread = threading.Thread(target=self._work, name="tierkv-populate-0", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the thread has ended, for whatever reason, after at most ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop after the present piece; again does nothing.

        Waits for the thread: not to be called under a lock that ``on_ready`` takes.
        """
        self._stop.set()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<Populator {self.ready_bytes} of {self._region.size} bytes ready{self.error and ', stopped'}>"

    def _work(self) -> None:
        started = time.perf_counter()
        size = self._region.size
        while self.ready_bytes < size:
            if self._stop.is_set():
                return
            piece = min(self._piece_bytes, size - self.ready_bytes)
            try:
                self._make_present(self.ready_bytes, piece)
            except OSError as error:
                self._give_up(str(error))
                return
            self.ready_bytes += piece
            if self.ready_bytes == size:
                self.seconds = time.perf_counter() - started
            try:
                self._on_ready(self.ready_bytes)
            except Exception as error:  # what is ready cannot be made known: more of it is of no use
                self._give_up(f"{type(error).__name__}: {error}")
                return
        self._log_end()

    def _make_present(self, start: int, nbytes: int) -> None:
        if self._advise:
            try:
                memory.populate(self._region.address + start, nbytes)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Before 5.14, and in some sandboxes, the kernel has no such advice.
                self._advise = False
        if not self._region.created_here:
            raise OSError(errno.EINVAL, "this kernel lacks MADV_POPULATE_WRITE")
        # The file gets its pages, whose first touch then only zeroes and maps them. Nothing is written to them: a
        # write could undo one of a process that uses the region, and ends in a signal where there is no memory.
        os.posix_fallocate(self._region.handle.fd, start, nbytes)

    def _give_up(self, error: str) -> None:
        self.error = error
        _logger.warning(
            "the host region is populated up to byte %d of %d and no further (%s): %s",
            self.ready_bytes,
            self._region.size,
            error,
            "the host cache uses that much" if self._region.created_here else "the first copies beyond are slower",
        )

    def _log_end(self) -> None:
        region = self._region
        huge = ""
        if region.pages == memory.TRANSPARENT:  # asked for is not given: the kernel needs a free piece for each
            huge = f", {memory.huge_bytes(region.address)} bytes of it in huge pages"
        _logger.info(
            "the host region of %d bytes is populated, in %.1f s%s%s",
            region.size,
            self.seconds,
            huge,
            "" if self._advise else " (not mapped: this kernel lacks MADV_POPULATE_WRITE)",
        )
