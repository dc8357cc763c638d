"""What a person does to the root of an fs tier: see what is there, verify it, and remove some. Safe beside engines."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tierkv.errors import ConfigError, RecordError
from tierkv.tiers import record
from tierkv.tiers.fs.geometry import PAGE, SMALLEST_SLAB, decode_slab_header, table_end
from tierkv.tiers.fs.ledger import Ledger
from tierkv.tiers.fs.root import Root
from tierkv.tiers.fs.segmentfile import lock
from tierkv.tiers.fs.survey import records, remove_empty, spaces
from tierkv.tiers.io import reason_of
from tierkv.tiers.paths import DESCRIPTION, name_of
from tierkv.types import ChunkName, Space

_READ_BYTES = 1 << 20

#: Names of ages, and up to how many seconds they go.
AGES = {"1h": 3600.0, "1d": 86_400.0, "7d": 7 * 86_400.0, "older": math.inf}


class Stored(NamedTuple):
    """A file that is a record by its name, or a record in a segment.

    nbytes: its size. used_s: when it was last used, in seconds of the epoch; in a segment, when something was last
    written near it. written: another file, or another header, has another one. place: in a segment, where its header
    and its payload are.
    """

    path: str
    name: ChunkName
    nbytes: int
    used_s: float
    written: object
    place: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.path if self.place is None else f"{self.path} at {self.place[0]}"


@dataclass(slots=True)
class SpaceSummary:
    """One generation of one namespace.

    model: of its description; empty where there is none. groups: records of each group. ages: of each of ``AGES``,
    records that were last used so long ago at most, and longer than the one before. last_s: the latest use of any.
    """

    space: Space
    model: str
    records: int = 0
    nbytes: int = 0
    groups: dict[int, int] = field(default_factory=dict)
    ages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AGES, 0))
    last_s: float = 0.0

    def add(self, stored: Stored) -> None:
        self.records += 1
        self.nbytes += stored.nbytes
        self.groups[stored.name.group] = self.groups.get(stored.name.group, 0) + 1
        age = time.time() - stored.used_s
        self.ages[next(name for name, seconds in AGES.items() if age <= seconds)] += 1
        self.last_s = max(self.last_s, stored.used_s)


class Problem(NamedTuple):
    """A record that would not be loaded. reason: one of ``record.REASONS``, or what the file system says."""

    stored: Stored
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Prune:
    """What is to go: all records of namespaces that begin with ``namespace`` (hex), if given, and were not used for
    ``unused_s``, if given; and, least recently used first, so many that ``to_bytes`` stay, if given."""

    namespace: str = ""
    unused_s: float | None = None
    to_bytes: int | None = None


def open_root(path: str) -> Root:
    """The root at ``path``.

    Raises:
        ConfigError: there is none.
    """
    root = Root(path)
    own = (root.temporary, root.segments)
    if not any(map(os.path.isdir, own)) and not any(True for _ in spaces(root)):
        raise ConfigError("PATH", f"{path!r} is no root of an fs tier", "the root_dir of one")
    return root


def stored(root: Root, namespace: str = "") -> Iterator[Stored]:
    """Every record below ``root`` whose namespace begins with ``namespace``, in no order."""
    for space, directory in spaces(root):
        if not space.namespace.hex().startswith(namespace):
            continue
        for entry in records(directory):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                name = name_of(space, entry.name)
                assert name is not None, "records are found by their names"
                yield Stored(entry.path, name, status.st_size, status.st_atime, _written(status))

    for each in _in_segments(root):
        if each.name.space.namespace.hex().startswith(namespace):
            yield each


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


def summaries(root: Root, namespace: str = "") -> list[SpaceSummary]:
    """One for each generation of each namespace that has records, the largest first."""
    found: dict[Space, SpaceSummary] = {}
    for each in stored(root, namespace):
        space = each.name.space
        if space not in found:
            found[space] = SpaceSummary(space, str(describe(root, space.namespace).get("model", "")))
        found[space].add(each)
    return sorted(found.values(), key=lambda summary: -summary.nbytes)


def describe(root: Root, namespace: bytes) -> dict[str, Any]:
    """What ``namespace.json`` says; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(root.of_namespace(namespace), DESCRIPTION), encoding="utf-8") as file:
            fields = json.load(file)
        return fields if isinstance(fields, dict) else {}
    return {}


