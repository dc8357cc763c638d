"""Where records lie in segments: THE format, version 1, of the files that the layout ``segments`` keeps.

::

    root_dir/segments/lock                  whose lock the owner holds
    root_dir/segments/segments-<n>.tkv      n from 0 to 7: slabs n, n + 8, n + 16 …, directly one behind the other

A *slab* is a number of bytes that is the same for all of them. All integers are unsigned and little-endian.

====== ===== =============== ======================================================================================
offset bytes field           content
====== ===== =============== ======================================================================================
0      8     magic           ``93 54 4B 53 4C 41 42 0A``: not ASCII, ``TKSLAB``, a line feed
8      4     version         1
12     4     header length   4096
16     8     slab            its number
24     8     slab bytes      a multiple of 4096
32     8     place bytes     what each payload has room for, a multiple of 512
40     8     slots           how many records there is room for
48     8     checksum        xxh3-64 of the 48 bytes before it
56     8     written at      milliseconds since 1970 when a record was last written here, or near that; not checked
64     4032  reserved        zeros
4096   512·n headers         slot i's at 4096 + 512·i: the header of a record (``tierkv.tiers.record``), or zeros
E      p·n   payloads        slot i's at E + p·i, where E is the end of the headers rounded up to a multiple of 4096
====== ===== =============== ======================================================================================

A slab whose header is not intact, or is of another slab or another size, is empty. A record is a header in the table
and as many bytes as it says in the same slot's place; what is behind them means nothing. Whoever cuts the files up in
slabs of another size MUST empty them before.

A writer MUST hold an exclusive ``flock`` on ``lock``. Before it writes into a place it MUST have written zeros over the
slot's header, and it MUST write the header when the payload is there. Before it cuts a slab up in another way it MUST
write zeros over the slab's header, then over the new table, and then the new header. So whenever it is killed, each
record that can be found is whole. (After a power cut one may be torn, which its checksum tells, unless all of these
steps were flushed.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tierkv.errors import ConfigError
from tierkv.host.slabs import SlabPlan, slot_bytes
from tierkv.tiers import record
from tierkv.types import Offsets

NUM_FILES = 8
PAGE = 4096
MAGIC = b"\x93TKSLAB\n"
VERSION = 1

_FIELDS = struct.Struct("<8sIIQQQQ")
_CHECKSUM = struct.Struct("<Q")
_WRITTEN_AT = struct.Struct("<Q")
WRITTEN_AT = _FIELDS.size + _CHECKSUM.size

#: Slabs have 65 · 2^k pages: of chunks of a power of two bytes, a power of two of them fit with their headers.
SMALLEST_SLAB = 65 * PAGE
#: They are small against the disk space, but for chunks that leave too much of one unused, and not larger than this …
_SLABS, _FEWEST_SLABS = 128, 32
_LARGEST_SLAB = SMALLEST_SLAB << 8
#: … nor do they have more slots, since a slab is restored in one step.
_MOST_SLOTS = 4096
#: So many are more than the index holds.
_MOST_CHUNKS = 2**31
#: The share of a slab that no slot fits into which is too much if a larger one can be had.
_WASTE = 1 / 32
#: A slab's own header, and what its table of headers may be rounded up by.
_OVERHEAD = 2 * PAGE


class Where(NamedTuple):
    """For each of some slots: its slab, the number of its file, and where there its header and its place are."""

    slabs: Offsets
    files: Offsets
    headers: Offsets
    places: Offsets

    def take(self, which: Offsets) -> Where:
        return Where(*(array[which] for array in self))


class SlabHeader(NamedTuple):
    """slab, slab_bytes: its number, and its size. place_bytes, slots: how it is cut up. written_at: milliseconds since
    1970."""

    slab: int
    slab_bytes: int
    place_bytes: int
    slots: int
    written_at: int


@dataclass(frozen=True)
class Geometry:
    """slab_bytes: of a slab on disk. place_bytes: of each size class, ascending. class_of_group: each group's class."""

    num_slabs: int
    slab_bytes: int
    place_bytes: tuple[int, ...]
    class_of_group: tuple[int, ...]

    @cached_property
    def plan(self) -> SlabPlan:
        """The same for a ``HostCache``, whose slots have their header and their place."""
        usable = self.slab_bytes - _OVERHEAD
        return SlabPlan(self.num_slabs * usable, usable, tuple(_with_header(size) for size in self.place_bytes))

    @property
    def slot_bytes_of_group(self) -> list[int]:
        """What a ``HostCache`` takes for the sizes of the groups' chunks."""
        return [_with_header(self.place_bytes[size_class]) for size_class in self.class_of_group]

    @cached_property
    def _tables(self) -> tuple[Offsets, Offsets]:
        """For each size class, where in a slab the payloads start, and the bytes of a place."""
        ends = [table_end(self.slots_in(size_class)) for size_class in range(len(self.place_bytes))]
        return np.array(ends, np.int64), np.array(self.place_bytes, np.int64)

    def slots_in(self, size_class: int) -> int:
        """Slots of a slab of ``size_class``."""
        return self.plan.slots_in(0, size_class)

    def file_bytes(self, file: int) -> int:
        """Of file number ``file``."""
        return len(range(file, self.num_slabs, NUM_FILES)) * self.slab_bytes

    def slab_at(self, slab: int) -> tuple[int, int]:
        """The file that ``slab`` is in, and where there it starts."""
        return slab % NUM_FILES, slab // NUM_FILES * self.slab_bytes

    def where(self, slots: Offsets, classes: Offsets) -> Where:
        """Where ``slots``, of these size classes, are."""
        slabs: Offsets = slots // self.plan.slots_per_slab
        numbers: Offsets = slots - slabs * self.plan.slots_per_slab
        ends, sizes = self._tables
        starts = slabs // NUM_FILES * self.slab_bytes
        headers = starts + PAGE + numbers * record.HEADER_BYTES
        return Where(slabs, slabs % NUM_FILES, headers, starts + ends[classes] + numbers * sizes[classes])

    def encode_slab_header(self, slab: int, size_class: int, written_at: int) -> bytes:
        """The first 4096 bytes of ``slab``."""
        sizes = self.slab_bytes, self.place_bytes[size_class], self.slots_in(size_class)
        fields = _FIELDS.pack(MAGIC, VERSION, PAGE, slab, *sizes)
        checked = fields + _CHECKSUM.pack(record.payload_checksum(fields))
        return (checked + encode_written_at(written_at)).ljust(PAGE, b"\0")

    def decode_slab_header(self, slab: int, raw: bytes) -> SlabHeader | None:
        """What the first bytes of ``slab`` say; None if it is empty."""
        header = decode_slab_header(raw)
        return header if header and (header.slab, header.slab_bytes) == (slab, self.slab_bytes) else None

    def is_foreign(self, read: Callable[[int], bytes], nbytes: int) -> bool:
        """Whether a file of ``nbytes``, of which ``read`` gives the page at a position, has slabs of another size.

        Its first slab may be empty, or damaged: then one of the next ones tells. Each size is a power of two of the
        smallest one.
        """
        positions = [0, *(SMALLEST_SLAB << k for k in range(12))]
        headers = (decode_slab_header(read(position)) for position in positions if position < nbytes)
        return any(header is not None and header.slab_bytes != self.slab_bytes for header in headers)

    def size_class(self, header: SlabHeader) -> int:
        """The size class of a slab with this header; -1 if it is of none of ours."""
        for size_class, place_bytes in enumerate(self.place_bytes):
            if (header.place_bytes, header.slots) == (place_bytes, self.slots_in(size_class)):
                return size_class
        return -1


