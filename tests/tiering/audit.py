"""The books of a manager: every pin has a holder, every slot that is written has one writer, every ready byte is right.

Reads what is inside, on purpose: what a test would see from outside is that a wrong byte is served now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tiering_harness import Bench, content

from tierkv.host.slots import CLASS, DEAD, EVICTABLE, FREE, ORPHAN, PINNED, READY, WRITING
from tierkv.tiering.cascades import TIER_SHARE
from tierkv.tiering.manager import StoreTicket, TieringManager
from tierkv.types import ChunkName


def audit(
    bench: Bench,
    tickets: Sequence[StoreTicket] = (),
    stored: set[ChunkName] | None = None,
    contents: dict[ChunkName, bytes] | None = None,
) -> None:
    """Check the books as they are now.

    Args:
        tickets: the stores that have been begun and not finished.
        stored: what may be in the host cache; None: anything.
        contents: what is known of the bytes of chunks; more is added.
    """
    manager = bench.manager
    with manager._lock:
        _check_pins(manager, tickets)
        _check_counts(manager)
        _check_requests(manager)
        _check_lanes(manager)
        _check_ready(bench, stored, {} if contents is None else contents)


def _check_pins(manager: TieringManager, tickets: Sequence[StoreTicket]) -> None:
    """Each slot is pinned as often as it has holders, and is being written if, and only if, it has one writer."""
    records = manager._cache._state.records
    holders, writers = np.zeros(len(records), np.int64), np.zeros(len(records), np.int64)
    for ticket in tickets:
        holders[ticket.slots] += 1
        writers[ticket.slots] += 1
    for job in manager._jobs._jobs.values():
        assert len(np.unique(job.slots)) == len(job.slots)
        holders[job.slots] += 1
        writers[job.slots] += job.load
        if job.load and job.late:
            assert (records["state"][job.slots] == ORPHAN).all(), "what is late has been forgotten"
    for hit in manager._hits.values():
        held = np.concatenate(hit.held)
        held = held[held >= 0]
        assert len(np.unique(held)) == len(held)
        holders[held] += 1
    assert writers.max(initial=0) <= 1, "two write to one slot"
    being_written = (records["state"] == WRITING) | (records["state"] == ORPHAN)
    assert (being_written == (writers == 1)).all()
    # Those that wait for their checksum have one pin more.
    extra = records["pins"] - holders
    assert (extra >= 0).all() and extra.sum() == manager._cascades.queued, f"pins without a holder: {extra}"
    assert (records["state"][holders > 0] != FREE).all()


def _check_counts(manager: TieringManager) -> None:
    cache = manager._cache
    state, records = cache._state, cache._state.records
    used = np.flatnonzero(records["state"] != FREE)
    classes = state.slabs[CLASS, np.arange(len(records)) // state.division[0]]
    assert (classes[used] >= 0).all()
    for size_class in range(len(cache.plan.class_bytes)):
        mine = records[(classes == size_class)]
        for number in (WRITING, READY, DEAD, ORPHAN):
            assert state.counts[size_class, number] == (mine["state"] == number).sum()
        assert state.counts[size_class, PINNED] == (mine["pins"] > 0).sum()
        assert state.counts[size_class, EVICTABLE] == ((mine["state"] == READY) & (mine["pins"] == 0)).sum()
    if len(cache.plan.class_bytes) == 1:
        assert cache.free + len(used) == cache.num_slots
    keys = np.stack([records["word0"], records["word1"]], axis=1)
    in_index = (records["state"] == READY) | (records["state"] == WRITING)
    assert ((cache.find(keys) == np.arange(len(records))) == in_index).all()


def _check_requests(manager: TieringManager) -> None:
    waiting = total = 0
    for hit in manager._hits.values():
        pinned = sum(int((held >= 0).sum() * size) for held, size in zip(hit.held, manager._slot_bytes, strict=True))
        assert hit.nbytes == pinned
        total += pinned
        waiting += 0 if hit.loading else pinned
        if hit.answer is not None and hit.answer > hit.query.local:
            for held, want in zip(hit.held, hit.ranges, strict=True):
                assert (held[want.first : want.last] >= 0).all(), "an answer that is not held"
    assert (manager._held_bytes, manager._waiting_bytes) == (total, waiting)


def _check_lanes(manager: TieringManager) -> None:
    jobs = manager._jobs._jobs.values()
    share = max(1, int(TIER_SHARE * manager.num_slots / max(1, len(manager._lanes))))
    for lane in manager._lanes:
        mine = [job for job in jobs if job.lane is lane]
        assert lane.late == sum(len(job.slots) for job in mine if job.load and job.late)
        assert lane.held == sum(len(job.slots) for job in mine if not job.load) <= share
        assert lane.waiting == sum(len(slots) for slots, _ in lane.backlog) <= manager.num_slots


def _check_ready(bench: Bench, stored: set[ChunkName] | None, contents: dict[ChunkName, bytes]) -> None:
    cache = bench.manager._cache
    slots = np.flatnonzero(cache._state.records["state"] == READY)
    if not len(slots):
        return
    chunks, offsets = cache.chunks(slots), cache.offset(slots).tolist()
    assert chunks.space == bench.manager.space
    for i, offset in enumerate(offsets):
        name = chunks.name(i)
        assert stored is None or name in stored, "in the host cache, and was never stored"
        size = bench.model.chunk_bytes(name.group)
        if name not in contents:
            contents[name] = content(name, size)
        assert bytes(bench.region.view[offset : offset + size]) == contents[name]
