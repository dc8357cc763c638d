"""What a person does to what lies in a tier: see what is there, verify it, and remove some. Safe beside engines.

How records are found, read and removed is a ``Storage``'s; each kind of tier has its own in its ``admin`` module.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, NamedTuple

from tierkv.errors import RecordError, RemoteError
from tierkv.tiers.io import reason_of
from tierkv.types import ChunkName, Space

#: Names of ages, and up to how many seconds they go.
AGES = {"1h": 3600.0, "1d": 86_400.0, "7d": 7 * 86_400.0, "older": math.inf}


class Stored(NamedTuple):
    """A file or an object that is a record by its name, or a record in a segment.

    nbytes: its size. used_s: when it was last used, in seconds of the epoch; in a segment, when something was last
    written near it; of an object, when it was written. written: another file, another object or another header in its
    place has another one. place: in a segment, where its header and its payload are.
    """

    path: str
    name: ChunkName
    nbytes: int
    used_s: float
    written: object
    place: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.path if self.place is None else f"{self.path} at {self.place[0]}"


class Problem(NamedTuple):
    """A record that would not be loaded.

    reason: one of ``record.REASONS``, or what the file system or the store says. damaged: False: it could not be read,
    but that may be the network's fault.
    """

    stored: Stored
    reason: str
    detail: str
    damaged: bool


class Storage(ABC):
    """Where the records of a tier lie. Leave with ``with``, or close.

    Thread safety: ``check`` and ``is_there`` may be called by any thread, the others by one at a time.
    """

    #: Records that are worth being read at the same time.
    readers: ClassVar[int] = 1

    @abstractmethod
    def stored(self, namespace: str = "") -> Iterator[Stored]:
        """Every record whose namespace begins with ``namespace`` (hex), in no order."""

    @abstractmethod
    def description(self, namespace: bytes) -> bytes:
        """What is in ``namespace.json``. Raises OSError or RecordError where it cannot be read."""

    @abstractmethod
    def check(self, stored: Stored) -> None:
        """Read a record whole. Raises RecordError or OSError if it would not be loaded."""

    @abstractmethod
    def is_there(self, stored: Stored) -> bool:
        """Whether it is still the record that was found."""

    @abstractmethod
    def remove(self, chosen: Sequence[Stored]) -> tuple[int, int]:
        """Remove records; how many went, and their bytes.

        Raises:
            ConfigError: they cannot be removed.
        """

    def used_bytes(self) -> int | None:
        """What the processes that share it have agreed it takes, promises included; None if they keep no ledger."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of all; what is under way is given up."""

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


@dataclass(frozen=True, kw_only=True)
class Prune:
    """What is to go: all records of namespaces that begin with ``namespace`` (hex), if given, and were not used for
    ``unused_s``, if given; and, least recently used first, so many that ``to_bytes`` stay, if given."""

    namespace: str = ""
    unused_s: float | None = None
    to_bytes: int | None = None


def summaries(storage: Storage, namespace: str = "") -> list[SpaceSummary]:
    """One for each generation of each namespace that has records, the largest first."""
    found: dict[Space, SpaceSummary] = {}
    for each in storage.stored(namespace):
        space = each.name.space
        if space not in found:
            found[space] = SpaceSummary(space, _model(storage, space.namespace))
        found[space].add(each)
    return sorted(found.values(), key=lambda summary: -summary.nbytes)


def verify(storage: Storage, namespace: str, on_record: Callable[[int], None]) -> Iterator[Problem]:
    """Read every record whole; those that would not be loaded.

    Args:
        on_record: called for each record that was read, with its bytes.
    """
    found = storage.stored(namespace)
    reading: dict[Future[Problem | None], int] = {}
    pool = ThreadPoolExecutor(storage.readers, "tierkv-verify")
    try:
        while True:
            # As many again wait, so that no reader does; all others have not even been listed.
            for each in islice(found, 2 * storage.readers - len(reading)):
                reading[pool.submit(_problem, storage, each)] = each.nbytes
            if not reading:
                break
            for future in wait(reading, return_when=FIRST_COMPLETED).done:
                nbytes = reading.pop(future)
                problem = future.result()
                if problem is not None:
                    yield problem
                on_record(nbytes)
        pool.shutdown()
    finally:  # for whoever leaves early: what is being read ends when the storage is closed
        pool.shutdown(wait=False, cancel_futures=True)


def remove_damaged(storage: Storage, problems: Sequence[Problem]) -> int:
    """Remove what is damaged, but for what has been written anew since; how many went."""
    damaged = (problem.stored for problem in problems if problem.damaged)
    return storage.remove([each for each in damaged if storage.is_there(each)])[0]


def choose(storage: Storage, prune: Prune, now: float | None = None) -> list[Stored]:
    """The records that ``prune`` asks to remove, in the order in which they go."""
    found = sorted(storage.stored(prune.namespace), key=lambda each: each.used_s)
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


def _model(storage: Storage, namespace: bytes) -> str:
    with contextlib.suppress(OSError, ValueError):  # no description, or none that can be read
        fields = json.loads(storage.description(namespace))
        return str(fields.get("model", "")) if isinstance(fields, dict) else ""
    return ""


def _problem(storage: Storage, each: Stored) -> Problem | None:
    try:
        storage.check(each)
    except (RecordError, OSError) as error:
        if storage.is_there(each):  # else it was removed or replaced meanwhile
            return Problem(each, reason_of(error), str(error), damaged=not isinstance(error, RemoteError))
    return None
