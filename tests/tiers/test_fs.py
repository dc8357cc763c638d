from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.config import parse_tier
from tierkv.errors import ConfigError
from tierkv.testing.driver import SPACE, TierDriver, some_chunks
from tierkv.testing.tier_contract import TierContract
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.fs import FsTier, FsTierConfig, recordfile
from tierkv.types import ChunkName, RequestContext

REQUEST = RequestContext()


def path_of(root: Path, name: ChunkName) -> Path:
    """Where a record lies, spelled out once more, so that it cannot change unnoticed."""
    digits = name.block_hash.hex()
    space = root / name.space.namespace.hex() / name.space.generation.hex()
    return space / digits[:2] / f"{digits}-{name.group}.tkv"


def maker(root: Path, **fields: Any) -> Callable[[TierContext], FsTier]:
    config = FsTierConfig(type="fs", root_dir=str(root), n_read_threads=2, n_write_threads=2, **fields)
    return lambda context: FsTier(config, context)


def files_below(root: Path) -> set[str]:
    """All but the ledger's."""
    paths = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    return {str(path) for path in paths if path.parts[0] != ".ledger"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a" / "root"


@pytest.fixture
def driver(root: Path) -> Iterator[TierDriver]:
    with TierDriver(maker(root)) as driver:
        yield driver


class TestFsTierContract(TierContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "root"

    def make_tier(self, context: TierContext) -> Tier:
        return maker(self.root)(context)

    def read_record(self, tier: Tier, name: ChunkName) -> bytes | None:
        path = path_of(self.root, name)
        return path.read_bytes() if path.exists() else None

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        path_of(self.root, name).write_bytes(raw)


class TestFsTierWithFsyncContract(TestFsTierContract):
    def make_tier(self, context: TierContext) -> Tier:
        return maker(self.root, fsync=True)(context)


class TestBoundedFsTierContract(TestFsTierContract):
    def make_tier(self, context: TierContext) -> Tier:
        return maker(self.root, capacity_bytes=1 << 30, min_free_bytes=1 << 20, direct_reads=False)(context)


# What is on the disk.


def test_files_and_modes(driver: TierDriver, root: Path) -> None:
    name = some_chunks(1, group=2).name(0)
    driver.fill([0])
    driver.store(some_chunks(1, group=2), [0])
    description = f"{SPACE.namespace.hex()}/namespace.json"
    assert files_below(root) == {str(path_of(root, name).relative_to(root)), description}
    assert json.loads((root / description).read_text()) == {"model": "a model"}
    for path in [root.parent, root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_existing_record_is_not_touched(driver: TierDriver, root: Path) -> None:
    chunks = some_chunks(1)
    driver.fill([0])
    driver.store(chunks, [0])
    before = path_of(root, chunks.name(0)).stat()
    driver.store(chunks, [0])
    after = path_of(root, chunks.name(0)).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("found", [b"", b"x" * 100, bytes(512 + 4096), None], ids=["empty", "short", "zeros", "cut"])
def test_a_file_that_is_no_record_is_rewritten_by_a_store(driver: TierDriver, root: Path, found: bytes | None) -> None:
    chunks = some_chunks(1)
    path = path_of(root, chunks.name(0))
    (payload,) = driver.fill([0])
    driver.store(chunks, [0])
    path.write_bytes(path.read_bytes()[:-1] if found is None else found)
    assert driver.store(chunks, [0]).ok.all()
    assert driver.load(chunks, [1]).ok.all() and driver.payload(1) == payload


def test_a_refused_record_is_removed(driver: TierDriver, root: Path) -> None:
    chunks = some_chunks(1)
    driver.fill([0])
    driver.store(chunks, [0])
    path = path_of(root, chunks.name(0))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert driver.load(chunks, [1]).reasons == {0: "checksum"}
    assert not path.exists()


def test_outlives_the_process_and_is_shared(driver: TierDriver, root: Path) -> None:
    chunks = some_chunks(3)
    payloads = driver.fill(range(3))
    driver.store(chunks, range(3))
    with TierDriver(maker(root)) as other:
        assert other.load(chunks, [5, 6, 7]).ok.all()
        assert [other.payload(slot) for slot in (5, 6, 7)] == payloads


def test_a_root_that_was_emptied_in_use_is_filled_again(driver: TierDriver, root: Path) -> None:
    chunks = some_chunks(1)
    driver.fill([0])
    driver.store(chunks, [0])
    shutil.rmtree(root)
    assert driver.load(chunks, [1]).reasons == {0: "absent"}
    assert not driver.tier.lookup(chunks.name(0), REQUEST)
    assert driver.store(chunks, [0]).ok.all() and driver.load(chunks, [1]).ok.all()


def test_the_oldest_of_two_temporary_files_goes_at_start(root: Path) -> None:
    temporary = root / ".tmp"
    temporary.mkdir(parents=True)
    for name, age_s in (("old.tmp", 3700), ("new.tmp", 3500)):
        (temporary / name).write_bytes(b"x")
        now = (temporary / name).stat().st_mtime
        os.utime(temporary / name, (now - age_s, now - age_s))
    with TierDriver(maker(root)):
        assert {path.name for path in temporary.iterdir() if path.is_file()} == {"new.tmp"}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_file_passes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    chunks, root = some_chunks(1), tmp_path_factory.mktemp("damaged")
    with TierDriver(maker(root), n_slots=4, slot_bytes=512) as driver:
        driver.fill([0])
        driver.store(chunks, [0])
        path = path_of(root, chunks.name(0))
        raw = path.read_bytes()
        start = data.draw(st.integers(0, len(raw) - 1))
        end = data.draw(st.integers(start, len(raw)))
        damaged = raw[:start] + data.draw(st.binary(max_size=40)) + raw[end:]
        path.write_bytes(damaged)
        result = driver.load(chunks, [1])
        assert bool(result.ok[0]) == (damaged == raw)
        assert driver.store(chunks, [0]).ok.all() and driver.load(chunks, [2]).ok.all()
        assert driver.payload(2) == driver.payload(0)


# Errors of the file system.


@pytest.mark.parametrize("call", ["open", "writev", "close", "fsync", "rename"])
def test_a_store_that_fails_leaves_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    original = getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not threading.current_thread().name.startswith("tierkv-tested-write"):
            return original(*args, **kwargs)
        if call == "open" and not str(args[0]).endswith(".tmp"):
            return original(*args, **kwargs)
        if call == "close":  # as a network file system does: the descriptor is gone, and so are the bytes
            original(*args, **kwargs)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with TierDriver(maker(root, fsync=True)) as driver:
        before = files_below(root)
        driver.fill([0])
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            result = driver.store(some_chunks(2), [0, 1])
        assert result.reasons == {0: "edquot", 1: "edquot"}
        assert files_below(root) == before
        assert driver.store(some_chunks(2), [0, 1]).ok.all()


def test_short_reads_and_writes_are_continued(driver: TierDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:1000]]))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:700]], at))
    (payload,) = driver.fill([0])
    assert driver.store(some_chunks(1), [0]).ok.all()
    assert driver.load(some_chunks(1), [1]).ok.all()
    assert driver.payload(1) == payload


