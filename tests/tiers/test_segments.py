"""The layout ``segments`` of the file system tier."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.keys import new_generation
from tierkv.testing.driver import SPACE, TierDriver, some_chunks
from tierkv.testing.tier_contract import REQUEST, TierContract
from tierkv.tiers import record
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.fs import FsTier, FsTierConfig, restore, segmentfile
from tierkv.tiers.fs.geometry import make_geometry
from tierkv.types import ChunkName, Chunks, Space

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("churn_segments.py")

MIB = 1 << 20
#: The least that a slab can have.
SLAB = 65 * 4096


def maker(root: Path, capacity: int = 4 * MIB, **fields: Any) -> Callable[[TierContext], FsTier]:
    fields = {"n_read_threads": 2, "n_write_threads": 2} | fields
    config = FsTierConfig(type="fs", root_dir=str(root), layout="segments", capacity_bytes=capacity, **fields)
    return lambda context: FsTier(config, context)


# The format, spelled out once more, so that it cannot change unnoticed.


class Place(NamedTuple):
    """One slot of a slab: where its header and its payload are in a file, and how large a payload may be."""

    path: Path
    header: int
    payload: int
    room: int


def slab_header(raw: bytes) -> tuple[int, int, int, int] | None:
    """slab, slab bytes, place bytes and slots, if the first bytes of a slab say so."""
    magic, version, length, slab, slab_bytes, place_bytes, slots, checksum = struct.unpack_from("<8sIIQQQQQ", raw)
    if (magic, version, length) != (b"\x93TKSLAB\n", 1, 4096) or checksum != xxhash.xxh3_64_intdigest(raw[:48]):
        return None
    return slab, slab_bytes, place_bytes, slots


def places(root: Path, slab_bytes: int = SLAB) -> Iterator[Place]:
    """Every slot of every slab below ``root``."""
    for number in range(8):
        path = root / "segments" / f"segments-{number}.tkv"
        with path.open("rb") as file:
            for nth in range(path.stat().st_size // slab_bytes):
                start = nth * slab_bytes
                file.seek(start)
                found = slab_header(file.read(64))
                if found is None:
                    continue
                slab, size, room, slots = found
                assert (slab, size) == (number + 8 * nth, slab_bytes)
                end = -(-(4096 + 512 * slots) // 4096) * 4096
                assert end + slots * room <= slab_bytes
                for slot in range(slots):
                    yield Place(path, start + 4096 + 512 * slot, start + end + slot * room, room)


def read_at(path: Path, position: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(position)
        return file.read(count)


def write_at(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def visible(root: Path, slab_bytes: int = SLAB) -> dict[ChunkName, Place]:
    """Where each record is whose header is intact."""
    found = {}
    for place in places(root, slab_bytes):
        try:
            header = record.decode_header(read_at(place.path, place.header, 512))
        except record.RecordError:
            continue
        found[header.name] = place
    return found


def verified(root: Path, slab_bytes: int = SLAB) -> int:
    """Verify each record that is visible, by the format alone; how many there are."""
    found = visible(root, slab_bytes)
    for name, place in found.items():
        header = read_at(place.path, place.header, 512)
        length = record.decode_header(header).length
        record.verify(header + read_at(place.path, place.payload, length), name, length)
    return len(found)


class TestSegmentsContract(TierContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "root"
        self.places: dict[ChunkName, Place] = {}

    def make_tier(self, context: TierContext) -> Tier:
        return maker(self.root)(context)

    def read_record(self, tier: Tier, name: ChunkName) -> bytes | None:
        self.places |= visible(self.root)
        if name not in self.places:
            return None
        place = self.places[name]
        header = read_at(place.path, place.header, 512)
        return header + read_at(place.path, place.payload, record.decode_header(header).length)

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        """A place has a size: what is cut is followed by zeros; what is longer than the header says must say so."""
        self.places |= visible(self.root)
        place = self.places[name]
        header = record.decode_header(read_at(place.path, place.header, 512))
        if len(raw) - 512 > header.length:
            raw = record.encode_header(header.name, len(raw) - 512, header.checksum) + raw[512:]
        write_at(place.path, place.header, raw[:512].ljust(512, b"\0"))
        write_at(place.path, place.payload, raw[512 : 512 + place.room].ljust(place.room, b"\0"))


class TestSegmentsWithFsyncContract(TestSegmentsContract):
    def make_tier(self, context: TierContext) -> Tier:
        return maker(self.root, fsync=True)(context)


# What is on the disk.


def wait_restored(driver: TierDriver) -> None:
    """Until the tier has looked at all that was there when it was opened."""
    layout = driver.tier._layout
    assert layout._restore.ended.wait(60)


def open_again(
    root: Path, capacity: int = 4 * MIB, *, driver: dict[str, Any] | None = None, **fields: Any
) -> TierDriver:
    """A tier on what is there, restored."""
    opened = TierDriver(maker(root, capacity, **fields), **(driver or {}))
    wait_restored(opened)
    return opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a" / "root"


@pytest.fixture
def driver(root: Path) -> Iterator[TierDriver]:
    with TierDriver(maker(root)) as driver:
        yield driver


def test_files_and_modes(driver: TierDriver, root: Path) -> None:
    names = {"lock", *(f"segments-{n}.tkv" for n in range(8))}
    assert {path.name for path in (root / "segments").iterdir()} == names
    for path in [root, root / "segments", *(root / "segments").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("capacity", [SLAB, SLAB + 1, 10 * SLAB - 1, 7 * MIB, 100 * MIB + 12345])
def test_all_files_together_never_have_more_than_the_capacity(root: Path, capacity: int) -> None:
    def size() -> int:
        return sum(path.stat().st_size for path in (root / "segments").iterdir())

    with TierDriver(maker(root, capacity), n_slots=32, slot_bytes=16384) as driver:
        before = size()
        assert capacity * 0.97 - SLAB < before <= capacity
        for seed in range(8):
            driver.fill(range(32), seed=seed)
            assert driver.store(some_chunks(32, seed), range(32)).ok.any()
        assert size() == before
        used = sum(path.stat().st_blocks * 512 for path in (root / "segments").iterdir())
        assert used <= capacity + 4096, "and the lock's directory entry"


@pytest.mark.parametrize("capacity", [16 << 30, 1 << 40])
@pytest.mark.parametrize("size", [64 << 10, 100_000, 1 << 20, 4 << 20, 5 << 20, 8 << 20])
def test_of_large_chunks_little_is_overhead(size: int, capacity: int) -> None:
    geometry = make_geometry(capacity, [size])
    chunks = geometry.num_slabs * geometry.slots_in(0)
    assert 0.95 * capacity <= chunks * size <= capacity - chunks * 512
    assert geometry.num_slabs * geometry.slab_bytes <= capacity


@pytest.mark.parametrize("sizes", [(4096,), (16384, 16384), (4096, 70_000), (512, 1536, 100_000)])
def test_no_two_places_overlap(sizes: tuple[int, ...]) -> None:
    geometry = make_geometry(20 * MIB, sizes)
    for size_class, room in enumerate(geometry.place_bytes):
        taken: list[tuple[int, int, int]] = []
        slots = geometry.slots_in(size_class)
        for slab in range(geometry.num_slabs):
            numbers = np.arange(slots) + slab * geometry.plan.slots_per_slab
            where = geometry.where(numbers, np.full(slots, size_class))
            start = slab // 8 * geometry.slab_bytes
            assert set(where.files.tolist()) == {slab % 8} and set(where.slabs.tolist()) == {slab}
            taken.append((slab % 8, start, start + 4096))
            taken += [(slab % 8, at, at + 512) for at in where.headers.tolist()]
            taken += [(slab % 8, at, at + room) for at in where.places.tolist()]
            assert max(end for _, _, end in taken) <= start + geometry.slab_bytes
        taken.sort()
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(taken))


def test_golden_bytes_of_a_slab_header() -> None:
    geometry = make_geometry(20 * SLAB, [4096, 16384])
    raw = geometry.encode_slab_header(9, 1, 0x0123456789AB)
    assert raw[:64].hex(" ", 8) == (
        "93544b534c41420a 0100000000100000 0900000000000000 0010040000000000 "
        "0040000000000000 0f00000000000000 66e888fed72a2c12 ab89674523010000"
    )
    assert raw[64:] == bytes(4096 - 64)


def test_files_with_slabs_of_another_size_are_emptied(root: Path) -> None:
    with TierDriver(maker(root, 200 * SLAB)) as driver:
        driver.fill(range(40))
        driver.store(some_chunks(40), range(40))
        assert len(visible(root)) == 40
    wide = {"slot_bytes": 1 << 20, "n_slots": 2}
    with open_again(root, 200 * SLAB, driver=wide) as driver:
        driver.fill([0])
        assert driver.store(some_chunks(1, 1), [0]).ok.all()
    assert len(visible(root, 4 * SLAB)) == 1
    with open_again(root, 200 * SLAB) as driver:
        assert not any(driver.tier.lookup_batch(some_chunks(40), REQUEST))
    assert not visible(root)


def test_places_are_aligned_for_direct_reads(driver: TierDriver, root: Path) -> None:
    driver.fill(range(4))
    driver.store(some_chunks(4), range(4))
    assert all(place.payload % 4096 == 0 and place.header % 512 == 0 for place in visible(root).values())


def test_what_is_asked_of_the_configuration(tmp_path: Path) -> None:
    for fields, message in [
        ({"capacity_bytes": None}, r"^capacity_bytes: missing; .*accepted: bytes"),
        ({"capacity_bytes": SLAB - 1}, rf"^capacity_bytes: .*accepted: at least {SLAB}$"),
        ({"min_free_bytes": 1}, r"^min_free_bytes: .*accepted: 0"),
        ({"capacity_bytes": 1 << 60}, r"^capacity_bytes: .*more than the index holds; accepted: below \d+$"),
        ({"capacity_bytes": 1 << 42}, r"^capacity_bytes: .*cannot be had.*accepted: what there is room for; \d+ bytes"),
    ]:
        config = FsTierConfig(
            **{"type": "fs", "root_dir": str(tmp_path), "layout": "segments", "capacity_bytes": MIB} | fields
        )
        with pytest.raises(ConfigError, match=message):
            TierDriver(lambda context, config=config: FsTier(config, context))
    with pytest.raises(ConfigError, match=r"^layout: "):
        TierDriver(maker(tmp_path), chunk_bytes=())


def test_a_disk_that_is_full_at_start_is_given_back_what_was_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TierDriver(maker(root, 20 * SLAB)):
        pass
    before = {path: path.stat().st_size for path in (root / "segments").iterdir()}
    allocate, calls = os.posix_fallocate, itertools.count()

    def failing(fd: int, offset: int, size: int) -> None:
        allocate(fd, offset, size)
        if next(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing)
        with pytest.raises(ConfigError, match=r"^capacity_bytes: ") as caught:
            TierDriver(maker(root, 40 * SLAB))
        assert caught.value.field == "capacity_bytes"
    assert {path: path.stat().st_size for path in (root / "segments").iterdir()} == before


def test_there_is_one_owner(driver: TierDriver, root: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^root_dir: .*in use by another process; accepted: a directory of one's own"
    ):
        TierDriver(maker(root))
    driver.close()
    with TierDriver(maker(root)):
        pass


# After a restart.


def test_a_restart_finds_what_was_stored(root: Path) -> None:
    others = some_chunks(8, 1, space=Space(SPACE.namespace, new_generation("step-1")), group=2)
    with TierDriver(maker(root)) as driver:
        payloads = driver.fill(range(48))
        driver.store(some_chunks(40), range(40))
        driver.store(others, range(40, 48), [100, 512, 513, 4095, 4096, 1, 2048, 4000])
    with open_again(root) as driver:
        assert driver.load(some_chunks(40), range(40)).ok.all()
        assert driver.load(others.take([1]), [40], [512]).ok.all()
        assert [driver.payload(slot) for slot in range(40)] == payloads[:40]
        assert driver.payload(40, 512) == payloads[41][:512]
        assert not driver.tier.lookup(some_chunks(1, 5).name(0), REQUEST)
        assert len(visible(root)) == 48


def test_more_capacity_keeps_what_is_there_and_less_keeps_a_part(root: Path) -> None:
    chunks = some_chunks(200)
    with TierDriver(maker(root, 5 * SLAB), n_slots=200, slot_bytes=4096) as driver:
        driver.fill(range(200))
        assert driver.store(chunks, range(200)).ok.all()
    wide = {"n_slots": 200, "slot_bytes": 4096}
    with open_again(root, 12 * SLAB, driver=wide) as driver:
        assert driver.load(chunks, range(200)).ok.all()
    with open_again(root, 2 * SLAB, driver=wide) as driver:
        result = driver.load(chunks, range(200))
        assert 100 <= int(result.ok.sum()) < 200 and set(result.reasons.values()) == {"absent"}


def test_a_restart_goes_on_in_the_order_of_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slabs written last are the last to be evicted."""
    clock = itertools.count(1_000_000, 5_000)
    monkeypatch.setattr(segmentfile, "_now_ms", lambda: next(clock))
    per_slab, batches = 56, []
    with TierDriver(maker(root, 3 * SLAB), slot_bytes=4096, n_slots=per_slab) as driver:
        for seed in (0, 1, 2, 3):  # the fourth in the place of the first
            driver.fill(range(per_slab), seed=seed)
            batches.append(some_chunks(per_slab, seed))
            assert driver.store(batches[-1], range(per_slab)).ok.all()
    with open_again(root, 3 * SLAB, driver={"n_slots": per_slab}) as driver:

        def there() -> list[bool]:
            return [driver.tier.lookup(batch.name(0), REQUEST) for batch in batches]

        assert there() == [False, True, True, True]
        driver.store(some_chunks(per_slab, 9), range(per_slab))
        assert there() == [False, False, True, True]


