"""The self-verifying record: THE format, version 1, of a chunk that lies in a tier.

A record is a header of 512 bytes and, directly behind it, the payload: the bytes of one chunk in the
canonical layout. All integers are unsigned and little-endian. There is no compression and no padding:
a record of a payload of ``n`` bytes has ``512 + n`` bytes.

====== ===== ================ ======================================================================
offset bytes field            content
====== ===== ================ ======================================================================
0      8     magic            ``93 54 49 45 52 4B 56 0A``: not ASCII, ``TIERKV``, a line feed, so that
                              a copy that converts text does not go unnoticed
8      4     version          1
12     4     header length    512
16     16    namespace        digest of the namespace
32     16    generation
48     4     group
52     4     hash length      bytes of the block hash, at most 64
56     64    block hash       the *full* hash of the chunk's last hash block, zeros behind it
120    8     payload length   bytes of the payload
128    8     payload checksum xxh3-64 of the payload, taken when the slot in host memory was committed
136    368   reserved         zeros
504    8     header checksum  xxh3-64 of the 504 bytes before it
====== ===== ================ ======================================================================

Alignment: the header is a whole number of 512-byte sectors, so that in a record that starts at a
sector the payload does too. A writer SHOULD start records at a multiple of 512 bytes.

A writer MUST take the payload checksum from the store job and MUST NOT compute it anew: bytes that
were overwritten after the slot was committed must not be signed. It MUST write zeros to the reserved
bytes, and MUST make a record visible only when it is whole.

A reader MUST refuse a record, and treat it as a miss, unless all of these hold: the magic and the
version are those above, the header checksum matches, the whole name (namespace, generation, group,
full block hash) and the payload length are those that were asked for, and the payload, *as it lies in
host memory after the read*, has the payload checksum. It MUST NOT use the reserved bytes, and SHOULD
check the size of what contains the record, which costs nothing, before it reads the payload. Whoever
meets a record that is refused SHOULD remove it, so that the next store writes it again.

A change of meaning or size of any field is a new version. Reserved bytes may get a meaning within
version 1 only if a reader that ignores them stays right.

Each refusal is a ``RecordError`` whose ``reason`` is one of ``REASONS``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from tierkv.errors import RecordError
from tierkv.layout import canonical
from tierkv.types import ChunkName, Space

HEADER_BYTES = 512
MAGIC = b"\x93TIERKV\n"
VERSION = 1
MAX_HASH_BYTES = 64

#: Why a record is refused, in the order in which it is checked.
REASONS = (
    "truncated",  # shorter than its header says
    "bad_magic",  # not a record at all
    "version",  # of a version that this reader does not know
    "header_checksum",  # the header was damaged
    "malformed",  # the header is intact and says what no writer may say
    "namespace",  # another namespace's
    "generation",  # another generation's
    "group",  # another group's
    "hash",  # another block hash's
    "length",  # the payload has another length than asked for, or bytes follow it
    "checksum",  # the payload was damaged
)

#: What records are made of. (``collections.abc.Buffer`` came with Python 3.12.)
Buffer = bytes | bytearray | memoryview

_FIELDS = struct.Struct("<8sII16s16sII64sQQ368x")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES


class Header(NamedTuple):
    """What a header says: the chunk's name, its payload's length in bytes and its payload's xxh3-64."""

    name: ChunkName
    length: int
    checksum: int


def payload_checksum(payload: Buffer) -> int:
    """The xxh3-64 of ``payload``."""
    return canonical.checksum(payload)


#: The same, for a payload that comes in pieces: ``update`` and ``intdigest``.
PayloadChecksum = canonical.Checksum


def encode_header(name: ChunkName, length: int, checksum: int) -> bytes:
    """The 512 bytes that stand before a payload of ``length`` bytes whose xxh3-64 is ``checksum``.

    Raises:
        RecordError: ``hash``: the block hash is longer than a header can hold.
    """
    space, group, block_hash = name
    if len(block_hash) > MAX_HASH_BYTES:
        raise RecordError("hash", f"{len(block_hash)} bytes, at most {MAX_HASH_BYTES} fit")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        space.namespace,
        space.generation,
        group,
        len(block_hash),
        block_hash,
        length,
        checksum,
    )
    return fields + _CHECKSUM.pack(payload_checksum(fields))


