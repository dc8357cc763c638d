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

from tierkv.types import DIGEST_BYTES, KEY_BYTES, Chunks, Hashes, Keys, Space

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


def hash_array(hashes: Sequence[bytes]) -> Hashes:
    """Block hashes, all of the same length of at least 16 bytes, as ``(n, bytes)``.

    Raises:
        ValueError: they are shorter, or not all of one length.
    """
    size = len(hashes[0]) if hashes else 0
    joined = b"".join(hashes)
    if hashes and (size < KEY_BYTES or len(joined) != size * len(hashes)):
        raise ValueError(f"block hashes must have one length of at least {KEY_BYTES} bytes, not {size} and others")
    return np.frombuffer(joined, np.uint8).reshape(len(hashes), size)


def make_keys(space: Space, group: int, hashes: Hashes) -> Keys:
    """The keys of the chunks of ``group`` whose last hash blocks are ``hashes``."""
    if not len(hashes):
        return np.empty((0, 2), np.uint64)
    return np.ascontiguousarray(hashes[:, -KEY_BYTES:]).view("<u8") ^ group_mask(space, group)


def make_chunks(space: Space, group: int, hashes: Sequence[bytes]) -> Chunks:
    """The chunks of one group, named by the hashes of their last hash blocks."""
    array = hash_array(hashes)
    return Chunks(space, make_keys(space, group, array), np.full(len(hashes), group, np.int32), array)


class RequestChunks:
    """The complete chunks of one request, by group; they only grow, and each hash is converted once.

    chunks: for each group, its chunks from the first token on: views, valid whatever grows later.

    Thread safety: ``extend`` is called by one thread; what ``chunks`` gave may be read by any.
    """

    __slots__ = ("_groups", "_hashes", "_keys", "_per_chunk", "chunks", "count", "space")

    def __init__(self, space: Space, groups: Sequence[int], hashes_per_chunk: Sequence[int]) -> None:
        """
        Args:
            groups: the groups' ids. hashes_per_chunk: for each, how many block hashes a chunk spans.
        """
        self.space = space
        self._groups = tuple(groups)
        self._per_chunk = tuple(hashes_per_chunk)
        self.count = 0  # of block hashes
        self._hashes: Hashes = np.empty((0, 0), np.uint8)
        self._keys: list[Keys] = [np.empty((0, 2), np.uint64) for _ in self._groups]
        self.chunks: tuple[Chunks, ...] = tuple(make_chunks(space, group, []) for group in self._groups)

    def extend(self, block_hashes: Sequence[bytes]) -> None:
        """Name what ``block_hashes``, the request's from its first block on, have completed since the last call.

        Those of a request that was cut back, and may have gone on otherwise, are converted anew.

        Raises:
            ValueError: as ``hash_array``.
        """
        if self._was_cut(block_hashes):
            self.count = 0
        count = len(block_hashes)
        if count == self.count:
            return
        added = hash_array(block_hashes[self.count :] if self.count else block_hashes)
        if self.count and added.shape[1] != self._hashes.shape[1]:
            raise ValueError("the block hashes of a request must have one length")
        self._hashes = _grown(self._hashes, self.count, added)
        named = []
        for n, (group, per_chunk) in enumerate(zip(self._groups, self._per_chunk, strict=True)):
            before, now = self.count // per_chunk, count // per_chunk
            last = self._hashes[per_chunk - 1 : now * per_chunk : per_chunk]
            self._keys[n] = _grown(self._keys[n], before, make_keys(self.space, group, last[before:]))
            ids = np.broadcast_to(np.int32(group), now)
            named.append(Chunks(self.space, self._keys[n][:now], ids, last))
        self.count = count
        self.chunks = tuple(named)

    def _was_cut(self, block_hashes: Sequence[bytes]) -> bool:
        """Whether these are not what is known, continued. A hash stands for all that precedes it: the last tells."""
        last = self.count - 1
        return last >= 0 and (len(block_hashes) <= last or block_hashes[last] != self._hashes[last].tobytes())


def _grown(array: npt.NDArray[Any], used: int, added: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``array``, whose first ``used`` rows count, with ``added`` behind them; a new one with room if it is full."""
    if not used:
        return added
    if used + len(added) > len(array):
        larger = np.empty((2 * (used + len(added)), added.shape[1]), added.dtype)
        larger[:used] = array[:used]
        array = larger
    array[used : used + len(added)] = added
    return array


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
