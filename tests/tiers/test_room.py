"""What a root may take, and what goes: seen on the disk, by way of the whole tier."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from roots import disk_bytes

from tierkv.errors import ConfigError
from tierkv.keys import new_generation
from tierkv.testing.driver import NAMESPACE, SPACE, TierDriver, some_chunks
from tierkv.tiers import record
from tierkv.tiers.fs import FsTier, FsTierConfig, ledger, room
from tierkv.tiers.fs.root import Root
from tierkv.tiers.fs.survey import names, survey
from tierkv.types import Chunks, RequestContext, Space

REQUEST = RequestContext()
SLOT = 64 << 10
#: File systems count time in ticks.
TICK_S = 0.005


def records(root: Path) -> set[str]:
    return {path.stem for path in root.rglob("*.tkv")}


def stem(chunks: Chunks, index: int) -> str:
    return f"{chunks.hashes[index].tobytes().hex()}-{chunks.groups[index]}"


def driver_of(root: Path, capacity: int | None = None, **fields: Any) -> TierDriver:
    config = FsTierConfig(type="fs", root_dir=str(root), n_write_threads=1, capacity_bytes=capacity, **fields)
    return TierDriver(lambda context: FsTier(config, context), slot_bytes=SLOT)


def age(root: Path, seconds: float = 3600.0) -> None:
    """As if all that is there now had been there, and used, so much earlier."""
    for path in root.rglob("*.tkv"):
        status = path.stat()
        earlier = int(seconds * 1e9)
        os.utime(path, ns=(status.st_atime_ns - earlier, status.st_mtime_ns - earlier))


def store_one_by_one(driver: TierDriver, chunks: Chunks) -> None:
    for i in range(len(chunks)):
        driver.fill([0], seed=i)
        assert driver.store(chunks.take([i]), [0]).ok.all()
        time.sleep(TICK_S)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_the_least_recently_used_go_and_it_is_never_too_much(root: Path) -> None:
    capacity = 40 * SLOT
    chunks = some_chunks(100)
    with driver_of(root, capacity) as driver:
        for i in range(100):
            driver.fill([0], seed=i)
            assert driver.store(chunks.take([i]), [0]).ok.all()
            assert disk_bytes(root) <= capacity
            time.sleep(TICK_S)
        left = records(root)
        assert len(left) > 28
        assert left == {stem(chunks, i) for i in range(100 - len(left), 100)}
        last = range(100 - len(left), 100)
        assert driver.load(chunks.take([99, 98]), [1, 2]).ok.all()
        driver.fill([3], seed=99)
        assert driver.payload(1) == driver.payload(3)
        assert not any(driver.tier.lookup(chunks.name(i), REQUEST) for i in range(last[0]))
        assert all(driver.tier.lookup(chunks.name(i), REQUEST) for i in last)


def test_what_was_loaded_lately_stays(root: Path) -> None:
    old, new = some_chunks(20), some_chunks(20, seed=1)
    with driver_of(root, 40 * SLOT) as driver:
        store_one_by_one(driver, old)
        age(root)
        assert driver.load(old.take([0, 5]), [1, 2]).ok.all()
        store_one_by_one(driver, new)
        left = records(root)
        assert {stem(old, 0), stem(old, 5)} | {stem(new, i) for i in range(20)} <= left
        assert len(left) < 40


def test_what_is_used_after_the_walk_stays(root: Path) -> None:
    old, new = some_chunks(20), some_chunks(20, seed=1)
    with driver_of(root, 40 * SLOT) as driver:
        store_one_by_one(driver, old)
        age(root)
        store_one_by_one(driver, new.take(range(16)))  # has known victims now
        assert driver.tier._layout._room.evicted  # type: ignore[attr-defined]
        remaining = [i for i in range(20) if stem(old, i) in records(root)]
        with driver_of(root) as other:  # another process uses them
            assert other.load(old.take(remaining), range(len(remaining))).ok.all()
        store_one_by_one(driver, new.take([16]))
        assert {stem(old, i) for i in remaining} <= records(root)


def test_a_record_that_is_too_large_for_the_root_is_refused(root: Path) -> None:
    with driver_of(root, SLOT) as driver:
        assert driver.store(some_chunks(1), [0]).reasons == {0: "capacity"}
        assert driver.store(some_chunks(1), [0], [512]).ok.all(), "a small one fits"


def test_generations_that_were_left_behind_go_first(root: Path) -> None:
    other = Space(NAMESPACE, new_generation())
    first, second, third = some_chunks(12), some_chunks(10, seed=1, space=other), some_chunks(24, seed=2)
    with driver_of(root, 40 * SLOT) as driver:
        store_one_by_one(driver, first)
        age(root)
        store_one_by_one(driver, second)
        age(root / NAMESPACE.hex() / other.generation.hex(), 120)  # newer than the first ones
        store_one_by_one(driver, third)
        gone = {stem(c, i) for c in (first, second, third) for i in range(len(c))} - records(root)
        behind = {stem(second, i) for i in range(10)}
        assert gone and (gone <= behind or behind <= gone)


def test_generations_that_nobody_uses_go_first(root: Path) -> None:
    named = Space(NAMESPACE, new_generation("step-1"))
    unused, used = some_chunks(10, space=named), some_chunks(34, seed=1)
    with driver_of(root) as driver:
        store_one_by_one(driver, unused)
    age(root, 7200)
    with driver_of(root, 40 * SLOT, generation_ttl_s=3600.0) as driver:
        store_one_by_one(driver, used.take(range(10)))
        age(root / NAMESPACE.hex() / SPACE.generation.hex(), 20_000)  # older, but of a generation that is in use
        store_one_by_one(driver, used.take(range(10, 34)))
        gone = {stem(c, i) for c in (unused, used) for i in range(len(c))} - records(root)
        behind = {stem(unused, i) for i in range(10)}
        assert gone and (gone <= behind or behind <= gone)


def test_another_namespace_counts_and_goes_when_it_is_the_oldest(root: Path) -> None:
    other = Space(bytes(16), SPACE.generation)
    theirs, mine = some_chunks(20, space=other), some_chunks(30, seed=1)
    with driver_of(root) as driver:
        store_one_by_one(driver, theirs)
    age(root)
    with driver_of(root, 40 * SLOT) as driver:
        store_one_by_one(driver, mine)
        left = records(root)
        assert {stem(mine, i) for i in range(30)} <= left
        gone = [i for i in range(20) if stem(theirs, i) not in left]
        assert gone == list(range(len(gone))), "the oldest of them first"
        assert len(left) < 40 and disk_bytes(root) <= 40 * SLOT


def test_an_evicted_file_is_used_again_and_sizes_may_differ(root: Path) -> None:
    with driver_of(root, 40 * SLOT) as driver:
        chunks = some_chunks(60)
        store_one_by_one(driver, chunks)
        inodes = {path.stat().st_ino for path in root.rglob("*.tkv")}
        same, small = some_chunks(5, seed=1), some_chunks(5, seed=2)
        payloads = driver.fill(range(5), seed=77)
        assert driver.store(same, range(5)).ok.all()
        assert {path.stat().st_ino for path in root.rglob("*.tkv")} <= inodes
        sizes = [100, 4096, 40_000, SLOT - 4096, SLOT - 1]
        for i, nbytes in enumerate(sizes):
            assert driver.store(small.take([i]), [i], [nbytes]).ok.all()
        assert driver.load(same, range(10, 15)).ok.all()
        assert [driver.payload(slot) for slot in range(10, 15)] == payloads
        assert driver.load(small, range(20, 25), sizes).ok.all()
        assert [driver.payload(20 + i, n) for i, n in enumerate(sizes)] == [
            payload[:n] for payload, n in zip(payloads, sizes, strict=True)
        ]
        for path in root.rglob("*.tkv"):
            assert record.decode_header(path.read_bytes()).length + record.HEADER_BYTES == path.stat().st_size
        assert not list((root / ".tmp").glob("*/*"))


def test_a_reader_of_a_file_that_is_written_over_finds_the_chunk_absent(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, chunks = os.preadv, some_chunks(2)
    with driver_of(root) as driver:
        driver.fill([0, 1])
        assert driver.store(chunks, [0, 1]).ok.all()
        path = next(path for path in root.rglob("*.tkv") if path.stem == stem(chunks, 0))

        def slow(fd: int, *args: Any) -> int:
            """Meanwhile the file becomes another record's."""
            if path.exists():
                raw = bytearray(path.read_bytes())
                raw[-100:] = bytes(100)
                path.rename(root / "elsewhere")
                (root / "elsewhere").write_bytes(raw)
            return preadv(fd, *args)

        monkeypatch.setattr(os, "preadv", slow)
        assert driver.load(chunks.take([0]), [2]).reasons == {0: "absent"}
        assert (root / "elsewhere").exists(), "what it is now is left alone"


