"""Fixtures that fail a test which leaves something behind: a file descriptor, a thread, a shared-memory name.

In a ``conftest.py``::

    from tierkv.testing.leaks import no_leaked_fds, no_leaked_shm, no_leaked_threads  # noqa: F401

    @pytest.fixture(autouse=True)
    def no_leaks(no_leaked_fds, no_leaked_shm, no_leaked_threads): ...

Only Linux tells what these need to know; elsewhere descriptors and names are not checked.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: How long what is about to go is waited for: a daemon thread that was told to end, say.
_PATIENCE_S = 3.0
_SHM = Path("/dev/shm")


def _left_behind(now: Callable[[], set[str]], before: set[str]) -> set[str]:
    """What is in ``now()`` and was not in ``before``, after waiting for it to go."""
    deadline = time.monotonic() + _PATIENCE_S
    while left := now() - before:
        gc.collect()
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return left


def _descriptors() -> set[str]:
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that listed them
                found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def _threads() -> set[str]:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _shm_names() -> set[str]:
    """Names of tierkv in ``/dev/shm``, without those that another process (another test run) is using."""
    if not _SHM.is_dir():
        return set()
    return {path.name for path in _SHM.iterdir() if "tierkv" in path.name and not _used_by_another(path)}


def _used_by_another(path: Path) -> bool:
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(path) in (process / "maps").read_text(errors="replace"):
                    return True
    return False


@pytest.fixture
def no_leaked_fds() -> Iterator[None]:
    """Fail the test if it leaves a file descriptor open."""
    before = _descriptors()
    yield
    left = _left_behind(_descriptors, before)
    assert not left, f"file descriptors left open: {sorted(left)}"


@pytest.fixture
def no_leaked_threads() -> Iterator[None]:
    """Fail the test if it leaves a thread running, daemons included."""
    before = _threads()
    yield
    left = _left_behind(_threads, before)
    assert not left, f"threads left running: {sorted(left)}"


@pytest.fixture
def no_leaked_shm() -> Iterator[None]:
    """Fail the test if it leaves a name of tierkv in ``/dev/shm``."""
    before = _shm_names()
    yield
    left = _left_behind(_shm_names, before)
    assert not left, f"names left in /dev/shm: {sorted(left)}"
