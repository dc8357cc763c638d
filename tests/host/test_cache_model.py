"""The host cache against a model of plain dictionaries, in whatever order hypothesis finds.

The model does not know which chunk is evicted: it takes what ``reserve`` says, and checks that it could be. With one
size of chunk it knows how many are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numba import config as numba_config
from twins import chunks, lists_of, walk

from tierkv.host.cache import ABSENT, NOT_WRITING, READY, WRITING, HostCache
from tierkv.host.policies.arc import ARCPolicy
from tierkv.host.policies.base import Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.host.policies.s3fifo import S3FIFOPolicy
from tierkv.host.slabs import plan_slabs, slot_bytes
from tierkv.host.slots import (
    BUSY,
    CLASS,
    DEAD,
    DRAINING,
    EVICTABLE,
    FREE,
    ORPHAN,
    PINNED,
    USED,
    SlotView,
)
from tierkv.types import Chunks, Offsets, Space

SPACES = [Space(bytes(16), bytes([n]) * 16) for n in range(3)]
NUM_NAMES = 14
EXAMPLES, STEPS = (12, 200) if numba_config.DISABLE_JIT else (40, 600)
NUM_HOLDERS = 3

#: (space, number); chunk ``number`` is of group ``number % groups``.
Name = tuple[int, int]


class Misbehaving(Policy):
    """Oldest first, but now and then raises, or names victims that are pinned, doubled, foreign, too many or few."""

    def __init__(self, slots: SlotView) -> None:
        super().__init__(slots)
        self.random = random.Random(slots.num_slots)
        self.order: dict[int, None] = {}

    def inserted(self, slots: Offsets) -> None:
        self.order.update(dict.fromkeys(slots.tolist()[::-1]))
        slots[:] = -1  # these are its own

    def accessed(self, slots: Offsets) -> None:
        if self.random.random() < 0.3:
            raise RuntimeError("no")
        for slot in slots.tolist()[::-1]:
            self.order[slot] = self.order.pop(slot)

    def removed(self, slots: Offsets, evicted: bool) -> None:
        for slot in slots.tolist():
            self.order.pop(slot)
        if self.random.random() < 0.1:
            raise RuntimeError("no")

    def victims(self, count: int, size_class: int) -> Offsets:
        if self.random.random() < 0.2:
            raise RuntimeError("no")
        ours = [*list(self.order)[: count + 2], 10**6, -1]
        return np.array(self.random.choices(ours, k=self.random.randint(0, count + 2)), np.int64)


@dataclass
class Slot:
    name: Name
    state: str  # writing, ready, dead
    writer: bool = True
    pins: int = 0  # without the writer's


@dataclass
class Holder:
    """Of the chunks of one space, the slot that is pinned for it, or -1."""

    space: int
    held: Offsets = field(default_factory=lambda: np.full(NUM_NAMES, -1, np.int64))


spaces = st.integers(0, len(SPACES) - 1)
runs = st.tuples(st.integers(0, NUM_NAMES - 1), st.integers(1, NUM_NAMES)).map(
    lambda run: list(range(run[0], min(NUM_NAMES, run[0] + run[1])))
)
numbers = runs | st.lists(st.integers(0, NUM_NAMES - 1), min_size=1, max_size=8)
some = st.lists(st.integers(0, 30), min_size=1, max_size=4)
part = st.tuples(st.integers(0, NUM_NAMES), st.integers(0, NUM_NAMES)).map(lambda ends: tuple(sorted(ends)))
holders = st.integers(0, NUM_HOLDERS - 1)

#: Bytes of each group's chunks. The same twice: two groups share a size class.
ONE_SIZE = [(512,), (700, 700)]
SIZES = [(512, 1024), (2560, 512, 1024), (1536, 512), (700, 5000, 700)]


class HostCacheMachine(RuleBasedStateMachine):
    policy_type: type[Policy]

    @initialize(
        sizes=st.sampled_from(ONE_SIZE) | st.sampled_from(SIZES), room=st.integers(0, 8), in_pieces=st.booleans()
    )
    def start(self, sizes: tuple[int, ...], room: int, in_pieces: bool) -> None:
        classes = {slot_bytes(size) for size in sizes}
        least = len(classes) * max(classes)
        plan = plan_slabs(least + room * max(classes) // 2, sizes)
        self.sizes, self.plan, self.several = sizes, plan, len(classes) > 1
        self.cache = HostCache(plan, sizes, self.policy_type)
        self.grown = 0
        if not in_pieces:
            self.grow(plan.region_bytes)
        self.used: dict[int, Slot] = {}  # slot → what the model knows; free ones are not there
        self.holders = [Holder(n % 2) for n in range(NUM_HOLDERS)]

    # ── what the model knows ─────────────────────────────────────────────────────────────────────────────────────────

    def batch(self, space: int, numbers: Sequence[int]) -> Chunks:
        parts = [chunks(n, group=n % len(self.sizes), space=SPACES[space]) for n in numbers]
        return Chunks.concat(parts) if parts else chunks(space=SPACES[space])

    def pick(self, choices: Sequence[int], which: Callable[[Slot], bool]) -> np.ndarray:
        """Some distinct slots for which ``which`` is true."""
        fitting = [slot for slot, known in self.used.items() if which(known)]
        return np.array(sorted({fitting[c % len(fitting)] for c in choices}) if fitting else [], np.int64)

    def add_pins(self, slot: int, count: int) -> None:
        self.used[slot].pins += count
        self.settle(slot)

    def settle(self, slot: int) -> None:
        known = self.used[slot]
        assert known.pins >= 0
        if known.state == "dead" and not known.writer and not known.pins:
            del self.used[slot]

    def held(self, slot: int) -> int:
        """Pins of the holders."""
        return sum(int((holder.held == slot).sum()) for holder in self.holders)

    def indexed(self) -> dict[Name, int]:
        found = {known.name: slot for slot, known in self.used.items() if known.state != "dead"}
        assert len(found) == sum(known.state != "dead" for known in self.used.values())
        return found

    def states_of(self, space: int) -> list[int]:
        codes, where = {"writing": WRITING, "ready": READY}, self.indexed()
        names = [(space, number) for number in range(NUM_NAMES)]
        return [codes[self.used[where[name]].state] if name in where else ABSENT for name in names]

    def usable_slots(self) -> int:
        """With one size: those of slabs that are ready."""
        slabs = self.plan.num_slabs if self.grown >= self.plan.region_bytes else self.grown // self.plan.slab_bytes
        return sum(self.plan.slots_in(slab, 0) for slab in range(slabs))

    # ── what can happen ──────────────────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.grown < self.plan.region_bytes)
    @rule(step=st.integers(1, 4))
    def grow_a_bit(self, step: int) -> None:
        self.grow(self.grown + step * self.plan.region_bytes // 5)

    def grow(self, ready_bytes: int) -> None:
        self.cache.grow(ready_bytes)
        self.grown = min(ready_bytes, self.plan.region_bytes)

    @rule(space=spaces, wanted=numbers)
    def store(self, space: int, wanted: list[int]) -> None:
        self.commit_slots(self.reserve_slots(space, wanted, True))

    @rule(space=spaces, wanted=numbers, only_new=st.booleans())
    def reserve(self, space: int, wanted: list[int], only_new: bool) -> None:
        self.reserve_slots(space, wanted, only_new)

    def reserve_slots(self, space: int, wanted: list[int], only_new: bool) -> list[int]:
        before = self.indexed()
        there = set(before)
        if only_new:
            wanted = [n for n in dict.fromkeys(wanted) if (space, n) not in before]
        batch = self.batch(space, wanted)
        promised = self.cache.room(batch.groups)
        evictable = sum(known.state == "ready" and not known.pins for known in self.used.values())
        room = self.usable_slots() - len(self.used)
        slots, evicted = self.cache.reserve(batch)
        slots = slots.tolist()
        assert slots == [-1] * len(wanted) or evicted.dtype == np.uint64
        by_key = {self.batch(space, [n]).keys.tobytes(): (space, n) for space, n in before}
        for key in evicted:
            known = self.used.pop(before.pop(by_key[key.tobytes()]))  # and none twice
            assert known.state == "ready" and not known.pins and not known.writer
        seen: set[Name] = set(before)
        full: set[int] = set()  # size classes for which there was no room
        for number, slot in zip(wanted, slots, strict=True):
            name, size = (space, number), slot_bytes(self.sizes[number % len(self.sizes)])
            if name in seen:
                assert slot == -1 and name in self.indexed()
            elif slot < 0:
                if name not in there:  # what is there is not kept for that
                    full.add(size)
            else:
                assert size not in full, "the head is served first"
                assert slot not in self.used and 0 <= slot < self.plan.num_slots
                self.used[slot] = Slot(name, "writing")
                seen.add(name)
        if only_new and promised:
            assert -1 not in slots
        if only_new and not self.several:
            assert len(evicted) == min(evictable, max(0, len(wanted) - room))
            assert sum(slot >= 0 for slot in slots) == min(len(wanted), room + evictable)
            assert promised == (-1 not in slots)
        return [slot for slot in slots if slot >= 0]

    @rule(choices=some)
    def commit(self, choices: list[int]) -> None:
        self.commit_slots(self.pick(choices, lambda known: known.writer).tolist())

    def commit_slots(self, slots: list[int]) -> None:
        ready = self.cache.commit(np.array(slots, np.int64))
        for slot, is_ready in zip(slots, ready.tolist(), strict=True):
            known = self.used[slot]
            known.writer = False
            assert is_ready == (known.state == "writing")
            known.state = "ready" if is_ready else "dead"
            self.settle(slot)

    @rule(choices=some)
    def abort(self, choices: list[int]) -> None:
        slots = self.pick(choices, lambda known: known.writer)
        self.cache.abort(slots)
        for slot in slots.tolist():
            self.used[slot].writer = False
            self.used[slot].state = "dead"
            self.settle(slot)

    @rule(choices=some)
    def pin(self, choices: list[int]) -> None:
        slots = self.pick(choices, lambda known: known.state != "dead")
        twice = np.concatenate([slots, slots[:1]])
        self.cache.pin(twice)
        for slot in twice.tolist():
            self.add_pins(slot, 1)

    @rule(choices=some)
    def unpin(self, choices: list[int]) -> None:
        fitting = [slot for slot, known in self.used.items() if known.pins > self.held(slot)]
        slots = np.array(sorted({fitting[c % len(fitting)] for c in choices}) if fitting else [], np.int64)
        self.cache.unpin(slots)
        for slot in slots.tolist():
            self.add_pins(slot, -1)

    @rule(number=holders, part=part)
    def hold(self, number: int, part: tuple[int, int]) -> None:
        holder, (first, last) = self.holders[number], part
        former = holder.held.tolist()
        got = self.cache.hold(self.batch(holder.space, range(NUM_NAMES)).keys, holder.held, first, last)
        where = self.indexed()
        expected = [where.get((holder.space, n), -1) if first <= n < last else -1 for n in range(NUM_NAMES)]
        assert holder.held.tolist() == expected
        assert got.missing.tolist() == [n for n in range(first, last) if expected[n] < 0]
        assert got.writing == sum(slot >= 0 and self.used[slot].state == "writing" for slot in expected)
        self.hold_instead(former, expected)

    def hold_instead(self, former: list[int], now: list[int]) -> None:
        """A holder's pins are others than before."""
        for slot in now:
            if slot >= 0:
                self.add_pins(slot, 1)
        for slot in former:
            if slot >= 0:
                self.add_pins(slot, -1)

    @rule(number=holders)
    def let_go(self, number: int) -> None:
        held = self.holders[number].held
        former = held.tolist()
        assert self.cache.let_go(held) == sum(slot >= 0 for slot in former)
        assert (held == -1).all()
        self.hold_instead(former, [])

    @rule(choices=some)
    def forget(self, choices: list[int]) -> None:
        slots = self.pick(choices, lambda known: True)
        self.cache.forget(np.concatenate([slots, slots[:1]]))
        for slot in slots.tolist():
            self.used[slot].state = "dead"
            self.settle(slot)

    @rule(space=spaces, wanted=numbers)
    def restore(self, space: int, wanted: list[int]) -> None:
        """Into slots that are free, each of the chunk's own size."""
        state, batch = self.cache._state, []
        for size_class in range(len(self.plan.class_bytes)):
            members = walk(state.free, state.records["older"], state.records["newer"], size_class)
            fitting = [n for n in wanted if self.cache._class_of_group[n % len(self.sizes)] == size_class]
            batch += list(zip(fitting, members[::2], strict=False))
        slots = np.array([slot for _, slot in batch], np.int64)
        restored = self.cache.restore(self.batch(space, [number for number, _ in batch]), slots)
        there = set(self.indexed())
        for (number, slot), ready in zip(batch, restored.tolist(), strict=True):
            assert ready == ((space, number) not in there)
            if ready:
                there.add((space, number))
                self.used[slot] = Slot((space, number), "ready", writer=False)

    @rule(space=spaces, wanted=numbers)
    def touch(self, space: int, wanted: list[int]) -> None:
        slots = self.cache.find(self.batch(space, list(dict.fromkeys(wanted))).keys)
        self.cache.touch(slots[slots >= 0])

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        for slot in list(self.indexed().values()):
            self.used[slot].state = "dead"
            self.settle(slot)

    @rule(
        number=holders,
        part=part,
        verdicts=st.lists(st.integers(-3, 1), min_size=NUM_NAMES, max_size=NUM_NAMES),
        backward=st.booleans(),
    )
    def find_gap(self, number: int, part: tuple[int, int], verdicts: list[int], backward: bool) -> None:
        holder, (first, last) = self.holders[number], part
        states, where = self.states_of(holder.space), self.indexed()
        former, expected = holder.held.tolist(), holder.held.tolist()
        coming = 0
        gap = first - 1 if backward else last
        for n in reversed(range(first, last)) if backward else range(first, last):
            if verdicts[n] >= 0:
                coming += 1
                continue
            if expected[n] >= 0 and self.used[expected[n]].state == "dead":
                expected[n] = -1
            if states[n] == ABSENT or (states[n] == WRITING and verdicts[n] == NOT_WRITING):
                gap = n
                break
            expected[n] = where[holder.space, n]
            coming += states[n] == WRITING
        look = self.cache.last_gap if backward else self.cache.first_gap
        keys = self.batch(holder.space, range(NUM_NAMES)).keys
        got = look(keys, holder.held, np.array(verdicts, np.int16), first, last)
        assert got.chunk == gap and holder.held.tolist() == expected
        pins = [sum(slot >= 0 for slot in held) for held in (former, expected)]
        assert got.pinned == pins[1] - pins[0] and got.coming == coming
        self.hold_instead(former, expected)

    # ── what is always so ────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def the_counts_are_the_models(self) -> None:
        cache, known = self.cache, list(self.used.values())
        for count, state in ((cache.ready, "ready"), (cache.writing, "writing"), (cache.dead, "dead")):
            assert count == sum(slot.state == state for slot in known)
        assert cache.pinned == sum(slot.writer or slot.pins > 0 for slot in known)
        assert cache.evictable == sum(slot.state == "ready" and not slot.pins for slot in known)
        assert len(cache) == cache.ready + cache.writing
        ready = [self.sizes[slot.name[1] % len(self.sizes)] for slot in known if slot.state == "ready"]
        assert cache.bytes_ready == sum(map(slot_bytes, ready))
        if not self.several:
            assert cache.free == self.usable_slots() - len(known)
        if self.policy_type is not Misbehaving:
            assert cache.policy_faults == 0

    @invariant()
    def every_name_is_found_and_no_other(self) -> None:
        where = self.indexed()
        for space in range(len(SPACES)):
            everything = self.batch(space, range(NUM_NAMES))
            slots, states = self.cache.locate(everything.keys)
            assert slots.tolist() == [where.get((space, n), -1) for n in range(NUM_NAMES)]
            expected = self.states_of(space)
            assert states.tolist() == expected
            ready = next((i for i, state in enumerate(expected) if state != READY), NUM_NAMES)
            pending = next((i for i, state in enumerate(expected) if state == ABSENT), NUM_NAMES)
            assert self.cache.lookup_prefix(everything.keys) == (ready, pending)
        assert np.count_nonzero(self.cache._state.table) == len(where)

    @invariant()
    def every_slot_has_its_name_and_its_bytes(self) -> None:
        end = 0
        slots = np.array(list(self.used), np.int64)
        places = sorted(zip(self.cache.offset(slots).tolist(), slots.tolist(), strict=True))
        for start, slot in places:
            space, number = self.used[slot].name
            assert self.cache.name(slot) == self.batch(space, [number]).name(0)
            assert start >= end, "slots overlap"
            end = start + slot_bytes(self.sizes[number % len(self.sizes)])
        assert end <= self.grown <= self.plan.region_bytes

    @invariant()
    def the_books_agree_with_a_recount(self) -> None:
        state, plan = self.cache._state, self.plan
        records, slabs = state.records, state.slabs
        counts = np.zeros_like(state.counts)
        pooled = self.cache._pooled()
        assert sorted(pooled) == [
            slab for slab in range(self.cache._slabs_grown) if slabs[CLASS, slab] < 0
        ] and (slabs[CLASS, self.cache._slabs_grown :] == -1).all()  # fmt: skip
        free: list[set[int]] = [set() for _ in plan.class_bytes]
        for slab in range(plan.num_slabs):
            size_class = int(slabs[CLASS, slab])
            first, after = slab * plan.slots_per_slab, min((slab + 1) * plan.slots_per_slab, plan.num_slots)
            fitting = first + plan.slots_in(slab, size_class) if size_class >= 0 else first
            assert (records["state"][fitting:after] == FREE).all()
            assert slabs[USED, slab] == (records["state"][first:after] != FREE).sum()
            evictable = (records["state"][first:after] == READY) & (records["pins"][first:after] == 0)
            assert slabs[BUSY, slab] == slabs[USED, slab] - evictable.sum()
            assert not slabs[DRAINING, slab] or slabs[USED, slab]
            for slot in range(first, fitting):
                at = int(records["state"][slot])
                if at == FREE and slabs[DRAINING, slab]:
                    continue  # not given out any more
                if at == FREE:
                    free[size_class].add(slot)
                counts[size_class, at] += 1
                pinned = at != FREE and records["pins"][slot] > 0
                counts[size_class, PINNED] += pinned
                counts[size_class, EVICTABLE] += at == READY and not pinned
        assert np.array_equal(counts, state.counts)
        assert slabs[DRAINING].sum() <= 1
        assert counts[:, [DEAD, ORPHAN]].sum() == self.cache.dead
        for size_class, expected in enumerate(free):
            members = walk(state.free, records["older"], records["newer"], size_class)
            assert len(members) == len(expected) and set(members) == expected
        ranked = [slot for by_class in lists_of(self.cache._order).values() for slots in by_class for slot in slots]
        assert sorted(ranked) == sorted(slot for slot, known in self.used.items() if known.state == "ready")

    def teardown(self) -> None:
        """When all writers and readers are done, everything can be had again."""
        if not hasattr(self, "cache"):
            return
        self.commit([*range(100)])
        for holder in range(NUM_HOLDERS):
            self.let_go(holder)
        while any(known.pins for known in self.used.values()):
            self.unpin([*range(100)])
        self.grow(self.plan.region_bytes)
        self.clear()
        assert not self.used
        whole = self.plan.region_bytes // self.plan.slab_bytes
        for group, size_class in enumerate(self.cache._class_of_group.tolist()):
            everything = chunks(*range(whole * self.plan.slots_in(0, size_class)), group=group)
            assert self.cache.room(everything.groups)
            slots = self.cache.reserve(everything).slots
            assert (slots >= 0).all()
            self.cache.abort(slots)
        self.the_books_agree_with_a_recount()


