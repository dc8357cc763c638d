"""One record in one file: written whole or not at all, and read straight into host memory."""

from __future__ import annotations

import contextlib
import os

from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.tiers.io import ABSENT
from tierkv.types import ChunkName

#: Nobody else's: KV can be turned back into the text that it was computed from.
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


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
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, FILE_MODE), path
    except FileNotFoundError:  # someone emptied the root while it was in use
        make_directory(directory)
        return os.open(path, flags, FILE_MODE), path


def write_atomically(path: str, parts: list[bytes | memoryview], temporary_directory: str, fsync: bool = False) -> None:
    """Write ``parts`` as the file ``path``, which appears, or is replaced, whole.

    Args:
        temporary_directory: on the same file system.
        fsync: flush before the file appears, so that a power cut leaves no torn one.

    Raises:
        OSError: it was not written; nothing is left behind.
    """
    make_directory(os.path.dirname(path))
    fd, temporary = create_temporary(temporary_directory)
    try:
        try:
            for part in parts:
                _write_all(fd, part)
            if fsync:
                os.fsync(fd)
        finally:
            os.close(fd)  # on a network file system, errors of the writes may come up only here
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def holds_record(path: str, name: ChunkName, length: int) -> bool:
    """Whether ``path`` is a record of ``name`` with a payload of ``length`` bytes, by its header and its size.

    Cheap, because every store asks: the payload is not read, and verified when it is loaded.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # absent, or unreadable: in both cases a store shall try to put it there
        return False
    try:
        _read_header(fd, name, length)
    except (RecordError, OSError):
        return False
    finally:
        os.close(fd)
    return True


def read_record(path: str, name: ChunkName, payload: memoryview) -> int:
    """Read the payload of the record ``path`` into ``payload``, verify it, and return its xxh3-64.

    Raises:
        RecordError: ``absent``, or it must not be loaded. Then ``payload`` holds whatever was read.
        OSError: it could not be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(ABSENT) from None
    try:
        header = _read_header(fd, name, len(payload))
        _read_all(fd, payload, record.HEADER_BYTES)
    finally:
        os.close(fd)
    return record.check_payload(header, payload)


def _read_header(fd: int, name: ChunkName, length: int) -> record.Header:
    header = record.decode_header(os.pread(fd, record.HEADER_BYTES, 0))
    record.check(header, name, length)
    record.check_size(header, os.fstat(fd).st_size)
    return header


def _write_all(fd: int, data: bytes | memoryview) -> None:
    with memoryview(data) as rest:
        done = 0
        while done < len(rest):
            with rest[done:] as part:
                done += os.write(fd, part)


def _read_all(fd: int, into: memoryview, position: int) -> None:
    """Fill ``into`` from ``position`` on; one call reads at most 2 GiB, so there may be several."""
    done = 0
    while done < len(into):
        with into[done:] as part:
            count = os.preadv(fd, [part], position + done)
        if not count:
            raise RecordError("truncated", f"{done} of {len(into)} bytes")
        done += count
