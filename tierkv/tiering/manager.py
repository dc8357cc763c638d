"""The tiering manager: which prefix can be served, what goes to the host and what goes on to the tiers.

Life of a chunk, in the order of the methods:

* ``begin_store`` reserves slots for chunks that the device has computed; the workers copy; ``finish_store``
  commits them and cascades them to all tiers from the host copy (``cascades.py``).
* ``lookup`` is asked by a request, again and again until the answer is not None: the host cache is looked
  up, beyond it the tiers are asked off this thread, what they have is promoted (``promotions.py``), and
  once the whole prefix lies in pinned slots, and only then, the boundary is returned.
* ``begin_load`` says where the chunks are; the workers copy; ``finish_load`` drops the pins.

No method blocks on a tier. Tiers are collected by the thread ``tierkv-manager``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cachetools
import numpy as np
import numpy.typing as npt

from tierkv.config import CacheConfig
from tierkv.events import Trace
from tierkv.host.cache import ABSENT, READY, WRITING, HostCache
from tierkv.keys import FIRST_GENERATION, new_generation
from tierkv.layout.spec import ModelSpec
from tierkv.metrics import Metrics
from tierkv.tiering.cascades import Cascades
from tierkv.tiering.hits import best_boundary, fitting_limit, needed
from tierkv.tiering.jobs import JobTable, LoadRecord, checked
from tierkv.tiering.promotions import Promotions
from tierkv.tiering.requests import NOWHERE, UNKNOWN, Hit, Query, concat_asked
from tierkv.tiers.base import Tier
from tierkv.tiers.lookups import LookupPool
from tierkv.types import Chunks, Flags, Offsets, Space, key_list

logger = logging.getLogger(__name__)

#: The share of the slots that loads which a tier has not delivered in time may hold before it is not asked any more.
OVERDUE_SHARE = 0.125

#: How often tiers that do not call ``wake`` are asked for finished jobs.
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class StoreTicket:
    """A store that has been planned: chunk ``indices[i]`` of what was offered goes to byte ``offsets[i]``."""

    indices: npt.NDArray[np.intp]
    slots: Offsets
    offsets: Offsets
    request_id: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where a request's prefix lies.

    offsets: per group, the byte offset of each chunk in the region, or -1.
    sources: the tokens that the hit serves, by where they came from: ``host``, or a tier's ``hit_source``.
    """

    boundary: int
    offsets: tuple[Offsets, ...]
    sources: dict[str, int]


