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
    behind it, 0 for all. For each layer, in order: its name; its page, as planes ``name[heads][cells][bytes]`` with the
    heads of all ranks; and what a cell is made of.
    """

    kind: str
    tokens_per_block: int
    tokens_per_chunk: int
    window: int
    layers: tuple[str, ...]
    pages: tuple[str, ...]
    cells: tuple[str, ...]


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
    tails = hashes[:, -KEY_BYTES:]
    # Words are read where they lie if they lie on words.
    words = np.ascontiguousarray(hashes).view("<u8")[:, -2:] if hashes.shape[1] % 8 == 0 else None
    return (np.ascontiguousarray(tails).view("<u8") if words is None else words) ^ group_mask(space, group)


def make_chunks(space: Space, group: int, hashes: Sequence[bytes]) -> Chunks:
    """The chunks of one group, named by the hashes of their last hash blocks."""
    array = hash_array(hashes)
    return Chunks(space, make_keys(space, group, array), np.broadcast_to(np.int32(group), len(hashes)), array)


class RequestChunks:
    """The complete chunks of one request, by group; they only grow, and a hash is converted once, when it is needed.

    A prompt may have 65,536 hashes of which only the first is looked at, on the thread that all requests wait for.

    Thread safety: ``extend`` and ``GroupChunks.upto`` and ``take`` are called by one thread at a time; ``slice`` and
    ``len`` by any.
    """

    def __init__(self, space: Space, groups: Sequence[int], hashes_per_chunk: Sequence[int]) -> None:
        """
        Args:
            groups: the groups' ids. hashes_per_chunk: for each, how many block hashes a chunk spans.
        """
        self.space = space
        #: Changes when the hashes are not what they were, continued.
        self.version = 0
        self._source: Sequence[bytes] = ()
        self._groups = tuple(groups)
        self._per_chunk = tuple(hashes_per_chunk)
        self._converted = [make_chunks(space, group, []) for group in groups]
        #: For each group, its chunks from the first token on, as far as they are complete.
        self.chunks = tuple(GroupChunks(self, n, 0) for n in range(len(self._groups)))

    def extend(self, block_hashes: Sequence[bytes]) -> None:
        """The request's hashes are ``block_hashes`` by now. The sequence is kept; it may only be appended to.

        A request that was cut back, and may have gone on otherwise, is named anew.
        """
        self._source = block_hashes
        if any(map(self._was_cut, range(len(self._groups)))):
            self.version += 1
            self._converted = [make_chunks(self.space, group, []) for group in self._groups]
        counts = [len(block_hashes) // per_chunk for per_chunk in self._per_chunk]
        if counts != [len(chunks) for chunks in self.chunks] or self.chunks[0].version != self.version:
            self.chunks = tuple(GroupChunks(self, n, count) for n, count in enumerate(counts))

    def upto(self, n: int, count: int) -> Chunks:
        """The first ``count`` chunks of group ``n``, or more, converted for good."""
        known = self._converted[n]
        if count > len(known):
            # At least as much again, so that a prompt that is asked for bit by bit is not copied each time.
            count = max(count, min(2 * len(known), len(self.chunks[n])))
            added = self.slice(n, len(known), count)
            self._converted[n] = known = Chunks.concat([known, added]) if len(known) else added
        return known

    def slice(self, n: int, first: int, last: int) -> Chunks:
        """The chunks ``first`` to ``last`` - 1 of group ``n``, converted for the caller alone."""
        per_chunk, source = self._per_chunk[n], self._source
        if first or last * per_chunk < len(source) or per_chunk > 1:
            source = source[(first + 1) * per_chunk - 1 : last * per_chunk : per_chunk]
        return make_chunks(self.space, self._groups[n], source)

    def _was_cut(self, n: int) -> bool:
        """Whether the hashes are not what is known, continued. A hash stands for all before it: the last one tells."""
        known = self._converted[n]
        last = len(known) * self._per_chunk[n] - 1
        return last >= 0 and (len(self._source) <= last or self._source[last] != known.hashes[-1].tobytes())


class GroupChunks:
    """The chunks of one group of a request, as many as there were when this was made. As ``Chunks``, converted late.

    Thread safety: as ``RequestChunks``.
    """

    __slots__ = ("_count", "_n", "_request", "space", "version")

    def __init__(self, request: RequestChunks, n: int, count: int) -> None:
        self.space = request.space
        self.version = request.version
        self._request = request
        self._n = n
        self._count = count

    def __len__(self) -> int:
        return self._count

    def upto(self, count: int) -> Chunks:
        """The first ``count`` chunks, or more."""
        return self._request.upto(self._n, count)

    def slice(self, first: int, last: int) -> Chunks:
        """The chunks ``first`` to ``last`` - 1."""
        return self._request.slice(self._n, first, last)

    def take(self, indices: Sequence[int] | npt.NDArray[np.intp]) -> Chunks:
        """The chunks at ``indices``, in that order; as views if these are a range."""
        if isinstance(indices, range) and indices.step == 1:
            return self.upto(indices.stop).slice(indices.start, indices.stop)
        return self.upto(max(indices, default=-1) + 1).take(indices)


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
