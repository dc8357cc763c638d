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


#: What threads of an fs tier call, and what they called before ``break_disk``.
_CALLS = ("open", "stat", "preadv", "writev", "rename")
_working: dict[str, Any] = {}


def break_disk(process: Any, number: int | None, names: list[str]) -> None:
    """From now on these calls fail with errno ``number``, or take until ``mend_disk``, for the threads of fs tiers."""
    mended = _working["mended"] = threading.Event()

    def broken(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("tierkv-fs-"):
                if number is not None:
                    raise OSError(number, os.strerror(number))
                mended.wait()
            return call(*args, **kwargs)

        return wrapped

    for name in names or _CALLS:
        _working[name] = getattr(os, name)
        setattr(os, name, broken(_working[name]))


def mend_disk(process: Any) -> None:
    """The disk works again."""
    mended = _working.pop("mended")
    for name in list(_working):
        setattr(os, name, _working.pop(name))
    mended.set()


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


def breakers(process: Any) -> dict[str, tuple[str, int]]:
    """Of the first tier, for what it is used: the state of the breaker, and how often it has opened."""
    manager = _manager(process)
    with manager._lock:
        lane = manager._lanes[0]
        uses = {"asking": lane.asking, "reading": lane.reading, "writing": lane.writing}
        return {use: (breaker.state, breaker.opened) for use, breaker in uses.items()}


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
