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
    ledger.removed(5000)
    assert ledger.take(5000) and not ledger.take(5000)
    ledger.close()


def test_what_is_not_used_is_given_back_at_the_end(root: Path) -> None:
    one, two = counted(make(root)), make(root)
    assert one.take(100) and two.take(200)
    one.close()
    two.close()
    with open(root / ".ledger" / "total", "rb") as file:
        assert ledger_module._Total.read(file.fileno()).used == 300
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
    ledger.removed(300)
    ledger.end_count(count, 200_000)
    # What was written since, and once more what was removed since.
    assert ledger.used - ledger._unused - ledger._pending == 200_000 - 300 + 300
    ledger.close()


def test_one_that_is_out_of_reach_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what it has, nothing would be right."""
    one, other = counted(make(root)), make(root)
    open_ = os.open

    def failing(path: str, *args: int) -> int:
        if str(path).endswith(other._token):
            raise OSError(24, "Too many open files")
        return open_(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        with pytest.raises(OSError, match="Too many"):
            one.begin_count()
        with pytest.raises(OSError, match="Too many"):
            one.take(1 << 20)
    assert one.take(1 << 20)
    one.close()
    other.close()


def test_two_walks_that_find_the_same_excess_take_it_off_once(root: Path) -> None:
    one, other = counted(make(root), 2_000_000), make(root)
    there = 1_000_000  # the rest was removed by hand
    counts = [one.begin_count(), other.begin_count()]
    assert one.take(600_000)
    one.made(600_000)
    other.removed(500_000)
    there += 600_000 - 500_000
    for ledger, count in zip((one, other), counts, strict=True):
        assert ledger.end_count(count, 500_000 + 2 * ledger._own_bytes)  # of the new one they have seen nothing
        assert ledger.used >= there + one._unused + other._unused + 2 * one._own_bytes
    one.close()
    other.close()


def test_another_ledger_makes_a_count_worthless(root: Path) -> None:
    ledger = counted(make(root))
    count = ledger.begin_count()
    shutil.rmtree(root / ".ledger")
    assert not ledger.end_count(count, 0)
    assert not ledger.take(10) and counted(ledger).take(10)
    ledger.close()


def test_what_was_promised_before_the_root_was_emptied_is_worthless(root: Path) -> None:
    ledger = counted(make(root))
    assert ledger.take(100) and ledger._unused
    shutil.rmtree(root / ".ledger")
    assert not ledger.take(100)
    ledger.close()


def test_a_lock_that_somebody_keeps_is_an_error_in_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "LOCK_S", 0.05)
    ledger = counted(make(root))
    assert ledger.take(10)
    with open(root / ".ledger" / "total", "rb") as file:
        ledger_module.fcntl.flock(file, ledger_module.fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            ledger.take(CAPACITY // 2)
        ledger.close()  # gives up, and leaves its file to the next one
    other = make(root)
    assert other.used == 10 + other._own_bytes
    other.close()


def test_a_ledger_that_is_a_link_to_nowhere(root: Path) -> None:
    (root / ".ledger").symlink_to(root / "nowhere")
    with pytest.raises(FileNotFoundError):
        make(root)


class Processes(RuleBasedStateMachine):
    """Several processes, files that they make, remove and take over, kills, and walks that overlap.

    A walk sees all that is there from its begin to its end, and of the rest what the worst of luck has it see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.ledgers: list[Ledger] = []
        #: Files, and their bytes; those that are only taken yet, and by whom.
        self.files: dict[int, int] = {}
        self.pending: dict[int, tuple[Ledger, int]] = {}
        self.next = 0
        self.walks: list[tuple[Ledger, Count, set[int], int]] = []
        #: How often a file was made or removed.
        self.events = 0
        #: Bytes that were made, or removed, by hand since all was counted.
        self.unknown = 0

    @initialize()
    def begin(self) -> None:
        self.ledgers = [counted(make(self.root, CAPACITY))]

    @rule()
    @precondition(lambda self: len(self.ledgers) < 4)
    def open(self) -> None:
        self.ledgers.append(make(self.root, CAPACITY))

    @rule(data=st.data(), nbytes=st.integers(1, 100_000))
    @precondition(lambda self: self.ledgers)
    def take(self, data: st.DataObject, nbytes: int) -> None:
        ledger = data.draw(st.sampled_from(self.ledgers))
        if ledger.take(nbytes):
            self.pending[self.next] = ledger, nbytes
            self.next += 1

    @rule(data=st.data())
    @precondition(lambda self: self.pending)
    def made(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.pending)))
        ledger, nbytes = self.pending.pop(number)
        self.files[number] = nbytes
        self.events += 1
        ledger.made(nbytes)

    @rule(data=st.data())
    @precondition(lambda self: self.pending)
    def fail(self, data: st.DataObject) -> None:
        ledger, nbytes = self.pending.pop(data.draw(st.sampled_from(sorted(self.pending))))
        ledger.give_back(nbytes)

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers and self.files)
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.files)))
        data.draw(st.sampled_from(self.ledgers)).removed(self.files.pop(number))
        self.events += 1

    @rule(data=st.data())
    @precondition(lambda self: self.ledgers and self.files)
    def reuse(self, data: st.DataObject) -> None:
        nbytes = self.files.pop(data.draw(st.sampled_from(sorted(self.files))))
        ledger = data.draw(st.sampled_from(self.ledgers))
        ledger.reuse(nbytes)
        self.events += 1
        self.pending[self.next] = ledger, nbytes
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
    @precondition(lambda self: self.ledgers and len(self.walks) < 3)
    def begin_walk(self, data: st.DataObject) -> None:
        ledger = data.draw(st.sampled_from(self.ledgers))
        self.walks.append((ledger, ledger.begin_count(), set(self.files), self.events))

    @rule(data=st.data())
    @precondition(lambda self: self.walks)
    def end_walk(self, data: st.DataObject) -> None:
        ledger, count, before, events = self.walks.pop(data.draw(st.integers(0, len(self.walks) - 1)))
        found = sum(self.files[number] for number in before & set(self.files))
        assert ledger.end_count(count, found + len(self.ledgers) * ledger._own_bytes)
        if events == self.events:  # else it is right but for what came and went meanwhile
            self.unknown = 0

    @invariant()
    def the_total_is_at_least_what_is_there(self) -> None:
        if self.ledgers and not self.unknown:
            there = sum(self.files.values()) + len(self.ledgers) * self.ledgers[0]._own_bytes
            there += sum(nbytes for _, nbytes in self.pending.values())
            assert there + sum(ledger._unused for ledger in self.ledgers) <= self.ledgers[0].used

    def teardown(self) -> None:
        for ledger in self.ledgers:
            for number, (owner, nbytes) in list(self.pending.items()):
                if owner is ledger:
                    del self.pending[number]
                    ledger.give_back(nbytes)
            ledger.close()
        last = make(self.root, CAPACITY)
        counted(last, sum(self.files.values()))
        assert last.used >= sum(self.files.values())
        last.close()
        self.stack.close()

    def _leave(self, data: st.DataObject) -> Ledger:
        """One of the processes, which is about to end; what it was about to make it makes before."""
        ledger = self.ledgers.pop(data.draw(st.integers(0, len(self.ledgers) - 1)))
        for number, (owner, nbytes) in list(self.pending.items()):
            if owner is ledger:
                del self.pending[number]
                self.files[number] = nbytes
        self.walks = [walk for walk in self.walks if walk[0] is not ledger]
        self.events += 1
        return ledger


class ProcessesAndHands(Processes):
    """… and somebody who copies and removes files."""

    @rule(data=st.data())
    @precondition(lambda self: self.files and not self.walks)
    def remove_by_hand(self, data: st.DataObject) -> None:
        self.unknown -= self.files.pop(data.draw(st.sampled_from(sorted(self.files))))

    @rule(nbytes=st.integers(1, 100_000))
    @precondition(lambda self: not self.walks)
    def copy_by_hand(self, nbytes: int) -> None:
        self.files[self.next] = nbytes
        self.next += 1
        self.unknown += nbytes


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestProcessesAndHands = ProcessesAndHands.TestCase
TestProcessesAndHands.settings = TestProcesses.settings
