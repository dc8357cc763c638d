"""One record in one file: written whole or not at all, and read straight into host memory."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence

from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.tiers.fs.direct import Reader
from tierkv.tiers.io import ABSENT
from tierkv.types import ChunkName

#: Nobody else's: KV can be turned back into the text that it was computed from.
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

#: What is said of something else than a file: a link, a directory, a socket.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)

#: When a record was last used is noted if it was longer ago than this (ns): to write that down costs a little.
TOUCH_NS = 60 * 10**9


def make_directory(path: str) -> None:
    """Make the directory ``path``, an absolute path, and those above it, each for this user only.

    (``os.makedirs`` gives its mode to the last one only.) What exists is left as it is.
    """
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_directory(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)


def create_temporary(directory: str) -> tuple[int, str]:
    """A new file in ``directory``, which is made if it is missing: its descriptor, for writing, and its path.

    The name is random rather than the process's id, which is not unique on a shared file system.
    """
    path = os.path.join(directory, f"{os.urandom(16).hex()}.tmp")
    return create(path), path


def create(path: str) -> int:
    """The descriptor, for writing, of the new file ``path``, whose directory is made if it is missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, FILE_MODE)
    except FileNotFoundError:  # someone emptied the root while it was in use
        make_directory(os.path.dirname(path))
        return os.open(path, flags, FILE_MODE)


def write_atomically(path: str, data: bytes, temporary_directory: str) -> None:
    """Write ``data`` as the file ``path``, which appears, or is replaced, whole.

    Args:
        temporary_directory: on the same file system.

    Raises:
        OSError: it was not written; nothing is left behind.
    """
    make_directory(os.path.dirname(path))
    fd, temporary = create_temporary(temporary_directory)
    try:
        write_new(fd, [data])
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_new(fd: int, parts: Sequence[bytes | memoryview], fsync: bool = False) -> None:
    """Write ``parts``, in order, to the new file ``fd``, and close it.

    Args:
        fsync: flush, so that a power cut after the file appears leaves no torn one.
    """
    try:
        _write_parts(fd, parts)
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)  # on a network file system, errors of the writes may come up only here


def write_over(path: str, parts: Sequence[bytes | memoryview], block_bytes: int, fsync: bool = False) -> None:
    """As ``write_new``, into a file that is there, and has as many blocks.

    Whole blocks are written, zeros up to the end of the last: for a part of one, the rest would be read from the disk.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        nbytes = sum(map(len, parts))
        _write_parts(fd, [*parts, bytes(-nbytes % block_bytes)])
        os.ftruncate(fd, nbytes)
        os.utime(fd)  # used now, not when its last content was
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_parts(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        count = os.writev(fd, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left and count:
            left[0] = left[0][count:]


def holds_record(path: str, name: ChunkName, length: int) -> bool | None:
    """Whether ``path`` is a record of ``name`` with a payload of ``length`` bytes, by its header and its size.

    None if there is nothing. Cheap, because every store asks: the payload is not read, and verified when it is loaded.

    Raises:
        OSError: it cannot be told.
    """
    try:
        fd = _open(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in _NO_FILE:
            return False
        raise
    try:
        header = record.decode_header(os.pread(fd, record.HEADER_BYTES, 0))
        record.check(header, name, length)
        record.check_size(header, os.fstat(fd).st_size)
    except RecordError:
        return False
    except OSError as error:
        if error.errno in _NO_FILE:
            return False
        raise
    finally:
        os.close(fd)
    return True


def read_record(path: str, name: ChunkName, payload: memoryview, reader: Reader) -> int:
    """Read the payload of the record ``path`` into ``payload``, verify it, and return its xxh3-64.

    The time of the file's last use is set, if that was long ago.

    Raises:
        RecordError: ``absent``, or it must not be loaded. Then ``payload`` holds whatever was read.
        OSError: it could not be read.
    """
    try:
        fd = _open(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(ABSENT) from None
    try:
        status = os.fstat(fd)
        whole = status.st_size == record.HEADER_BYTES + len(payload)
        count = reader.read(fd, [reader.header, payload] if whole else [reader.header])
        header = record.decode_header(reader.header[:count])
        record.check(header, name, len(payload))
        record.check_size(header, min(count, status.st_size) if whole else status.st_size)
        now = time.time_ns()
        if now - status.st_atime_ns > TOUCH_NS:
            with contextlib.suppress(OSError):  # a root that can be read only
                os.utime(fd, ns=(now, status.st_mtime_ns))
        return record.check_payload(header, payload)
    except RecordError:
        if not _is_still(fd, path):  # evicted, and perhaps written over, while we read
            raise RecordError(ABSENT) from None
        raise
    finally:
        os.close(fd)


def _is_still(fd: int, path: str) -> bool:
    """Whether ``path`` is the file that was opened as ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _open(path: str) -> int:
    """Open a record, which is no link to anywhere else."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
