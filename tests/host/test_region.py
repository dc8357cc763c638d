"""The host region: shared by processes, gone with the last of them, and never the wrong one."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import RegionError
from tierkv.host.region import Region, RegionHandle

SIZE = 4 * mmap.PAGESIZE


def _write_seven(handle: RegionHandle) -> None:
    with Region.open(handle) as region:
        region.view[5] = 7


def test_a_new_region_is_zero_writable_and_mapped_at_its_address() -> None:
    with Region.create(SIZE) as region:
        assert region.size == len(region.view) == SIZE
        assert not region.view.readonly and region.view.format == "B"
        assert bytes(region.view) == bytes(SIZE)
        assert np.frombuffer(region.view, np.uint8).ctypes.data == region.address


def test_another_process_sees_the_same_bytes() -> None:
    with Region.create(SIZE) as region:
        process = multiprocessing.get_context("spawn").Process(target=_write_seven, args=(region.handle,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert region.view[5] == 7


def test_the_creating_process_can_open_it_too() -> None:
    with Region.create(SIZE) as region, Region.open(pickle.loads(pickle.dumps(region.handle))) as second:
        second.view[:3] = b"abc"
        assert bytes(region.view[:3]) == b"abc"
        assert second.address != region.address
        assert second.handle == region.handle
        assert second.pages == region.pages


def test_a_mapping_outlives_the_creators_close() -> None:
    region = Region.create(SIZE)
    second = Region.open(region.handle)
    region.view[0] = 9
    region.close()
    assert second.view[0] == 9
    second.close()


def test_close_can_be_repeated_and_tolerates_exported_buffers() -> None:
    region = Region.create(SIZE)
    array = np.frombuffer(region.view, np.uint8)
    part = region.view[:8]
    region.close()
    region.close()
    array[0] = 3  # still valid memory
    assert part[0] == 3
    assert len(region.view) == 0
    assert "closed" in repr(region)


def test_its_repr_says_what_it_is() -> None:
    with Region.create(SIZE) as region:
        assert f"{SIZE} bytes" in repr(region) and f"{region.pages} pages" in repr(region)


def test_close_gives_descriptors_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Region.create(SIZE) as region, Region.open(region.handle):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_not_inherited() -> None:
    with Region.create(SIZE) as region:
        assert not os.get_inheritable(region.handle.fd)


@pytest.mark.parametrize("size", [0, -mmap.PAGESIZE, 1, mmap.PAGESIZE + 1, 1 << 70])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(RegionError):
        Region.create(size)


def test_a_closed_region_cannot_be_opened() -> None:
    region = Region.create(SIZE)
    region.close()
    with pytest.raises(RegionError, match="has closed it, or it runs in another PID namespace"):
        Region.open(region.handle)


def test_a_process_that_is_gone_is_an_error_that_says_so() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(RegionError, match="is gone"):
        Region.open(RegionHandle(process.pid, 3, SIZE, "0" * 32))


def test_another_file_at_the_same_descriptor_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    with other.open("r+b") as file, pytest.raises(RegionError, match="not the expected host region"):
        Region.open(RegionHandle(os.getpid(), file.fileno(), SIZE, "0" * 32))


def test_another_region_or_another_size_is_refused() -> None:
    with Region.create(SIZE) as region:
        for wrong in (region.handle._replace(token="0" * 32), region.handle._replace(size=2 * SIZE)):
            with pytest.raises(RegionError, match="not the expected host region"):
                Region.open(wrong)


def test_nobody_can_shrink_it_under_the_others() -> None:
    with Region.create(SIZE) as region, pytest.raises(PermissionError):
        os.ftruncate(region.handle.fd, mmap.PAGESIZE)


def test_nothing_is_left_in_dev_shm_after_kill_9() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm here")
    before = set(os.listdir(shm))
    code = (
        "import os, signal; from tierkv.host.region import Region\n"
        f"region = Region.create({SIZE}); region.view[0] = 1; print('ready', flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    during = {name for name in os.listdir(shm) if name.startswith("tierkv")}
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    after = {name for name in os.listdir(shm) if name.startswith("tierkv")}
    assert during <= before and after <= before