def test_another_models_records_stay_until_their_place_is_needed(root: Path) -> None:
    theirs = some_chunks(10, 1, space=Space(bytes(16), SPACE.generation))
    with TierDriver(maker(root)) as driver:
        payloads = driver.fill(range(10))
        driver.store(theirs, range(10))  # a job of a namespace that is not the tier's own
    before = visible(root)
    with open_again(root) as driver:
        assert not driver.tier.lookup(theirs.name(0), REQUEST)
        driver.fill(range(40), seed=2)
        assert driver.store(some_chunks(40), range(40)).ok.all()
        now = visible(root)
        assert before.items() <= now.items() and len(now) == 50
    for name, place in before.items():
        payload = read_at(place.path, place.payload, 4096)
        record.verify(read_at(place.path, place.header, 512) + payload, name, 4096)
        assert payload in payloads


def test_other_sizes_leave_what_is_there_until_the_slab_is_needed(root: Path) -> None:
    capacity = 4 * SLAB
    first, second = some_chunks(50), some_chunks(10, 1)
    with TierDriver(maker(root, capacity)) as driver:
        payloads = driver.fill(range(50))
        driver.store(first, range(50))
    with open_again(root, capacity, driver={"slot_bytes": 16384, "n_slots": 16}) as driver:
        assert not driver.tier.lookup(first.name(0), REQUEST)
        driver.fill(range(10), seed=1)
        assert driver.store(second, range(10)).ok.all()
    with open_again(root, capacity) as driver:
        assert driver.load(first, range(50)).ok.all()
        assert [driver.payload(slot) for slot in range(50)] == payloads
        assert not driver.tier.lookup(second.name(0), REQUEST)
    with open_again(root, capacity, driver={"slot_bytes": 16384, "n_slots": 50}) as driver:
        assert driver.load(second, range(10)).ok.all()
        driver.fill(range(50), seed=1)
        assert driver.store(some_chunks(50, 2), range(50)).ok.all()  # needs all slabs
        assert verified(root) == 60 - (60 - len(visible(root)))
    with open_again(root, capacity) as driver:
        assert not any(driver.tier.lookup_batch(first, REQUEST))


