"""The file system tier among processes: killed, racing, on a disk that is full or cannot be written."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from roots import disk_bytes, verified

from tierkv.testing.driver import TierDriver, some_chunks
from tierkv.tiers.fs import FsTier, FsTierConfig

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("store_in_a_loop.py")


def start(*args: object) -> subprocess.Popen[str]:
    """``store_in_a_loop.py``, up to its ``ready``."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def lines(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.splitlines()


@pytest.mark.parametrize("stop_at", [0, 5])
def test_every_record_that_is_visible_after_a_kill_is_whole(tmp_path: Path, stop_at: int) -> None:
    with start(tmp_path, 0, 10, 1 << 20, stop_at) as process:
        go(process)
        assert process.stdout is not None
        for _ in range(stop_at):
            assert " True " in process.stdout.readline()
        assert process.stdout.readline() == "half\n"
        process.kill()
        process.communicate()
    assert verified(tmp_path) == stop_at
    (left,) = (tmp_path / ".tmp").glob("*/*.tmp")
    assert left.stat().st_size == 512 + (1 << 19), "the victim was killed in the middle of a record"
    # What the victim left half written is in nobody's way, and gone.
    with TierDriver(lambda context: FsTier(FsTierConfig(type="fs", root_dir=str(tmp_path)), context)) as driver:
        driver.fill([0])
        assert driver.store(some_chunks(1, seed=5), [0]).ok.all()
    assert not list((tmp_path / ".tmp").iterdir())


def test_two_processes_store_the_same_chunks(tmp_path: Path) -> None:
    with start(tmp_path, 0, 60) as one, start(tmp_path, 0, 60) as other:
        go(one)
        go(other)
        for process in (one, other):
            said = lines(process)
            assert said[-1] == "end" and all(line.endswith(" True -") for line in said[:-1])
    assert verified(tmp_path) == 60
    assert not list((tmp_path / ".tmp").iterdir())


@pytest.mark.parametrize(
    ("capacity", "jobs"), [(48 << 20, 60), pytest.param(1 << 30, 1500, marks=pytest.mark.soak)], ids=["48M", "1G"]
)
def test_processes_that_share_a_root_never_exceed_its_capacity(tmp_path: Path, capacity: int, jobs: int) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(start(tmp_path, seed, jobs, 256 << 10, -1, capacity)) for seed in range(4)]
        for process in processes:
            go(process)
        most = 0
        while any(process.poll() is None for process in processes):
            most = max(most, disk_bytes(tmp_path))
            assert most <= capacity
        for process in processes:
            assert lines(process) == ["end"]
    assert most > 0.8 * capacity, "it was filled"
    assert verified(tmp_path) > 0.8 * capacity / (256 << 10)
    assert not list((tmp_path / ".tmp").iterdir()) and os.listdir(tmp_path / ".ledger") == ["total"]


@pytest.mark.parametrize("kills", [30, pytest.param(300, marks=pytest.mark.soak)])
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    """Two processes store, evict and load; one after the other is killed, and another one started."""
    capacity, rng = 12 << 20, random.Random(0)
    with ExitStack() as stack:
        running = []
        for number in range(kills + 2):
            process = stack.enter_context(start(tmp_path, number, 100_000, 128 << 10, -1, capacity))
            stack.callback(process.kill)
            go(process)
            running.append(process)
            if number < 2:
                continue
            time.sleep(rng.uniform(0.0, 0.25))
            running.pop(rng.randrange(2)).kill()
            assert disk_bytes(tmp_path) <= capacity
            verified(tmp_path)
        for process in running:
            assert process.poll() is None, "nobody stops at what another one has left"
            process.kill()
    assert verified(tmp_path) > 30
    with TierDriver(lambda context: FsTier(FsTierConfig(type="fs", root_dir=str(tmp_path)), context)):
        assert len(list((tmp_path / ".tmp").iterdir())) == 1 and not list((tmp_path / ".tmp").glob("*/*"))
    assert not list((tmp_path / ".tmp").iterdir()) and os.listdir(tmp_path / ".ledger") == ["total"]


# In a mount namespace of one's own, where one may mount without being anybody.


def confined(tmp_path: Path, mount: str, *args: object, stdin: str = "go\n") -> subprocess.CompletedProcess[str]:
    """Run the script with ``mount`` having been run first, where only the script sees it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare(1) here, to mount a small file system with")
    (tmp_path / "mounted").mkdir()
    can = subprocess.run([unshare, "-rm", "sh", "-c", mount], cwd=tmp_path, capture_output=True, text=True, check=False)
    if can.returncode:
        pytest.skip(f"cannot mount in a namespace of one's own: {can.stderr.strip()}")
    python = f'exec "{sys.executable}" "{SCRIPT}" {" ".join(map(str, args))}'
    tail = "; find mounted -type f >&2" if stdin else ""
    return subprocess.run(
        [unshare, "-rm", "sh", "-c", f"{mount} && ({python}){tail}"],
        cwd=tmp_path,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def test_a_full_disk_fails_what_does_not_fit_and_leaves_nothing(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=1m tmpfs mounted"
    done = confined(tmp_path, mount, "mounted", 0, 20, 100_000)
    said = [line.split() for line in done.stdout.splitlines()]
    assert said[0] == ["ready"] and said[-1] == ["end"], done.stderr
    stored = [ok for _, ok, _ in said[1:-1]].count("True")
    assert 5 <= stored <= 10
    assert {reason for _, ok, reason in said[1:-1] if ok == "False"} == {"enospc"}
    left = [line for line in done.stderr.splitlines() if line.startswith("mounted/")]
    assert len([path for path in left if path.endswith(".tkv")]) == stored
    assert not [path for path in left if path.endswith(".tmp")]


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_mount_that_cannot_be_written_is_an_error_of_the_configuration(tmp_path: Path, below: str) -> None:
    done = confined(tmp_path, "mount -t tmpfs -o ro tmpfs mounted", f"mounted{below}", 0, 1)
    assert "tierkv.errors.ConfigError: root_dir: " in done.stderr
    assert "cannot be written (Read-only file system); accepted: a directory" in done.stderr
    assert done.stdout == ""
