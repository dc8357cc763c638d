"""The values that all parts of tierkv pass to each other.

Words are those of docs/ARCHITECTURE.md: a *chunk* is named by the hash of its last hash block, its
*group*, the *namespace* and the *generation*; its *key* is the 16 bytes that index it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
DIGEST_BYTES = 16

#: A batch of keys: shape ``(n, 2)``, C-contiguous, the 16 bytes as two little-endian words.
Keys = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Space:
    """What a chunk's name is relative to: the namespace's digest and the generation, 16 bytes each."""

    namespace: bytes
    generation: bytes

    def __post_init__(self) -> None:
        assert len(self.namespace) == DIGEST_BYTES and len(self.generation) == DIGEST_BYTES


class ChunkName(NamedTuple):
    """The full name of one chunk: what records carry and what is compared before a load."""

    space: Space
    group: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Chunks:
    """A batch of ``n`` chunks of one space.

    keys: ``(n, 2)`` uint64 · groups: ``(n,)`` int32 · hashes: ``n`` full block hashes.
    """

    space: Space
    keys: Keys
    groups: npt.NDArray[np.int32]
    hashes: Sequence[bytes]

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.groups) == len(self.hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    def name(self, index: int) -> ChunkName:
        return ChunkName(self.space, int(self.groups[index]), self.hashes[index])

    def take(self, indices: Sequence[int] | npt.NDArray[np.intp]) -> Chunks:
        """The chunks at ``indices``, in that order."""
        where = np.asarray(indices, dtype=np.intp)
        return Chunks(self.space, self.keys[where], self.groups[where], [self.hashes[i] for i in where])

    @staticmethod
    def concat(parts: Sequence[Chunks]) -> Chunks:
        """All of ``parts``, which are not empty and share one space, as one batch."""
        assert parts and all(p.space == parts[0].space for p in parts)
        return Chunks(
            parts[0].space,
            np.concatenate([p.keys for p in parts]),
            np.concatenate([p.groups for p in parts]),
            [h for p in parts for h in p.hashes],
        )


def key_list(keys: Keys) -> list[bytes]:
    """The keys as ``n`` ``bytes`` of 16, for dictionaries."""
    raw = keys.tobytes()
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a tier may know of the request that asks. ``params`` is the request's ``kv_transfer_params``."""

    request_id: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Host → tier. Chunk ``i`` is ``view[offsets[i] : offsets[i] + lengths[i]]`` of the host region.

    ``checksums[i]`` is the xxh3-64 of the payload, taken when the slot was committed.
    """

    job_id: int
    chunks: Chunks
    offsets: Offsets
    lengths: Offsets
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Tier → host, into ``view[offsets[i] : offsets[i] + lengths[i]]``."""

    job_id: int
    chunks: Chunks
    offsets: Offsets
    lengths: Offsets


@dataclass(frozen=True, slots=True)
class JobResult:
    """The one report of a job.

    ok: ``(n,)`` flags, one a chunk; for a load, ``ok[i]`` says that the bytes were verified.
    checksums: for a load, the verified xxh3-64 of each payload (0 where not ok); for a store, None.
    reasons: chunk index → the word that metrics count, for chunks that are not ok.
    """

    job_id: int
    ok: Flags
    checksums: Checksums | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)