@pytest.mark.parametrize("what", ["header", "namespace", "length", "group", "short hash"])
def test_what_cannot_be_ours_is_not_restored(root: Path, what: str) -> None:
    chunks = some_chunks(3)
    with TierDriver(maker(root)) as driver:
        driver.fill(range(3))
        driver.store(chunks, range(3))
    name = chunks.name(1)
    place = visible(root)[name]
    raw = read_at(place.path, place.header, 512)
    if what == "header":
        raw = raw[:60] + b"?" + raw[61:]
    else:
        other = {
            "namespace": (ChunkName(Space(bytes(16), SPACE.generation), 0, name.block_hash), 4096),
            "length": (name, 4097),
            "group": (name._replace(group=4), 4096),
            "short hash": (name._replace(block_hash=name.block_hash[:15]), 4096),
        }[what]
        raw = record.encode_header(*other, 0)
    write_at(place.path, place.header, raw)
    with open_again(root) as driver:
        assert list(driver.tier.lookup_batch(chunks, REQUEST)) == [True, False, True]
        assert driver.store(chunks, range(3)).ok.all() and driver.load(chunks, [5, 6, 7]).ok.all()


def test_a_record_that_is_there_twice_is_restored_once(root: Path) -> None:
    chunks = some_chunks(2)
    with TierDriver(maker(root)) as driver:
        payloads = driver.fill(range(2))
        driver.store(chunks, range(2))
    one, other = (visible(root)[chunks.name(i)] for i in range(2))
    for at in ("header", "payload"):
        size = {"header": 512, "payload": 4096}[at]
        write_at(other.path, getattr(other, at), read_at(one.path, getattr(one, at), size))
    with open_again(root) as driver:
        assert list(driver.tier.lookup_batch(chunks, REQUEST)) == [True, False]
        assert driver.load(chunks.take([0]), [5]).ok.all() and driver.payload(5) == payloads[0]
        assert "1 ready" in repr(driver.tier)