def test_a_capacity_that_is_full_at_start_is_kept(root: Path) -> None:
    with driver_of(root) as driver:
        store_one_by_one(driver, some_chunks(60))
    assert disk_bytes(root) > 40 * SLOT
    age(root)
    with driver_of(root, 40 * SLOT) as driver:
        until = time.monotonic() + 60
        while disk_bytes(root) > 40 * SLOT:
            assert time.monotonic() < until, "what is too much goes by itself"
            time.sleep(0.01)
        assert driver.store(some_chunks(1, seed=1), [0]).ok.all()
        assert disk_bytes(root) <= 40 * SLOT
        assert stem(some_chunks(1, seed=1), 0) in records(root)


def test_free_space_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(root.parent)

    class Disk:
        """A disk of 60 slots, on which nobody else is."""

        f_frsize = real.f_frsize

        @property
        def f_bavail(self) -> int:
            return (60 * SLOT - (disk_bytes(root) if root.exists() else 0)) // self.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Disk())
    chunks = some_chunks(80)
    with driver_of(root, min_free_bytes=20 * SLOT) as driver:
        for i in range(80):
            assert driver.store(chunks.take([i]), [0]).ok.all()
            assert 60 * SLOT - disk_bytes(root) >= 20 * SLOT
        assert len(records(root)) > 28 and stem(chunks, 79) in records(root)