class TieringManager:
    """The primary tier and the secondary ones as one cache.

    Thread safety: every method may be called by any thread; all state is under one lock, which is never
    held during I/O.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: ModelSpec,
        cache: HostCache,
        view: memoryview,
        tiers: Sequence[Tier],
        namespace: bytes,
        *,
        align: int,
        trace: Trace,
        wake: threading.Event | None = None,
    ) -> None:
        """
        Args:
            view: the host region, whose slots ``cache`` manages.
            tiers: asked and written to in this order; their contexts' ``wake`` sets ``wake``.
            align: boundaries of hits are multiples of this many tokens.
        """
        self._config = config
        self._model = model
        self._groups = model.groups
        self._cache = cache
        self._tiers = list(tiers)
        self._align = align
        self._trace = trace
        self._lock = threading.Lock()
        self._wake = wake if wake is not None else threading.Event()
        self._closing = False
        self.space = Space(namespace, FIRST_GENERATION)
        self.metrics = Metrics()
        self._hits: dict[str, Hit] = {}
        self._barred: set[str] = set()
        self._sightings: cachetools.LRUCache[bytes, int] = cachetools.LRUCache(config.max_tracker_size)
        chunk_bytes = np.array([model.chunk_bytes(i) for i in range(len(model.groups))], np.int64)
        self._jobs = JobTable()
        self._promotions = Promotions(cache, self._tiers, self._jobs, chunk_bytes, self.metrics)
        self._cascades = Cascades(
            cache, view, self._tiers, self._jobs, chunk_bytes, self.metrics, self._lock, self._wake
        )
        self._lookups = LookupPool()
        self._thread = threading.Thread(target=self._run, name="tierkv-manager", daemon=True)
        if self._tiers:
            self._thread.start()

    # ---- store: device → host → tiers

    def begin_store(self, chunks: Chunks, request_id: str) -> StoreTicket | None:
        """Reserve slots for those of ``chunks`` that the host cache has not, as far as there is room.

        Returns:
            What to copy; ``finish_store`` must be called with it. None if there is nothing to copy.
        """
        with self._lock:
            if chunks.space != self.space:
                return None
            states = self._cache.states(chunks.keys)
            self._cache.touch(chunks.keys[states == READY])
            fresh = self._seen_often(chunks, np.flatnonzero(states == ABSENT))
            slots = self._cache.reserve(chunks.take(fresh)) if len(fresh) else np.empty(0, np.int64)
            self._count_evictions()
            placed = slots >= 0
            self.metrics.add("stores_no_room", int((~placed).sum()))
            if not placed.any():
                return None
            slots = slots[placed]
            ticket = StoreTicket(fresh[placed], slots, self._cache.offset(slots), request_id)
        self._trace.emit("store_planned", request=request_id, chunks=len(ticket.slots))
        return ticket

    def finish_store(self, ticket: StoreTicket, ok: bool) -> None:
        """End a store: all ranks have copied, or one could not. From here the device blocks are not needed."""
        with self._lock:
            if ok:
                ready = ticket.slots[self._cache.commit(ticket.slots)]
                self.metrics.add("stores", len(ready))
                self._cascades.add(ready)
            else:
                self._cache.abort(ticket.slots)
                self.metrics.add("stores_failed", len(ticket.slots))
            self._stir()
        self._trace.emit("store_copied", request=ticket.request_id, chunks=len(ticket.slots), ok=ok)

    # ---- load: tiers → host → device

    def lookup(self, query: Query) -> int | None:
        """How many tokens of the request's prefix can be served, those on the device included.

        Returns:
            The boundary, once every chunk that it needs beyond ``query.local`` lies in a pinned slot;
            ``query.local`` if there is nothing to load; None if this is not known yet: ask again.
        """
        request_id = query.context.request_id
        with self._lock:
            if request_id in self._barred or query.space != self.space:
                return query.local
            hit = self._hits.get(request_id)
            if hit is None:
                hit = self._hits[request_id] = Hit(query)
                self.metrics.add("lookups")
            elif not hit.query.same_as(query):
                hit.restart(query)
            now = time.monotonic()
            if hit.dirty or hit.due(now):
                hit.dirty = False
                hit.answer = self._advance(hit, now)
            return hit.answer

    def begin_load(self, request_id: str) -> LoadPlan | None:
        """Where the prefix lies that ``lookup`` has announced. None if it is gone: after a reset.

        ``finish_load`` must be called for a plan.
        """
        with self._lock:
            hit = self._hits.get(request_id)
            if hit is None or hit.answer is None or hit.answer <= hit.query.local:
                return None
            hit.loading = True
            promoted = min(hit.promoted, len(hit.pins))
            self.metrics.add("hit_chunks_tier", promoted)
            self.metrics.add("hit_chunks_host", len(hit.pins) - promoted)
            offsets = tuple(np.where(s >= 0, self._cache.offset(s), -1) for s in hit.slots)
            plan = LoadPlan(hit.answer, offsets, self._sources(hit, hit.answer))
        self._trace.emit("load_planned", request=request_id, chunks=len(hit.pins))
        return plan

    def finish_load(self, request_id: str, ok: bool) -> None:
        """End a load. After a failed one the host copies are forgotten and the request gets no more hits."""
        with self._lock:
            hit = self._hits.pop(request_id, None)
            if hit is None:
                return
            slots = np.fromiter(sorted(hit.pins), np.int64, len(hit.pins))
            if ok:
                self.metrics.add("loads", len(slots))
                for chunks, where in zip(hit.query.chunks, hit.slots, strict=True):
                    self._cache.touch(chunks.keys[where >= 0])
            else:
                self.metrics.add("loads_failed")
                self._barred.add(request_id)
                self._cache.forget(slots)
            self._cache.unpin(slots)
            self._stir()
        self._trace.emit("loaded", request=request_id, chunks=len(slots), ok=ok)

    def release(self, request_id: str) -> None:
        """The request was scheduled without a load: it holds nothing any more. Not while it is loading."""
        with self._lock:
            hit = self._hits.get(request_id)
            if hit is not None and not hit.loading:
                self._drop(request_id)

    def finish_request(self, request_id: str) -> None:
        """The request has ended or was aborted. A load that still runs keeps its pins until it has ended."""
        self.release(request_id)
        with self._lock:
            self._barred.discard(request_id)

    # ---- the whole cache

    def reset(self, scope: str | None = None, generation: str | None = None) -> None:
        """Forget what is in the host and, with scope ``all``, never serve what any tier has until now.

        Stores that are under way are dropped when they end; loads that are under way go on.

        Args:
            scope: ``all`` or ``host``; None for the configured one.
            generation: a name for what comes now, so that replicas agree; random otherwise.
        """
        with self._lock:
            for request_id in [r for r, hit in self._hits.items() if not hit.loading]:
                self._drop(request_id)
            self._cache.clear()
            if (scope or self._config.reset_scope) == "all":
                self.space = Space(self.space.namespace, new_generation(generation))
            self.metrics.add("resets")

    def invalidate(self, name: str | None = None) -> None:
        """The weights have changed: nothing that is stored now is served again (to this generation)."""
        self.reset("all", name)

    def close(self) -> None:
        """Stop the threads and close the tiers; the region may go afterwards."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._cascades.close()
        self._lookups.close()
        for tier in self._tiers:
            try:
                tier.close()
            except Exception:  # a user's tier may raise anything; the others are to be closed all the same
                logger.exception("tier %s failed to close", tier.context.name)
        with self._lock:
            self._collect()
        self._trace.close()

    @property
    def num_slots(self) -> int:
        return self._cache.num_slots

    @property
    def idle(self) -> bool:
        """Whether no tier has a job and nothing waits to be cascaded."""
        with self._lock:
            return not self._jobs and not self._cascades.queued

    def counts(self) -> Mapping[str, int]:
        """Counters and the present numbers of slots, requests and jobs."""
        with self._lock:
            cache = self._cache
            return {
                **self.metrics.snapshot(),
                "slots_free": cache.free,
                "slots_ready": cache.ready,
                "slots_writing": cache.writing,
                "slots_pinned": cache.pinned,
                "requests": len(self._hits),
                "jobs": len(self._jobs),
            }

    def __repr__(self) -> str:
        return f"TieringManager(hits={len(self._hits)}, jobs={len(self._jobs)}, {self._cache!r}, {self.metrics!r})"

    # ---- inside, under the lock

    def _advance(self, hit: Hit, now: float) -> int | None:
        """Bring ``hit`` as far as it goes without waiting; the answer, or None while something is under way."""
        if hit.ticket is not None:
            if not hit.ticket.done and now < hit.lookup_deadline:
                return None
            if not hit.ticket.done:
                self.metrics.add("lookup_timeouts")
            hit.absorb_ticket()
        if hit.load_deadline is not None and now >= hit.load_deadline:
            self._stop_waiting(hit)
        limit = hit.query.limit
        while True:
            states = [self._cache.states(c.keys) for c in hit.query.chunks]
            boundary = best_boundary(self._groups, self._usable(hit, states), hit.query.local, limit, self._align)
            wanted = self._masks(hit, boundary)
            unknown = [(s == ABSENT) & (v == UNKNOWN) for s, v in zip(states, hit.verdicts, strict=True)]
            if self._tiers and any((w & u).any() for w, u in zip(wanted, unknown, strict=True)):
                self._ask_tiers(hit, unknown, boundary, now)
                return None
            self._pin(hit, [w & (s != ABSENT) for w, s in zip(wanted, states, strict=True)])
            missing = [w & (s == ABSENT) for w, s in zip(wanted, states, strict=True)]
            count = sum(int(m.sum()) for m in missing)
            room = self._cache.free + self._cache.evictable
            if count <= room:
                break
            if self._may_wait_for_room(hit, now):
                return None
            self.metrics.add("promotions_no_room")
            limit = fitting_limit(self._groups, missing, hit.query.local, boundary, room, self._align)
        if count and self._older_one_waits(hit) and self._may_wait_for_room(hit, now):
            return None
        hit.room_deadline = None
        if count:
            self._promote(hit, missing, now)
            states = [self._cache.states(c.keys) for c in hit.query.chunks]
        self._settle(hit, wanted)
        if any((w & (s == WRITING)).any() for w, s in zip(wanted, states, strict=True)):
            hit.load_deadline = hit.load_deadline or now + self._config.load_timeout_s
            return None
        hit.load_deadline = None
        if boundary > hit.query.local:
            self._trace.emit("promoted", request=hit.query.context.request_id, chunks=len(hit.pins))
        return boundary

    def _sources(self, hit: Hit, boundary: int) -> dict[str, int]:
        """Tokens by source, by the first group: one without a window, if there is one, has a chunk for each."""
        first = min(range(len(self._groups)), key=lambda n: self._groups[n].window > 0)
        size, local = self._groups[first].tokens_per_chunk, hit.query.local
        sources: dict[str, int] = {}
        for chunk in range(local // size, -(-boundary // size)):
            origin = int(hit.origins[first][chunk])
            source = "host" if origin == NOWHERE else self._tiers[origin].hit_source
            tokens = min((chunk + 1) * size, boundary) - max(chunk * size, local)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def _usable(self, hit: Hit, states: Sequence[npt.NDArray[np.uint8]]) -> list[Flags]:
        """What may be counted on, the answers of tiers that were not asked yet taken for yes."""
        floor = UNKNOWN if self._tiers else 0
        return [
            (s == READY) | ((s == WRITING) & ~late) | ((s == ABSENT) & (v >= floor) & (v != NOWHERE))
            for s, v, late in zip(states, hit.verdicts, hit.late, strict=True)
        ]

    def _masks(self, hit: Hit, boundary: int) -> list[Flags]:
        masks = []
        for group, chunks in zip(self._groups, hit.query.chunks, strict=True):
            mask = np.zeros(len(chunks), np.bool_)
            if boundary > hit.query.local:
                want = needed(group, hit.query.local, boundary)
                mask[want.first : want.last] = True
            masks.append(mask)
        return masks

    def _ask_tiers(self, hit: Hit, unknown: Sequence[Flags], boundary: int, now: float) -> None:
        """Ask for all that is unknown up to ``boundary``, a window's chunks behind the window too: one round.

        A tier that holds its share of the slots with loads that are overdue is passed over until it reports.
        """
        hit.asked = []
        for group, flags in zip(self._groups, unknown, strict=True):
            first, last = hit.query.local // group.tokens_per_chunk, -(-boundary // group.tokens_per_chunk)
            hit.asked.append(np.flatnonzero(flags[:last])[np.count_nonzero(flags[:first]) :])
        share = OVERDUE_SHARE * self._cache.num_slots
        hit.asked_tiers = [n for n, t in enumerate(self._tiers) if self._jobs.overdue_slots(t, now) < share]
        hit.lookup_deadline = now + self._config.lookup_timeout_s
        batch = concat_asked(hit.query.chunks, hit.asked)
        hit.ticket = self._lookups.submit([self._tiers[n] for n in hit.asked_tiers], batch, hit.query.context)

    def _older_one_waits(self, hit: Hit) -> bool:
        """Whether a request that came before this one waits for room."""
        for other in self._hits.values():
            if other is hit:
                return False
            if other.room_deadline is not None:
                return True
        return False

    def _may_wait_for_room(self, hit: Hit, now: float) -> bool:
        """Whether ``hit`` should wait for the room that others hold now; if so, it holds nothing meanwhile.

        Requests that each held a part of the room could wait for each other for ever.
        """
        if hit.room_deadline is None:
            hit.room_deadline = now + self._config.load_timeout_s
        others = any(other.pins for other in self._hits.values() if other is not hit)
        if not others or now >= hit.room_deadline:
            return False
        self._unpin_all(hit)
        self.metrics.add("waits_for_room")
        return True

    def _pin(self, hit: Hit, present: Sequence[Flags]) -> None:
        for chunks, flags in zip(hit.query.chunks, present, strict=True):
            slots = [s for s in self._cache.find(chunks.keys[flags]).tolist() if s not in hit.pins]
            self._cache.pin(np.array(slots, np.int64))
            hit.pins.update(slots)

    def _promote(self, hit: Hit, missing: Sequence[Flags], now: float) -> None:
        where = [np.flatnonzero(m) for m in missing]
        batch = concat_asked(hit.query.chunks, where)
        numbers = np.concatenate([v[w] for v, w in zip(hit.verdicts, where, strict=True)])
        self._promotions.start(batch, numbers, now + self._config.load_timeout_s)
        hit.promoted += len(batch)
        self._wake.set()
        self._count_evictions()
        for origins, verdicts, indices in zip(hit.origins, hit.verdicts, where, strict=True):
            origins[indices] = verdicts[indices]
            verdicts[indices] = NOWHERE  # whatever comes of it, this request does not have it read again
        self._pin(hit, missing)
        self._trace.emit("lookup_found", request=hit.query.context.request_id, chunks=len(batch))

    def _settle(self, hit: Hit, wanted: Sequence[Flags]) -> None:
        """Note where the wanted chunks are and let go of all others."""
        hit.slots = [
            np.where(flags, self._cache.find(chunks.keys), -1)
            for chunks, flags in zip(hit.query.chunks, wanted, strict=True)
        ]
        keep = {int(s) for slots in hit.slots for s in slots if s >= 0}
        surplus = hit.pins - keep
        if surplus:
            self._cache.unpin(np.fromiter(surplus, np.int64, len(surplus)))
            hit.pins &= keep
            self._stir()

    def _stop_waiting(self, hit: Hit) -> None:
        """The deadline has passed: what is still being written is a miss for this request."""
        for chunks, late, verdicts in zip(hit.query.chunks, hit.late, hit.verdicts, strict=True):
            writing = self._cache.states(chunks.keys) == WRITING
            self.metrics.add("promotions_late", int((writing & ~late).sum()))
            late |= writing
            verdicts[writing] = NOWHERE
        hit.load_deadline = None

    def _seen_often(self, chunks: Chunks, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Those of ``indices`` that have been seen ``store_threshold`` times now."""
        if self._config.store_threshold < 2:
            return indices
        keys = key_list(chunks.keys[indices])
        for key in keys:
            self._sightings[key] = self._sightings.get(key, 0) + 1
        often = np.array([self._sightings.get(k, 0) >= self._config.store_threshold for k in keys], np.bool_)
        self.metrics.add("stores_below_threshold", int((~often).sum()))
        return indices[often]

    def _drop(self, request_id: str) -> None:
        hit = self._hits.pop(request_id)
        hit.cancel_lookup()
        self._unpin_all(hit)
        self._stir()

    def _unpin_all(self, hit: Hit) -> None:
        self._cache.unpin(np.fromiter(hit.pins, np.int64, len(hit.pins)))
        hit.pins.clear()

    def _stir(self) -> None:
        """The host cache has changed in a way that waiting requests may be waiting for."""
        for hit in self._hits.values():
            if hit.answer is None:
                hit.dirty = True

    def _count_evictions(self) -> None:
        self.metrics.add("evictions", len(self._cache.take_evicted()))

    def _collect(self) -> None:
        """Take the tiers' reports."""
        for tier in self._tiers:
            for result in self._jobs.reports(tier):
                record = self._jobs.take(result.job_id)
                if record is None:
                    continue  # a tier that reports twice must not end another job's pins
                result = checked(result, record)
                if isinstance(record, LoadRecord):
                    self._trace.emit("tier_loaded", **self._promotions.finish(record, result))
                else:
                    self._trace.emit("cascaded", **self._cascades.finish(record, result))
                self._stir()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(POLL_S if len(self._jobs) else None)
            self._wake.clear()
            with self._lock:
                self._collect()