def test_a_torn_payload_is_found_out_by_the_load(root: Path) -> None:
    chunks = some_chunks(3)
    with TierDriver(maker(root)) as driver:
        payloads = driver.fill(range(3))
        driver.store(chunks, range(3))
    places = visible(root)
    write_at(places[chunks.name(0)].path, places[chunks.name(0)].header, bytes(512))
    write_at(places[chunks.name(1)].path, places[chunks.name(1)].payload + 2048, bytes(2048))
    with open_again(root) as driver:
        assert list(driver.tier.lookup_batch(chunks, REQUEST)) == [False, True, True]
        assert driver.load(chunks, [4, 5, 6]).reasons == {0: "absent", 1: "checksum"}
        assert driver.payload(6) == payloads[2]
        assert list(driver.tier.lookup_batch(chunks, REQUEST)) == [False, False, True]
        assert set(visible(root)) == {chunks.name(2)}, "what is refused is erased"


@pytest.mark.parametrize("position", [0, 9, 20, 27, 33, 41, 50], ids=str)
def test_a_slab_whose_header_is_damaged_is_empty(root: Path, position: int) -> None:
    with TierDriver(maker(root, SLAB)) as driver:
        driver.fill([0])
        driver.store(some_chunks(1), [0])
    path = root / "segments" / "segments-0.tkv"
    write_at(path, position, bytes([read_at(path, position, 1)[0] ^ 1]))
    with open_again(root, SLAB) as driver:
        assert not driver.tier.lookup(some_chunks(1).name(0), REQUEST)
        assert driver.store(some_chunks(1, 1), [0]).ok.all()
    assert set(visible(root)) == {some_chunks(1, 1).name(0)}, "and cut up anew"


