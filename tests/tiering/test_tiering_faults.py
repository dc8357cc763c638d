"""The manager with a faulty tier and a slow one, driven at random against a plain model.

The model is a set: the names of what has been stored. What a chunk's bytes are follows from its name. After every step,
the books are checked (``audit``): what is ready in the host was stored under its name and has its bytes, every pin has
a holder, and no two write to one slot.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from audit import audit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiering_harness import TOKENS, Bench, group, memory, wait_until

from tierkv.layout.spec import GroupSpec
from tierkv.testing.faults import FaultyTier
from tierkv.tiering import manager as manager_module
from tierkv.tiering.hits import needed
from tierkv.tiering.manager import LoadPlan, StoreTicket
from tierkv.tiering.query import Query
from tierkv.tiers.breaker import Breaker
from tierkv.types import ChunkName, Chunks

LOOKUP_S, LOAD_S, STORE_S = 0.02, 0.03, 0.04

#: Few, so that they meet each other. Letter i stands for block i, the last one goes on.
PROMPTS = st.sampled_from(["a", "ab", "abc", "b", "ba", "c"])
COUNTS = st.integers(1, 16)
LOCALS = st.sampled_from([0, 0, 1, 3])
PICK = st.integers(0, 1000)


def faulty(seed: int) -> dict[str, Any]:
    return {
        "type": "faulty",
        "module_path": "tierkv.testing.faults:FaultyTier",
        "inner": memory(),
        "seed": seed,
        "raises": 0.04,
        "fails": 0.08,
        "partial": 0.1,
        "never": 0.015,
        "late": 0.08,
        "twice": 0.1,
        "malformed": 0.05,
        "wrong_sums": 0.1,
        "lookup_raises": 0.05,
        "lookup_blocks": 0.04,
        "lookup_invents": 0.1,
        "lookup_denies": 0.1,
        "reports_raise": 0.1,
        "late_s": 0.05,
    }


SLOW = {
    "type": "latency",
    "module_path": "tierkv.testing.faults:LatencyTier",
    "inner": memory(capacity_bytes=24_000),
    "load_delay_s": 0.004,
    "store_delay_s": 0.002,
    "lookup_delay_s": 0.001,
}


@dataclass
class Asker:
    """A request of the model engine. barred: a load of it has failed, so that it gets no more."""

    request_id: str
    text: str
    count: int
    local: int = 0
    query: Query | None = None
    barred: bool = False


@dataclass
class Loading:
    """A load under way. gone: its request was aborted meanwhile."""

    asker: Asker
    plan: LoadPlan
    chunks: tuple[Chunks, ...]
    local: int
    gone: bool = False


@dataclass
class Storing:
    """A store under way. resets: how many there had been when it was begun."""

    ticket: StoreTicket
    batch: Chunks
    resets: int


@dataclass
class Engine:
    """What the model knows."""

    stored: set[ChunkName] = field(default_factory=set)
    contents: dict[ChunkName, bytes] = field(default_factory=dict)
    askers: dict[str, Asker] = field(default_factory=dict)
    loads: list[Loading] = field(default_factory=list)
    stores: list[Storing] = field(default_factory=list)
    resets: int = 0
    requests: int = 0


class FaultyTiers(RuleBasedStateMachine):
    groups: ClassVar[Sequence[GroupSpec]] = ()

    @initialize(
        seed=st.integers(0, 2**16),
        slots=st.sampled_from([24, 10, 40, 5]),
        policy=st.sampled_from(["lru", "arc", "s3fifo"]),
        threshold=st.sampled_from([0, 0, 2]),
        share=st.sampled_from([1.0, 0.5, 0.1]),
        slow_first=st.booleans(),
    )
    def start(self, seed: int, slots: int, policy: str, threshold: int, share: float, slow_first: bool) -> None:
        manager_module.EXPIRY_S = 0.01
        self.engine = Engine()
        self.bench = Bench(
            self.groups,
            slots=slots,
            tiers=[SLOW, faulty(seed)] if slow_first else [faulty(seed), SLOW],
            eviction_policy=policy,
            store_threshold=threshold,
            promotion_share=share,
            lookup_timeout_s=LOOKUP_S,
            load_timeout_s=LOAD_S,
            store_timeout_s=STORE_S,
        )
        self.manager = self.bench.manager
        for lane in self.manager._lanes:
            # So that being cut off is an episode, not the end.
            lane.asking, lane.reading, lane.writing = (Breaker(3, 0.01, 0.03) for _ in range(3))
            if isinstance(lane.tier, FaultyTier):
                self.faulty = lane.tier

    @rule(seed=st.integers(0, 2**16))
    def be_busy(self, seed: int) -> None:
        """What an engine does most of the time, several steps of it: alone, hypothesis comes to little of that."""
        draw = random.Random(seed)
        for _ in range(20):
            self.do_something(draw)
            self.the_books_are_right()

    def do_something(self, draw: random.Random) -> None:
        text, count, index = draw.choice(["a", "ab", "abc", "b"]), draw.randint(2, 16), draw.randrange(1000)
        weighted: list[tuple[int, Callable[[], None]]] = [
            (6, lambda: self.run(text, count, draw.choice([0, 0, 1]))),
            (3, lambda: self.cool_down(text, count)),
            (3, lambda: self.ask(text, count, draw.choice([0, 0, 0, 2]))),
            (4, self.ask_all_again),
            (4, lambda: self.begin_load(index, draw.random() < 0.5)),
            (4, lambda: self.finish_load(index, draw.randrange(8))),
            (2, lambda: self.begin_store(text, count)),
            (3, lambda: self.finish_store(index, draw.random() < 0.9)),
            (1, lambda: self.come_back(index, draw.randrange(4), draw.randrange(4))),
            (2, lambda: self.abort(index)),
            (1, lambda: self.wait(draw.choice([1, 5, 20]))),
        ]
        weights, actions = zip(*weighted, strict=True)
        draw.choices(actions, weights)[0]()

    # ---- stores

    @rule(text=PROMPTS, count=COUNTS, ok=st.integers(0, 6))
    def store(self, text: str, count: int, ok: int) -> None:
        self.begin_store(text, count)
        if self.engine.stores:
            self.finish_store(-1, ok > 0)

    @rule(text=PROMPTS, count=COUNTS)
    def begin_store(self, text: str, count: int) -> None:
        batch = Chunks.concat(self.bench.chunks(text, count))
        ticket = self.manager.begin_store(batch, "s") if len(batch) else None
        if ticket is not None:
            self.garble(batch, ticket)
            self.engine.stores.append(Storing(ticket, batch, self.engine.resets))

    @rule(index=PICK, ok=st.booleans())
    def finish_store(self, index: int, ok: bool) -> None:
        """A store that a reset has overtaken copies whatever the device has there by now."""
        if not self.engine.stores:
            return
        storing = self.engine.stores.pop(index % len(self.engine.stores))
        counts = ok and storing.resets == self.engine.resets
        if counts:
            self.bench.copy(storing.batch, storing.ticket)
        self.manager.finish_store(storing.ticket, ok)
        if counts:
            self.engine.stored.update(storing.batch.name(i) for i in storing.ticket.indices.tolist())

    def garble(self, batch: Chunks, ticket: StoreTicket) -> None:
        for index, offset in zip(ticket.indices.tolist(), ticket.offsets.tolist(), strict=True):
            size = self.bench.model.chunk_bytes(int(batch.groups[index]))
            self.bench.region.view[offset : offset + size] = b"\x5a" * size

    # ---- requests

    @rule(text=PROMPTS, count=COUNTS, local=LOCALS)
    def run(self, text: str, count: int, local: int) -> None:
        """The usual life of a request: its prefix is loaded, the rest is computed and stored."""
        self.ask(text, count, local)
        loads = len(self.engine.loads)
        self.begin_load(-1, patience=True)
        if len(self.engine.loads) > loads:
            self.finish_load(-1, 1)
        self.store(text, count, 1)
        self.abort(-1)

    @rule(text=PROMPTS, count=COUNTS)
    def cool_down(self, text: str, count: int) -> None:
        """Only tiers have anything, and somebody wants it."""
        end = time.monotonic() + 0.02
        while not self.manager.idle and time.monotonic() < end:
            time.sleep(0.001)
        self.reset("host")
        self.ask(text, count, 0)

    @rule(text=PROMPTS, count=COUNTS, local=LOCALS)
    def ask(self, text: str, count: int, local: int) -> None:
        self.engine.requests += 1
        asker = Asker(f"r{self.engine.requests:04}", text, count, min(local, count) * TOKENS)
        self.engine.askers[asker.request_id] = asker
        self.answer_to(asker)

    @rule(index=PICK)
    def ask_again(self, index: int) -> None:
        if asker := self.waiting(index):
            self.answer_to(asker)

    @rule()
    def ask_all_again(self) -> None:
        """As an engine does in each step."""
        for asker in self.all_waiting():
            self.answer_to(asker)

    @rule(index=PICK, more=st.integers(0, 5), local=LOCALS)
    def come_back(self, index: int, more: int, local: int) -> None:
        """A request that was preempted: longer, and with something else on the device."""
        if asker := self.waiting(index):
            asker.count += more
            asker.local = min(local, asker.count) * TOKENS
            self.answer_to(asker)

    @rule(index=PICK)
    def ask_of_an_earlier_generation(self, index: int) -> None:
        asker = self.waiting(index)
        if asker and asker.query and asker.query.space != self.manager.space:
            assert self.manager.lookup(asker.query) == asker.query.local

    @rule(index=PICK, patience=st.booleans())
    def begin_load(self, index: int, patience: bool) -> None:
        """Every byte of the prefix is checked; and once more at the end of the load."""
        asker = self.waiting(index)
        if asker is None:
            return
        answer = self.answer_to(asker)
        end = time.monotonic() + (0.05 if patience else 0)
        while answer is None and time.monotonic() < end:
            time.sleep(0.001)
            answer = self.answer_to(asker)
        if answer is None or answer == asker.local:
            return
        plan = self.manager.begin_load(asker.request_id)
        if plan is None:  # it has just run out of time
            self.manager.finish_load(asker.request_id, ok=False)
            asker.barred = True
            return
        assert plan.boundary == answer and sum(plan.sources.values()) == answer - asker.local
        assert asker.query is not None
        chunks = tuple(c for c in asker.query.chunks if isinstance(c, Chunks))
        loading = Loading(asker, plan, chunks, asker.local)
        self.engine.loads.append(loading)
        for spec, named in zip(self.groups, chunks, strict=True):
            want = needed(spec, asker.local, answer)
            assert self.engine.stored >= {named.name(i) for i in range(want.first, want.last)}
        self.bench.check(plan, chunks, asker.local)

    @rule(index=PICK, ok=st.integers(0, 6))
    def finish_load(self, index: int, ok: int) -> None:
        if not self.engine.loads:
            return
        loading = self.engine.loads.pop(index % len(self.engine.loads))
        self.bench.check(loading.plan, loading.chunks, loading.local)
        self.manager.finish_load(loading.asker.request_id, ok > 0)
        loading.asker.barred |= not ok
        if loading.gone:
            self.manager.finish_request(loading.asker.request_id)

    @rule(index=PICK)
    def schedule_without_a_load(self, index: int) -> None:
        if asker := self.waiting(index):
            self.manager.release(asker.request_id)

    @rule(index=PICK)
    def abort(self, index: int) -> None:
        """In whatever state it is; a load goes on."""
        if not self.engine.askers:
            return
        asker = self.engine.askers.pop(list(self.engine.askers)[index % len(self.engine.askers)])
        for loading in self.engine.loads:
            loading.gone |= loading.asker is asker
        self.manager.finish_request(asker.request_id)

    def all_waiting(self) -> list[Asker]:
        loading = {one.asker.request_id for one in self.engine.loads}
        return [asker for asker in self.engine.askers.values() if asker.request_id not in loading]

    def waiting(self, index: int) -> Asker | None:
        """One of the requests that are not loading."""
        waiting = self.all_waiting()
        return waiting[index % len(waiting)] if waiting else None

    def answer_to(self, asker: Asker) -> int | None:
        asker.query = self.bench.query(asker.text, asker.count, asker.request_id, asker.local)
        answer = self.manager.lookup(asker.query)
        if answer is not None:
            assert asker.local <= answer <= asker.count * TOKENS and answer % TOKENS == 0
            assert answer == asker.local or not asker.barred
        return answer

    # ---- the whole

    @rule(scope=st.sampled_from(["host", "host", "all"]))
    def reset(self, scope: str) -> None:
        self.manager.reset(scope)
        self.engine.resets += 1

    @rule(name=st.sampled_from(["one", "two", None]))
    def invalidate(self, name: str | None) -> None:
        """A name that was used before brings back what was stored under it."""
        self.manager.invalidate(name)
        self.engine.resets += 1

    @rule(milliseconds=st.sampled_from([1, 3, 10, 50]))
    def wait(self, milliseconds: int) -> None:
        """Deadlines pass, late ones come."""
        time.sleep(milliseconds / 1000)

    @rule()
    def stop_asking(self) -> None:
        """An engine that does not step: what waits for it is let go, by the manager itself."""
        loading = sum(int((o >= 0).sum()) for one in self.engine.loads for o in one.plan.offsets)
        wait_until(lambda: self.manager.counts()["bytes_waiting"] == 0)
        held = sum(int((held >= 0).sum()) for hit in list(self.manager._hits.values()) for held in hit.held)
        assert held == loading

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "engine"):
            tickets = [storing.ticket for storing in self.engine.stores]
            audit(self.bench, tickets, self.engine.stored, self.engine.contents)
            assert self.manager._thread.is_alive()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            try:
                self.come_to_rest()
            finally:
                self.bench.close()
                manager_module.EXPIRY_S = 0.25
            wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("tierkv-")])

    def come_to_rest(self) -> None:
        """Everybody has ended, and tiers have reported what they will ever report: only that is still held."""
        while self.engine.stores:
            self.finish_store(0, True)
        while self.engine.loads:
            self.finish_load(0, 1)
        while self.engine.askers:
            self.abort(0)
        jobs = self.manager._jobs._jobs
        with contextlib.suppress(AssertionError):  # what it says would not help
            wait_until(lambda: jobs.keys() <= self.faulty.silent and all(job.late for job in list(jobs.values())))
        assert jobs.keys() <= self.faulty.silent, f"{jobs.keys()}, silent {self.faulty.silent}"
        wait_until(lambda: not self.manager._cascades.queued)
        self.the_books_are_right()
        counts, left = self.manager.counts(), list(jobs.values())
        assert counts["requests"] == counts["bytes_waiting"] == counts["slots_writing"] == 0
        assert counts["slots_late"] == sum(len(job.slots) for job in left if job.load)
        assert counts["slots_pinned"] == len(np.unique(np.concatenate([[-1], *(job.slots for job in left)]))) - 1
        self.manager.close()
        audit(self.bench, (), self.engine.stored, self.engine.contents)
        counts = self.manager.counts()
        for held in ("jobs", "slots_pinned", "slots_writing", "slots_dead", "slots_late"):
            assert counts[held] == 0, held


def machine(*groups: GroupSpec, examples: int) -> Any:
    class Machine(FaultyTiers):
        pass

    Machine.groups = groups
    Machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return pytest.mark.filterwarnings("error")(Machine.TestCase)


TestOneGroup = machine(group(0), examples=40)
TestTwoGroups = machine(group(0), group(1, "sliding_window", window=2 * TOKENS), examples=40)
TestStates = machine(group(0, blocks=2), group(1, "state", page=700), examples=20)
#: Slots of three sizes, so that slabs move.
TestThreeSizes = machine(
    group(0),
    group(1, "sliding_window", window=5 * TOKENS, page=600, blocks=2),
    group(2, page=700, blocks=4),
    examples=40,
)