def decode_slab_header(raw: bytes) -> SlabHeader | None:
    """What the first bytes of a slab say; None if they are no slab's."""
    if len(raw) < WRITTEN_AT + _WRITTEN_AT.size:
        return None
    magic, version, header_bytes, *fields = _FIELDS.unpack_from(raw)
    (checksum,) = _CHECKSUM.unpack_from(raw, _FIELDS.size)
    if (magic, version, header_bytes) != (MAGIC, VERSION, PAGE) or checksum != record.payload_checksum(
        raw[: _FIELDS.size]
    ):
        return None
    return SlabHeader(*fields, *_WRITTEN_AT.unpack_from(raw, WRITTEN_AT))


def encode_written_at(milliseconds: int) -> bytes:
    return _WRITTEN_AT.pack(milliseconds)


def table_end(slots: int) -> int:
    """Where in a slab of so many slots the payloads start."""
    return -(-(PAGE + slots * record.HEADER_BYTES) // PAGE) * PAGE


def make_geometry(capacity_bytes: int, chunk_bytes: Sequence[int]) -> Geometry:
    """How ``capacity_bytes`` of disk are cut up for groups whose chunks have ``chunk_bytes``.

    The size of slabs does not depend on the model as long as its chunks are of usual sizes, so that several models can
    use the same files one after another and find what the others have left of theirs.

    Raises:
        ConfigError: ``capacity_bytes``: there is no room for a slab of each size.
    """
    places = sorted({slot_bytes(size) for size in chunk_bytes})
    slab = SMALLEST_SLAB
    while slab - _OVERHEAD < _with_header(places[-1]):
        slab *= 2
    if capacity_bytes < len(places) * slab:
        raise ConfigError(
            "capacity_bytes",
            f"{capacity_bytes} bytes are less than one slab of {slab} for each size of chunk",
            f"at least {len(places) * slab}",
        )
    if capacity_bytes // _with_header(places[0]) >= _MOST_CHUNKS:
        bound = _MOST_CHUNKS * _with_header(places[0])
        raise ConfigError("capacity_bytes", f"{capacity_bytes} bytes are more than the index holds", f"below {bound}")
    most = min(_LARGEST_SLAB, capacity_bytes // _SLABS, _MOST_SLOTS * _with_header(places[0]))
    while 2 * slab <= most:
        slab *= 2
    while 2 * slab * _FEWEST_SLABS <= capacity_bytes and _waste(slab, places) > _WASTE:
        slab *= 2
    classes = tuple(places.index(slot_bytes(size)) for size in chunk_bytes)
    return Geometry(capacity_bytes // slab, slab, tuple(places), classes)


def _with_header(place_bytes: int) -> int:
    return place_bytes + record.HEADER_BYTES


def _waste(slab_bytes: int, places: Sequence[int]) -> float:
    """The largest share of a slab that no slot fits into."""
    return max((slab_bytes - _OVERHEAD) % _with_header(size) / slab_bytes for size in places)
