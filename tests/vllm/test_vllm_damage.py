"""Records of the ``fs`` tier that were damaged, or are others': misses for the right reason, and right answers."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_harness import BLOCK, Engine, connector, fs, most_hits, same, settle, tokens

from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.types import ChunkName, Space

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

HEADER = record.HEADER_BYTES


def flip(position: int) -> Callable[[bytes, bytes], bytes]:
    def damage(raw: bytes, other: bytes) -> bytes:
        damaged = bytearray(raw)
        damaged[position] ^= 0x40
        return bytes(damaged)

    return damage


def signed(**changes: object) -> Callable[[bytes, bytes], bytes]:
    """An intact record that says something else."""

    def damage(raw: bytes, other: bytes) -> bytes:
        header = record.decode_header(raw)
        (space, group, block_hash) = header.name
        space = Space(changes.get("namespace", space.namespace), changes.get("generation", space.generation))  # type: ignore[arg-type]
        name = ChunkName(space, changes.get("group", group), block_hash)  # type: ignore[arg-type]
        return record.encode_header(name, header.length, header.checksum) + raw[HEADER:]

    return damage


def newer(raw: bytes, other: bytes) -> bytes:
    """As a later version of the format would be."""
    fields = raw[:8] + struct.pack("<I", record.VERSION + 1) + raw[12:504]
    return fields + struct.pack("<Q", record.payload_checksum(fields)) + raw[HEADER:]


#: What is done to a record, given its bytes and those of another one, and why it must be refused.
DAMAGES: dict[str, tuple[Callable[[bytes, bytes], bytes], str]] = {
    "magic": (flip(0), "bad_magic"),
    "version": (flip(8), "version"),
    "header length": (flip(12), "header_checksum"),
    "namespace": (flip(20), "header_checksum"),
    "generation": (flip(40), "header_checksum"),
    "group": (flip(48), "header_checksum"),
    "hash": (flip(60), "header_checksum"),
    "length": (flip(120), "header_checksum"),
    "payload checksum": (flip(130), "header_checksum"),
    "reserved": (flip(300), "header_checksum"),
    "header checksum": (flip(504), "header_checksum"),
    "first byte": (flip(HEADER), "checksum"),
    "last byte": (flip(-1), "checksum"),
    "cut": (lambda raw, other: raw[:-1], "truncated"),
    "header only": (lambda raw, other: raw[:HEADER], "truncated"),
    "cut in the header": (lambda raw, other: raw[:100], "truncated"),
    "emptied": (lambda raw, other: b"", "truncated"),
    "lengthened": (lambda raw, other: raw + b"\0", "length"),
    "swapped": (lambda raw, other: other, "hash"),
    "payload of another": (lambda raw, other: raw[:HEADER] + other[HEADER:], "checksum"),
    "of another namespace": (signed(namespace=bytes(16)), "namespace"),
    "of another generation": (signed(generation=b"x" * 16), "generation"),
    "of another group": (signed(group=7), "group"),
    "of a newer version": (newer, "version"),
}


def records(root: Path) -> list[Path]:
    return sorted(root.rglob("*.tkv"))


def verifies(path: Path) -> bool:
    raw = path.read_bytes()
    digits = path.stem.partition("-")[0]
    space = Space(*(bytes.fromhex(part) for part in path.parts[-4:-2]))
    try:
        record.verify(raw, ChunkName(space, 0, bytes.fromhex(digits)), len(raw) - HEADER)
    except RecordError:
        return False
    return True


def reasons(engine: Engine) -> dict[str, int]:
    """How often each reason was counted."""
    counts = engine("call", function="books", arguments={})["counts"]
    return {name.removeprefix("reason:"): count for name, count in counts.items() if name.startswith("reason:")}


def test_every_damage_is_a_miss_and_is_mended(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    prompt = tokens(70, 8 * BLOCK + 5)
    expected, most = oracle("llama", [prompt]), most_hits(8 * BLOCK + 5, BLOCK)
    config = connector(secondary_tiers=[fs(root)], reset_scope="host")
    with engines.running("llama", config) as engine:
        assert same([engine.one(prompt)], expected)
        engine.drain()
        settle(root)
        for number, (what, (damage, reason)) in enumerate(DAMAGES.items()):
            paths = records(root)
            assert len(paths) == 8 and all(map(verifies, paths)), what
            path, other = paths[number % 8], paths[(number + 1) % 8]
            path.write_bytes(damage(path.read_bytes(), other.read_bytes()))
            assert not verifies(path)
            before = reasons(engine)
            assert engine.reset(connector=True)
            answer = engine.one(prompt)
            assert same([answer], expected), what
            assert answer["external"] < most, what
            counted = {word: n - before.get(word, 0) for word, n in reasons(engine).items() if n != before.get(word)}
            assert counted == {reason: 1}, what
            engine.drain()
            settle(root)
            assert verifies(path), f"{what}: not written anew"
        assert engine.reset(connector=True)
        answer = engine.one(prompt)
        assert answer["external"] == most and same([answer], expected)


def test_damage_is_found_by_the_next_process(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    prompt = tokens(71, 8 * BLOCK + 5)
    expected = oracle("llama", [prompt])
    config = connector(secondary_tiers=[fs(root)])
    with engines.running("llama", config) as engine:
        engine.one(prompt)
        engine.drain()
        settle(root)
    for path in records(root):
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2] + os.urandom(len(raw) - len(raw) // 2))
    with engines.running("llama", config) as engine:
        answer = engine.one(prompt)
        assert same([answer], expected) and answer["external"] == 0
        assert reasons(engine)["checksum"] >= 1
        engine.drain()
        settle(root)
    assert len(records(root)) == 8 and all(map(verifies, records(root)))


def test_damaged_segments(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Every 64 KiB a byte is flipped: tables, headers and payloads alike, in use and between two processes."""
    root = tmp_path / "kv"
    prompts = [tokens(76 + seed, 8 * BLOCK + 5) for seed in range(3)]
    expected = oracle("llama", prompts)
    config = connector(secondary_tiers=[fs(root, "segments")], reset_scope="host")
    with engines.running("llama", config) as engine:
        assert same(engine.generate(prompts), expected)
        engine.drain()
        time.sleep(0.5)
        scratch(root / "segments", 1 << 16)
        assert engine.reset(connector=True)
        answers = engine.generate(prompts)
        assert same(answers, expected)
        assert sum(answer["external"] for answer in answers) < 3 * 8 * BLOCK
        counted = reasons(engine)
        assert set(counted) <= set(record.REASONS) and sum(counted.values()) >= 1
        engine.drain()
        time.sleep(0.5)
        assert engine.reset(connector=True)
        again = engine.generate(prompts)
        assert same(again, expected) and [a["external"] for a in again] == [8 * BLOCK] * 3, "written anew"
    scratch(root / "segments", 1 << 16)
    with engines.running("llama", config) as engine:
        assert same(engine.generate(prompts), expected)


def scratch(directory: Path, every: int) -> None:
    """Flip a byte of each file every so many bytes, where there is something."""
    for path in directory.glob("*.tkv"):
        with path.open("r+b") as file:
            for position in range(100, path.stat().st_size, every):
                byte = os.pread(file.fileno(), 1, position)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), position)


def test_a_bounded_root_thrashes_and_answers_stay_right(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Less room than the prompts take, in memory and below the root: eviction all the time, in both."""
    root, block_bytes = tmp_path / "kv", 4 * 2 * 2 * 32 * 4 * BLOCK
    prompts = [tokens(72 + seed, 8 * BLOCK + 5) for seed in range(6)]
    expected = oracle("llama", prompts)
    tier = {**fs(root), "capacity_bytes": 24 * (block_bytes + 8192) + (1 << 20)}
    with engines.running("llama", connector(12 * block_bytes, secondary_tiers=[tier])) as engine:
        for _ in range(3):
            for prompt, answer in zip(prompts, expected, strict=True):
                engine.forget_device()
                assert same([engine.one(prompt)], [answer])
                engine.drain()
    used = sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")])
    assert used <= tier["capacity_bytes"]