def decode_header(raw: Buffer) -> Header:
    """What the first 512 bytes of ``raw`` say.

    Raises:
        RecordError: they are not an intact header of this version.
    """
    data = bytes(memoryview(raw)[:HEADER_BYTES])
    if len(data) < HEADER_BYTES:
        raise RecordError("truncated", f"{len(data)} bytes, a header has {HEADER_BYTES}")
    magic, version, header_length, namespace, generation, group, hash_length, block_hash, length, checksum = (
        _FIELDS.unpack_from(data)
    )
    if magic != MAGIC:
        raise RecordError("bad_magic", magic.hex())
    if version != VERSION:
        raise RecordError("version", f"{version}, known is {VERSION}")
    if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != payload_checksum(data[: _FIELDS.size]):
        raise RecordError("header_checksum")
    if header_length != HEADER_BYTES or hash_length > MAX_HASH_BYTES:
        raise RecordError("malformed", f"header of {header_length} bytes, hash of {hash_length}")
    return Header(ChunkName(Space(namespace, generation), group, block_hash[:hash_length]), length, checksum)


def check(header: Header, name: ChunkName, length: int) -> None:
    """Accept ``header`` as that of the chunk ``name``, with a payload of ``length`` bytes.

    Raises:
        RecordError: it is another chunk's, or another length's.
    """
    found, wanted = header.name, name
    if found.space.namespace != wanted.space.namespace:
        raise RecordError("namespace", found.space.namespace.hex())
    if found.space.generation != wanted.space.generation:
        raise RecordError("generation", found.space.generation.hex())
    if found.group != wanted.group:
        raise RecordError("group", f"{found.group}, asked for {wanted.group}")
    if found.block_hash != wanted.block_hash:
        raise RecordError("hash", found.block_hash.hex())
    if header.length != length:
        raise RecordError("length", f"{header.length} bytes, asked for {length}")


def check_size(header: Header, size: int) -> None:
    """Accept ``size`` bytes as those of the whole record.

    Raises:
        RecordError: ``truncated`` or ``length``: there are fewer, or more.
    """
    expected = HEADER_BYTES + header.length
    if size != expected:
        raise RecordError("truncated" if size < expected else "length", f"{size} bytes, expected {expected}")


def check_payload(header: Header, payload: Buffer) -> int:
    """Accept ``payload`` as the one that was stored, and return its xxh3-64.

    Raises:
        RecordError: ``checksum``.
    """
    found = payload_checksum(payload)
    check_checksum(header.checksum, found)
    return found


def check_checksum(stored: int, found: int) -> None:
    """Accept ``found`` as the xxh3-64 of a payload whose was ``stored`` when it was stored.

    Raises:
        RecordError: ``checksum``.
    """
    if found != stored:
        raise RecordError("checksum", f"{found:016x}, stored was {stored:016x}")


def verify(record: Buffer, name: ChunkName, length: int) -> Header:
    """Accept ``record`` (header and payload in one) whole, as that of ``name``.

    Raises:
        RecordError: see ``REASONS``.
    """
    view = memoryview(record)
    header = decode_header(view)
    check(header, name, length)
    check_size(header, len(view))
    check_payload(header, view[HEADER_BYTES:])
    return header


def verify_pieces(pieces: Iterable[Buffer], name: ChunkName, size: int) -> None:
    """Accept ``pieces``, one behind the other, as a record of ``size`` bytes, that of ``name``, of whatever length.

    Raises:
        RecordError: see ``REASONS``.
    """
    header, head, digest = None, b"", PayloadChecksum()
    for piece in pieces:
        payload = memoryview(piece)
        if header is None:
            missing = HEADER_BYTES - len(head)
            head, payload = head + bytes(payload[:missing]), payload[missing:]
            if len(head) < HEADER_BYTES:
                continue
            header = decode_header(head)
            check(header, name, header.length)
            check_size(header, size)
        digest.update(payload)
    if header is None:
        header = decode_header(head)  # says that it is too short
    check_checksum(header.checksum, digest.intdigest())
