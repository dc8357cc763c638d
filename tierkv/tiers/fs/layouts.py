"""How an fs tier keeps its records: the interface of ``files`` and ``segments``, which ``FsTier`` chooses from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tierkv.tiers.io import Outcome
from tierkv.types import Chunks, Flags, LoadJob, StoreJob


class Layout(Protocol):
    """Where records lie below a root, and how they get there.

    Thread safety: any method may be called by any thread.
    """

    #: Of a job, so many chunks are given to a thread at a time, at most.
    most_chunks: int

    def has(self, chunks: Chunks, required: Flags | None = None) -> Flags:
        """For each of ``chunks``, whether a load would probably succeed; ``required`` as ``BatchLookup`` has it.

        Raises:
            OSError: it cannot tell.
        """
        ...

    def store(self, job: StoreJob, part: range) -> Iterable[Outcome]:
        """Store the chunks ``part`` of ``job``; outcomes as ``tierkv.tiers.io.Task`` says."""
        ...

    def load(self, job: LoadJob, part: range) -> Iterable[Outcome]:
        """Load the chunks ``part`` of ``job``, verified; outcomes as ``tierkv.tiers.io.Task`` says."""
        ...

    def stop(self) -> None:
        """The tier is about to be closed: let nobody wait for room any longer."""
        ...

    def close(self) -> None:
        """Let go of everything; no other method is running, or called any more."""
        ...
