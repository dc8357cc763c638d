"""What lies below a root: a walk through all records, for whoever needs to know."""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tierkv.keys import group_mask
from tierkv.tiers.fs.known import Words
from tierkv.tiers.fs.root import DESCRIPTION, Root
from tierkv.types import KEY_BYTES, ChunkName, Space

_DIGEST = re.compile(r"[0-9a-f]{32}")
_FAN = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"-(\d+)\.tmp$")
_RECORD = re.compile(r"((?:[0-9a-f]{2}){16,64})-(\d{1,9})\.tkv")


class Victim(NamedTuple):
    """A record that may go. used_ns: when it was last used, as the file system has it."""

    path: str
    nbytes: int
    used_ns: int


@dataclass(slots=True)
class Survey:
    """What a walk has found.

    nbytes: what everything takes. known: of the namespace that was asked for, the first word of each record's key.
    victims: those that should go first, in that order.
    """

    nbytes: int = 0
    known: array[int] = field(default_factory=lambda: array("Q"))
    victims: list[Victim] = field(default_factory=list)

    @property
    def known_words(self) -> Words:
        return np.frombuffer(self.known, np.uint64) if self.known else np.empty(0, np.uint64)


def spaces(root: Root) -> Iterator[tuple[Space, str]]:
    """Each generation of each namespace below ``root``, and its directory."""
    for namespace in _subdirectories(root.path, _DIGEST):
        for generation in _subdirectories(namespace.path, _DIGEST):
            yield Space(bytes.fromhex(namespace.name), bytes.fromhex(generation.name)), generation.path


def records(directory: str) -> Iterator[os.DirEntry[str]]:
    """The files of records below the directory of a space."""
    for fan in _subdirectories(directory, _FAN):
        with contextlib.suppress(FileNotFoundError), os.scandir(fan.path) as entries:
            for entry in entries:
                if _RECORD.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry


def name_of(space: Space, file_name: str) -> ChunkName | None:
    """The chunk whose record has this file name in the directory of ``space``; None: it is no record's."""
    match = _RECORD.fullmatch(file_name)
    return match and ChunkName(space, int(match[2]), bytes.fromhex(match[1]))


def word_of(path: str) -> int | None:
    """The first word of the key of the record whose file is ``path``; None: it is no record's path."""
    *_, namespace, generation, _, file_name = path.split(os.sep)
    if not _RECORD.fullmatch(file_name):
        return None
    return _Words(Space(bytes.fromhex(namespace), bytes.fromhex(generation))).of(file_name)


def names(root: Root, namespace: bytes, stop: Callable[[], bool] = lambda: False) -> Survey:
    """Only what is ``known`` of ``namespace``: the directories are listed, and no file is looked at."""
    found = Survey()
    for space, directory in spaces(root):
        if space.namespace == namespace:
            words = _Words(space)
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
    first: list[Victim] = []
    others: list[Victim] = []
    for space, directory in spaces(root):
        words = _Words(space) if space.namespace == namespace else None
        candidates: list[Victim] = []
        newest = total = 0
        for entry in records(directory):
            if stop():
                return found
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            nbytes = size_of(status.st_size)
            found.nbytes += nbytes
            if words is not None:
                found.known.append(words.of(entry.name))
            newest = max(newest, status.st_atime_ns)
            candidates.append(Victim(entry.path, nbytes, status.st_atime_ns))
            total += nbytes
            if total > 4 * victim_bytes:
                candidates = _oldest(candidates, victim_bytes)
                total = sum(victim.nbytes for victim in candidates)
        abandoned = newest < unused_since_ns or newest <= left.get(space, -1)
        (first if abandoned else others).extend(_oldest(candidates, victim_bytes))
    found.nbytes += _directories(root, size_of)
    found.victims = _oldest(first, victim_bytes)
    rest = victim_bytes - sum(victim.nbytes for victim in found.victims)
    found.victims += _oldest(others, rest)
    return found


class _Words:
    """The first words of keys of one space, from the names of files."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._masks: dict[str, int] = {}

    def of(self, file_name: str) -> int:
        digits, _, group = file_name[:-4].rpartition("-")
        mask = self._masks.get(group)
        if mask is None:
            mask = self._masks[group] = int(group_mask(self._space, int(group))[0])
        tail = bytes.fromhex(digits[-2 * KEY_BYTES :])
        return int.from_bytes(tail[: KEY_BYTES // 2], "little") ^ mask


def _oldest(victims: Collection[Victim], nbytes: int) -> list[Victim]:
    """The least recently used of ``victims``, of ``nbytes`` together, or a little more; in that order."""
    chosen, total = [], 0
    for victim in sorted(victims, key=lambda victim: victim.used_ns):
        if total >= nbytes:
            break
        chosen.append(victim)
        total += victim.nbytes
    return chosen


def _subdirectories(path: str, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        return [e for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return []


def _directories(root: Root, size_of: Callable[[int], int]) -> int:
    """What all directories take, and the descriptions of namespaces."""
    paths = [root.path]
    for namespace in _subdirectories(root.path, _DIGEST):
        paths += [namespace.path, os.path.join(namespace.path, DESCRIPTION)]
    for _, directory in spaces(root):
        paths += [directory, *(fan.path for fan in _subdirectories(directory, _FAN))]
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += size_of(os.stat(path).st_size)
    return total


def _own_files(path: str, size_of: Callable[[int], int]) -> int:
    """What the directory ``path`` takes, and all below it; temporary files, what was taken for them."""
    total = 0
    for directory, _, files in os.walk(path):
        for name in (".", *files):
            with contextlib.suppress(FileNotFoundError):
                taken = _TEMPORARY.search(name)
                status = os.stat(os.path.join(directory, name), follow_symlinks=False)
                total += int(taken[1]) if taken else size_of(status.st_size)
    return total