def verify(root: Root, namespace: str, on_record: Callable[[int], None]) -> Iterator[Problem]:
    """Read every record whole; those that would not be loaded.

    Args:
        on_record: called for each record that was read, with its bytes.
    """
    for each in stored(root, namespace):
        try:
            _verify(each)
        except (RecordError, OSError) as error:
            if _is_there(each):
                yield Problem(each, reason_of(error), str(error))
        on_record(each.nbytes)


def choose(root: Root, prune: Prune, now: float | None = None) -> list[Stored]:
    """The records that ``prune`` asks to remove, in the order in which they go."""
    found = sorted(stored(root, prune.namespace), key=lambda each: each.used_s)
    least = (time.time() if now is None else now) - (prune.unused_s or 0.0)
    if prune.to_bytes is None:
        return [each for each in found if each.used_s <= least]
    left, chosen = sum(each.nbytes for each in found), []
    for each in found:
        if left <= prune.to_bytes or each.used_s > least:
            break
        chosen.append(each)
        left -= each.nbytes
    return chosen


def remove(root: Root, chosen: list[Stored]) -> tuple[int, int]:
    """Remove records, but for those that were used since they were chosen; how many went, and their bytes.

    The ledger learns of it: engines that share the root can use the room soon.

    Raises:
        ConfigError: one of them is in a segment, and the segments are in use.
    """
    ledger, gone = Ledger(root, None, 0), []
    ledger.open()
    try:
        with contextlib.ExitStack() as stack:
            if any(each.place for each in chosen):
                stack.callback(os.close, lock(root.segments))
            for each in chosen:
                with contextlib.suppress(OSError):
                    if _remove(each):
                        gone.append(each)
                        if each.place is None:
                            ledger.removed(ledger.size_of(each.nbytes))
        for _, directory in list(spaces(root)):
            ledger.removed(remove_empty(directory) * ledger.directory_bytes)
    finally:
        ledger.close()
    return len(gone), sum(each.nbytes for each in gone)


def used_bytes(root: Root) -> int | None:
    """What the processes that share the root have agreed it takes, promises included; None if they keep no ledger."""
    try:
        fd = os.open(os.path.join(root.ledger, "total"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Ledger.read_used(fd)
    finally:
        os.close(fd)


def _verify(each: Stored) -> None:
    at, payload = each.place or (0, record.HEADER_BYTES)
    with open(each.path, "rb", buffering=0, opener=_open_unnoticed) as file:
        header = record.decode_header(os.pread(file.fileno(), record.HEADER_BYTES, at))
        record.check(header, each.name, header.length)
        if each.place is None:
            record.check_size(header, os.fstat(file.fileno()).st_size)
        digest, end = record.PayloadChecksum(), payload + header.length
        while data := os.pread(file.fileno(), min(_READ_BYTES, end - payload), payload):
            digest.update(data)
            payload += len(data)
        record.check_checksum(header.checksum, digest.intdigest())


def _open_unnoticed(path: str, flags: int) -> int:
    """Open without setting the time of the last use, by which records are evicted; that is the owner's privilege."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


def _is_there(each: Stored) -> bool:
    """Whether it is still the record that it was: one that is evicted is written over."""
    try:
        if each.place is None:
            return _written(os.stat(each.path, follow_symlinks=False)) == each.written
        with open(each.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), record.HEADER_BYTES, each.place[0])[-8:] == each.written
    except OSError:
        return False


def _remove(each: Stored) -> bool:
    """Remove a record, or erase its header, if it is still what it was; whether that was done."""
    if not _is_there(each):
        return False
    if each.place is None:
        if os.stat(each.path, follow_symlinks=False).st_atime > each.used_s:
            return False
        os.unlink(each.path)
    else:
        with open(each.path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes(record.HEADER_BYTES), each.place[0])
    return True


def _written(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
