"""The values that all parts of tierkv pass to each other.

Words are those of docs/ARCHITECTURE.md: a *chunk* is named by the hash of its last hash block, its
*group*, the *namespace* and the *generation*; its *key* is the 16 bytes that index it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
DIGEST_BYTES = 16

#: A batch of keys: shape ``(n, 2)``, C-contiguous, the 16 bytes as two little-endian words.
Keys = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

#: A batch of block hashes of one length: shape ``(n, bytes)``.
Hashes = npt.NDArray[np.uint8]


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

    keys: ``(n, 2)`` uint64 · groups: ``(n,)`` int32 · hashes: ``(n, bytes)`` uint8, the full block hashes.
    All may be views of arrays that others read, too: they are not written to.
    """

    space: Space
    keys: Keys
    groups: npt.NDArray[np.int32]
    hashes: Hashes

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.groups) == len(self.hashes)

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> ChunkName:
        return ChunkName(self.space, int(self.groups[index]), self.hashes[index].tobytes())

    def take(self, indices: Sequence[int] | npt.NDArray[np.intp]) -> Chunks:
        """The chunks at ``indices``, in that order."""
        where = np.asarray(indices, dtype=np.intp)
        return Chunks(self.space, self.keys[where], self.groups[where], self.hashes[where])

    def slice(self, first: int, last: int) -> Chunks:
        """The chunks ``first`` to ``last`` - 1, as views."""
        return Chunks(self.space, self.keys[first:last], self.groups[first:last], self.hashes[first:last])

    def upto(self, count: int) -> Chunks:
        """The first ``count`` chunks, or more."""
        return self

    @property
    def version(self) -> int:
        """Always 0: see ``GroupChunks``."""
        return 0

    @staticmethod
    def concat(parts: Sequence[Chunks]) -> Chunks:
        """All of ``parts``, which are not empty and share one space, as one batch."""
        assert parts
        if len(parts) > 1:
            assert all(p.space == parts[0].space for p in parts)
            parts = [p for p in parts if len(p)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        return Chunks(
            parts[0].space,
            np.concatenate([p.keys for p in parts]),
            np.concatenate([p.groups for p in parts]),
            np.concatenate([p.hashes for p in parts]),
        )


def every(flags: Flags) -> bool:
    """Whether all of ``flags`` are set. (``flags.all()`` takes three times as long for a batch.)"""
    return int(np.count_nonzero(flags)) == len(flags)


def filled(count: int, value: int, dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
    """As ``np.full``, in half the time for a batch."""
    array = np.empty(count, dtype)
    array.fill(value)
    return array


def key_list(keys: Keys) -> list[bytes]:
    """The keys as ``n`` ``bytes`` of 16, for dictionaries."""
    raw = keys.tobytes()
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]


#: What a tier keeps its chunks on, and whether that is this host's, in vLLM's words (``kv_load_tiers`` of a request).
Medium = Literal["CPU", "STORAGE"]
Locality = Literal["LOCAL", "REMOTE"]


class TierMatch(NamedTuple):
    """A kind of tiers. None: of any medium, or anywhere."""

    medium: Medium | None = None
    locality: Locality | None = None

    def fits(self, medium: Medium | None, locality: Locality | None) -> bool:
        """Whether a tier is of this kind. One that does not say (None) may be."""
        return (None in (self.medium, medium) or self.medium == medium) and (
            None in (self.locality, locality) or self.locality == locality
        )


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Which tiers may be asked: those of one of the kinds ``matches``; without any, none. ``matches`` None: all."""

    matches: tuple[TierMatch, ...] | None = None

    def allows(self, medium: Medium | None, locality: Locality | None) -> bool:
        """Whether a tier with this ``medium`` and ``locality`` may be asked."""
        return self.matches is None or any(match.fits(medium, locality) for match in self.matches)


ANY_TIER = TierFilter()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a tier may know of the request that asks.

    params: the request's ``kv_transfer_params``. load_tiers: the tiers that it may be served from; what lies in the
        host cache, wherever it came from, serves every request.
    """

    request_id: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    load_tiers: TierFilter = ANY_TIER


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