@pytest.mark.parametrize("at", [0, 4096])
def test_a_slab_that_cannot_be_read_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    with TierDriver(maker(root, 3 * SLAB), n_slots=112) as driver:
        driver.fill(range(112))
        driver.store(some_chunks(112), range(112))
    preadv = os.preadv

    def failing(fd: int, parts: list[memoryview], position: int) -> int:
        if position == at and os.readlink(f"/proc/self/fd/{fd}").endswith("segments-1.tkv"):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, parts, position)

    monkeypatch.setattr(os, "preadv", failing)
    with open_again(root, 3 * SLAB) as driver:
        assert sum(driver.tier.lookup_batch(some_chunks(112), REQUEST)) == 56
        for seed in range(4):
            assert driver.store(some_chunks(56, seed + 1), range(56)).ok.all()
        assert sum(driver.tier.lookup_batch(some_chunks(56, 4), REQUEST)) == 56
    assert verified(root) > 112


def test_closing_does_not_wait_for_all_to_be_restored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TierDriver(maker(root, 12 * SLAB), n_slots=256) as driver:
        driver.fill(range(256))
        for seed in range(2):
            driver.store(some_chunks(256, seed), range(256))
    monkeypatch.setattr(restore, "_PAUSE_S", 0.3)
    with TierDriver(maker(root, 12 * SLAB)) as driver:
        assert "restored=False" in repr(driver.tier)
        start = time.monotonic()
    assert time.monotonic() - start < 2


# Room.


def test_what_was_not_used_for_the_longest_time_goes_first(root: Path) -> None:
    """A job is one access, whose tail goes before its head, whatever the order in which its parts were done."""
    n = 56  # of one slab
    with TierDriver(maker(root, SLAB, n_write_threads=1), n_slots=n) as driver:
        driver.fill(range(n))
        first, second = some_chunks(28, 1), some_chunks(28, 2)
        driver.store(first, range(28))
        driver.store(second, range(28))
        driver.load(first.slice(0, 10), range(10))

        def there(chunks: Chunks) -> list[int]:
            return np.flatnonzero(driver.tier.lookup_batch(chunks, REQUEST)).tolist()

        driver.store(some_chunks(8, 3), range(8))
        assert there(first) == list(range(20)) and there(second) == list(range(28))
        driver.store(some_chunks(20, 4), range(20))
        assert there(first) == list(range(10)) and there(second) == list(range(18))
        driver.store(second.slice(0, 1), [0])  # what is there already is used, too
        driver.store(some_chunks(27, 5), range(27))
        assert there(first) == [] and there(second) == [0]


