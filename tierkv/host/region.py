"""The host region: one piece of shared memory for one engine, that leaves nothing behind.

The scheduler's process creates it as an anonymous memory file (``memfd_create``); workers open it through
``/proc/<pid>/fd/<fd>`` of that process. It never has a name in ``/dev/shm``: the kernel frees it when the last
process that maps it is gone, ``kill -9`` included, and the size of the ``/dev/shm`` mount does not bound it
(the memory is charged to the process's cgroup like any other).

Such a path is reached through a process id, and ids are reused and differ between PID namespaces. So the memory
file carries a random token in its name, and whoever opens it compares token and size.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
from typing import Any, NamedTuple

from tierkv.errors import RegionError

_NAME = "tierkv-"
# Nobody who opened the region can make it shorter, which would be a SIGBUS for everybody else.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RegionHandle(NamedTuple):
    """What a worker needs to open a region. It can be pickled.

    pid, fd: the creating process and its descriptor. size: bytes. token: 32 hexadecimal digits.
    """

    pid: int
    fd: int
    size: int
    token: str


class Region:
    """A mapping of the host region.

    view: all of it, writable, one byte an item; empty after ``close``.
    address: where it is mapped in this process. size: bytes.

    Thread safety: attributes may be read by any thread; ``close`` is called once no thread uses the memory.
    Several processes map the same memory; who may touch which slot is the host cache's business.
    """

    def __init__(self, fd: int, handle: RegionHandle, owner: bool) -> None:
        """For ``create`` and ``open``: maps ``fd`` and takes it over (the owner keeps it open for others)."""
        self.handle = handle
        self.size = handle.size
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

    @classmethod
    def create(cls, size: int) -> Region:
        """A new region of ``size`` bytes, all zero.

        Args:
            size: a positive multiple of the page size.

        Raises:
            RegionError: the size is not such a multiple, or the system refuses.
        """
        if size <= 0 or size % mmap.PAGESIZE:
            raise RegionError(f"a host region of {size} bytes: not a positive multiple of {mmap.PAGESIZE}")
        token = secrets.token_hex(16)
        try:
            fd = os.memfd_create(_NAME + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:
            raise RegionError(f"this system has no anonymous memory files (memfd_create): {error}") from error
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise RegionError(f"a host region of {size} bytes cannot be created: {error}") from error
        return cls(fd, RegionHandle(os.getpid(), fd, size, token), owner=True)

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

    def close(self) -> None:
        """Give the mapping up; again does nothing. The creator's close also ends ``open`` for others.

        Buffers that are still exported (arrays over ``view``) stay valid: the memory goes with the last of them.
        """
        if self._map is None:
            return
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
        return f"<Region {self.size} bytes of process {self.handle.pid}, {state}>"


def _mismatch(fd: int, handle: RegionHandle) -> str:
    """What of the opened ``fd`` is not as ``handle`` says; empty when it is the region.

    The open descriptor is asked, not the path: the path may mean something else by now.
    """
    name = os.readlink(f"/proc/self/fd/{fd}")
    if f"/memfd:{_NAME}{handle.token} " not in name + " ":
        return f"it is {name!r}"
    size = os.fstat(fd).st_size
    return "" if size == handle.size else f"it has {size} bytes, not {handle.size}"
