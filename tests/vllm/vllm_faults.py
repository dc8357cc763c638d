"""Faults that tests plant in a running engine's process; called by ``Engine("call", function=…, arguments=…)``."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from typing import Any

from tierkv.transfer.cpu import CpuCopyEngine


def _before_copies(store: bool, act: Any) -> None:
    """Call ``act`` on the copying thread before each copy of that direction."""
    copy = CpuCopyEngine._copy

    def wrapped(self: CpuCopyEngine, transfer: Any, begun: Any) -> tuple[int, float]:
        if transfer.store == store:
            act()
        return copy(self, transfer, begun)

    CpuCopyEngine._copy = wrapped  # type: ignore[method-assign]


def slow_copies(process: Any, store: bool, seconds: float) -> None:
    """Each copy starts late: whoever does not wait for it changes its source or uses its target too early."""
    _before_copies(store, lambda: time.sleep(seconds))


def fail_copies(process: Any, store: bool, which: list[int]) -> None:
    """The copies of these numbers, counted from now on, fail."""
    numbers = itertools.count()

    def fail() -> None:
        if next(numbers) in which:
            raise OSError("this copy was made to fail")

    _before_copies(store, fail)


# ---- what tests want to know of the process


def books(process: Any) -> dict[str, Any]:
    """The manager's counts, the faults of its tiers, and what the process holds.

    unanswered: jobs that a tier may still report. silent: slots of those that none will ever report.
    """
    manager = _manager(process)
    tiers = [lane.tier for lane in manager._lanes]
    silent = {job for tier in tiers for job in getattr(tier, "silent", ())}
    faults: Counter[str] = Counter()
    for tier in tiers:
        faults.update(getattr(tier, "faults", {}))
    with manager._lock:
        jobs = dict(manager._jobs._jobs)
    slots = {slot for number, job in jobs.items() if number in silent for slot in job.slots.tolist()}
    return {
        "counts": dict(manager.counts()),
        "faults": dict(faults),
        "unanswered": len(jobs.keys() - silent) + manager._cascades.queued,
        "silent": len(slots),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def blocks_of_requests(process: Any) -> dict[str, tuple[str, int]]:
    """For each request that is not over, its status and how many device blocks it has."""
    scheduler = process._core.scheduler
    held = scheduler.kv_cache_manager.get_block_ids
    return {
        request_id: (request.status.name, sum(map(len, held(request_id))))
        for request_id, request in scheduler.requests.items()
    }


def _manager(process: Any) -> Any:
    return process._core.scheduler.connector.scheduler_half.manager