def test_a_walk_that_fails_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError("Input/output error")] * 2)

    def failing(*args: Any, **kwargs: Any) -> Any:
        for error in failures:
            raise error
        return survey(*args, **kwargs)

    monkeypatch.setattr(room, "survey", failing)
    with driver_of(root, 40 * SLOT) as driver:
        results = [driver.store(some_chunks(1, seed=i), [0]) for i in range(3)]
        while not results[-1].ok.all():
            time.sleep(0.02)
            results.append(driver.store(some_chunks(1, seed=9), [0]))
        assert {reason for result in results for reason in result.reasons.values()} <= {"capacity"}


def test_stores_wait_for_a_walk_and_close_does_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), threading.Event()

    def waiting(*args: Any, stop: Callable[[], bool], **kwargs: Any) -> Any:
        begun.set()
        while not go.wait(0.01):
            if stop():
                break
        return survey(*args, stop=stop, **kwargs)

    monkeypatch.setattr(room, "survey", waiting)
    with driver_of(root, 40 * SLOT) as driver:
        assert begun.wait(60)
        job = driver.submit(driver.store_job(some_chunks(1), [0]))
        assert driver.reports() == {}
        go.set()
        assert driver.wait([job])[0].ok.all()
    go.clear()
    begun.clear()
    with driver_of(root, 40 * SLOT):
        assert begun.wait(60)


