"""The host cache against a model of plain dictionaries, in whatever order hypothesis finds.

The model does not know which chunk is evicted: it takes what ``take_evicted`` says, and checks that it could be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv import keys as key_tools
from tierkv.host.cache import ABSENT, READY, WRITING, HostCache
from tierkv.host.policies.arc import ARCPolicy
from tierkv.host.policies.base import Policy
from tierkv.host.policies.lru import LRUPolicy
from tierkv.types import Chunks, Space

SPACE = Space(bytes(16), bytes(16))
NUM_NAMES = 14


def chunks(numbers: Sequence[int]) -> Chunks:
    return key_tools.make_chunks(SPACE, 0, [number.to_bytes(16, "big") for number in numbers])


class Misbehaving(LRUPolicy):
    """LRU that now and then raises, or names victims that are pinned, doubled, foreign, too many or too few."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.random = random.Random(capacity)

    def accessed(self, keys: Sequence[bytes]) -> None:
        if self.random.random() < 0.3:
            raise RuntimeError("no")
        super().accessed(keys)

    def victims(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        if self.random.random() < 0.2:
            raise RuntimeError("no")
        resident = super().victims(count + 2, lambda key: True)
        chosen = self.random.choices([*resident, b"x" * 16], k=self.random.randint(0, count + 2))
        return chosen


@dataclass
class Slot:
    number: int
    state: str  # writing, ready, dead
    writer: bool = True
    pins: int = 0  # without the writer's


numbers = st.lists(st.integers(0, NUM_NAMES - 1), min_size=1, max_size=6, unique=True)
some = st.lists(st.integers(0, 30), min_size=1, max_size=4)


class HostCacheMachine(RuleBasedStateMachine):
    policy_type: type[Policy]

    @initialize(num_slots=st.integers(1, 8))
    def start(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.cache = HostCache(num_slots, 64, self.policy_type(num_slots))
        self.used: dict[int, Slot] = {}  # slot → what the model knows; free ones are not there

    def pick(self, choices: Sequence[int], which: Callable[[Slot], bool]) -> np.ndarray:
        """Some distinct slots for which ``which`` is true."""
        fitting = [slot for slot, known in self.used.items() if which(known)]
        return np.array(sorted({fitting[c % len(fitting)] for c in choices}) if fitting else [], np.int64)

    def settle(self, slot: int) -> None:
        known = self.used[slot]
        if known.state == "dead" and not known.writer and not known.pins:
            del self.used[slot]

    def indexed(self) -> dict[int, int]:
        found = {known.number: slot for slot, known in self.used.items() if known.state != "dead"}
        assert len(found) == sum(known.state != "dead" for known in self.used.values())
        return found

    @rule(wanted=numbers)
    def reserve(self, wanted: list[int]) -> None:
        new = [number for number in wanted if number not in self.indexed()]
        slots = self.cache.reserve(chunks(new)).tolist()
        evictable = sum(known.state == "ready" and not known.pins for known in self.used.values())
        room = self.num_slots - len(self.used)
        evicted = [int.from_bytes(name.block_hash, "big") for name in self.cache.take_evicted()]
        assert len(evicted) == min(evictable, max(0, len(new) - room))
        for number in evicted:
            known = self.used.pop(self.indexed()[number])
            assert known.state == "ready" and not known.pins and not known.writer
        served = min(len(new), room + evictable)
        assert all(slot >= 0 for slot in slots[:served]) and slots[served:] == [-1] * (len(new) - served)
        for number, slot in zip(new, slots[:served], strict=False):
            assert slot not in self.used and 0 <= slot < self.num_slots
            self.used[slot] = Slot(number, "writing")

    @rule(choices=some)
    def commit(self, choices: list[int]) -> None:
        slots = self.pick(choices, lambda known: known.writer)
        ready = self.cache.commit(slots)
        for slot, is_ready in zip(slots.tolist(), ready.tolist(), strict=True):
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
            self.used[slot].pins += 1

    @rule(choices=some)
    def unpin(self, choices: list[int]) -> None:
        slots = self.pick(choices, lambda known: known.pins > 0)
        self.cache.unpin(slots)
        for slot in slots.tolist():
            self.used[slot].pins -= 1
            self.settle(slot)

    @rule(choices=some)
    def forget(self, choices: list[int]) -> None:
        slots = self.pick(choices, lambda known: True)
        self.cache.forget(slots)
        for slot in slots.tolist():
            self.used[slot].state = "dead"
            self.settle(slot)

    @rule(wanted=numbers)
    def touch(self, wanted: list[int]) -> None:
        self.cache.touch(chunks(wanted).keys)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        for slot in list(self.indexed().values()):
            self.used[slot].state = "dead"
            self.settle(slot)

    @invariant()
    def agrees(self) -> None:
        cache, known = self.cache, list(self.used.values())
        assert cache.free == self.num_slots - len(known)
        for count, state in ((cache.ready, "ready"), (cache.writing, "writing"), (cache.dead, "dead")):
            assert count == sum(slot.state == state for slot in known)
        assert cache.free + cache.ready + cache.writing + cache.dead == self.num_slots
        assert cache.pinned == sum(slot.writer or slot.pins > 0 for slot in known)
        where = self.indexed()
        everything = chunks(range(NUM_NAMES))
        assert cache.find(everything.keys).tolist() == [where.get(n, -1) for n in range(NUM_NAMES)]
        codes = {"writing": WRITING, "ready": READY}
        states = [codes[self.used[where[n]].state] if n in where else ABSENT for n in range(NUM_NAMES)]
        assert cache.states(everything.keys).tolist() == states
        ready = next((i for i, state in enumerate(states) if state != READY), NUM_NAMES)
        pending = next((i for i, state in enumerate(states) if state == ABSENT), NUM_NAMES)
        assert cache.lookup_prefix(everything.keys) == (ready, pending)
        for slot, what in self.used.items():
            assert cache.name(slot) == chunks([what.number]).name(0)
        if self.policy_type is not Misbehaving:
            assert cache.policy_faults == 0


class LRUMachine(HostCacheMachine):
    policy_type = LRUPolicy


class ARCMachine(HostCacheMachine):
    policy_type = ARCPolicy


class MisbehavingMachine(HostCacheMachine):
    policy_type = Misbehaving


_few = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWithLRU = LRUMachine.TestCase
TestWithARC = ARCMachine.TestCase
TestWithAMisbehavingPolicy = MisbehavingMachine.TestCase
for _case in (TestWithLRU, TestWithARC, TestWithAMisbehavingPolicy):
    _case.settings = _few
