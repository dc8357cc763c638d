"""The configuration of the fs tier."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tierkv.config import NonNegative, Positive, Seconds, TierConfig
from tierkv.types import Locality


class FsTierConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """root_dir: where records lie; made if missing. Processes and hosts that share it share chunks.

    layout: ``files``, a file per chunk; or ``segments``, many chunks in a few large files, for a disk of one's own
        and one process at a time.
    capacity_bytes: of everything below the root, whichever process has written it; what was not used for the longest
        time goes first. None: no bound. For ``segments`` it must be given, and is taken at the start.
    min_free_bytes: leave at least so much of the file system free.
    generation_ttl_s: a generation of which nothing was used for so long goes before everything else.
    n_read_threads, n_write_threads: how many chunks are read, and written, at the same time.
    direct_reads: read past the page cache (O_DIRECT) what is not in it, where that works.
    fsync: flush each record before it becomes visible, so that a power cut leaves no torn one (which
        would be noticed at its load).
    locality: whether the root is this host's, for requests that choose (``kv_load_tiers``). None: does not say.
    enable_kv_events: accepted for vLLM's sake; not used yet.
    """

    root_dir: Annotated[str, Meta(min_length=1)]
    layout: Literal["files", "segments"] = "files"
    capacity_bytes: Positive | None = None
    min_free_bytes: NonNegative = 0
    generation_ttl_s: Seconds = 86_400.0
    n_read_threads: Positive = 8
    n_write_threads: Positive = 4
    direct_reads: bool = True
    fsync: bool = False
    enable_kv_events: bool = False
    locality: Locality | None = None