def test_a_file_cut_while_it_is_read_is_truncated(driver: TierDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.fill([0])
    driver.store(some_chunks(1), [0])
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: 0)
    assert driver.load(some_chunks(1), [1]).reasons == {0: "truncated"}


def test_an_error_while_reading_keeps_the_record(driver: TierDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    driver.fill([0])
    driver.store(some_chunks(1), [0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert driver.load(some_chunks(1), [1]).reasons == {0: "eio"}
    assert driver.load(some_chunks(1), [1]).ok.all()


def test_lookup_raises_when_it_cannot_tell(driver: TierDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: str) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(OSError, match="Stale"):
        driver.tier.lookup(some_chunks(1).name(0), REQUEST)


def test_a_hash_that_no_header_holds_is_not_stored(driver: TierDriver) -> None:
    chunks = some_chunks(1)
    long = type(chunks)(chunks.space, chunks.keys, chunks.groups, np.zeros((1, 65), np.uint8))
    assert driver.store(long, [0]).reasons == {0: "hash"}


def test_make_directory_does_not_loop_on_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        recordfile.make_directory(str(tmp_path / "link" / "below"))


# The configuration.


def test_a_root_below_a_file_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"^root_dir: .*cannot be written.*; accepted: a directory") as caught:
            TierDriver(maker(root))
        assert caught.value.field == "root_dir"
    assert files_below(tmp_path) == {"file"}


@pytest.mark.parametrize("root", ["/proc/tierkv", "/a\0b"])
def test_a_root_that_cannot_be_is_an_error_of_the_configuration(root: str) -> None:
    with pytest.raises(ConfigError, match=r"^root_dir: "):
        TierDriver(maker(Path(root)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_at_start_is_served(
    driver: TierDriver, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    driver.fill([0])
    driver.store(some_chunks(1), [0])
    open_ = os.open

    def failing(path: str, flags: int, *args: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return open_(path, flags, *args)

    monkeypatch.setattr(os, "open", failing)
    with TierDriver(maker(root)) as other:
        assert other.load(some_chunks(1), [0]).ok.all()


def test_fields() -> None:
    raw = {"type": "fs", "root_dir": "/cache", "n_read_threads": 3, "fsync": True}
    tier_class, config = parse_tier(raw, "secondary_tiers[0]")
    assert tier_class is FsTier and isinstance(config, FsTierConfig)
    assert (config.root_dir, config.n_read_threads, config.n_write_threads, config.fsync) == ("/cache", 3, 4, True)


def test_the_fields_of_vllm_are_accepted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = {
        "type": "fs",
        "root_dir": str(root),
        "n_read_threads": 1,
        "n_write_threads": 1,
        "enable_kv_events": True,
        "locality": "REMOTE",
        "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
    }
    tier_class, config = parse_tier(raw, "secondary_tiers[0]")
    with caplog.at_level("INFO"), TierDriver(lambda context: tier_class(config, context)) as driver:
        assert "enable_kv_events is accepted and has no effect" in caplog.text
        assert (driver.tier.medium, driver.tier.locality) == ("STORAGE", "REMOTE")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"^tiers\[0\]\.root_dir: missing"),
        ({"root_dir": ""}, r"^tiers\[0\]\.root_dir: "),
        ({"root_dir": "/x", "n_read_threads": 0}, r"^tiers\[0\]\.n_read_threads: "),
        ({"root_dir": "/x", "root": "/x"}, r"^tiers\[0\]\.root: unknown field.*root_dir"),
        ({"root_dir": "/x", "locality": "NEAR"}, r"^tiers\[0\]\.locality: "),
    ],
)
def test_a_field_that_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tier({"type": "fs", **fields}, "tiers[0]")


def test_no_thread_and_no_file_is_left_by_a_constructor_that_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(ConfigError, match="Input/output error"):
        TierDriver(maker(root))
    assert files_below(root) == set()
