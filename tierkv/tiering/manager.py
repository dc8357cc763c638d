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
from tierkv.host.cache import ABSENT, READY, WRITING, FoundGap, HostCache
from tierkv.host.slabs import slot_bytes
from tierkv.keys import FIRST_GENERATION, new_generation
from tierkv.layout.spec import ModelSpec
from tierkv.metrics import Metrics
from tierkv.tiering.cascades import Cascades
from tierkv.tiering.hits import Gap, Range, best_boundary, by_position, fitting_limit, needed
from tierkv.tiering.jobs import JobRecord, JobTable
from tierkv.tiering.lanes import Lane
from tierkv.tiering.promotions import Promotions
from tierkv.tiering.query import Query
from tierkv.tiering.requests import LATE, NOWHERE, UNKNOWN, Hit, Part, Question, pieces
from tierkv.tiers.base import Tier
from tierkv.tiers.lookups import LookupPool
from tierkv.tiers.throttle import Throttle
from tierkv.types import Chunks, JobResult, Offsets, Space, every, key_list

logger = logging.getLogger(__name__)

#: The share of the slots that loads which a tier has not delivered in time may hold before it is not asked any more.
LATE_SHARE = 0.125

#: How often tiers that do not call ``wake`` are asked for finished jobs, and how often deadlines are looked at.
POLL_S = 0.005
EXPIRY_S = 0.25

#: Chunks at the end of a window that tiers are asked about first: the boundary moves back where one is missing.
WINDOW_CHUNKS = 256

