"""The fixtures that find leaks, each with a leak to find."""

from __future__ import annotations

import os
import threading
import uuid

import pytest

from tierkv.testing import leaks


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_PATIENCE_S", 0.05)


def test_a_descriptor_is_found() -> None:
    before = leaks._descriptors()
    fd = os.open(os.devnull, os.O_RDONLY)
    assert leaks._left_behind(leaks._descriptors, before) == {f"{fd} -> {os.devnull}"}
    os.close(fd)
    assert not leaks._left_behind(leaks._descriptors, before)


def test_a_thread_is_found() -> None:
    before, go = leaks._threads(), threading.Event()
    thread = threading.Thread(target=go.wait, name="tierkv-left-0", daemon=True)
    thread.start()
    (left,) = leaks._left_behind(leaks._threads, before)
    assert left.startswith("tierkv-left-0 ")
    go.set()
    thread.join()
    assert not leaks._left_behind(leaks._threads, before)


def test_a_name_in_shared_memory_is_found() -> None:
    before = leaks._shm_names()
    path = leaks._SHM / f"tierkv-test-{uuid.uuid4().hex}"
    path.write_bytes(b"left")
    assert leaks._left_behind(leaks._shm_names, before) == {path.name}
    path.unlink()
    assert not leaks._left_behind(leaks._shm_names, before)
