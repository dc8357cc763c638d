"""How much room a root takes, agreed on by all processes that write to it.

::

    root_dir/.ledger/total       bytes in use or promised, of all processes together
    root_dir/.ledger/<random>    one process: bytes it was promised and has not used; locked as long as it lives

A process is promised bytes in large amounts, under the lock of ``total``, and uses them up file by file without it. It
notes that it has used them *before* it makes a file, and that it has them back *after* it removed one, so whenever a
process is killed, ``total`` is at least what is there. Who finds a process's file unlocked gives back what that one
had not used. What is lost between the note and the deed, and what is removed by hand, a count of the root puts right.

The files survive the processes, not a crash of the machine: the first process after that counts before it promises.
They are in the byte order of little-endian machines, and locked by ``flock``, on network file systems, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierkv.tiers.fs.recordfile import FILE_MODE, make_directory
from tierkv.tiers.fs.root import Root

#: What a process is promised at a time, at most, and which share of the capacity.
PROMISE_BYTES = 64 << 20
PROMISE_SHARE = 64

#: What the name of a file takes in its directory, generously.
NAME_BYTES = 256

_MAGIC = b"tierkvL1"
_TOTAL = struct.Struct("<8sqq?16s")
_HOLDER = struct.Struct("<qq")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class _Total:
    """used: bytes in use or promised, right up to a constant unless ``counted``.

    removed: bytes of files that processes which have ended removed, ever, their own included. boot: of which run of the
        machine.
    """

    used: int = 0
    removed: int = 0
    counted: bool = False
    boot: bytes = bytes(16)


class Count(NamedTuple):
    """What the ledger said when a count began. promised: bytes, of all processes."""

    used: int
    promised: int
    removed: int


class Ledger:
    """One process's part in the ledger of a root.

    Thread safety: any method may be called by any thread.
    """

    def __init__(self, root: Root, capacity_bytes: int | None, min_free_bytes: int) -> None:
        """
        Args:
            capacity_bytes: promise no more than this in all. None: no bound.
            min_free_bytes: promise nothing that would leave less free on the file system.

        It is to be opened before anything else; who finds the disk full may try again later.
        """
        self._root = root
        self._capacity = capacity_bytes
        self._min_free = min_free_bytes
        self.promise_bytes = min(PROMISE_BYTES, max(1, (capacity_bytes or PROMISE_BYTES << 6) // PROMISE_SHARE))
        self.block_bytes = os.statvfs(root.path).f_frsize
        self._lock = threading.Lock()
        self._token = os.urandom(16).hex()
        self._holder = -1
        #: Promised bytes that are not used, and bytes of files that this process has removed, ever.
        self._unused = self._removed = 0
        self._largest = 0
        #: Whether there was more than the capacity when that was looked at last: it may have been larger before.
        self.over = False

    def open(self) -> None:
        """Become known to the other processes. Idempotent.

        Raises:
            OSError: the ledger cannot be written, or files cannot be locked here.
        """
        with self._lock:
            if self._holder >= 0:
                return
            with self._total() as total:
                if not self._others(total):
                    # What was noted since the machine started is right; what was before may not be on the disk.
                    total.counted = total.counted and total.boot == _boot_id()
                    total.boot = _boot_id()
                total.used += self._own_bytes
            with self._total():
                self._enter()

    @property
    def used(self) -> int:
        """Bytes in use or promised, of all processes, as known now."""
        with self._lock, self._total() as total:
            return total.used

    def size_of(self, nbytes: int) -> int:
        """What a file of ``nbytes`` takes, its name included."""
        return -(-nbytes // self.block_bytes) * self.block_bytes + NAME_BYTES

    @property
    def directory_bytes(self) -> int:
        """What an empty directory takes."""
        return self.size_of(self.block_bytes)

    def take(self, nbytes: int, *, ask: bool = True) -> bool:
        """Use ``nbytes`` for a file that is about to be made; False: there is no room, some must be made first.

        Args:
            ask: for another promise, which takes a look at what all processes have.
        """
        with self._lock:
            assert self._holder >= 0, "a ledger is opened first"
            if self._unused < nbytes and not (ask and self._get_promise(nbytes)):
                return False
            self._unused -= nbytes
            self._largest = max(self._largest, nbytes)
            self._note()
            return True

    def give_back(self, nbytes: int, *, removed: bool) -> None:
        """``nbytes`` can be used anew. removed: since a file was removed, and not because none was made."""
        with self._lock:
            self._unused += nbytes
            self._removed += nbytes if removed else 0
            self._note()
            kept = 0 if self.over else max(self.promise_bytes, self._largest)
            if self._unused > 2 * kept:
                self._return(self._unused - kept)

    def reuse(self, nbytes: int) -> None:
        """A record's file, which takes ``nbytes``, becomes another's: as if it were removed, and another made."""
        with self._lock:
            self._removed += nbytes
            self._note()

    def begin_count(self) -> Count:
        """Before a walk that adds up ``size_of`` every file and directory that was there when it began."""
        with self._lock, self._total() as total:
            others = self._others(total)
            promised = self._unused + sum(unused for unused, _ in others)
            return Count(total.used, promised, self._all_removed(total, others))

    def end_count(self, begun: Count, found: int) -> None:
        """The walk has found ``found`` bytes. What was written and removed meanwhile, by anybody, is accounted for.

        Files that were removed after the walk had seen them count twice, until the next time: the total is never
        below what is there.
        """
        with self._lock, self._total() as total:
            removed = self._all_removed(total, self._others(total)) - begun.removed
            used = found + begun.promised + (total.used - begun.used) + removed
            total.used = min(total.used, used) if total.counted else used
            total.counted = True
            self._compare(total)

    def close(self) -> None:
        """Give back what is not used, and be gone."""
        with self._lock:
            if self._holder < 0:
                return
            with contextlib.suppress(OSError):
                os.rmdir(self.temporary)
                os.unlink(self._path)
                with self._total() as total:
                    total.used -= self._unused + self._own_bytes
                    total.removed += self._removed + self._own_bytes
            os.close(self._holder)
            self._holder = -1

    @property
    def temporary(self) -> str:
        """This process's directory for files that are being written; each is named by ``temporary_name``."""
        return os.path.join(self._root.temporary, self._token)

    @staticmethod
    def read_used(fd: int) -> int | None:
        """``used``, from the opened file of the total, for who has no part in it; None if that is not known."""
        total = _read_total(fd)
        return total.used if total.counted else None

    @staticmethod
    def temporary_name(nbytes: int) -> str:
        """A name for a temporary file for which ``nbytes`` were taken: whoever finds it knows how much to give back."""
        return f"{os.urandom(8).hex()}-{nbytes}.tmp"

    def __repr__(self) -> str:
        return f"Ledger(unused={self._unused}, removed={self._removed}, capacity_bytes={self._capacity})"

    # ── inside, under the lock ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def _path(self) -> str:
        return os.path.join(self._root.ledger, self._token)

    @property
    def _own_bytes(self) -> int:
        """What this process's own file and directory take."""
        return self.size_of(_HOLDER.size) + self.directory_bytes

    def _enter(self) -> None:
        """Become known, with nothing promised. With the total locked: nobody sees the file before it is locked, too."""
        if self._holder >= 0:
            os.close(self._holder)
        self._unused = self._removed = 0
        self._holder = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._note()
            make_directory(self.temporary)
        except BaseException:
            os.close(self._holder)
            self._holder = -1
            raise

    def _note(self) -> None:
        os.pwrite(self._holder, _HOLDER.pack(self._unused, self._removed), 0)

    def _get_promise(self, nbytes: int) -> bool:
        """Be promised enough for ``nbytes``, and more if there is; False: there is too little."""
        with self._total() as total:
            if not os.path.exists(self._path):  # someone emptied the root while it was in use
                total.used += self._own_bytes
                self._enter()
            room = self._room(total, self._others(total))
            self._compare(total)
            missing = nbytes - self._unused
            if room < missing:
                return False
            promised = min(room, max(missing, self.promise_bytes))
            total.used += promised
        # Only when the total has it: whoever is killed in between is promised less than the total says, never more.
        self._unused += promised
        self._note()
        return True

    def _room(self, total: _Total, others: list[tuple[int, int]]) -> int:
        room = 1 << 62
        if self._capacity is not None:
            room = self._capacity - total.used if total.counted else 0
        if self._min_free:
            disk = os.statvfs(self._root.path)
            promised = self._unused + sum(unused for unused, _ in others)
            room = min(room, disk.f_bavail * disk.f_frsize - promised - self._min_free)
        return room

    def _return(self, nbytes: int) -> None:
        self._unused -= nbytes
        self._note()
        with self._total() as total:
            total.used -= nbytes
            self._compare(total)

    def _compare(self, total: _Total) -> None:
        self.over = self._capacity is not None and total.counted and total.used > self._capacity

    def _all_removed(self, total: _Total, others: list[tuple[int, int]]) -> int:
        return total.removed + self._removed + sum(removed for _, removed in others)

    @contextlib.contextmanager
    def _total(self) -> Iterator[_Total]:
        """The total, locked, to be changed: written when the body ends."""
        fd = self._lock_total()
        try:
            total = _read_total(fd)
            yield total
            os.pwrite(fd, _TOTAL.pack(_MAGIC, total.used, total.removed, total.counted, total.boot), 0)
        finally:
            os.close(fd)

    def _lock_total(self) -> int:
        path = os.path.join(self._root.ledger, "total")
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            except FileNotFoundError:
                make_directory(self._root.ledger)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            except FileNotFoundError:  # removed while we waited
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _others(self, total: _Total) -> list[tuple[int, int]]:
        """(unused, removed) of each other process that lives; what dead ones have left is given back."""
        found = []
        for name in os.listdir(self._root.ledger):
            if name in ("total", self._token):
                continue
            with contextlib.suppress(OSError):
                fd = os.open(os.path.join(self._root.ledger, name), os.O_RDWR | os.O_CLOEXEC)
                try:
                    raw = os.pread(fd, _HOLDER.size, 0).ljust(_HOLDER.size, b"\0")
                    unused, removed = _HOLDER.unpack(raw)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        found.append((unused, removed))
                        continue
                    gone = self._own_bytes + self._remove_temporary(name)
                    total.used -= unused + gone
                    total.removed += removed + gone
                    os.unlink(os.path.join(self._root.ledger, name))
                finally:
                    os.close(fd)
        return found

    def _remove_temporary(self, token: str) -> int:
        """Remove the files that a process which is dead was writing; the bytes that were taken for them."""
        directory, found = os.path.join(self._root.temporary, token), 0
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                os.unlink(os.path.join(directory, name))
                taken = name.removesuffix(".tmp").rpartition("-")[2]
                found += int(taken) if taken.isdecimal() else 0
            os.rmdir(directory)
        return found


def _read_total(fd: int) -> _Total:
    """The total; one that is new or damaged is to be counted."""
    raw = os.pread(fd, _TOTAL.size, 0)
    if len(raw) != _TOTAL.size:
        return _Total()
    magic, used, removed, counted, boot = _TOTAL.unpack(raw)
    return _Total(used, removed, counted, boot) if magic == _MAGIC else _Total()


def _boot_id() -> bytes:
    """The same as long as the machine runs; where that is not known, never the same."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return os.urandom(16)