#: Chunks whose keys are looked up first; as long as all are there, twice as many again and again.
FIRST_CHUNKS = 512


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
        throttles: Sequence[Throttle | None] = (),
        wake: threading.Event | None = None,
    ) -> None:
        """
        Args:
            view: the host region, whose slots ``cache`` manages.
            tiers: asked and written to in this order; their contexts' ``wake`` sets ``wake``.
            align: boundaries of hits are multiples of this many tokens.
            throttles: one a tier, or none at all.
        """
        self._config = config
        self._groups = model.groups
        self._cache = cache
        self._align = align
        self._trace = trace
        self._lock = threading.Lock()
        self._wake = wake if wake is not None else threading.Event()
        self._closing = False
        self._opened_at = time.monotonic()
        self.space = Space(namespace, FIRST_GENERATION)
        self.metrics = Metrics()
        self._lanes = [
            Lane(number, tier, throttle)
            for number, (tier, throttle) in enumerate(zip(tiers, throttles or [None] * len(tiers), strict=True))
        ]
        self._hits: dict[str, Hit] = {}
        #: Bytes that hits hold pinned, and of these, those of requests that are not loading yet.
        self._held_bytes = 0
        self._waiting_bytes = 0
        self._most_waiting_bytes = int(config.promotion_share * cache.plan.region_bytes)
        self._barred: set[str] = set()
        self._sightings: cachetools.LRUCache[bytes, int] = cachetools.LRUCache(config.max_tracker_size)
        self._chunk_bytes = np.array([model.chunk_bytes(i) for i in range(len(model.groups))], np.int64)
        self._slot_bytes = np.array([slot_bytes(n) for n in self._chunk_bytes.tolist()], np.int64)
        self._jobs = JobTable()
        self._promotions = Promotions(cache, self._lanes, self._jobs, self._chunk_bytes, self.metrics)
        self._cascades = Cascades(
            cache,
            view,
            self._lanes,
            self._jobs,
            self._chunk_bytes,
            self.metrics,
            self._lock,
            self._wake,
            config.store_timeout_s,
        )
        self._lookups = LookupPool(wake=self._wake.set, note=self._note_lookup)
        self._lookups.open(tiers)
        self._thread = threading.Thread(target=self._run, name="tierkv-manager", daemon=True)
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
            known, states = self._cache.locate(chunks.keys)
            if states.any():  # not all absent
                self._cache.touch(known[states == READY])
            fresh = self._seen_often(chunks, np.flatnonzero(states == ABSENT))
            if not len(fresh):
                return None
            reserved = self._cache.reserve(chunks if len(fresh) == len(chunks) else chunks.take(fresh))
            self.metrics.add("evictions", len(reserved.evicted))
            slots, placed = reserved.slots, reserved.slots >= 0
            if not every(placed):
                self.metrics.add("stores_no_room", int((~placed).sum()))
                if not placed.any():
                    return None
                fresh, slots = fresh[placed], slots[placed]
            ticket = StoreTicket(fresh, slots, self._cache.offset(slots), request_id)
        self._trace.emit("store_planned", request=request_id, chunks=len(ticket.slots))
        return ticket

    def finish_store(self, ticket: StoreTicket, ok: bool) -> None:
        """End a store: all ranks have copied, or one could not. From here the device blocks are not needed."""
        with self._lock:
            if ok:
                alive = self._cache.commit(ticket.slots)
                ready = ticket.slots if every(alive) else ticket.slots[alive]
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
                hit = self._hits[request_id] = Hit(query, self._useful_limit(query))
                self.metrics.add("lookups")
            elif not hit.query.same_as(query):
                self._let_go(hit)
                hit.restart(query, self._useful_limit(query))
            now = hit.asked_at = time.monotonic()
            if hit.dirty or hit.due(now):
                hit.dirty = False
                hit.answer = self._advance(hit, now)
            self.metrics.add("answers_pending", hit.answer is None)
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
            self._waiting_bytes -= hit.nbytes
            offsets = []
            for held, want, origins in zip(hit.held, hit.ranges, hit.origins, strict=True):
                inside = slice(want.first, want.last)
                where = np.full(len(held), -1, np.int64)
                where[inside] = self._cache.offset(held[inside])
                offsets.append(where)
                promoted = int((origins[inside] != NOWHERE).sum())
                self.metrics.add("hit_chunks_tier", promoted)
                self.metrics.add("hit_chunks_host", len(want) - promoted)
            self._touch(hit)
            plan = LoadPlan(hit.answer, tuple(offsets), self._sources(hit, hit.answer))
        self._trace.emit("load_planned", request=request_id, chunks=sum(map(len, hit.ranges)))
        return plan

    def touch(self, chunks: Chunks) -> None:
        """A request uses ``chunks``, head first, on the device; those that the host has are as good as used there."""
        with self._lock:
            if chunks.space == self.space:
                known, states = self._cache.locate(chunks.keys)
                self._cache.touch(known[states == READY])

    def finish_load(self, request_id: str, ok: bool) -> None:
        """End a load. After a failed one the host copies are forgotten and the request gets no more hits."""
        with self._lock:
            hit = self._hits.get(request_id)
            if hit is None:
                return
            if ok:
                self.metrics.add("loads", sum(map(len, hit.ranges)))
            else:
                self.metrics.add("loads_failed")
                self._barred.add(request_id)
                for held in hit.held:
                    self._cache.forget(held[held >= 0])
            self._drop(request_id)
        self._trace.emit("loaded", request=request_id, chunks=sum(map(len, hit.ranges)), ok=ok)

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

    def grow(self, ready_bytes: int) -> None:
        """The first ``ready_bytes`` of the host region can be used from now on."""
        with self._lock:
            self._cache.grow(ready_bytes)
            if ready_bytes >= self._cache.plan.region_bytes:
                self.metrics.add("ready_ms", round(1000 * (time.monotonic() - self._opened_at)))
            self._stir()

    def reset(self, scope: str | None = None, generation: bytes | str | None = None) -> None:
        """Forget what is in the host and, with scope ``all``, never serve what any tier has until now.

        Stores that are under way are dropped when they end; loads that are under way go on.

        Args:
            scope: ``all`` or ``host``; None for the configured one.
            generation: what comes now, or a name for it, so that replicas agree; random otherwise.
        """
        with self._lock:
            for request_id in [r for r, hit in self._hits.items() if not hit.loading]:
                self._drop(request_id)
            self._cache.clear()
            if (scope or self._config.reset_scope) == "all":
                new = generation if isinstance(generation, bytes) else new_generation(generation)
                self.space = Space(self.space.namespace, new)
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
        self._thread.join()
        self._cascades.close()
        self._lookups.close()
        for lane in self._lanes:
            try:
                lane.tier.close()
            except Exception:  # a user's tier may raise anything; the others are to be closed all the same
                logger.exception("tier %s failed to close", lane.name)
        with self._lock:
            self._collect(time.monotonic())
            for record, result in self._jobs.abandoned():
                self._end_job(record, result, time.monotonic())
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
                "slots_dead": cache.dead,
                "slots_pinned": cache.pinned,
                "slots_late": sum(lane.late for lane in self._lanes),
                "bytes_waiting": self._waiting_bytes,
                "requests": len(self._hits),
                "jobs": len(self._jobs),
            }

    def __repr__(self) -> str:
        return f"TieringManager(hits={len(self._hits)}, jobs={len(self._jobs)}, {self._cache!r}, {self.metrics!r})"

    # ---- inside, under the lock: a request's prefix

    def _advance(self, hit: Hit, now: float) -> int | None:
        """Bring ``hit`` as far as it goes without waiting; the answer, or None while something is under way."""
        if hit.question is not None:
            if not hit.question.ticket.done:
                if now < hit.question.deadline:
                    return None
                self.metrics.add("lookup_timeouts")
                self._lanes[hit.question.tiers[hit.question.ticket.waits_for]].asking.failed(now)
            hit.absorb_answers()
        if hit.load_deadline is not None and now >= hit.load_deadline:
            self._give_up_late_jobs(now)
            self._stop_waiting(hit)
        while True:
            held_before, hit.coming = hit.nbytes, 0
            boundary = best_boundary(self._groups, self._gaps_of(hit), hit.query.local, hit.limit, self._align)
            if self._ask_tiers(hit, boundary.whole, boundary.gaps, now):
                return None
            hit.ranges = [needed(group, hit.query.local, boundary.tokens) for group in self._groups]
            if not (held_before or boundary.gaps or hit.coming):  # all of it was here, and was pinned as it was found
                writing = 0
                break
            missing, writing = self._hold(hit)
            if not any(map(len, missing)):
                break
            if not self._has_room(self._groups_of(missing)):
                if self._may_wait_for_room(hit, now):
                    return None
                self.metrics.add("promotions_no_room")
                hit.limit = fitting_limit(self._groups, missing, boundary.tokens, self._align, self._has_room)
            elif self._older_one_waits(hit) and self._may_wait_for_room(hit, now):
                return None
            else:
                self._promote(hit, missing, now)
        hit.room_deadline = None
        if writing:
            hit.load_deadline = hit.load_deadline or now + self._config.load_timeout_s
            return None
        hit.load_deadline = None
        hit.use_deadline = now + self._config.load_timeout_s
        if boundary.tokens > hit.query.local:
            self._trace.emit("promoted", request=hit.query.context.request_id, chunks=sum(map(len, hit.ranges)))
        else:
            self.metrics.add("answers_absent")
        return boundary.tokens

    def _useful_limit(self, query: Query) -> int:
        """The query's limit, or where the complete chunks of a group end."""
        ends = [len(c) * g.tokens_per_chunk for c, g in zip(query.chunks, self._groups, strict=True)]
        return min(query.limit, *ends)

    def _gaps_of(self, hit: Hit) -> Gap:
        """What of the request's chunks cannot be had, as ``best_boundary`` asks for it."""

        def gap(n: int, want: Range) -> int | None:
            chunks, held, verdicts = hit.query.chunks[n], hit.held[n], hit.verdicts[n]
            if self._groups[n].windowed:
                found = self._cache.last_gap(chunks.upto(want.last).keys, held, verdicts, want.first, want.last)
                self._note_found(hit, n, found)
                return found.chunk if found.chunk >= want.first else None
            first, step = want.first, FIRST_CHUNKS
            while first < want.last:  # piece by piece, so that not much more is converted than is looked at
                known = chunks.upto(min(first + step, want.last))
                last = min(len(known), want.last)
                found = self._cache.first_gap(known.keys, held, verdicts, first, last)
                self._note_found(hit, n, found)
                if found.chunk < last:
                    return found.chunk
                first, step = last, 2 * step
            return None

        return gap

    def _note_found(self, hit: Hit, n: int, found: FoundGap) -> None:
        hit.coming += found.coming
        self._note_pins(hit, found.pinned * int(self._slot_bytes[n]))

    def _ask_tiers(self, hit: Hit, whole: int, gaps: Sequence[tuple[int, int]], now: float) -> bool:
        """Ask the tiers about what keeps the boundary from being larger and is not known; whether they were asked.

        Groups without a window first, all that lies behind their gaps; then the windows, back from the boundary
        ``whole`` that those have.
        """
        unknown = [(n, chunk) for n, chunk in gaps if hit.verdicts[n][chunk] == UNKNOWN]
        if not unknown or not self._lanes:
            return False
        without_window = not all(self._groups[n].windowed for n, _ in unknown)
        parts = [
            Part(n, self._unknown_behind(hit, n, whole) if without_window else self._unknown_before(hit, n, whole))
            for n, group in enumerate(self._groups)
            if group.windowed != without_window
        ]
        hit.windows_asked += not without_window
        parts = [part for part in parts if len(part.where)]
        most_late = LATE_SHARE * self._cache.num_slots
        context = hit.query.context
        tiers = [lane.number for lane in self._lanes if lane.may_serve(context, most_late, now)]
        asked = self._lookups.submit(
            [self._lanes[n].tier for n in tiers], pieces(self._groups, hit.query.chunks, parts), context
        )
        hit.question = Question(asked, tiers, parts, now + self._config.lookup_timeout_s)
        if not tiers:
            hit.absorb_answers()
        return bool(tiers)

    def _unknown_behind(self, hit: Hit, n: int, boundary: int) -> Range:
        """The chunks of group ``n`` from ``boundary`` to the limit, known ones at both ends left out."""
        size = self._groups[n].tokens_per_chunk
        return self._unknown(hit, n, Range(boundary // size, -(-hit.limit // size)))

    def _unknown_before(self, hit: Hit, n: int, boundary: int) -> Range:
        """The last chunks of group ``n`` before ``boundary``; when these are known, all of them."""
        size, first = self._groups[n].tokens_per_chunk, hit.query.local // self._groups[n].tokens_per_chunk
        last = -(-boundary // size)
        enough = max(WINDOW_CHUNKS, len(needed(self._groups[n], hit.query.local, boundary)))
        close = self._unknown(hit, n, Range(max(first, last - enough), last))
        return close if close and not hit.windows_asked else self._unknown(hit, n, Range(first, last))

    @staticmethod
    def _unknown(hit: Hit, n: int, where: Range) -> Range:
        unknown = hit.verdicts[n][where.first : where.last] == UNKNOWN
        if not unknown.any():
            return Range(where.first, where.first)
        return Range(where.first + int(unknown.argmax()), where.first + len(unknown) - int(unknown[::-1].argmax()))

    def _hold(self, hit: Hit) -> tuple[list[npt.NDArray[np.int64]], int]:
        """Pin what is here of ``hit.ranges`` and nothing else.

        Returns:
            by group, the chunks that are missing; and how many of those that are held are being written.
        """
        missing, writing, nbytes = [], 0, 0
        for n, want in enumerate(hit.ranges):
            keys = hit.query.chunks[n].upto(want.last).keys
            holding = self._cache.hold(keys, hit.held[n], want.first, want.last)
            missing.append(holding.missing)
            writing += holding.writing
            nbytes += (len(want) - len(holding.missing)) * int(self._slot_bytes[n])
        if nbytes < hit.nbytes:
            self._stir()  # somebody may wait for the room
        self._note_pins(hit, nbytes - hit.nbytes)
        return missing, writing

    def _note_pins(self, hit: Hit, nbytes: int) -> None:
        """``hit``, which is not loading, holds ``nbytes`` more."""
        hit.nbytes += nbytes
        self._held_bytes += nbytes
        self._waiting_bytes += nbytes

    def _let_go(self, hit: Hit) -> None:
        for held in hit.held:
            self._cache.let_go(held)
        self._held_bytes -= hit.nbytes
        if not hit.loading:
            self._waiting_bytes -= hit.nbytes
        hit.nbytes = 0
        hit.answer = None
        hit.dirty = True

    def _promote(self, hit: Hit, missing: Sequence[npt.NDArray[np.int64]], now: float) -> None:
        """Have the tiers that have them fill slots with the ``missing`` chunks."""
        chunks = [c.take(m) for c, m in zip(hit.query.chunks, missing, strict=True)]
        batch = Chunks.concat(chunks)
        numbers = np.concatenate([v[m] for v, m in zip(hit.verdicts, missing, strict=True)])
        placed = self._promotions.start(batch, numbers, now, self._config.load_timeout_s)
        start = 0
        for origins, verdicts, indices in zip(hit.origins, hit.verdicts, missing, strict=True):
            origins[indices] = np.where(placed[start : start + len(indices)], verdicts[indices], NOWHERE)
            verdicts[indices] = NOWHERE  # whatever comes of it, this request does not have it read again
            start += len(indices)
        hit.promoting = True
        hit.room_deadline = None
        self._wake.set()
        self._trace.emit("lookup_found", request=hit.query.context.request_id, chunks=int(placed.sum()))

    def _stop_waiting(self, hit: Hit) -> None:
        """The deadline has passed: what is still being written is a miss for this request."""
        for chunks, held, verdicts in zip(hit.query.chunks, hit.held, hit.verdicts, strict=True):
            here = np.flatnonzero(held >= 0)
            slow = here[self._cache.states(chunks.take(here).keys) == WRITING]
            self.metrics.add("waits_given_up", len(slow))
            verdicts[slow] = LATE
        hit.load_deadline = None

    def _touch(self, hit: Hit) -> None:
        """The request uses what it loads, and of the groups that need all of the prefix, what the device has of it."""
        used, ranges = [], []
        for group, chunks, held, want in zip(self._groups, hit.query.chunks, hit.held, hit.ranges, strict=True):
            first = want.first if group.windowed else 0
            slots = held[first : want.last]
            if first < want.first:
                slots = slots.copy()
                slots[: want.first] = self._cache.find(chunks.upto(want.first).keys[: want.first])
            used.append(slots)
            ranges.append(Range(first, want.last))
        slots = np.concatenate(used)
        order = by_position(self._groups, ranges)
        slots = slots if order is None else slots[order]
        self._cache.touch(slots[slots >= 0])

    def _sources(self, hit: Hit, boundary: int) -> dict[str, int]:
        """Tokens by source, by the first group: one without a window, if there is one, has a chunk for each."""
        first = min(range(len(self._groups)), key=lambda n: self._groups[n].windowed)
        size, local = self._groups[first].tokens_per_chunk, hit.query.local
        chunks = np.arange(local // size, -(-boundary // size))
        tokens = np.minimum((chunks + 1) * size, boundary) - np.maximum(chunks * size, local)
        origins = hit.origins[first][chunks]
        sources: dict[str, int] = {}
        for origin in np.unique(origins).tolist():
            source = "host" if origin == NOWHERE else self._lanes[origin].tier.hit_source
            sources[source] = sources.get(source, 0) + int(tokens[origins == origin].sum())
        return sources

    # ---- inside, under the lock: room

    def _groups_of(self, missing: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int32]:
        """The group of each missing chunk."""
        return np.repeat(np.arange(len(missing), dtype=np.int32), [len(m) for m in missing])

    def _has_room(self, groups: npt.NDArray[np.int32]) -> bool:
        """Whether chunks of these groups can be promoted beside what all waiting requests hold."""
        nbytes = int(self._slot_bytes[groups].sum())
        return self._waiting_bytes + nbytes <= self._most_waiting_bytes and self._cache.room(groups)

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

        Requests that each held a part of the room could wait for each other for ever. One that has had chunks read
        does not: it would have to give them up.
        """
        if hit.room_deadline is None:
            hit.room_deadline = now + self._config.load_timeout_s
            self._stir()  # what it gives up now, others may wait for
        if hit.promoting or self._held_bytes == hit.nbytes or now >= hit.room_deadline:
            return False
        self._let_go(hit)
        hit.dirty = False
        self.metrics.add("waits_for_room")
        return True

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
        hit.cancel_question()
        self._let_go(hit)
        self._stir()

    def _stir(self) -> None:
        """The host cache has changed in a way that waiting requests may be waiting for."""
        for hit in self._hits.values():
            if hit.answer is None:
                hit.dirty = True

    # ---- the manager's own thread

    def _note_lookup(self, tier: Tier, seconds: float, error: BaseException | None) -> None:
        """A lookup thread has an answer, or not; one that nobody waits for any more is none."""
        with self._lock:
            for lane in self._lanes:
                if lane.tier is tier:
                    in_time = error is None and seconds < self._config.lookup_timeout_s
                    lane.asking.judge(in_time, time.monotonic())
                    self.metrics.add("lookups_failed", error is not None)

    def _collect(self, now: float) -> None:
        """Take the tiers' reports."""
        for lane in self._lanes:
            for record, result in self._jobs.ended(lane):
                self._end_job(record, result, now)

    def _end_job(self, record: JobRecord, result: JobResult, now: float) -> None:
        if record.load:
            self._trace.emit("tier_loaded", **self._promotions.finish(record, result, now))
        else:
            self._trace.emit("cascaded", **self._cascades.finish(record, result, now))
        self._stir()

    def _take_answers(self, now: float) -> None:
        """Go on with what the tiers have answered: what they have is promoted before the engine asks again."""
        for hit in list(self._hits.values()):
            if hit.question is not None and hit.question.ticket.done:
                hit.dirty = False
                hit.answer = self._advance(hit, now)

    def _give_up_late_jobs(self, now: float) -> None:
        for record in self._jobs.overdue(now):
            if record.load:
                self._promotions.give_up(record, now)
            else:
                self._cascades.give_up(record, now)
            self._stir()

    def _give_up_unused_hits(self, now: float) -> None:
        """Let go of what the engine does not come for, be it that it has no device blocks or that it does not step."""
        for hit in self._hits.values():
            unused = hit.answer is not None and hit.use_deadline is not None and now >= hit.use_deadline
            forgotten = now >= hit.asked_at + self._config.load_timeout_s
            if not hit.loading and hit.nbytes and (unused or forgotten):
                self.metrics.add("hits_expired")
                self._let_go(hit)
                self._stir()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(POLL_S if len(self._jobs) else EXPIRY_S)
            self._wake.clear()
            now = time.monotonic()
            with self._lock:
                self._collect(now)
                self._take_answers(now)
                self._give_up_late_jobs(now)
                self._give_up_unused_hits(now)
