"""What tierkv counts: one table, and the counters themselves.

Names are without prefix here; exporters add theirs. Each counter only grows.
"""

from __future__ import annotations

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "lookups": "Requests whose prefix was looked up.",
    "hit_chunks_host": "Chunks of served prefixes that were in the host cache when they were looked up.",
    "hit_chunks_tier": "Chunks of served prefixes that a tier had.",
    "answers_pending": "Answers to a lookup that were: not known yet, ask again.",
    "answers_absent": "Answers to a lookup that were: nothing to load.",
    "lookups_failed": "Calls by which a tier was asked, and raised.",
    "lookup_timeouts": "Lookups that ended at their deadline, unanswered tiers counting as misses.",
    "promotions": "Chunks that tiers were asked to load.",
    "promotions_failed": "Chunks that a tier could not load after all; each is a miss.",
    "promotions_late": "Chunks that a tier had not loaded by the deadline; each is a miss.",
    "waits_given_up": "Chunks whose copy from the device a request stopped waiting for.",
    "hits_expired": "Times a request's prefix was let go because the engine did not come for it.",
    "waits_for_room": "Times a request had to wait because others held the host cache pinned.",
    "promotions_no_room": "Times a served prefix was cut short because the host cache had no room.",
    "stores": "Chunks stored from the device to the host.",
    "stores_failed": "Chunks whose copy from the device failed or was cancelled.",
    "stores_no_room": "Chunks not stored because every slot of the host cache was pinned.",
    "stores_below_threshold": "Chunks not stored because they were not yet seen store_threshold times.",
    "cascades": "Chunks handed to tiers, once a tier.",
    "cascades_failed": "Chunks that a tier could not store.",
    "cascades_late": "Chunks that a tier had not stored by the deadline.",
    "cascades_cut_off": "Chunks not handed to a tier because it keeps failing.",
    "cascades_throttled": "Chunks not handed to a tier because it has become slow.",
    "cascades_missed": "Chunks evicted from the host before a slow tier could be handed them.",
    "loads": "Chunks loaded from the host to the device.",
    "loads_failed": "Loads to the device that failed; the request recomputes.",
    "evictions": "Chunks evicted from the host cache.",
    "ready_ms": "Milliseconds until all of the host region was present.",
    "resets": "Times the cache was reset or invalidated.",
}


class Metrics:
    """The counters of one manager. Thread safety: changed under the manager's lock only."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)
        self.reasons: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        self._values[name] += amount

    def add_reason(self, reason: str) -> None:
        """Count why a tier did not deliver or keep a chunk: ``checksum``, ``absent``, ``enospc`` …"""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """All counters, and the reasons as ``reason:<word>``."""
        return {**self._values, **{f"reason:{word}": count for word, count in self.reasons.items()}}

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{k}={v}' for k, v in self.snapshot().items() if v)})"
