"""Headers of many records at once, for tiers that keep them in tables: ``record``, in array operations.

``record`` is the format, and says why a header is refused; here, what is as it should be costs about a microsecond.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.types import Checksums, Chunks, Flags, Offsets

#: A header, field by field (``record`` has the table); names and digests as words, which are quick to compare.
HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("namespace", "<u8", (2,)),
        ("generation", "<u8", (2,)),
        ("group", "<u4"),
        ("hash_bytes", "<u4"),
        ("hash", "u1", (record.MAX_HASH_BYTES,)),
        ("length", "<u8"),
        ("payload_checksum", "<u8"),
        ("reserved", "u1", (368,)),
        ("header_checksum", "<u8"),
    ]
)
assert HEADER.itemsize == record.HEADER_BYTES

#: ``(n,)`` of ``HEADER``, contiguous.
Headers = npt.NDArray[np.void]

_MAGIC = np.frombuffer(record.MAGIC, "<u8")[0]
#: Bytes of a header that the header's checksum is of; and those, as words, that name and length decide.
_CHECKED = record.HEADER_BYTES - 8
_NAMED_WORDS = 128 // 8


def encode(chunks: Chunks, lengths: Offsets, checksums: Checksums) -> Headers:
    """As ``record.encode_header``, for each of ``chunks``.

    Raises:
        RecordError: ``hash``: the block hashes are longer than a header can hold.
    """
    headers = _named(chunks, lengths)
    headers["payload_checksum"] = checksums
    headers["header_checksum"] = _checksums(headers, range(len(headers)))
    return headers


def check(headers: Headers, chunks: Chunks, lengths: Offsets) -> list[int | RecordError]:
    """For each header the payload's checksum, if it is of the chunk, with a payload of that length; else why not."""
    expected = _words(_named(chunks, lengths))
    fits = (_words(headers)[:, :_NAMED_WORDS] == expected[:, :_NAMED_WORDS]).all(axis=1)
    where = np.flatnonzero(fits)
    fits[where] = headers["header_checksum"][where] == _checksums(headers, where.tolist())
    found: list[int | RecordError] = headers["payload_checksum"].tolist()
    for i in np.flatnonzero(~fits).tolist():
        found[i] = _refusal(headers[i : i + 1], chunks, lengths, i)
    return found


def intact(headers: Headers, namespace: bytes) -> Flags:
    """Which of ``headers`` are whole, and of records of ``namespace``, whose block hashes can be made keys of."""
    good: Flags = (headers["magic"] == _MAGIC) & (headers["version"] == record.VERSION)
    good &= (headers["namespace"] == np.frombuffer(namespace, "<u8")).all(axis=1)
    good &= (headers["header_bytes"] == record.HEADER_BYTES) & (headers["hash_bytes"] <= record.MAX_HASH_BYTES)
    where = np.flatnonzero(good)
    good[where] = headers["header_checksum"][where] == _checksums(headers, where.tolist())
    return good


def raw_bytes(headers: Headers) -> memoryview:
    """The bytes of ``headers``, as they are in memory."""
    return headers.view(np.uint8).data


def _named(chunks: Chunks, lengths: Offsets) -> Headers:
    """Headers without their two checksums."""
    hash_bytes = chunks.hashes.shape[1]
    if hash_bytes > record.MAX_HASH_BYTES:
        raise RecordError("hash", f"{hash_bytes} bytes, at most {record.MAX_HASH_BYTES} fit")
    headers = np.zeros(len(chunks), HEADER)
    headers["magic"] = _MAGIC
    headers["version"] = record.VERSION
    headers["header_bytes"] = record.HEADER_BYTES
    headers["namespace"] = np.frombuffer(chunks.space.namespace, "<u8")
    headers["generation"] = np.frombuffer(chunks.space.generation, "<u8")
    headers["group"] = chunks.groups
    headers["hash_bytes"] = hash_bytes
    headers["hash"][:, :hash_bytes] = chunks.hashes
    headers["length"] = lengths
    return headers


def _words(headers: Headers) -> npt.NDArray[np.uint64]:
    return headers.view("<u8").reshape(len(headers), record.HEADER_BYTES // 8)


def _checksums(headers: Headers, which: range | list[int]) -> Checksums:
    raw = raw_bytes(headers)
    starts = (i * record.HEADER_BYTES for i in which)
    return np.array([record.payload_checksum(raw[start : start + _CHECKED]) for start in starts], np.uint64)


def _refusal(header: Headers, chunks: Chunks, lengths: Offsets, i: int) -> RecordError:
    """Why ``header`` is not that of chunk ``i``."""
    try:
        record.check(record.decode_header(header.tobytes()), chunks.name(i), int(lengths[i]))
    except RecordError as error:
        return error.with_traceback(None)
    raise AssertionError("what record accepts is accepted here, too")
