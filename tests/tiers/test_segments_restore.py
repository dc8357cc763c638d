"""What a restart with many chunks costs the threads that go on meanwhile."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv.host.cache import HostCache
from tierkv.keys import make_keys
from tierkv.testing.driver import SPACE, TierDriver
from tierkv.tiers import headers as header_tools
from tierkv.tiers import record
from tierkv.tiers.fs import FsTier, FsTierConfig
from tierkv.tiers.fs.geometry import NUM_FILES, PAGE, Geometry, make_geometry
from tierkv.tiers.fs.restore import Restore
from tierkv.types import Chunks

#: The smallest place there is, so that many fit on the disk.
CHUNK_BYTES = 512


def write_tables(root: Path, geometry: Geometry) -> int:
    """Fill all tables with headers, and write no payloads; how many records that are."""
    rng = np.random.default_rng(0)
    slots = geometry.slots_in(0)
    lengths, checksums = np.full(slots, CHUNK_BYTES, np.int64), np.zeros(slots, np.uint64)
    directory = root / "segments"
    directory.mkdir(parents=True)
    files = [(directory / f"segments-{n}.tkv").open("wb") for n in range(NUM_FILES)]
    for slab in range(geometry.num_slabs):
        hashes = rng.integers(0, 256, (slots, 32), np.uint8)
        chunks = Chunks(SPACE, make_keys(SPACE, 0, hashes), np.zeros(slots, np.int32), hashes)
        table = header_tools.encode(chunks, lengths, checksums)
        file, start = geometry.slab_at(slab)
        files[file].seek(start)
        files[file].write(geometry.encode_slab_header(slab, 0, slab) + table.tobytes())
    for opened in files:
        opened.close()
    return slots * geometry.num_slabs


def delays(until: threading.Event, least: int) -> np.ndarray:
    """How much later than asked for this thread goes on after sleeping a millisecond, in ms, again and again."""
    found = []
    while len(found) < least or not until.is_set():
        start = time.perf_counter()
        time.sleep(0.001)
        found.append((time.perf_counter() - start) * 1e3 - 1)
    return np.array(found)


class Steps:
    """The CPU time (ms) of what the restoring thread does in one go, with the GIL: another thread would wait for it.

    (That takes as long only where there are processors for both, and nobody else wants them.)
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[float] = []
        self.watch(monkeypatch, Restore, "_ours")
        self.watch(monkeypatch, HostCache, "add_slabs")
        self.watch(monkeypatch, HostCache, "restore")

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any) -> Any:
            start = time.thread_time()
            result = method(*args)
            if threading.current_thread().name.startswith("tierkv-tested-restore"):
                self.found.append((time.thread_time() - start) * 1e3)
            return result

        monkeypatch.setattr(owner, name, watched)


def restore(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = count * (CHUNK_BYTES + record.HEADER_BYTES) * 103 // 100
    geometry = make_geometry(capacity, [CHUNK_BYTES])
    records = write_tables(root, geometry)
    assert records >= count and PAGE + 512 * geometry.slots_in(0) < geometry.slab_bytes
    config = FsTierConfig(type="fs", root_dir=str(root), layout="segments", capacity_bytes=capacity)
    steps = Steps(monkeypatch)
    done = threading.Event()
    done.set()
    alone = delays(done, 1000)
    start = time.monotonic()
    with TierDriver(lambda context: FsTier(config, context), slot_bytes=CHUNK_BYTES) as driver:
        ended = driver.tier._layout._restore.ended
        beside = delays(ended, 100)
        took = time.monotonic() - start
        with driver.tier._layout._lock:
            assert len(driver.tier._layout._cache) == records
    shown = [f"{np.percentile(found, q):.2f}" for found in (alone, beside) for q in (50, 99, 99.9, 100)]
    print(f"\n{records} chunks restored in {took:.1f} s, {records / took / 1e6:.2f} million a second")
    print(
        f"a sleeping thread went on late by (ms: median, 99 %, 99.9 %, most) {shown[:4]} alone, {shown[4:]} beside it"
    )
    print(f"CPU time of a step (ms: median, 99 %, most) {np.percentile(steps.found, [50, 99, 100]).round(2)}")
    assert np.percentile(steps.found, 99) < 1


def test_others_go_on_while_many_chunks_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore(tmp_path, 200_000, monkeypatch)


@pytest.mark.soak
def test_others_go_on_while_ten_million_chunks_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a minute, and 11 GB of disk."""
    try:
        restore(tmp_path, 10_000_000, monkeypatch)
    finally:
        shutil.rmtree(tmp_path)
