"""Populating the region in the background: real memory, and the kernel's own word for what is present."""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.host import memory
from tierkv.host.populate import PIECE_BYTES
from tierkv.host.region import Region, RegionHandle

PAGE = mmap.PAGESIZE
PIECE = 16 * PAGE
PIECES = 8
SIZE = PIECES * PIECE
EHWPOISON = 133  # which older versions of Python do not name


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(SIZE) as made:
        yield made
    assert populating() == []


def populating() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tierkv-populate-")]


def present(region: Region) -> list[bool]:
    """For each page of the region, whether it is in memory; by mincore(2)."""
    pages = (ctypes.c_ubyte * (region.size // PAGE))()
    assert memory.LIBC.mincore(ctypes.c_void_p(region.address), ctypes.c_size_t(region.size), pages) == 0
    return [bool(page & 1) for page in pages]


def mapped_bytes(region: Region) -> int:
    """How much of the region is mapped in this process; by smaps."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        if mapping.startswith(f"{region.address:x}-"):
            found = re.search(r"^Rss: +(\d+) kB$", mapping, re.MULTILINE)
            assert found is not None
            return int(found[1]) << 10
    raise AssertionError("the region is not mapped")


class Gate:
    """An ``on_ready`` that lets the populating thread make as many pieces as the test says."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._pieces = threading.Semaphore(0)
        self._reported = threading.Semaphore(0)

    def __call__(self, nbytes: int) -> None:
        self.seen.append(nbytes)
        self._reported.release()
        assert self._pieces.acquire(timeout=60)

    def reached(self) -> int:
        """Wait for the next report, and leave the thread in it."""
        assert self._reported.acquire(timeout=60)
        return self.seen[-1]

    def release(self, pieces: int = PIECES) -> None:
        self._pieces.release(pieces)


def test_nothing_is_present_before_and_everything_after(region: Region) -> None:
    assert not any(present(region)) and mapped_bytes(region) == 0
    seen: list[int] = []
    populator = region.populate(seen.append, piece_bytes=PIECE)
    assert populator.wait(60)
    assert all(present(region)) and mapped_bytes(region) == SIZE
    assert seen == [PIECE * (i + 1) for i in range(PIECES)]
    assert populator.ready_bytes == SIZE and populator.seconds > 0 and populator.error == ""
    assert bytes(region.view) == bytes(SIZE)
    assert repr(populator) == f"<Populator {SIZE} of {SIZE} bytes ready>"


def test_each_report_is_true_and_in_order(region: Region) -> None:
    gate = Gate()
    populator = region.populate(gate, piece_bytes=PIECE)
    for piece in range(1, PIECES + 1):
        assert gate.reached() == populator.ready_bytes == piece * PIECE
        assert present(region) == [page < piece * PIECE // PAGE for page in range(SIZE // PAGE)]
        assert populating() == ["tierkv-populate-0"]
        gate.release(1)
    assert populator.wait(60)


def test_the_last_piece_is_what_is_left() -> None:
    with Region.create(5 * PAGE) as region:
        seen: list[int] = []
        assert region.populate(seen.append, piece_bytes=2 * PAGE).wait(60)
        assert seen == [2 * PAGE, 4 * PAGE, 5 * PAGE] and all(present(region))
        assert PIECE_BYTES % (2 << 20) == 0  # whole huge pages


def test_what_the_region_holds_does_not_change(region: Region) -> None:
    region.view[:] = (filled := os.urandom(SIZE))
    assert region.populate(lambda _: None, piece_bytes=PIECE).wait(60)
    assert bytes(region.view) == filled


def test_close_in_the_middle_stops_there(region: Region) -> None:
    gate = Gate()
    populator = region.populate(gate, piece_bytes=PIECE)
    assert gate.reached() == PIECE
    gate.release(1)
    assert gate.reached() == 2 * PIECE
    assert not populator.wait(0.01)
    threading.Timer(0.1, gate.release).start()
    started = time.monotonic()
    populator.close()
    populator.close()
    assert time.monotonic() - started < 10
    assert gate.seen == [PIECE, 2 * PIECE] and populating() == []
    assert (populator.ready_bytes, populator.seconds, populator.error) == (2 * PIECE, 0.0, "")
    assert sum(present(region)) == 2 * PIECE // PAGE


def test_a_piece_is_small_enough_that_close_does_not_wait() -> None:
    with Region.create(64 * PIECE_BYTES) as region:
        first = threading.Event()
        populator = region.populate(lambda _: first.set())
        assert first.wait(60)
        started = time.perf_counter()
        populator.close()
        assert time.perf_counter() - started < 0.5
        assert PIECE_BYTES <= populator.ready_bytes < region.size


def test_the_regions_close_ends_it(region: Region) -> None:
    gate = Gate()
    region.populate(gate, piece_bytes=PIECE)
    gate.reached()
    gate.release()
    region.close()
    assert populating() == []


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT, EHWPOISON])
def test_what_the_system_refuses_ends_it_there(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    populate = memory.populate

    def refuse_the_third(address: int, size: int) -> None:
        if address >= region.address + 2 * PIECE:
            raise OSError(code, os.strerror(code))
        populate(address, size)

    monkeypatch.setattr(memory, "populate", refuse_the_third)
    seen: list[int] = []
    populator = region.populate(seen.append, piece_bytes=PIECE)
    assert populator.wait(60)
    assert seen == [PIECE, 2 * PIECE] and populator.ready_bytes == 2 * PIECE and populator.seconds == 0.0
    assert os.strerror(code) in populator.error
    (record,) = caplog.records
    assert f"byte {2 * PIECE} of {SIZE}" in record.getMessage() and os.strerror(code) in record.getMessage()
    assert repr(populator).endswith("bytes ready, stopped>")
    assert sum(present(region)) == 2 * PIECE // PAGE


def test_an_error_of_on_ready_ends_it_and_is_logged(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    def fail(nbytes: int) -> None:
        raise KeyError(nbytes)

    populator = region.populate(fail, piece_bytes=PIECE)
    assert populator.wait(60)
    assert populator.ready_bytes == PIECE and "KeyError" in populator.error and "KeyError" in caplog.text


def test_a_kernel_without_the_advice_allocates_and_writes_nothing(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def too_old(address: int, size: int) -> None:
        calls.append(address)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(memory, "populate", too_old)
    region.view[PIECE : PIECE + 3] = b"abc"
    seen: list[int] = []
    assert region.populate(seen.append, piece_bytes=PIECE).wait(60)
    assert calls == [region.address]  # asked once
    assert seen == [PIECE * (i + 1) for i in range(PIECES)]
    assert os.fstat(region.handle.fd).st_blocks * 512 == SIZE  # all of it is there
    assert bytes(region.view[PIECE : PIECE + 4]) == b"abc\0"


def test_another_mapping_is_populated_for_itself(region: Region) -> None:
    region.view[:] = (filled := os.urandom(SIZE))
    with Region.open(region.handle) as second:
        assert mapped_bytes(second) == 0
        assert second.populate(piece_bytes=PIECE).wait(60)
        assert mapped_bytes(second) == SIZE and bytes(second.view) == filled


def test_another_mapping_allocates_nothing_without_the_advice(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_old(address: int, size: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(memory, "populate", too_old)
    with Region.open(region.handle) as second:
        populator = second.populate(piece_bytes=PIECE)
        assert populator.wait(60)
        assert populator.ready_bytes == 0 and "MADV_POPULATE_WRITE" in populator.error
        assert "the first copies beyond are slower" in caplog.text
        assert os.fstat(region.handle.fd).st_blocks == 0


def test_memory_that_is_not_mapped_is_an_error_with_its_name() -> None:
    with pytest.raises(OSError, match="allocate memory") as error:
        memory.populate(PAGE, PAGE)
    assert error.value.errno == errno.ENOMEM


def use_while_populated(handle: RegionHandle) -> None:
    with Region.open(handle) as region:
        region.view[0] = 1  # ready
        region.view[SIZE - PAGE] = 2  # not ready


def test_another_process_can_use_it_meanwhile(region: Region) -> None:
    gate = Gate()
    populator = region.populate(gate, piece_bytes=PIECE)
    assert gate.reached() == PIECE
    process = multiprocessing.get_context("spawn").Process(target=use_while_populated, args=(region.handle,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and populator.ready_bytes == PIECE
    gate.release()
    assert populator.wait(60) and all(present(region))
    assert (region.view[0], region.view[SIZE - PAGE]) == (1, 2)
    assert sum(region.view) == 3


KILLED = f"""
import time
from tierkv.host.region import Region

region = Region.create({64 * PIECE_BYTES})
def on_ready(nbytes):
    if nbytes == {16 * PIECE_BYTES}:
        print("ready", flush=True)
        time.sleep(600)
region.populate(on_ready).wait()
"""


def shared_memory_bytes() -> int:
    found = re.search(r"^Shmem: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def names_in_dev_shm() -> set[str]:
    shm = Path("/dev/shm")
    return {name for name in os.listdir(shm) if name.startswith("tierkv")} if shm.is_dir() else set()


def test_kill_9_in_the_middle_leaves_nothing() -> None:
    before = names_in_dev_shm()
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert names_in_dev_shm() <= before
    during = shared_memory_bytes()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert names_in_dev_shm() <= before
    # Other processes use shared memory, too: so not to the byte, and not at the first look.
    deadline = time.monotonic() + 30
    while (left := shared_memory_bytes()) > during - 8 * PIECE_BYTES and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left <= during - 8 * PIECE_BYTES
