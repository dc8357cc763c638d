"""The record format: its golden bytes, and that nothing that was damaged passes."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.types import ChunkName, Space

NAME = ChunkName(Space(bytes(range(16)), bytes(range(16, 32))), 3, bytes(range(32, 64)))
PAYLOAD = bytes(i * 7 % 256 for i in range(100))

GOLDEN_START = bytes.fromhex(
    "93544945524b560a"  # magic
    "0100000000020000"  # version, header length
    "000102030405060708090a0b0c0d0e0f"  # namespace
    "101112131415161718191a1b1c1d1e1f"  # generation
    "0300000020000000"  # group, hash length
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"  # hash
    "0000000000000000000000000000000000000000000000000000000000000000"
    "6400000000000000"  # payload length
    "efcdab8967452301"  # payload checksum
)
GOLDEN_END = bytes.fromhex("1a355010fdb23626")

names = st.builds(
    ChunkName,
    st.builds(Space, st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16)),
    st.integers(0, 2**31 - 1),
    st.binary(min_size=16, max_size=64),
)


def make(name: ChunkName, payload: bytes) -> bytes:
    return record.encode_header(name, len(payload), record.payload_checksum(payload)) + payload


def refused(raw: bytes, name: ChunkName = NAME, length: int = len(PAYLOAD)) -> str:
    with pytest.raises(RecordError) as caught:
        record.verify(raw, name, length)
    assert caught.value.reason in record.REASONS
    return caught.value.reason


def test_golden_bytes() -> None:
    header = record.encode_header(NAME, 100, 0x0123456789ABCDEF)
    assert header[: len(GOLDEN_START)] == GOLDEN_START
    assert header[len(GOLDEN_START) : 504] == bytes(504 - len(GOLDEN_START))
    assert header[504:] == GOLDEN_END
    assert len(header) == 512


@given(names, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_header_says_what_it_was_told(name: ChunkName, length: int, checksum: int) -> None:
    header = record.decode_header(record.encode_header(name, length, checksum))
    assert header == record.Header(name, length, checksum)
    record.check(header, name, length)


@given(names, st.binary(max_size=2000))
def test_an_intact_record_passes(name: ChunkName, payload: bytes) -> None:
    assert record.verify(make(name, payload), name, len(payload)).checksum == xxhash.xxh3_64_intdigest(payload)


def test_every_flipped_byte_is_noticed() -> None:
    raw = make(NAME, PAYLOAD)
    for position in range(len(raw)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[position] ^= mask
            reason = refused(bytes(damaged))
            if position < 8:
                assert reason == "bad_magic"
            elif position < 12:
                assert reason == "version"
            else:
                assert reason == ("header_checksum" if position < 512 else "checksum")


def test_every_cut_is_noticed() -> None:
    raw = make(NAME, PAYLOAD)
    for length in range(len(raw)):
        assert refused(raw[:length]) == "truncated"


@given(st.binary(min_size=1, max_size=600))
def test_every_byte_too_many_is_noticed(tail: bytes) -> None:
    assert refused(make(NAME, PAYLOAD) + tail) == "length"


@given(st.binary(max_size=700))
def test_noise_is_refused(raw: bytes) -> None:
    assert refused(raw) in ("truncated", "bad_magic")


@given(names, names)
def test_another_name_is_refused(mine: ChunkName, other: ChunkName) -> None:
    raw = make(other, PAYLOAD)
    if mine == other:
        record.verify(raw, mine, len(PAYLOAD))
    else:
        assert refused(raw, mine) in ("namespace", "generation", "group", "hash")


def test_the_reason_names_what_differs() -> None:
    raw = make(NAME, PAYLOAD)
    namespace, generation = NAME.space.namespace, NAME.space.generation
    assert refused(raw, NAME._replace(space=Space(bytes(16), generation))) == "namespace"
    assert refused(raw, NAME._replace(space=Space(namespace, bytes(16)))) == "generation"
    assert refused(raw, NAME._replace(group=4)) == "group"
    assert refused(raw, NAME._replace(block_hash=NAME.block_hash[:-1])) == "hash"
    assert refused(raw, NAME, len(PAYLOAD) + 1) == "length"


@pytest.mark.parametrize(("offset", "value"), [(12, 1024), (52, 65)])
def test_a_signed_header_that_no_writer_may_write_is_malformed(offset: int, value: int) -> None:
    raw = bytearray(make(NAME, PAYLOAD))
    struct.pack_into("<I", raw, offset, value)
    struct.pack_into("<Q", raw, 504, xxhash.xxh3_64_intdigest(bytes(raw[:504])))
    assert refused(bytes(raw)) == "malformed"


def test_a_hash_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RecordError, match="hash"):
        record.encode_header(NAME._replace(block_hash=bytes(65)), 1, 1)


@given(st.integers(1, 700), st.integers(-612, 5), st.none() | st.integers(0, 611))
def test_in_pieces_the_verdict_is_the_same(step: int, longer: int, flipped: int | None) -> None:
    raw = bytearray(make(NAME, PAYLOAD))
    raw = raw[: len(raw) + longer] if longer < 0 else raw + bytes(longer)
    if flipped is not None and flipped < len(raw):
        raw[flipped] ^= 1
    pieces = [raw[start : start + step] for start in range(0, len(raw), step)]
    try:
        record.verify(raw, NAME, len(PAYLOAD))
    except RecordError as expected:
        with pytest.raises(RecordError) as caught:
            record.verify_pieces(pieces, NAME, len(raw))
        assert caught.value.reason == expected.reason
    else:
        record.verify_pieces(pieces, NAME, len(raw))
