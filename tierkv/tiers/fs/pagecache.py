"""Whether a part of a file is in the page cache, asked without any I/O.

``preadv`` with ``RWF_NOWAIT`` does not do: on its way it begins to read ahead what is not there, so that a direct read
after it has the disk read everything twice (measured on ext4 with Linux 6.18).
"""

from __future__ import annotations

import ctypes
import errno
import mmap

#: cachestat(2), since Linux 6.5; the same number on every architecture.
_CACHESTAT = 451


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


# The GIL is kept: the call takes a microsecond or two.
_SYSCALL = ctypes.PyDLL(None, use_errno=True).syscall
_SYSCALL.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_SYSCALL.restype = ctypes.c_long
_UNKNOWN = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class PageCache:
    """Answers until it turns out that the system does not. Thread safety: any thread may call it."""

    def __init__(self) -> None:
        self._answers = True

    def has(self, fd: int, position: int, nbytes: int) -> bool:
        """Whether all of ``nbytes`` from ``position`` on are there; False if the system does not say."""
        if not self._answers:
            return False
        pages = _Pages()
        if _SYSCALL(_CACHESTAT, fd, ctypes.byref(_Range(position, nbytes)), ctypes.byref(pages), 0):
            self._answers = ctypes.get_errno() not in _UNKNOWN
            return False
        touched = (position + nbytes - 1) // mmap.PAGESIZE - position // mmap.PAGESIZE + 1
        return bool(pages.cached >= touched)