@pytest.mark.parametrize("count", [1, 3])
def test_chunks_that_are_being_read_are_not_evicted(root: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    go, reading = threading.Event(), threading.Semaphore(0)
    preadv = os.preadv

    def slow(fd: int, parts: Any, position: int) -> int:
        if threading.current_thread().name.startswith("tierkv-tested-read") and not go.is_set():
            reading.release()
            assert go.wait(30)
        return preadv(fd, parts, position)

    with TierDriver(maker(root, SLAB, n_read_threads=3), slot_bytes=65536, n_slots=8) as driver:
        payloads = driver.fill(range(3))
        driver.store(some_chunks(3), range(3))  # all that there is room for
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", slow)
            job = driver.submit(driver.load_job(some_chunks(count), range(5, 5 + count)))
            assert all(reading.acquire(timeout=30) for _ in range(count))
            reasons = [driver.store(some_chunks(1, seed), [0]).reasons for seed in range(1, 7)]
            assert reasons == [{} if count == 1 else {0: "capacity"}] * 6
            go.set()
            assert driver.wait([job])[0].ok.all()
        assert [driver.payload(5 + i) for i in range(count)] == payloads[:count]
        assert driver.store(some_chunks(1, 9), [0]).ok.all()


def test_sizes_share_the_disk(root: Path) -> None:
    sizes = (4096, 16384)
    with TierDriver(maker(root, 8 * SLAB), n_slots=40, slot_bytes=16384, chunk_bytes=sizes) as driver:
        for seed in range(6):
            driver.fill(range(40), seed=seed)
            small = driver.store(some_chunks(40, seed), range(40), [4096] * 40)
            large = driver.store(some_chunks(40, seed, group=1), range(40))
            assert small.ok.all() and large.ok.all(), seed
        assert driver.load(some_chunks(40, 5, group=1), range(40)).ok.all()
        assert driver.load(some_chunks(40, 5), range(40), [4096] * 40).ok.all()
    assert verified(root) >= 80
    with open_again(root, 8 * SLAB, driver={"slot_bytes": 16384, "chunk_bytes": sizes}) as driver:
        assert driver.load(some_chunks(40, 5, group=1), range(40)).ok.all()
        assert driver.load(some_chunks(40, 5), range(40), [4096] * 40).ok.all()


def test_what_no_slot_has_room_for_is_not_stored(driver: TierDriver) -> None:
    chunks = Chunks.concat([some_chunks(1), some_chunks(1, 1, group=9), some_chunks(1, 2)])
    driver.fill(range(3))
    result = driver.store(chunks, [0, 1, 2], [4097, 4096, 4096])
    assert result.reasons == {0: "length", 1: "length"}
    assert driver.load(chunks, [5, 6, 7]).ok.tolist() == [False, False, True]


def test_a_hash_that_no_header_holds_is_not_stored(driver: TierDriver) -> None:
    chunks = some_chunks(1)
    long = type(chunks)(chunks.space, chunks.keys, chunks.groups, np.zeros((1, 65), np.uint8))
    assert driver.store(long, [0]).reasons == {0: "hash"}


@pytest.mark.parametrize("write", [True, False], ids=["written", "read"])
def test_a_bad_place_costs_what_is_there_and_no_more(root: Path, monkeypatch: pytest.MonkeyPatch, write: bool) -> None:
    """One place of the disk fails: all other chunks are stored and loaded, and the others of its run, too."""
    name = "pwritev" if write else "preadv"
    call = getattr(os, name)
    with TierDriver(maker(root, 2 * SLAB, n_write_threads=1), n_slots=64) as driver:
        driver.fill(range(32))
        assert driver.store(some_chunks(32), range(32)).ok.all()
        place = visible(root)[some_chunks(32).name(20)]

        def failing(fd: int, parts: list[memoryview], position: int) -> int:
            length = sum(map(len, parts))
            same = os.path.samestat(os.fstat(fd), os.stat(place.path))
            if same and position <= place.payload < position + length:
                raise OSError(errno.EIO, "Input/output error")
            return call(fd, parts, position)

        monkeypatch.setattr(os, name, failing)
        if write:
            stored = [driver.store(some_chunks(32, 1 + seed), range(32)) for seed in range(8)]
            assert sum(int((~result.ok).sum()) for result in stored) == 1
            assert [set(result.reasons.values()) for result in stored if result.reasons] == [{"eio"}]
        else:
            result = driver.load(some_chunks(32), range(32))
            assert result.reasons == {20: "eio"}
            for seed in range(8):
                assert driver.store(some_chunks(32, 1 + seed), range(32)).ok.all()
            assert not driver.tier.lookup(some_chunks(32).name(20), REQUEST), "it is used by nobody, and goes"


def test_a_disk_that_fails_as_a_whole_is_used_again_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with TierDriver(maker(root, 2 * SLAB), n_slots=64) as driver:
        driver.fill(range(32))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing)
            for seed in range(4):
                assert set(driver.store(some_chunks(32, seed), range(32)).reasons.values()) == {"eio"}
        assert driver.store(some_chunks(32), range(32)).ok.all()
        assert driver.load(some_chunks(32), range(32)).ok.all()


def test_the_same_chunk_twice_fails_twice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with TierDriver(maker(root, 2 * SLAB, n_write_threads=1), n_slots=64) as driver:
        driver.fill([0])
        monkeypatch.setattr(os, "pwritev", failing)
        twins = some_chunks(8).take([0, 0, 1, 1, 2, 2, 3, 3] * 4)
        assert not driver.store(twins, [0] * 32).ok.any()


