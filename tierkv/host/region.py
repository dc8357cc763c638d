"""The host region: one piece of shared memory for one engine, that leaves nothing behind.

The scheduler's process creates it as an anonymous memory file (``memfd_create``); workers open it through
``/proc/<pid>/fd/<fd>`` of that process. It never has a name in ``/dev/shm``: the kernel frees it when the last
process that maps it is gone, ``kill -9`` included, and the size of the ``/dev/shm`` mount does not bound it
(the memory is charged to the process's cgroup like any other).

Such a path is reached through a process id, and ids are reused and differ between PID namespaces. So the memory
file carries a random token in its name, and whoever opens it compares token and size.

It is created in no time, whatever its size: no page is there yet. ``populate`` makes them present in the background.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from tierkv.errors import ConfigError, RegionError
from tierkv.host import memory
from tierkv.host.numa import nodes_with_memory, place, plan, this_node
from tierkv.host.populate import PIECE_BYTES, Populator

_logger = logging.getLogger(__name__)

_NAME = "tierkv-"
# Nobody who opened the region can make it shorter, which would be a SIGBUS for everybody else.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RegionHandle(NamedTuple):
    """What a worker needs to open a region. It can be pickled.

    pid, fd: the creating process and its descriptor. size: bytes. token: 32 hexadecimal digits.
    pages: as ``Region.pages``.
    """

    pid: int
    fd: int
    size: int
    token: str
    pages: str = memory.SMALL


class Region:
    """A mapping of the host region.

    view: all of it, writable, one byte an item; empty after ``close``.
    address: where it is mapped in this process. size: bytes.
    pages: what it consists of: ``huge`` (reserved ones), ``transparent huge`` (the kernel was asked for them and took
        the advice; ``huge_bytes`` says how many it gave), or the size of the usual ones, such as ``4k``.
    numa: on which nodes its pages lie, or why that is left to the kernel, for people. Of the creating process alone;
        what it says holds for the pages that others make present, too.

    Thread safety: attributes may be read by any thread; ``close`` is called once no thread uses the memory, that of
    ``populate`` excepted, which it ends.
    Several processes map the same memory; who may touch which slot is the host cache's business.
    """

    def __init__(self, fd: int, handle: RegionHandle, owner: bool) -> None:
        """For ``create`` and ``open``: maps ``fd`` and takes it over (the owner keeps it open for others)."""
        self.handle = handle
        self.size = handle.size
        self.pages = handle.pages
        self.numa = "off"
        self._populator: Populator | None = None
        self._fd = fd if owner else -1
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, handle.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as error:
            self._fd = -1
            os.close(fd)
            raise RegionError(f"the host region of {handle.size} bytes cannot be mapped: {error}") from error
        if not owner:
            os.close(fd)  # the mapping holds a descriptor of its own
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)
        # Each mapping asks for itself: the kernel looks at the one through which a page is touched first.
        if self.pages == memory.TRANSPARENT and not memory.advise_huge(self.address, self.size):
            self.pages = memory.SMALL

    @classmethod
    def create(cls, size: int, *, huge_pages: str = "off", numa: str = "off") -> Region:
        """A new region of ``size`` bytes, all zero, none of its pages present. Warns if there is less memory.

        Args:
            size: a positive multiple of the page size; with reserved huge pages, rounded up to a multiple of theirs.
            huge_pages: ``off``; ``auto``: transparent ones where the system allows them to shared memory; ``on``:
                reserved ones.
            numa: ``off``; ``interleave``: on all nodes, turn by turn; ``local``: on the one that the caller runs on;
                or nodes such as ``0,1``, turn by turn. Does nothing on a machine of one node.

        Raises:
            RegionError: the size is not such a multiple, or the system refuses.
            ConfigError: ``huge_pages`` or ``numa`` cannot be as asked for; says which, and what can.
        """
        if size <= 0 or size % mmap.PAGESIZE:
            raise RegionError(f"a host region of {size} bytes: not a positive multiple of {mmap.PAGESIZE}")
        if huge_pages not in ("off", "auto", "on"):
            raise ConfigError("huge_pages", f"{huge_pages!r} is not understood", "off, auto, on")
        placement = plan(numa, nodes_with_memory(), this_node())
        if huge_pages == "on":
            region = _create_huge(size)
        else:
            pages = memory.TRANSPARENT if huge_pages == "auto" and memory.transparent_huge_pages() else memory.SMALL
            region = cls(*_memory_file(size, pages), owner=True)
            _warn_if_short(size)
        region.numa = place(region.address, region.size, placement)
        _logger.debug("created %r", region)
        return region

    @classmethod
    def open(cls, handle: RegionHandle) -> Region:
        """The region that another process (or this one) has created.

        Raises:
            RegionError: it cannot be reached, or what is there is not it. Says what is likely wrong.
        """
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise RegionError(
                f"host region {path} does not exist: the process that created it is gone or has closed it, "
                "or it runs in another PID namespace (containers of one engine must share theirs)"
            ) from error
        except PermissionError as error:
            raise RegionError(
                f"host region {path} may not be opened: the process that created it runs as another user, "
                "or /proc is restricted here (hidepid, a container's security profile)"
            ) from error
        except OSError as error:
            raise RegionError(f"host region {path} cannot be opened: {error}") from error
        problem = _mismatch(fd, handle)
        if problem:
            os.close(fd)
            raise RegionError(
                f"{path} is not the expected host region ({problem}): the process that created it has closed it or "
                "is gone and its id was reused, or it runs in another PID namespace"
            )
        return cls(fd, handle, owner=False)

    def populate(
        self, on_ready: Callable[[int], object] = lambda _: None, *, piece_bytes: int = PIECE_BYTES
    ) -> Populator:
        """Make the pages present in the background, from byte 0 on, and map them here; ``close`` ends that. Once.

        A process other than the creator does so for its own mapping: a page that another process has made present
        still costs a fault at the first touch here, which takes longer than the copy into it.

        Args:
            on_ready: called on the populating thread after each piece, with the number of bytes that are present by
                then. ``close`` must not be called under a lock that it takes.
            piece_bytes: a multiple of the page size.
        """
        assert self._populator is None, "populated once"
        self._populator = Populator(self, on_ready, piece_bytes=piece_bytes)
        return self._populator

    @property
    def created_here(self) -> bool:
        """Whether this is the creator's mapping, and still open."""
        return self._fd >= 0

    def huge_bytes(self) -> int:
        """How many bytes are mapped by huge pages in this process now. The kernel walks the mapping for it."""
        return memory.huge_bytes(self.address)

    def close(self) -> None:
        """Give the mapping up; again does nothing. The creator's close also ends ``open`` for others.

        Buffers that are still exported (arrays over ``view``) stay valid: the memory goes with the last of them.
        """
        if self._map is None:
            return
        if self._populator is not None:
            self._populator.close()
        mapping, self._map = self._map, None
        view, self.view = self.view, memoryview(b"")
        with contextlib.suppress(BufferError):
            view.release()
        del view
        with contextlib.suppress(BufferError):
            mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._map is None else f"mapped at {self.address:#x}"
        return f"<Region {self.size} bytes of process {self.handle.pid}, {self.pages} pages, {state}>"


