"""How much room a root takes, agreed on by all processes that write to it.

::

    root_dir/.ledger/total       bytes in use or promised, of all processes together
    root_dir/.ledger/<random>    one process: what it was promised and has not used; locked as long as it lives

A process is promised bytes in large amounts, under the lock of ``total``, and uses them up file by file without it. It
notes that it has used them *before* it makes a file, and that it has them back *after* it removed one, so whenever a
process is killed, ``total`` is at least what is there. Who finds a process's file unlocked gives back what that one
had not used. What is lost between the note and the deed, and what is made or removed by hand, a *count* of the root
puts right: a walk that adds up all files, while everybody goes on.

The files survive the processes, not a crash of the machine: the first process after that counts before it promises.
They are in the byte order of little-endian machines, and locked by ``flock``, on network file systems, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tierkv.tiers.fs.recordfile import FILE_MODE, make_directory
from tierkv.tiers.fs.root import Root

#: What a process is promised at a time, at most, and which share of the capacity.
PROMISE_BYTES = 64 << 20
PROMISE_SHARE = 64

#: What the name of a file takes in its directory, generously.
NAME_BYTES = 256

#: Bounds of what a file is rounded up to. Network file systems give the size of their transfers as that of a block.
_BLOCK_BYTES = (4 << 10, 64 << 10)

#: How long to wait for the lock of the total, which is held for microseconds, and how often to look.
LOCK_S = 5.0
_LOOK_S = 0.001

_MAGIC = b"tierkvL1"
_TOTAL = struct.Struct("<8s16sqqq?16s")
_HOLDER = struct.Struct("<qqq")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: File systems on which what one host has written is seen by others only when the file was closed, or flushed.
_CACHED = ("nfs", "cifs", "smb", "fuse")


@dataclass(slots=True)
class _Total:
    """used: bytes in use or promised, right up to a constant unless ``counted``.

    removed: bytes of files that processes which have ended removed, ever, their own included. corrected: what counts
    have added to ``used``, ever. boot: of which run of the machine. id: of this total; another one begins anew.
    """

    id: bytes = field(default_factory=lambda: os.urandom(16))
    used: int = 0
    removed: int = 0
    corrected: int = 0
    counted: bool = False
    boot: bytes = bytes(16)

    @staticmethod
    def read(fd: int) -> _Total:
        """What the file says; one that is new or damaged is to be counted."""
        raw = os.pread(fd, _TOTAL.size, 0)
        if len(raw) != _TOTAL.size or raw[: len(_MAGIC)] != _MAGIC:
            return _Total()
        return _Total(*_TOTAL.unpack(raw)[1:])

    def write(self, fd: int) -> None:
        fields = (self.id, self.used, self.removed, self.corrected, self.counted, self.boot)
        os.pwrite(fd, _TOTAL.pack(_MAGIC, *fields), 0)


class _Holder(NamedTuple):
    """unused: promised bytes. pending: bytes of files that are about to be made, or were just now.

    removed: bytes of files that this process has removed, ever.
    """

    unused: int
    pending: int
    removed: int


class Count(NamedTuple):
    """What the ledger said when a count began: the total's id, changes but for corrections; of all processes, what
    may become files, and what they have removed."""

    id: bytes
    changes: int
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
        self.block_bytes = min(max(os.statvfs(root.path).f_frsize, _BLOCK_BYTES[0]), _BLOCK_BYTES[1])
        self._lock = threading.Lock()
        self._token = os.urandom(16).hex()
        self._holder = -1
        self._unused = self._pending = self._removed = 0
        self._largest = 0
        #: Whether there was more than the bounds allow when that was looked at last.
        self.over = False

    def open(self) -> None:
        """Become known to the other processes. Idempotent.

        Raises:
            OSError: the ledger cannot be written, or files cannot be locked here.
        """
        with self._lock:
            if self._holder >= 0:
                return
            with self._total() as (total, fd):
                if not self._others(total, fd):
                    # What was noted since the machine started is right; what was before may not be on the disk.
                    total.counted = total.counted and total.boot == _boot_id()
                    total.boot = _boot_id()
                self._enter(total)

    @property
    def used(self) -> int:
        """Bytes in use or promised, of all processes, as known now."""
        with self._lock, self._total() as (total, _):
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

        ``made`` or ``give_back`` must follow.

        Args:
            ask: for another promise, which takes a look at what all processes have.
        """
        with self._lock:
            self._see_that_it_is_known()
            if self._unused < nbytes and not (ask and self._get_promise(nbytes)):
                return False
            self._unused -= nbytes
            self._pending += nbytes
            self._largest = max(self._largest, nbytes)
            self._note()
            return True

    def reuse(self, nbytes: int) -> None:
        """A record's file, which takes ``nbytes``, is to become another's: it was removed, and another is pending."""
        with self._lock:
            self._see_that_it_is_known()
            self._removed += nbytes
            self._pending += nbytes
            self._note()

    def made(self, nbytes: int) -> None:
        """The file for which ``nbytes`` were taken is there."""
        with self._lock:
            self._pending -= nbytes  # noted with what comes next: too much does no harm

    def give_back(self, nbytes: int) -> None:
        """The file for which ``nbytes`` were taken is not made after all, or gone."""
        with self._lock:
            self._see_that_it_is_known()
            self._pending -= nbytes
            self._have(nbytes)

    def removed(self, nbytes: int) -> None:
        """A file that takes ``nbytes`` was removed; they can be used anew."""
        with self._lock:
            self._see_that_it_is_known()
            self._removed += nbytes
            self._have(nbytes)

    def begin_count(self) -> Count:
        """Before a walk that adds up ``size_of`` every file and directory that is there all the time."""
        with self._lock, self._total() as (total, fd):
            others = self._others(total, fd)
            promised = sum(holder.unused + holder.pending for holder in (self._own, *others))
            return Count(total.id, total.used - total.corrected, promised, self._all_removed(total, others))

    def end_count(self, begun: Count, found: int) -> bool:
        """The walk has found ``found`` bytes. What was written and removed meanwhile, by anybody, is accounted for.

        Where that cannot be told (a file was made, or removed, before or after the walk came by), the total is too
        high until the next count, never too low.

        Returns:
            False: the ledger is another one by now, and the count is of no use.
        """
        with self._lock, self._total() as (total, fd):
            if total.id != begun.id:
                return False
            others = self._others(total, fd)
            removed = self._all_removed(total, others) - begun.removed
            most = found + begun.promised + (total.used - total.corrected - begun.changes) + removed
            least = found - removed + sum(holder.unused + holder.pending for holder in (self._own, *others))
            used = max(min(total.used, most), least) if total.counted else most
            total.corrected += used - total.used
            total.used = used
            total.counted = True
            self._compare(total)
            return True

    def close(self) -> None:
        """Give back what is not used, and be gone."""
        with self._lock:
            if self._holder < 0:
                return
            # Whoever is in the way for long, or has emptied the root: the next one finds that nobody holds the file.
            with contextlib.suppress(OSError):
                if os.fstat(self._holder).st_nlink:
                    with self._total() as (total, fd):
                        self._retire(total, fd, self._token, self._own)
            os.close(self._holder)
            self._holder = -1

    @property
    def temporary(self) -> str:
        """This process's directory for files that are being written; each is named by ``temporary_name``."""
        return os.path.join(self._root.temporary, self._token)

    @staticmethod
    def read_used(fd: int) -> int | None:
        """``used``, from the opened file of the total, for who has no part in it; None if that is not known."""
        total = _Total.read(fd)
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
    def _own(self) -> _Holder:
        return _Holder(self._unused, self._pending, self._removed)

    @property
    def _own_bytes(self) -> int:
        """What a process's own file and directory take."""
        return self.size_of(_HOLDER.size) + self.directory_bytes

    def _see_that_it_is_known(self) -> None:
        """Enter again if someone emptied the root while it was in use: what was promised is of no worth then."""
        assert self._holder >= 0, "a ledger is opened first"
        if not os.fstat(self._holder).st_nlink:
            with self._total() as (total, _):
                self._enter(total)

    def _enter(self, total: _Total) -> None:
        """Become known, with nothing promised. With the total locked: nobody sees the file before it is locked, too."""
        before, self._holder = self._holder, -1
        if before >= 0:
            os.close(before)
        self._unused = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_DSYNC if _is_cached(self._root.path) else 0
        holder = os.open(self._path, flags, FILE_MODE)
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._give_to_owner(holder)
            make_directory(self.temporary)
        except BaseException:
            os.close(holder)
            raise
        self._holder = holder
        self._note()
        total.used += self._own_bytes

    def _give_to_owner(self, fd: int) -> None:
        """What an administrator's command makes must not be in the way of the engines, which run as somebody else."""
        owner = os.stat(self._root.path)
        if os.geteuid() == 0 and owner.st_uid != 0:
            os.fchown(fd, owner.st_uid, owner.st_gid)

    def _note(self) -> None:
        os.pwrite(self._holder, _HOLDER.pack(*self._own), 0)

    def _have(self, nbytes: int) -> None:
        """``nbytes`` more can be used; what is more than is needed soon goes to others."""
        self._unused += nbytes
        self._note()
        kept = 0 if self.over else max(self.promise_bytes, self._largest)
        if self._unused > 2 * kept:
            returned = self._unused - kept
            self._unused = kept
            self._note()
            with self._total() as (total, _):
                total.used -= returned
                self._compare(total)

    def _get_promise(self, nbytes: int) -> bool:
        """Be promised enough for ``nbytes``, and more if there is; False: there is too little."""
        with self._total() as (total, fd):
            others = self._others(total, fd)
            self._compare(total)
            room = self._room(total, others)
            missing = nbytes - self._unused
            if room < missing:
                return False
            promised = min(room, max(missing, self.promise_bytes))
            total.used += promised
        # Only when the total has it: whoever is killed in between is promised less than the total says, never more.
        self._unused += promised
        self._note()
        return True

    def _room(self, total: _Total, others: list[_Holder]) -> int:
        room = 1 << 62
        if self._capacity is not None:
            room = self._capacity - total.used if total.counted else 0
        if self._min_free:
            promised = sum(holder.unused + holder.pending for holder in (self._own, *others))
            room = min(room, self._free() - promised - self._min_free)
        return room

    def _free(self) -> int:
        disk = os.statvfs(self._root.path)
        return disk.f_bavail * disk.f_frsize

    def _compare(self, total: _Total) -> None:
        too_much = self._capacity is not None and total.counted and total.used > self._capacity
        self.over = too_much or (self._min_free > 0 and self._free() < self._min_free)

    def _all_removed(self, total: _Total, others: list[_Holder]) -> int:
        return total.removed + self._removed + sum(holder.removed for holder in others)

    @contextlib.contextmanager
    def _total(self) -> Iterator[tuple[_Total, int]]:
        """The total, to be changed, and its file, locked: written when the body ends."""
        fd = self._lock_total()
        try:
            total = _Total.read(fd)
            yield total, fd
            total.write(fd)
        finally:
            os.close(fd)

    def _lock_total(self) -> int:
        path = os.path.join(self._root.ledger, "total")
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            except FileNotFoundError:
                make_directory(self._root.ledger)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                _flock(fd, until)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    self._give_to_owner(fd)
                    return fd
            except FileNotFoundError:  # removed while we waited
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _others(self, total: _Total, fd: int) -> list[_Holder]:
        """What each other process has that lives; what dead ones have left is given back.

        Raises:
            OSError: one of them cannot be read: without it, nothing here is right.
        """
        found = []
        for name in os.listdir(self._root.ledger):
            if name in ("total", self._token):
                continue
            try:
                theirs = os.open(os.path.join(self._root.ledger, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                holder = _Holder(*_HOLDER.unpack(os.pread(theirs, _HOLDER.size, 0).ljust(_HOLDER.size, b"\0")))
                try:
                    fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(holder)
                else:
                    self._retire(total, fd, name, holder)
            finally:
                os.close(theirs)
        return found

    def _retire(self, total: _Total, fd: int, token: str, holder: _Holder) -> None:
        """Strike out a process that has ended, or is about to. Whoever is killed in between leaves a total too high."""
        gone = self._own_bytes + self._remove_temporary(token)
        total.removed += holder.removed + gone
        total.write(fd)
        os.unlink(os.path.join(self._root.ledger, token))
        total.used -= holder.unused + gone

    def _remove_temporary(self, token: str) -> int:
        """Remove the files that a process which has ended was writing; the bytes that were taken for them."""
        directory, found = os.path.join(self._root.temporary, token), 0
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, name))
                    taken = name.removesuffix(".tmp").rpartition("-")[2]
                    found += int(taken) if taken.isdecimal() else 0
            os.rmdir(directory)
        return found


def _flock(fd: int, until: float) -> None:
    """Lock ``fd``.

    Raises:
        OSError: ``ETIMEDOUT``: somebody has held it all the time: stopped, or behind a mount that does not answer.
    """
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(errno.ETIMEDOUT, "the ledger is held by another process") from None
            time.sleep(_LOOK_S)
        else:
            return


def _is_cached(path: str) -> bool:
    """Whether other hosts see what is written to files below ``path`` only after a flush."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError, ValueError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1].startswith(_CACHED)
    return False


def _boot_id() -> bytes:
    """The same as long as the machine runs; where that is not known, never the same."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return os.urandom(16)