def test_what_is_stored_during_a_restore_is_newer_than_what_is_restored(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity, go = 8 * SLAB, threading.Event()
    with TierDriver(maker(root, capacity), n_slots=64) as driver:
        driver.fill(range(56))
        for seed in range(9):
            assert driver.store(some_chunks(56, seed), range(56)).ok.all()
    read, held = restore.Restore._read, []

    def slow(self: restore.Restore, slab: int, size_class: int) -> restore.Found:
        if len(held) == 4:
            go.wait()
        held.append(slab)
        return read(self, slab, size_class)

    monkeypatch.setattr(restore.Restore, "_read", slow)
    with TierDriver(maker(root, capacity), n_slots=64) as driver:
        driver.fill(range(56))
        assert driver.store(some_chunks(56, 20), range(56)).ok.all()
        go.set()
        assert driver.tier._layout._restore.ended.wait(60)  # type: ignore[attr-defined]
        assert driver.store(some_chunks(56, 21), range(56)).ok.all()
        assert all(driver.tier.lookup(some_chunks(56, 20).name(i), REQUEST) for i in range(56))


def test_a_damaged_first_slab_costs_no_other(root: Path) -> None:
    with TierDriver(maker(root, 32 * SLAB), n_slots=64) as driver:
        driver.fill(range(56))
        for seed in range(32):
            assert driver.store(some_chunks(56, seed), range(56)).ok.all()
    before = len(visible(root))
    with (root / "segments" / "segments-0.tkv").open("r+b") as file:
        file.write(b"?")
    with open_again(root, 32 * SLAB):
        assert len(visible(root)) >= before - 64


# Whatever happens.


def start_churning(root: Path, capacity: int, seed: int) -> subprocess.Popen[str]:
    """``churn_segments.py``, up to its ``ready``."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(root), str(capacity), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("kills", [5, pytest.param(300, marks=pytest.mark.soak)])
def test_every_record_that_is_visible_after_a_kill_is_whole(root: Path, kills: int) -> None:
    capacity, rng = 6 * SLAB, random.Random(0)
    for round_ in range(kills):
        with start_churning(root, capacity, round_) as process:
            if not round_:
                with pytest.raises(ConfigError, match=r"^root_dir: .*in use by another process"):
                    TierDriver(maker(root, capacity))
            time.sleep(rng.uniform(0, 0.4))
            process.kill()
        assert verified(root) > 40
        assert sum(path.stat().st_size for path in (root / "segments").iterdir()) <= capacity
    there = visible(root)
    with open_again(root, capacity, driver={"slot_bytes": 16384, "chunk_bytes": (4096, 16384)}) as driver:
        assert all(driver.tier.lookup(name, REQUEST) for name in there)
        assert driver.store(some_chunks(40), range(40), [4096] * 40).ok.all()


class Cut(Exception):
    """Nothing is written after this."""


@pytest.mark.parametrize("write", range(14))
def test_wherever_a_store_ends_each_visible_record_is_whole(
    root: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    """At each write of a job that evicts, and has a slab change its size: half of it is written, and no more."""
    sizes, writes, pwritev = (4096, 65536), itertools.count(), os.pwritev

    def cut(fd: int, parts: list[memoryview], position: int) -> int:
        number = next(writes)
        if number < write:
            return pwritev(fd, parts, position)
        if number == write:
            whole = b"".join(parts)
            pwritev(fd, [whole[: len(whole) // 1024 * 512]], position)
        raise Cut

    with TierDriver(
        maker(root, 2 * SLAB, n_write_threads=1), n_slots=112, slot_bytes=4096, chunk_bytes=sizes
    ) as driver:
        driver.fill(range(112))
        driver.store(some_chunks(112), range(112))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", cut)
            failed = driver.store(some_chunks(3, 1, group=1), [0, 16, 32], [65536] * 3)
            again = driver.store(some_chunks(20, 2), range(20))
        assert verified(root) >= 50 or write < 3
        if not failed.ok.all():
            assert set(failed.reasons.values()) == {"error"}
        assert again.ok.sum() < 20 or next(writes) <= write
        assert driver.store(some_chunks(3, 1, group=1), [0, 16, 32], [65536] * 3).ok.all()
        assert driver.store(some_chunks(20, 2), range(20)).ok.all()
        assert driver.load(some_chunks(20, 2), range(20)).ok.all()
    assert verified(root) >= 23


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_slab_passes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root, chunks = tmp_path_factory.mktemp("damaged"), some_chunks(3)
    with TierDriver(maker(root, SLAB), n_slots=8, slot_bytes=512) as driver:
        payloads = driver.fill(range(3))
        driver.store(chunks, range(3))
    places = sorted(visible(root).values())
    starts = [0, *(place.header for place in places), *(place.payload for place in places)]
    position = data.draw(st.sampled_from(starts)) + data.draw(st.integers(0, 600))
    write_at(root / "segments" / "segments-0.tkv", position, data.draw(st.binary(min_size=1, max_size=700)))
    with open_again(root, SLAB, driver={"n_slots": 8, "slot_bytes": 512}) as driver:
        result = driver.load(chunks, [4, 5, 6])
        for i in np.flatnonzero(result.ok).tolist():
            assert driver.payload(4 + i) == payloads[i]
        driver.fill(range(3))
        assert driver.store(chunks, range(3)).ok.all() and driver.load(chunks, [4, 5, 6]).ok.all()
        assert [driver.payload(4 + i) for i in range(3)] == payloads


# Errors of the file system, and what it cannot do.


def test_a_store_that_fails_is_reported_and_repeated(driver: TierDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    payloads = driver.fill(range(8))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        assert set(driver.store(some_chunks(8), range(8)).reasons.values()) == {"eio"}
    assert not any(driver.tier.lookup_batch(some_chunks(8), REQUEST))
    assert driver.store(some_chunks(8), range(8)).ok.all() and driver.load(some_chunks(8), range(8, 16)).ok.all()
    assert [driver.payload(8 + i) for i in range(8)] == payloads


@pytest.mark.parametrize("what", ["headers", "payloads"])
def test_an_error_while_reading_keeps_the_record(
    driver: TierDriver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    preadv = os.preadv

    def failing(fd: int, parts: list[memoryview], position: int) -> int:
        if (len(parts[0]) == 512) == (what == "headers"):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, parts, position)

    driver.fill([0])
    driver.store(some_chunks(1), [0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert driver.load(some_chunks(1), [1]).reasons == {0: "eio"}
    assert driver.load(some_chunks(1), [1]).ok.all()


def test_short_reads_and_writes_are_continued(driver: TierDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:1000]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:700]], at))
    payloads = driver.fill(range(5))
    assert driver.store(some_chunks(5), range(5)).ok.all()
    assert driver.load(some_chunks(5), range(10, 15)).ok.all()
    assert [driver.payload(10 + i) for i in range(5)] == payloads


def test_a_file_that_was_cut_has_lost_its_records(driver: TierDriver, root: Path) -> None:
    driver.fill(range(2))
    for i in range(2):  # one behind the other
        driver.store(some_chunks(2).take([i]), [i])
    places = visible(root)
    first, second = (places[some_chunks(2).name(i)] for i in range(2))
    os.truncate(second.path, second.payload + 100)
    assert driver.load(some_chunks(2), [4, 5]).reasons == {1: "truncated"} and first.path == second.path
    os.truncate(second.path, first.header)
    assert set(driver.load(some_chunks(2), [4, 5]).reasons.values()) <= {"bad_magic", "absent"}


@pytest.mark.parametrize("fields", [{"direct_reads": False}, {}])
def test_what_is_not_in_the_page_cache_is_read_past_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    preadv, direct = os.preadv, []

    def watched(fd: int, parts: list[memoryview], position: int) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return preadv(fd, parts, position)

    with TierDriver(maker(root, **fields), n_slots=64) as driver:
        payloads = driver.fill(range(8))
        driver.store(some_chunks(8), range(8))
        for path in (root / "segments").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        monkeypatch.setattr(os, "preadv", watched)
        assert driver.load(some_chunks(8), range(8, 16)).ok.all()
        assert [driver.payload(8 + i) for i in range(8)] == payloads
        assert any(direct) == ("alignment=0" not in repr(driver.tier))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_direct_read_that_is_refused_goes_through_the_page_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    preadv = os.preadv

    def refusing(fd: int, parts: list[memoryview], position: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return preadv(fd, parts, position)

    with TierDriver(maker(root)) as driver:
        files = driver.tier._layout._files
        monkeypatch.setattr(files, "alignment", 1)  # as if any memory would do
        monkeypatch.setattr(files._page_cache, "_answers", False)
        driver.fill([0])
        driver.store(some_chunks(1), [0])
        monkeypatch.setattr(os, "preadv", refusing)
        assert driver.load(some_chunks(1), [1]).reasons == ({} if number == errno.EINVAL else {0: "eio"})


def test_where_nothing_can_be_opened_for_direct_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = os.open

    def refusing(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    with TierDriver(maker(root)) as driver:
        assert "alignment=0" in repr(driver.tier)
        driver.fill([0])
        assert driver.store(some_chunks(1), [0]).ok.all() and driver.load(some_chunks(1), [1]).ok.all()