def _memory_file(size: int, pages: str) -> tuple[int, RegionHandle]:
    """A new memory file of ``size`` bytes, sealed at that, and its handle.

    Raises:
        RegionError: the system refuses.
    """
    token = secrets.token_hex(16)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if pages == memory.HUGE else 0)
    try:
        fd = os.memfd_create(_NAME + token, flags)
    except (OSError, AttributeError) as error:
        raise RegionError(f"this system has no anonymous memory files (memfd_create): {error}") from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise RegionError(f"a host region of {size} bytes cannot be created: {error}") from error
    return fd, RegionHandle(os.getpid(), fd, size, token, pages)


def _create_huge(size: int) -> Region:
    """A region of reserved huge pages, which are this process's from here on, present or not.

    Raises:
        ConfigError: there are not enough.
    """
    page = memory.huge_page_bytes()
    if not page:
        raise ConfigError("huge_pages", "this system has no reserved huge pages", "off, auto")
    count = -(-size // page)
    try:
        return Region(*_memory_file(count * page, memory.HUGE), owner=True)
    except RegionError as error:
        total, free = memory.huge_page_counts()
        raise ConfigError(
            "huge_pages",
            f"{count} huge pages of {page >> 10} kB are needed and {free} are free ({error})",
            f"off, auto, or on after they were reserved: sysctl vm.nr_hugepages={total + max(0, count - free)} "
            "(/proc/sys/vm/nr_hugepages; best at boot, before memory is fragmented)",
        ) from error


def _warn_if_short(size: int) -> None:
    """The memory is taken as pages become present, and a process that takes more than there is gets killed."""
    left = memory.available()
    if left is not None and size > left.nbytes:
        _logger.warning(
            "the host region has %d bytes (cpu_bytes_to_use), and %s has %d available: when they run out, the system "
            "kills a process",
            size,
            left.bound,
            left.nbytes,
        )


def _mismatch(fd: int, handle: RegionHandle) -> str:
    """What of the opened ``fd`` is not as ``handle`` says; empty when it is the region.

    The open descriptor is asked, not the path: the path may mean something else by now.
    """
    name = os.readlink(f"/proc/self/fd/{fd}")
    if f"/memfd:{_NAME}{handle.token} " not in name + " ":
        return f"it is {name!r}"
    size = os.fstat(fd).st_size
    return "" if size == handle.size else f"it has {size} bytes, not {handle.size}"
