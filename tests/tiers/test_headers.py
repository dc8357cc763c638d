"""Headers in tables are those of ``record``, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import RecordError
from tierkv.keys import make_chunks
from tierkv.testing.driver import NAMESPACE, SPACE, some_chunks
from tierkv.tiers import headers as header_tools
from tierkv.tiers import record
from tierkv.types import Chunks, Space

SUMS = np.array([0, 2**64 - 1, 5, 7], np.uint64)
LENGTHS = np.array([0, 1, 4096, 2**40], np.int64)


def some_headers() -> tuple[Chunks, header_tools.Headers]:
    chunks = some_chunks(4, group=3)
    return chunks, header_tools.encode(chunks, LENGTHS, SUMS)


def expected(chunks: Chunks, raw: bytes, i: int) -> int | str:
    """What ``record`` says of one header."""
    try:
        header = record.decode_header(raw)
        record.check(header, chunks.name(i), int(LENGTHS[i]))
    except RecordError as error:
        return str(error)
    return header.checksum


@pytest.mark.parametrize("hash_bytes", [16, 20, 32, 64])
def test_they_are_encoded_as_one_by_one(hash_bytes: int) -> None:
    chunks = make_chunks(SPACE, 3, [bytes([i]) * hash_bytes for i in range(4)])
    raw = header_tools.raw_bytes(header_tools.encode(chunks, LENGTHS, SUMS)).tobytes()
    assert raw == b"".join(record.encode_header(chunks.name(i), int(LENGTHS[i]), int(SUMS[i])) for i in range(4))


def test_a_hash_that_is_too_long_is_refused() -> None:
    chunks = make_chunks(SPACE, 0, [bytes(65)])
    with pytest.raises(RecordError, match="hash: 65 bytes, at most 64 fit"):
        header_tools.encode(chunks, LENGTHS[:1], SUMS[:1])


def test_none_at_all() -> None:
    nothing = some_chunks(1).take([])
    headers = header_tools.encode(nothing, LENGTHS[:0], SUMS[:0])
    assert header_tools.check(headers, nothing, LENGTHS[:0]) == []
    assert header_tools.intact(headers, NAMESPACE).tolist() == []


@given(st.integers(0, 4 * 512 - 1), st.binary(min_size=1, max_size=40))
def test_each_is_accepted_or_refused_as_one_by_one(position: int, damage: bytes) -> None:
    chunks, headers = some_headers()
    raw = bytearray(headers.tobytes())
    raw[position : position + len(damage)] = damage[: len(raw) - position]
    damaged = np.frombuffer(raw, header_tools.HEADER)
    found = header_tools.check(damaged, chunks, LENGTHS)
    assert [one if isinstance(one, int) else str(one) for one in found] == [
        expected(chunks, raw[512 * i : 512 * (i + 1)], i) for i in range(4)
    ]
    whole = [bytes(raw[512 * i : 512 * (i + 1)]) == headers[i].tobytes() for i in range(4)]
    assert header_tools.intact(damaged, NAMESPACE).tolist() == whole


@pytest.mark.parametrize("what", ["namespace", "generation", "group", "hash", "length"])
def test_another_name_is_refused_as_one_by_one(what: str) -> None:
    chunks, headers = some_headers()
    other = {
        "namespace": some_chunks(4, group=3, space=Space(bytes(16), SPACE.generation)),
        "generation": some_chunks(4, group=3, space=Space(NAMESPACE, bytes([1]) * 16)),
        "group": some_chunks(4),
        "hash": some_chunks(4, 1, group=3),
        "length": chunks,
    }[what]
    found = header_tools.check(headers, other, LENGTHS + (what == "length"))
    assert [one.reason for one in found if isinstance(one, RecordError)] == [what] * 4
    assert header_tools.intact(headers, other.space.namespace).all() == (what != "namespace")