@pytest.mark.parametrize("late", [False, True], ids=["waits", "late"])
def test_who_asked_before_the_first_count_evicts_nothing_if_there_is_room(
    root: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Before the first count nothing is promised. When it ends, the store waits for it, or is about to (``late``)."""
    refused, ended = threading.Event(), threading.Event()
    walk, take = room.Room._walk_once, ledger.Ledger.take

    def waiting(self: room.Room) -> bool:
        assert refused.wait(60)
        done = walk(self)
        ended.set()
        return done

    def observed(self: ledger.Ledger, nbytes: int, *, ask: bool = True) -> bool:
        taken = take(self, nbytes, ask=ask)
        if not taken and not refused.is_set():
            refused.set()
            assert not late or ended.wait(60)
        return taken

    old, new = some_chunks(20), some_chunks(5, seed=1)
    with driver_of(root) as driver:
        store_one_by_one(driver, old)
    monkeypatch.setattr(room.Room, "_walk_once", waiting)
    monkeypatch.setattr(ledger.Ledger, "take", observed)
    with driver_of(root, 40 * SLOT) as driver:
        store_one_by_one(driver, new)
        assert refused.is_set() and ended.is_set()
        assert records(root) == {stem(old, i) for i in range(20)} | {stem(new, i) for i in range(5)}


# What a process knows of the others.


def test_what_was_there_before_is_known_after_a_walk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = some_chunks(30)
    with driver_of(root) as driver:
        store_one_by_one(driver, chunks.take(range(0, 30, 2)))
    with driver_of(root) as driver:
        while not driver.tier._layout._room._walks:  # type: ignore[attr-defined]
            time.sleep(0.001)
        looked = []
        stat = os.stat
        monkeypatch.setattr(os, "stat", lambda path, **kwargs: looked.append(path) or stat(path, **kwargs))
        assert driver.tier.lookup_batch(chunks, REQUEST) == [True, False] * 15  # type: ignore[attr-defined]
        assert len(looked) == 15, "what is known is not looked for"
        looked.clear()
        some, needed = some_chunks(100, seed=7), np.arange(100) >= 20
        assert not any(driver.tier.lookup_batch(some, REQUEST, needed))  # type: ignore[attr-defined]
        assert len(looked) == 21, "and nothing behind what is needed and not there"


def test_what_another_process_stores_is_found(root: Path) -> None:
    chunks = some_chunks(3)
    with driver_of(root) as one, driver_of(root) as other:
        one.fill(range(3))
        assert one.store(chunks, range(3)).ok.all()
        assert other.tier.lookup_batch(chunks, REQUEST) == [True] * 3  # type: ignore[attr-defined]


def test_names_and_survey_agree(root: Path) -> None:
    chunks = some_chunks(20)
    with driver_of(root) as driver:
        store_one_by_one(driver, chunks)
        (root / NAMESPACE.hex() / SPACE.generation.hex() / "00").mkdir(exist_ok=True)
        (root / NAMESPACE.hex() / SPACE.generation.hex() / "00" / "what is this.tkv").touch()
        (root / "lost+found").mkdir()
        found = survey(
            Root(str(root)), NAMESPACE, lambda n: n, victim_bytes=5 * (SLOT + 512), left={}, unused_since_ns=0
        )
        expected = sorted(chunks.keys[:, 0].tolist())
        assert sorted(found.known) == sorted(names(Root(str(root)), NAMESPACE).known) == expected
        assert [Path(victim.path).stem for victim in iter(found.victims.take, None)] == [
            stem(chunks, i) for i in range(5)
        ]


# The configuration.


def test_a_capacity_needs_files_that_can_be_locked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(ledger.fcntl, "flock", failing)
    with pytest.raises(ConfigError, match=r"^capacity_bytes: .*No locks available.*; accepted: a root"):
        driver_of(root, 40 * SLOT)
    with driver_of(root) as driver:  # without a bound it does without
        assert driver.store(some_chunks(1), [0]).ok.all() and driver.load(some_chunks(1), [1]).ok.all()


@pytest.fixture(autouse=True)
def _walks_are_wanted_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PAUSE_S", 0.01)


# What goes wrong.


def refuse(number: int, *names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """These calls fail for records."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in names:
            call = getattr(os, name)

            def failing(path: Any, *args: Any, call: Any = call, **kwargs: Any) -> Any:
                if str(path).endswith(".tkv"):
                    raise OSError(number, os.strerror(number))
                return call(path, *args, **kwargs)

            monkeypatch.setattr(os, name, failing)

    return patch


def test_what_cannot_be_evicted_is_given_up_in_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.5)
    with driver_of(root, 40 * SLOT) as driver:
        store_one_by_one(driver, some_chunks(40))
        age(root)
        with monkeypatch.context() as patch:
            refuse(errno.EACCES, "unlink", "rename")(patch)
            jobs = [driver.submit(driver.store_job(some_chunks(4, seed=i), range(4))) for i in range(1, 3)]
            for result in driver.wait(jobs):
                assert set(result.reasons.values()) == {"capacity"}
        assert driver.tier._layout._room._walks < 30  # type: ignore[attr-defined]
        until = time.monotonic() + 60
        while not driver.store(some_chunks(1, seed=9), [0]).ok.all():
            assert time.monotonic() < until
            time.sleep(0.02)


def test_close_does_not_wait_for_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def endless(*args: Any, stop: Callable[[], bool], **kwargs: Any) -> Any:
        begun.set()
        while not stop():
            time.sleep(0.001)
        return survey(*args, stop=stop, **kwargs)

    monkeypatch.setattr(room, "survey", endless)
    with driver_of(root, 40 * SLOT) as driver:
        assert begun.wait(60)
        driver.submit(driver.store_job(some_chunks(32), range(32)))
        begin = time.monotonic()
        driver.close()
        assert time.monotonic() - begin < room.PATIENCE_S / 2
        (result,) = driver.reports().values()
        assert set(result.reasons.values()) <= {"capacity", "closed"}


