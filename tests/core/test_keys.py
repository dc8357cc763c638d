"""Keys and namespaces: what must separate chunks does, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.keys import (
    FIRST_GENERATION,
    GroupNamespace,
    Namespace,
    RequestChunks,
    group_mask,
    hash_array,
    hash_tokens,
    make_chunks,
    make_keys,
    new_generation,
)
from tierkv.types import Chunks, Space, key_list
from tierkv.weights import weights_identity

GROUP = GroupNamespace(
    kind="full",
    tokens_per_block=16,
    tokens_per_chunk=16,
    window=0,
    layers=("a", "b"),
    pages=("kv[2][16][32]", "kv[2][16][32]"),
    cells=("8+8:bfloat16", "8+8:bfloat16"),
)
NAMESPACE = Namespace(
    model="m",
    weights="w",
    kv_dtype="bfloat16",
    hash_algorithm="sha256",
    hash_seed="s",
    hash_block_size=16,
    groups=(GROUP,),
    layout="canonical-1",
)
SPACE = Space(NAMESPACE.digest, FIRST_GENERATION)
HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=8)


def test_the_digest_is_a_constant_of_the_fields() -> None:
    assert NAMESPACE.digest.hex() == "74aa48c3e972a62bcf9387767c76f3fc"


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_each_field_of_the_namespace_separates(field: str) -> None:
    value = getattr(NAMESPACE, field)
    other = value + 1 if isinstance(value, int) else value + "x" if isinstance(value, str) else ()
    assert msgspec.structs.replace(NAMESPACE, **{field: other}).digest != NAMESPACE.digest


@pytest.mark.parametrize("field", GroupNamespace.__struct_fields__)
def test_each_field_of_a_group_separates(field: str) -> None:
    value = getattr(GROUP, field)
    other = value + 1 if isinstance(value, int) else value + "x" if isinstance(value, str) else value[:1]
    changed = msgspec.structs.replace(GROUP, **{field: other})
    assert msgspec.structs.replace(NAMESPACE, groups=(changed,)).digest != NAMESPACE.digest


def test_a_hash_that_can_be_made_to_collide_is_not_trusted() -> None:
    assert NAMESPACE.trusted
    assert not msgspec.structs.replace(NAMESPACE, hash_algorithm="xxhash").trusted


@given(HASHES, st.integers(0, 9))
def test_keys_are_reversible_tails_of_hashes(hashes: list[bytes], group: int) -> None:
    keys = make_keys(SPACE, group, hash_array(hashes))
    back = (keys ^ group_mask(SPACE, group)).tobytes()
    assert back == b"".join(h[-16:] for h in hashes)
    assert key_list(keys) == [keys[i].tobytes() for i in range(len(hashes))]


def test_namespace_generation_and_group_separate_keys() -> None:
    spaces = [SPACE, Space(bytes(16), FIRST_GENERATION), Space(NAMESPACE.digest, new_generation("x"))]
    keys = {make_keys(space, group, hash_array([b"h" * 32])).tobytes() for space in spaces for group in (0, 1)}
    assert len(keys) == 6


def test_generations() -> None:
    assert new_generation("step-1") == new_generation("step-1") != new_generation("step-2")
    assert new_generation() != new_generation()
    assert not any(FIRST_GENERATION)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 4), st.integers(1, 4))
def test_a_request_names_its_chunks_as_it_grows(steps: list[int], first: int, second: int) -> None:
    """Each chunk by its last hash, however the hashes came in; and views that were given out stay as they are."""
    request = RequestChunks(SPACE, [0, 5], [first, second])
    hashes: list[bytes] = []
    before = []
    for step in steps:
        hashes += [bytes([len(hashes) + i]) * 32 for i in range(step)]
        request.extend(hashes)
        for chunks, group, per_chunk in zip(request.chunks, (0, 5), (first, second), strict=True):
            expected = [hashes[(i + 1) * per_chunk - 1] for i in range(len(hashes) // per_chunk)]
            before.append((chunks, make_chunks(SPACE, group, expected)))
        for chunks, wanted in before:
            some = len(chunks) * 2 // 3
            for found, same in (
                (chunks.slice(some, len(chunks)), wanted.slice(some, len(wanted))),
                (chunks.upto(some).slice(0, some), wanted.slice(0, some)),
                (chunks.take(range(len(chunks))[::-2]), wanted.take(range(len(wanted))[::-2])),
            ):
                assert [found.name(i) for i in range(len(found))] == [same.name(i) for i in range(len(same))]
                assert np.array_equal(found.keys, same.keys)


def test_a_request_that_was_cut_back_is_named_anew() -> None:
    request = RequestChunks(SPACE, [0], [1])
    request.extend([b"a" * 32, b"b" * 32, b"c" * 32])
    before = request.chunks[0]
    assert len(before.upto(3)) == 3
    request.extend([b"a" * 32, b"x" * 32, b"y" * 32])
    assert [request.chunks[0].upto(3).name(i).block_hash[:1] for i in range(3)] == [b"a", b"x", b"y"]
    assert request.chunks[0].version != before.version
    request.extend([b"a" * 32])
    assert len(request.chunks[0]) == 1


def test_a_prompt_is_converted_as_far_as_it_is_looked_at() -> None:
    class Counting(list[bytes]):
        taken = 0

        def __getitem__(self, where):  # type: ignore[no-untyped-def]
            found = super().__getitem__(where)
            self.taken += len(found) if isinstance(where, slice) else 1
            return found

    hashes = Counting(i.to_bytes(32, "big") for i in range(10_000))
    request = RequestChunks(SPACE, [0, 1], [1, 1])
    request.extend(hashes)
    request.chunks[0].upto(100)
    assert hashes.taken == 100
    for count in range(100, 10_000, 100):
        request.chunks[0].upto(count)
    assert hashes.taken <= 2 * 10_000


def test_hashes_of_several_lengths_are_refused() -> None:
    for wrong in ([b"h" * 15], [b"h" * 32, b"h" * 31], [b"h" * 16, b""]):
        with pytest.raises(ValueError, match="length"):
            hash_array(wrong)


def test_batches_are_taken_and_joined() -> None:
    chunks = Chunks.concat([make_chunks(SPACE, g, [bytes([g, i]) * 16 for i in range(3)]) for g in range(2)])
    taken = chunks.take([4, 0])
    assert [taken.name(0), taken.name(1)] == [chunks.name(4), chunks.name(0)]
    assert np.array_equal(taken.keys, chunks.keys[[4, 0]])


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_token_hashes_are_a_chain_that_is_the_same_in_every_process(algorithm: str) -> None:
    tokens = list(range(100))
    hashes = hash_tokens(tokens, 16, b"lora", algorithm)  # type: ignore[arg-type]
    assert len(hashes) == 6
    changed = hash_tokens([*tokens[:40], 7, *tokens[41:]], 16, b"lora", algorithm)  # type: ignore[arg-type]
    assert [a == b for a, b in zip(hashes, changed, strict=True)] == [True, True, False, False, False, False]
    assert hash_tokens(tokens, 16, b"", algorithm)[0] != hashes[0]  # type: ignore[arg-type]
    code = f"from tierkv.keys import hash_tokens; print(hash_tokens(range(100), 16, b'lora', {algorithm!r})[-1].hex())"
    for seed in ("0", "1"):
        there = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == hashes[-1].hex()


def test_weights_identity(tmp_path: Path) -> None:
    def model(name: str, content: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      " + content)
        (folder / "config.json").write_text(name)  # not a weight file
        return folder

    content = bytes(range(256)) * 8192
    one, copy = model("one", content), model("copy", content)
    assert weights_identity(one) == weights_identity(copy)
    assert weights_identity(one) != weights_identity(one, "full")
    assert weights_identity(model("longer", content + b"x")) != weights_identity(one)
    middle = bytearray(content)
    middle[40_000] ^= 1
    edited = model("edited", bytes(middle))
    assert weights_identity(edited, "full") != weights_identity(one, "full")
    (one / "model.safetensors").rename(one / "renamed.safetensors")
    assert weights_identity(one) != weights_identity(copy)
    with pytest.raises(FileNotFoundError, match="no weight files"):
        weights_identity(tmp_path / "nothing")
