"""Keys, namespaces and generations: a name contains every invariant that changes the cached bytes.

A chunk is named by the hash of its last hash block, its group, the namespace and the generation. Its
16-byte *key* is the last 16 bytes of that hash XOR a digest of (namespace, generation, group): an array
operation for a whole request, and reversible. The key only indexes; the full name is compared wherever
bytes come back from a tier.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.types import DIGEST_BYTES, KEY_BYTES, Chunks, Keys, Space

FORMAT_VERSION = 1

#: The generation of the weights as the files are.
FIRST_GENERATION = bytes(DIGEST_BYTES)


class GroupNamespace(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What of one group decides the bytes of its chunks.

    kind: ``full``, ``sliding_window``, ``chunked_local`` or ``mla``. window: tokens that a query sees
    behind it, 0 for all. page_bytes: bytes of one block of each layer, all KV heads, in layer order.
    """

    kind: str
    tokens_per_block: int
    tokens_per_chunk: int
    window: int
    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]
    kv_heads: int
    head_size: int
    dtype: str


class Namespace(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Everything beside the tokens that changes the bytes of a chunk. Its digest is what records carry.

    weights, draft_weights: identities of the weight files (``tierkv.weights``).
    kv_dtype: of the KV cache, with its quantisation variant and where its scales come from.
    hash_algorithm, hash_seed: how the engine hashes blocks; a hash that is not cryptographic makes
        the namespace untrusted: who can choose prompts could make two of them collide.
    layout: ``canonical-1``, or ``topology:…`` for bytes that only the same topology can read.
    """

    model: str
    weights: str
    draft_weights: str = ""
    kv_dtype: str
    hash_algorithm: str
    hash_seed: str
    hash_block_size: int
    groups: tuple[GroupNamespace, ...]
    layout: str
    cache_namespace: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> bytes:
        """16 bytes, the same for the same fields on every host."""
        encoded = msgspec.json.encode(self, order="deterministic")
        return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES, person=b"tierkv-namespace").digest()

    @property
    def trusted(self) -> bool:
        """Whether blocks are hashed so that collisions cannot be made on purpose."""
        return self.hash_algorithm.startswith(("sha256", "blake2"))

    def describe(self) -> dict[str, Any]:
        """The fields, for people and for JSON."""
        described: dict[str, Any] = msgspec.to_builtins(self)
        return {**described, "digest": self.digest.hex(), "trusted": self.trusted}


def new_generation(name: str | None = None) -> bytes:
    """A generation of 16 bytes: derived from ``name``, so that replicas agree, or random."""
    if name is None:
        return os.urandom(DIGEST_BYTES)
    return hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES, person=b"tierkv-generat").digest()


def group_mask(space: Space, group: int) -> npt.NDArray[np.uint64]:
    """The two words that turn the tails of block hashes into keys of ``group``, and back."""
    material = space.namespace + space.generation + group.to_bytes(4, "little")
    return np.frombuffer(xxhash.xxh3_128_digest(material), dtype="<u8").astype(np.uint64)


def make_keys(space: Space, group: int, hashes: Sequence[bytes]) -> Keys:
    """The keys of the chunks of ``group`` whose last hash blocks are ``hashes`` (16 bytes or more each)."""
    tails = b"".join([h[-KEY_BYTES:] for h in hashes])
    assert len(tails) == KEY_BYTES * len(hashes), "block hashes have at least 16 bytes"
    return np.frombuffer(tails, dtype="<u8").reshape(-1, 2) ^ group_mask(space, group)


def make_chunks(space: Space, group: int, hashes: Sequence[bytes]) -> Chunks:
    """The chunks of one group, named by the hashes of their last hash blocks."""
    return Chunks(space, make_keys(space, group, hashes), np.full(len(hashes), group, np.int32), list(hashes))


def chunk_hashes(block_hashes: Sequence[bytes], hashes_per_chunk: int, first: int = 0) -> list[bytes]:
    """The hashes that name the complete chunks from number ``first`` on: each chunk's last one."""
    return list(block_hashes[(first + 1) * hashes_per_chunk - 1 :: hashes_per_chunk])


def hash_tokens(
    tokens: Sequence[int],
    block_size: int,
    extra: bytes = b"",
    algorithm: Literal["xxh3_128", "sha256"] = "xxh3_128",
) -> list[bytes]:
    """Block hashes without an engine: a chain over (parent, tokens, extra), for each full block.

    Stable across processes, hosts and runs. ``sha256`` is for tenants that do not trust each other.

    Args:
        tokens: token ids, each below 2**32.
        block_size: tokens a block; a last block that is not full has no hash.
        extra: what else distinguishes the content, such as a LoRA's name or a salt.

    Returns:
        ``len(tokens) // block_size`` digests, of 16 bytes (``xxh3_128``) or 32 (``sha256``).
    """
    digest = xxhash.xxh3_128_digest if algorithm == "xxh3_128" else lambda data: hashlib.sha256(data).digest()
    raw = np.asarray(tokens, dtype="<u4").tobytes()
    parent = digest(b"tierkv-root")
    hashes = []
    for start in range(0, len(raw) // (4 * block_size) * 4 * block_size, 4 * block_size):
        block = raw[start : start + 4 * block_size]
        parent = digest(parent + len(extra).to_bytes(4, "little") + extra + block)
        hashes.append(parent)
    return hashes
