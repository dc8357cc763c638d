from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.tiers.fs import ledger as ledger_module
from tierkv.tiers.fs.ledger import Count, Ledger
from tierkv.tiers.fs.root import Root

CAPACITY = 4 << 20


def make(path: Path, capacity: int | None = CAPACITY, min_free: int = 0) -> Ledger:
    ledger = Ledger(Root(str(path)), capacity, min_free)
    ledger.open()
    return ledger


def counted(ledger: Ledger, found: int = 0) -> Ledger:
    """A walk that finds ``found`` bytes of records, and what the living processes have for themselves."""
    count = ledger.begin_count()
    living = len(os.listdir(ledger._root.ledger)) - 1
    ledger.end_count(count, found + living * ledger._own_bytes)
    return ledger


def kill(ledger: Ledger) -> None:
    """What the kernel does for a process that is killed."""
    os.close(ledger._holder)
    ledger._holder = -1


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def test_a_ledger_that_is_new_promises_nothing_until_it_is_counted(root: Path) -> None:
    ledger = make(root)
    assert not ledger.take(1)
    counted(ledger, 1000)
    assert ledger.used == 1000 + ledger._own_bytes
    assert ledger.take(1)
    ledger.close()


def test_without_a_bound_it_promises_at_once(root: Path) -> None:
    ledger = make(root, None)
    assert ledger.take(1 << 30)
    ledger.close()


def test_the_total_is_never_above_the_capacity(root: Path) -> None:
    ledger = counted(make(root))
    taken = 0
    while ledger.take(5000):
        taken += 5000
    assert CAPACITY - 5000 - ledger._own_bytes < taken <= CAPACITY
    ledger.give_back(5000, removed=True)
    assert ledger.take(5000) and not ledger.take(5000)
    ledger.close()


def test_what_is_not_used_is_given_back_at_the_end(root: Path) -> None:
    one, two = counted(make(root)), make(root)
    assert one.take(100) and two.take(200)
    one.close()
    two.close()
    with open(root / ".ledger" / "total", "rb") as file:
        assert ledger_module._read_total(file.fileno()).used == 300
    assert sorted(os.listdir(root / ".ledger")) == ["total"] and not os.listdir(root / ".tmp")


def test_what_a_killed_process_has_not_used_comes_back_and_its_files_go(root: Path) -> None:
    victim, other = counted(make(root)), make(root)
    assert victim.take(1000) and victim.take(500)
    Path(victim.temporary, victim.temporary_name(500)).write_bytes(b"half of it")
    kill(victim)
    own = other._own_bytes
    assert other.take(100)  # has a look at who lives
    assert other.used - other._unused == 1000 + 100 + own
    assert os.listdir(root / ".tmp") == [other._token]
    other.close()


def test_a_count_is_trusted_as_long_as_the_machine_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(make(root), 1000).close()
    ledger = make(root)
    assert ledger.used == 1000 + ledger._own_bytes and ledger.take(10)
    kill(ledger)
    monkeypatch.setattr(ledger_module, "_boot_id", lambda: b"another boot....")
    ledger = make(root)
    assert not ledger.take(10), "what was noted before may not have reached the disk"
    counted(ledger, 1010)
    assert ledger.take(10)
    ledger.close()


@pytest.mark.parametrize("damaged", [b"", b"short", bytes(200)])
def test_a_damaged_total_is_counted_anew(root: Path, damaged: bytes) -> None:
    counted(make(root), 1000).close()
    (root / ".ledger" / "total").write_bytes(damaged)
    ledger = make(root)
    assert not ledger.take(10)
    assert counted(ledger, 50).take(10)
    ledger.close()


def test_a_root_that_is_emptied_in_use(root: Path) -> None:
    ledger = counted(make(root))
    assert ledger.take(10)
    shutil.rmtree(root / ".ledger")
    while ledger.take(50_000):
        pass
    assert not ledger.take(50_000), "it is to be counted"
    counted(ledger, 0)
    assert ledger.take(50_000)
    ledger.close()
    assert sorted(os.listdir(root / ".ledger")) == ["total"]