def test_a_store_that_has_waited_in_vain_is_the_only_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.5)
    go = threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        go.wait()
        return survey(*args, **kwargs)

    monkeypatch.setattr(room, "survey", slow)
    with driver_of(root, 40 * SLOT) as driver:
        begin = time.monotonic()
        assert set(driver.store(some_chunks(32), range(32)).reasons.values()) == {"capacity"}
        assert time.monotonic() - begin < 10.0
        go.set()
        until = time.monotonic() + 60
        while not driver.store(some_chunks(1, seed=9), [0]).ok.all():
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_directory_of_temporary_files_that_was_tidied_up(root: Path) -> None:
    with driver_of(root, 40 * SLOT) as driver:
        store_one_by_one(driver, some_chunks(40))
        shutil.rmtree(root / ".tmp")
        assert driver.store(some_chunks(4, seed=1), range(4)).ok.all()


def test_many_processes_that_walk_do_not_lose_count(root: Path) -> None:
    """Two tiers below one root, each walking all the time, one storing what the other stores."""
    capacity = 40 * SLOT
    with driver_of(root, capacity) as one, driver_of(root, capacity) as other:
        for i in range(60):
            chunks = some_chunks(4, seed=i % 25)
            for driver in (one, other):
                driver.fill(range(4), seed=i % 25)
            jobs = [(driver, driver.submit(driver.store_job(chunks, range(4)))) for driver in (one, other)]
            for driver, job in jobs:
                driver.wait([job])
                with driver.tier._layout._room._changed:  # type: ignore[attr-defined]
                    driver.tier._layout._room._want_walk()  # type: ignore[attr-defined]
            assert disk_bytes(root) <= capacity
        used = one.tier._layout._ledger.used  # type: ignore[attr-defined]
        assert disk_bytes(root) <= used <= capacity


def test_a_lost_disk_does_not_end_the_walking_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver_of(root) as driver:
        store_one_by_one(driver, some_chunks(60))
    age(root)
    removed, failures = ledger.Ledger.removed, iter([OSError(errno.EIO, "Input/output error")] * 3)

    def failing(self: ledger.Ledger, nbytes: int) -> None:
        for error in failures:
            raise error
        removed(self, nbytes)

    monkeypatch.setattr(ledger.Ledger, "removed", failing)
    with driver_of(root, 40 * SLOT) as driver:
        until = time.monotonic() + 60
        while disk_bytes(root) > 40 * SLOT or not driver.store(some_chunks(1, seed=9), [0]).ok.all():
            assert time.monotonic() < until
            time.sleep(0.02)


def test_directories_of_what_is_gone_go_too(root: Path) -> None:
    others = Space(NAMESPACE, new_generation())
    with driver_of(root) as driver:
        store_one_by_one(driver, some_chunks(10, space=others))
    old = root / NAMESPACE.hex() / others.generation.hex()
    for path in old.rglob("*.tkv"):
        path.unlink()
    hours_ago = time.time() - 2 * 3600
    for path in [*old.iterdir(), old]:
        os.utime(path, (hours_ago, hours_ago))
    with driver_of(root, 40 * SLOT):
        until = time.monotonic() + 60
        while old.exists():
            assert time.monotonic() < until
            time.sleep(0.01)


def test_what_cannot_be_told_is_not_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver_of(root) as driver:
        chunks = some_chunks(1)
        store_one_by_one(driver, chunks)
        with monkeypatch.context() as patch:
            refuse(errno.EMFILE, "open")(patch)
            assert driver.store(chunks, [0]).reasons == {0: "emfile"}
        assert driver.load(chunks, [1]).ok.all()


def test_something_else_in_the_place_of_a_record(root: Path) -> None:
    chunks = some_chunks(1)
    with driver_of(root) as driver:
        store_one_by_one(driver, chunks)
        (path,) = root.rglob("*.tkv")
        path.unlink()
        path.mkdir()
        assert driver.load(chunks, [1]).reasons == {0: "eisdir"}
        assert driver.store(chunks, [0]).reasons == {0: "eexist"}
        path.rmdir()
        path.symlink_to("/etc/passwd")
        assert not driver.load(chunks, [1]).ok.any()
        assert driver.store(chunks, [0]).ok.all() and driver.load(chunks, [1]).ok.all()
        assert not path.is_symlink()
