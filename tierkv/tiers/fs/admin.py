"""What ``tierkv.tiers.admin`` needs to know of the root of an fs tier, in both layouts."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence

from tierkv.errors import ConfigError, RecordError
from tierkv.tiers import record
from tierkv.tiers.admin import Storage, Stored
from tierkv.tiers.fs.geometry import PAGE, SMALLEST_SLAB, decode_slab_header, table_end
from tierkv.tiers.fs.ledger import Ledger
from tierkv.tiers.fs.root import Root
from tierkv.tiers.fs.segmentfile import lock
from tierkv.tiers.fs.survey import records, remove_empty, spaces
from tierkv.tiers.paths import DESCRIPTION, name_of

_READ_BYTES = 1 << 20


def open_root(path: str) -> Storage:
    """The root at ``path``.

    Raises:
        ConfigError: ``PATH``: there is none.
    """
    root = Root(path)
    own = (root.temporary, root.segments)
    if not any(map(os.path.isdir, own)) and not any(True for _ in spaces(root)):
        raise ConfigError("PATH", f"{path!r} is no root of an fs tier", "the root_dir of one")
    return _RootStorage(root)


class _RootStorage(Storage):
    def __init__(self, root: Root) -> None:
        self._root = root

    def stored(self, namespace: str = "") -> Iterator[Stored]:
        for space, directory in spaces(self._root):
            if not space.namespace.hex().startswith(namespace):
                continue
            for entry in records(directory):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    name = name_of(space, entry.name)
                    assert name is not None, "records are found by their names"
                    yield Stored(entry.path, name, status.st_size, status.st_atime, _written(status))

        for each in _in_segments(self._root):
            if each.name.space.namespace.hex().startswith(namespace):
                yield each

    def description(self, namespace: bytes) -> bytes:
        with open(os.path.join(self._root.of_namespace(namespace), DESCRIPTION), "rb") as file:
            return file.read()

    def check(self, stored: Stored) -> None:
        with open(stored.path, "rb", buffering=0, opener=_open_unnoticed) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size if stored.place is None else stored.nbytes
            record.verify_pieces(_pieces(fd, stored, size), stored.name, size)

    def is_there(self, stored: Stored) -> bool:
        """A record that is evicted is written over."""
        try:
            if stored.place is None:
                return _written(os.stat(stored.path, follow_symlinks=False)) == stored.written
            with open(stored.path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), record.HEADER_BYTES, stored.place[0])[-8:] == stored.written
        except OSError:
            return False

    def remove(self, chosen: Sequence[Stored]) -> tuple[int, int]:
        """All but those that were used since they were chosen.

        The ledger learns of it: engines that share the root can use the room soon.

        Raises:
            ConfigError: one of them is in a segment, and the segments are in use.
        """
        ledger, gone = Ledger(self._root, None, 0), []
        ledger.open()
        try:
            with contextlib.ExitStack() as stack:
                if any(each.place for each in chosen):
                    stack.callback(os.close, lock(self._root.segments))
                for each in chosen:
                    with contextlib.suppress(OSError):
                        if self._remove(each):
                            gone.append(each)
                            if each.place is None:
                                ledger.removed(ledger.size_of(each.nbytes))
            for _, directory in list(spaces(self._root)):
                ledger.removed(remove_empty(directory) * ledger.directory_bytes)
        finally:
            ledger.close()
        return len(gone), sum(each.nbytes for each in gone)

    def used_bytes(self) -> int | None:
        try:
            fd = os.open(os.path.join(self._root.ledger, "total"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return Ledger.read_used(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is open."""

    def _remove(self, each: Stored) -> bool:
        """Remove a record, or erase its header, if it is still what it was; whether that was done."""
        if not self.is_there(each):
            return False
        if each.place is None:
            if os.stat(each.path, follow_symlinks=False).st_atime > each.used_s:
                return False
            os.unlink(each.path)
        else:
            with open(each.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), bytes(record.HEADER_BYTES), each.place[0])
        return True


def _in_segments(root: Root) -> Iterator[Stored]:
    """Every record whose header is intact in the files of the layout ``segments``, whoever owns them."""
    for path in sorted(glob.glob(os.path.join(glob.escape(root.segments), "segments-*.tkv"))):
        with open(path, "rb", buffering=0) as file:
            start = 0
            while raw := os.pread(file.fileno(), PAGE, start):
                header = decode_slab_header(raw)
                if header is None:  # empty: its size is not known, but it is a whole number of the smallest ones
                    start += SMALLEST_SLAB
                    continue
                table = os.pread(file.fileno(), header.slots * record.HEADER_BYTES, start + PAGE)
                for slot in range(len(table) // record.HEADER_BYTES):
                    raw = table[slot * record.HEADER_BYTES : (slot + 1) * record.HEADER_BYTES]
                    with contextlib.suppress(RecordError):
                        found = record.decode_header(raw)
                        place = start + PAGE + slot * record.HEADER_BYTES
                        payload = start + table_end(header.slots) + slot * header.place_bytes
                        size = record.HEADER_BYTES + found.length
                        yield Stored(path, found.name, size, header.written_at / 1000, raw[-8:], (place, payload))
                start += header.slab_bytes


def _pieces(fd: int, each: Stored, size: int) -> Iterator[bytes]:
    """The bytes of a record, header first; of a file, up to ``size``."""
    at, payload = each.place or (0, record.HEADER_BYTES)
    yield os.pread(fd, record.HEADER_BYTES, at)
    end = payload + size - record.HEADER_BYTES
    while data := os.pread(fd, max(0, min(_READ_BYTES, end - payload)), payload):
        yield data
        payload += len(data)


def _open_unnoticed(path: str, flags: int) -> int:
    """Open without setting the time of the last use, by which records are evicted; that is the owner's privilege."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


def _written(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