def test_free_space_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(root)

    class Disk:
        f_frsize, f_bavail = real.f_frsize, (10 << 20) // real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Disk)
    one, two = make(root, None, 8 << 20), make(root, None, 8 << 20)
    assert one.take(1 << 20)
    assert not two.take(2 << 20), "what is promised to the other is not free"
    assert not one.take(3 << 20)
    one.close()
    two.close()


def test_counting_lowers_a_total_that_is_too_high(root: Path) -> None:
    ledger = counted(make(root), 500_000)
    count = ledger.begin_count()
    assert ledger.take(1000)
    ledger.give_back(300, removed=True)
    ledger.end_count(count, 200_000)
    # What was written since, and once more what was removed since.
    assert ledger.used - ledger._unused == 200_000 + 1000 - 300 + 300
    ledger.close()


class Processes(RuleBasedStateMachine):
    """Several processes, files that they make, remove and take over, kills, and walks that see as little as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(self.stack.enter_context(_directory()))
        self.ledgers: list[Ledger] = []
        self.files: dict[int, int] = {}
        self.next = 0
        self.count: tuple[Ledger, Count, set[int]] | None = None

    @initialize()
    def begin(self) -> None:
        self.ledgers = [make(self.root, CAPACITY)]
        counted(self.ledgers[0], 0)

    @rule()
    @precondition(lambda self: len(self.ledgers) < 4)
    def open(self) -> None:
        self.ledgers.append(make(self.root, CAPACITY))

    @rule(data=st.data(), nbytes=st.integers(1, 100_000))
    @precondition(lambda self: self.ledgers)
    def store(self, data: st.DataObject, nbytes: int) -> None:
        if data.draw(st.sampled_from(self.ledgers)).take(nbytes):
            self.files[self.next] = nbytes
            self.next += 1

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers)
    def fail(self, data: st.DataObject) -> None:
        ledger = data.draw(st.sampled_from(self.ledgers))
        if ledger.take(7000):
            ledger.give_back(7000, removed=False)

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers and self.files)
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.files)))
        data.draw(st.sampled_from(self.ledgers)).give_back(self.files.pop(number), removed=True)

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers and self.files)
    def reuse(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.files)))
        nbytes = self.files.pop(number)
        data.draw(st.sampled_from(self.ledgers)).reuse(nbytes)
        self.files[self.next] = nbytes
        self.next += 1

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers)
    def end(self, data: st.DataObject) -> None:
        self._leave(data).close()

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers)
    def killed(self, data: st.DataObject) -> None:
        kill(self._leave(data))

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers and self.count is None)
    def begin_walk(self, data: st.DataObject) -> None:
        ledger = data.draw(st.sampled_from(self.ledgers))
        self.count = ledger, ledger.begin_count(), set(self.files)

    @rule()
    @precondition(lambda self: self.count is not None)
    def end_walk(self) -> None:
        assert self.count is not None
        ledger, count, before = self.count
        # A walk sees what was there all the time; of what came and went meanwhile, nothing.
        found = sum(self.files[number] for number in before & set(self.files))
        holders = len(self.ledgers) * ledger._own_bytes
        ledger.end_count(count, found + holders)
        self.count = None

    @invariant()
    def the_total_is_at_least_what_is_there(self) -> None:
        if self.ledgers:
            there = sum(self.files.values()) + len(self.ledgers) * self.ledgers[0]._own_bytes
            promised = sum(ledger._unused for ledger in self.ledgers)
            assert there + promised <= self.ledgers[0].used <= CAPACITY + 8 * self.ledgers[0]._own_bytes

    def teardown(self) -> None:
        for ledger in self.ledgers:
            ledger.close()
        if self.ledgers and self.count is None:
            last = make(self.root, CAPACITY)
            assert last.begin_count()  # gives back what dead ones had
            assert last.used >= sum(self.files.values())
            last.close()
        self.stack.close()

    def _leave(self, data: st.DataObject) -> Ledger:
        ledger = self.ledgers.pop(data.draw(st.integers(0, len(self.ledgers) - 1)))
        if self.count is not None and self.count[0] is ledger:
            self.count = None
        return ledger


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