class LRUMachine(HostCacheMachine):
    policy_type = LRUPolicy


class ARCMachine(HostCacheMachine):
    policy_type = ARCPolicy


class S3FIFOMachine(HostCacheMachine):
    policy_type = S3FIFOPolicy


class MisbehavingMachine(HostCacheMachine):
    policy_type = Misbehaving


_few = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestWithLRU = LRUMachine.TestCase
TestWithARC = ARCMachine.TestCase
TestWithS3FIFO = S3FIFOMachine.TestCase
TestWithAMisbehavingPolicy = MisbehavingMachine.TestCase
for _case in (TestWithLRU, TestWithARC, TestWithS3FIFO, TestWithAMisbehavingPolicy):
    _case.settings = _few
del _case  # or it would be one more test


@pytest.mark.parametrize("sizes", [*ONE_SIZE[:1], *SIZES])
@pytest.mark.parametrize("machine_type", [LRUMachine, ARCMachine, S3FIFOMachine, MisbehavingMachine])
def test_a_long_life(machine_type: type[HostCacheMachine], sizes: tuple[int, ...]) -> None:
    """What hypothesis seldom comes to: a cache that is always full, of several sizes, whose slabs move to and fro."""
    rng = random.Random(sum(sizes))
    machine = machine_type()
    machine.start(sizes, 16, False)
    invariants = [
        machine.the_counts_are_the_models,
        machine.every_name_is_found_and_no_other,
        machine.every_slot_has_its_name_and_its_bytes,
        machine.the_books_agree_with_a_recount,
    ]

    def some() -> list[int]:
        return [rng.randrange(30) for _ in range(rng.randint(1, 4))]

    def wanted() -> list[int]:
        # For a while mostly chunks of one group, then of another.
        favourite = number // 40 % len(sizes)
        numbers = [n for n in range(NUM_NAMES) if n % len(sizes) == favourite or rng.random() < 0.1]
        first = rng.randrange(len(numbers))
        return numbers[first : first + rng.randint(1, 5)]

    def part() -> tuple[int, int]:
        first = rng.randrange(NUM_NAMES)
        return first, min(NUM_NAMES, first + rng.randint(0, 4))

    moves: list[tuple[int, Callable[[], None]]] = [
        (20, lambda: machine.store(rng.randrange(3), wanted())),
        (4, lambda: machine.reserve(rng.randrange(3), wanted(), rng.random() < 0.8)),
        (6, lambda: machine.commit(some())),
        (1, lambda: machine.abort(some())),
        (1, lambda: machine.pin(some())),
        (3, lambda: machine.unpin(some())),
        (2, lambda: machine.hold(rng.randrange(NUM_HOLDERS), part())),
        (4, lambda: machine.let_go(rng.randrange(NUM_HOLDERS))),
        (
            2,
            lambda: machine.find_gap(
                rng.randrange(NUM_HOLDERS), part(), [rng.randint(-3, -1)] * NUM_NAMES, rng.random() < 0.5
            ),
        ),
        (6, lambda: machine.touch(rng.randrange(3), wanted())),
        (1, lambda: machine.restore(rng.randrange(3), wanted())),
        (1, lambda: machine.forget(some()[:1])),
    ]
    for number in range(STEPS):
        rng.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()
        if number % 5 == 0:
            for check in invariants:
                check()
    machine.teardown()
