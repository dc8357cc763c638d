"""The layout ``segments`` of the file system tier."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

from tierkv.testing.tier_contract import TierContract
from tierkv.tiers import record
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.fs import FsTier, FsTierConfig
from tierkv.types import ChunkName

MIB = 1 << 20
#: The least that a slab can have.
SLAB = 65 * 4096


def maker(root: Path, capacity: int = 4 * MIB, **fields: Any) -> Callable[[TierContext], FsTier]:
    config = FsTierConfig(
        type="fs",
        root_dir=str(root),
        layout="segments",
        capacity_bytes=capacity,
        n_read_threads=2,
        n_write_threads=2,
        **fields,
    )
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
