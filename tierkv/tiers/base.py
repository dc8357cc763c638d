"""The interface of a tier: four methods, plus optional abilities as protocols.

A tier keeps records of chunks somewhere and gives them back. It works on the host region directly,
through the ``memoryview`` that it gets at construction, and knows nothing of devices or of the engine.

The contract, which ``tierkv.testing.tier_contract`` checks for any implementation:

* ``submit_store`` and ``submit_load`` return at once and never raise for a chunk's sake; each job is
  reported by ``get_finished_jobs`` **exactly once**, whatever happens to it, ``close()`` included:
  chunks that were not started by then are not ok, with the reason ``closed``. Of a job without chunks
  there is a report too. After ``close()``, ``submit_*`` raise ``TierClosedError``.
* A tier reads (stores) or writes (loads) the bytes of a job's chunks only between its submission and
  its report.
* A load reports ``ok`` for a chunk only if the bytes are those that were stored under exactly this
  name, verified by the checksum that the store job carried. Anything else is a miss with a reason
  (``absent``, or a word of ``tierkv.tiers.record.REASONS``), and the next store of the chunk writes it anew.
* A record becomes visible whole or not at all. A chunk that is there already is not written again,
  and reported ``ok``.
* ``lookup`` may block: it is called on a lookup thread of tierkv, never on the engine's.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from tierkv.config import TierConfig
from tierkv.types import ChunkName, Chunks, Flags, JobResult, LoadJob, Locality, Medium, RequestContext, StoreJob


class Deadlines(NamedTuple):
    """After so many seconds nobody waits for a lookup, a load or a store any more; a tier need not try for longer."""

    lookup_s: float = 10.0
    load_s: float = 60.0
    store_s: float = 60.0


DEADLINES = Deadlines()


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier gets from tierkv.

    name: unique among the tiers of one manager (``fs``, ``fs-2``); used in thread names and metrics.
    view: the host region, writable, one byte an item.
    namespace: the namespace's digest, 16 bytes. description: its fields, for people (JSON-able).
    wake: to be called, from any thread, when a job has finished, so that it is collected at once;
    without it, jobs are collected by polling. It does not raise. Call it without holding a lock, and
    never from ``submit_*``, whose caller may hold the lock that it takes.
    chunk_bytes: for each group, the bytes of its chunks; for tiers that cut space up beforehand.
    """

    name: str
    view: memoryview
    namespace: bytes
    description: dict[str, Any]
    wake: Callable[[], None] = lambda: None
    chunk_bytes: tuple[int, ...] = ()
    deadlines: Deadlines = DEADLINES


class Tier(abc.ABC):
    """A secondary tier.

    Thread safety: ``submit_*`` and ``get_finished_jobs`` are called by one thread at a time (under the
    manager's lock); ``lookup`` by lookup threads, concurrently with them and with itself.
    """

    #: The struct that this tier's configuration is decoded into; unknown fields are errors.
    Config: ClassVar[type[TierConfig]] = TierConfig
    #: Where the chunks are, in the engine's terms: "host", "disk", "p2p" or "external_unspecified".
    hit_source: ClassVar[str] = "external_unspecified"
    #: What the chunks are kept on, and whether that is this host's; None: unknown. Requests choose tiers by them
    #: (``RequestContext.load_tiers``); an instance may have its own.
    medium: Medium | None = None
    locality: Locality | None = None
    #: Whether it is to be given stores; an instance that only reads says no.
    stores: bool = True

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        """Open the tier.

        Raises:
            ConfigError: the configuration cannot be used here (a directory that cannot be written);
                ``field`` is the field's name within this tier's configuration.
        """
        self.config = config
        self.context = context

    @abc.abstractmethod
    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        """Whether a load of ``name`` would probably succeed. May block; never called on the engine's thread."""

    @abc.abstractmethod
    def submit_store(self, job: StoreJob) -> None:
        """Start to store the chunks of ``job``."""

    @abc.abstractmethod
    def submit_load(self, job: LoadJob) -> None:
        """Start to load the chunks of ``job``."""

    @abc.abstractmethod
    def get_finished_jobs(self) -> list[JobResult]:
        """The jobs that have ended since the last call, each exactly once. Never blocks."""

    def close(self) -> None:  # noqa: B027 - a tier without resources need not override it
        """Stop. Returns when the tier touches the host region no more; unreported jobs can still be collected."""


@runtime_checkable
class BatchLookup(Protocol):
    """A tier that answers for many chunks at once, cheaper than one by one."""

    def lookup_batch(self, chunks: Chunks, request: RequestContext, required: Flags | None = None) -> Sequence[bool]:
        """One answer a chunk, as ``lookup`` gives them.

        Args:
            required: ``(n,)`` flags. What stands behind the first required chunk that is missing is of no use: it need
                not be looked for, and counts as missing. None: all is looked for.
        """
        ...
