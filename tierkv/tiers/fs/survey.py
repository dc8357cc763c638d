"""What lies below a root: a walk through all records, for whoever needs to know."""

from __future__ import annotations

import contextlib
import os
import re
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tierkv.tiers.fs.recordfile import TOUCH_NS
from tierkv.tiers.fs.root import Root
from tierkv.tiers.known import Words
from tierkv.tiers.paths import DESCRIPTION, DIGEST, FAN, RECORD, KeyWords
from tierkv.types import Space

_TEMPORARY = re.compile(r"-(\d+)\.tmp$")
#: Records that are looked at, at most, before other threads get to run: about half a millisecond.
_STEP = 64
#: Directories that were not changed for so long are not about to be used.
_OLD_S = 3600.0


class Victim(NamedTuple):
    """A record that may go. nbytes: what its file takes. used_ns: when it was last used, as the file system has it."""

    path: str
    nbytes: int
    used_ns: int


class Victims:
    """Records that may go, in an order.

    They are kept in columns: there may be millions. Each garbage collection would look at as many objects, and to let
    go of them would take the interpreter for long, while the engine waits.
    """

    def __init__(self) -> None:
        self._directories: list[str] = []
        #: Names of files one behind the other, and where each ends.
        self._names = bytearray()
        self._ends = array("Q", [0])
        self._places = array("i")
        self._nbytes = array("q")
        self._used = array("q")
        self._taken = 0
        #: Of all that were added.
        self.nbytes = 0

    def add(self, directory: str, name: bytes, nbytes: int, used_ns: int) -> None:
        """Add the record with file name ``name`` of the space whose directory is ``directory``."""
        if not self._directories or self._directories[-1] != directory:
            self._directories.append(directory)
        self._names += name
        self._ends.append(len(self._names))
        self._places.append(len(self._directories) - 1)
        self._nbytes.append(nbytes)
        self._used.append(used_ns)
        self.nbytes += nbytes

    def oldest(self, nbytes: int, into: Victims | None = None) -> Victims:
        """The least recently used, of ``nbytes`` together or a little more, behind those of ``into``."""
        chosen = Victims() if into is None else into
        # By arrays, which are sorted without the interpreter; and then in steps, so that others get to run.
        order = np.argsort(np.array(self._used, np.int64), kind="stable")
        wanted = chosen.nbytes + nbytes
        for step in range(0, len(order), _STEP):
            if chosen.nbytes >= wanted:
                break
            let_others_run()
            for i in order[step : step + _STEP].tolist():
                if chosen.nbytes < wanted:
                    chosen.add(self._directories[self._places[i]], self._name(i), self._nbytes[i], self._used[i])
        return chosen

    def take(self) -> Victim | None:
        """The next one, which is not among them any more; None if that was all."""
        if not len(self):
            return None
        i = self._taken
        self._taken += 1
        name = self._name(i).decode()
        path = os.path.join(self._directories[self._places[i]], name[:2], name)
        return Victim(path, self._nbytes[i], self._used[i])

    def __len__(self) -> int:
        return len(self._places) - self._taken

    def _name(self, i: int) -> bytes:
        return bytes(self._names[self._ends[i] : self._ends[i + 1]])


@dataclass(slots=True)
class Survey:
    """What a walk has found.

    nbytes: what everything takes. known: of the namespace that was asked for, the first word of each record's key.
    victims: those that should go first, in that order. empty: generations of which nothing is left, and where that was.
    """

    nbytes: int = 0
    known: array[int] = field(default_factory=lambda: array("Q"))
    victims: Victims = field(default_factory=Victims)
    empty: list[tuple[Space, str]] = field(default_factory=list)

    @property
    def known_words(self) -> Words:
        return np.frombuffer(self.known, np.uint64) if self.known else np.empty(0, np.uint64)


def spaces(root: Root) -> Iterator[tuple[Space, str]]:
    """Each generation of each namespace below ``root``, and its directory."""
    for namespace in _subdirectories(root.path, DIGEST):
        for generation in _subdirectories(namespace.path, DIGEST):
            yield Space(bytes.fromhex(namespace.name), bytes.fromhex(generation.name)), generation.path


def records(directory: str) -> Iterator[os.DirEntry[str]]:
    """The files of records below the directory of a space. Lets other threads run now and then."""
    for fan in _subdirectories(directory, FAN):
        with contextlib.suppress(OSError), os.scandir(fan.path) as entries:
            for number, entry in enumerate(entries):
                if number % _STEP == 0:
                    let_others_run()
                if RECORD.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry


def word_of(path: str) -> int | None:
    """The first word of the key of the record whose file is ``path``; None: it is no record's path."""
    *_, namespace, generation, _, file_name = path.split(os.sep)
    if not RECORD.fullmatch(file_name):
        return None
    return KeyWords(Space(bytes.fromhex(namespace), bytes.fromhex(generation))).of(file_name)


def names(root: Root, namespace: bytes, stop: Callable[[], bool] = lambda: False) -> Survey:
    """Only what is ``known`` of ``namespace``: the directories are listed, and no file is looked at."""
    found = Survey()
    for space, directory in spaces(root):
        if space.namespace == namespace:
            words = KeyWords(space)
            for entry in records(directory):
                if stop():
                    return found
                found.known.append(words.of(entry.name))
    return found


def survey(
    root: Root,
    namespace: bytes,
    size_of: Callable[[int], int],
    *,
    victim_bytes: int,
    left: Mapping[Space, int],
    unused_since_ns: int,
    stop: Callable[[], bool] = lambda: False,
) -> Survey:
    """Walk through everything below ``root``.

    Args:
        size_of: what a file of so many bytes takes.
        victim_bytes: find victims of so many bytes, about.
        left: generations that this process does not use any more, and since when (ns).
        unused_since_ns: generations of which nothing was used since then go first, with those of ``left`` of which
            nobody has used anything since.
        stop: asked at each record whether to give up.
    """
    found = Survey()
    # Temporary files first: what is renamed meanwhile is found again as a record, which is better than not at all.
    for path in (root.temporary, root.ledger):
        found.nbytes += _own_files(path, size_of)
    first, others = Victims(), Victims()
    for space, directory in spaces(root):
        words = KeyWords(space) if space.namespace == namespace else None
        candidates, newest = Victims(), 0
        for entry in records(directory):
            if stop():
                return found
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # gone, or out of reach: one bad file is no reason to know nothing of the others
                continue
            nbytes = size_of(status.st_size)
            found.nbytes += max(nbytes, size_of(512 * status.st_blocks))
            if words is not None:
                found.known.append(words.of(entry.name))
            newest = max(newest, status.st_atime_ns)
            candidates.add(directory, entry.name.encode(), nbytes, status.st_atime_ns)
            if candidates.nbytes > 2 * victim_bytes:
                candidates = candidates.oldest(victim_bytes)
        if not newest and _is_old(directory):
            found.empty.append((space, directory))
        abandoned = newest < unused_since_ns or newest + TOUCH_NS <= left.get(space, -1)
        candidates.oldest(victim_bytes, into=first if abandoned else others)
    found.nbytes += _directories(root, size_of)
    found.victims = first.oldest(victim_bytes)
    others.oldest(victim_bytes - found.victims.nbytes, into=found.victims)
    return found


def remove_empty(directory: str) -> int:
    """Remove the directory of a space, and those in it, as far as they are empty; how many went."""
    count = 0
    for path, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(path)
            count += 1
    return count


def _is_old(directory: str) -> bool:
    """Whether nobody is about to make the first record in ``directory``."""
    with contextlib.suppress(OSError):
        return time.time() - os.stat(directory).st_mtime > _OLD_S
    return False


def let_others_run() -> None:
    """Leave the interpreter to who waits for it.

    System calls do that, too, but those that return at once have it back before anybody has woken up, and what only
    computes has it for five milliseconds.
    """
    time.sleep(1e-4)


def _subdirectories(path: str, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [e for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return []


def _directories(root: Root, size_of: Callable[[int], int]) -> int:
    """What all directories take, and the descriptions of namespaces."""
    paths = [root.path]
    for namespace in _subdirectories(root.path, DIGEST):
        paths += [namespace.path, os.path.join(namespace.path, DESCRIPTION)]
    for _, directory in spaces(root):
        paths += [directory, *(fan.path for fan in _subdirectories(directory, FAN))]
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += size_of(os.stat(path).st_size)
    return total


def _own_files(path: str, size_of: Callable[[int], int]) -> int:
    """What the directory ``path`` takes, and all below it; temporary files, what was taken for them."""
    total = 0
    for directory, _, files in os.walk(path):
        for name in (".", *files):
            with contextlib.suppress(OSError):
                taken = _TEMPORARY.search(name)
                status = os.stat(os.path.join(directory, name), follow_symlinks=False)
                total += int(taken[1]) if taken else size_of(status.st_size)
    return total
