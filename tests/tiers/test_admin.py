"""What ``tierkv store`` does with any storage. tests/s3/test_store_cli.py has it with real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from tierkv.errors import ConfigError, RecordError, RemoteError
from tierkv.testing.driver import SPACE, some_hashes
from tierkv.tiers.admin import Problem, Storage, Stored, remove_damaged, verify
from tierkv.types import ChunkName


class Counting(Storage):
    """Many records, which are listed as they are asked for; it counts those that are held meanwhile."""

    readers: ClassVar[int] = 3

    def __init__(self, count: int, errors: dict[int, Exception] | None = None) -> None:
        self.names = [ChunkName(SPACE, 0, block_hash) for block_hash in some_hashes(count)]
        self.errors = errors or {}
        self.gone: set[int] = set()
        self.removed: list[Stored] = []
        self.lock = threading.Lock()
        self.listed = self.read = self.most_held = self.most_read = self.reading = 0

    def stored(self, namespace: str = "") -> Iterator[Stored]:
        for number, name in enumerate(self.names):
            with self.lock:
                self.listed += 1
                self.most_held = max(self.most_held, self.listed - self.read)
            yield Stored(str(number), name, 1, 0.0, None)

    def description(self, namespace: bytes) -> bytes:
        raise FileNotFoundError

    def check(self, stored: Stored) -> None:
        with self.lock:
            self.reading += 1
            self.most_read = max(self.most_read, self.reading)
        with self.lock:
            self.read += 1
            self.reading -= 1
        if int(stored.path) in self.errors:
            raise self.errors[int(stored.path)]

    def is_there(self, stored: Stored) -> bool:
        if int(stored.path) == 13:
            raise ConfigError("field", "the store does not answer")
        return int(stored.path) not in self.gone

    def remove(self, chosen: Sequence[Stored]) -> tuple[int, int]:
        self.removed += chosen
        return len(chosen), len(chosen)

    def close(self) -> None: ...


def problems_of(storage: Storage) -> list[Problem]:
    sizes: list[int] = []
    found = sorted(verify(storage, "", sizes.append), key=lambda each: int(each.stored.path))
    assert sum(sizes) == len(storage.names)  # type: ignore[attr-defined]
    return found


def test_few_records_are_held_and_read_at_a_time() -> None:
    storage = Counting(500)
    assert problems_of(storage) == []
    assert storage.read == 500 and storage.most_read <= 3 and storage.most_held <= 2 * 3


def test_what_is_damaged_is_told_from_what_is_gone_and_what_cannot_be_read() -> None:
    storage = Counting(10, {2: RecordError("checksum"), 4: RecordError("hash"), 6: RemoteError("timeout", "none")})
    storage.gone.add(4)
    problems = problems_of(storage)
    assert [(each.stored.path, each.reason, each.damaged) for each in problems] == [
        ("2", "checksum", True),
        ("6", "timeout", False),
    ]
    assert remove_damaged(storage, problems) == 1
    assert [each.path for each in storage.removed] == ["2"]
    storage.gone.add(2)
    assert remove_damaged(storage, problems) == 0


def test_a_store_that_does_not_answer_ends_it() -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        problems_of(Counting(100, {13: RemoteError("timeout")}))
