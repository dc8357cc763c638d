"""LRU and ARC, decision by decision, against slow twins that keep plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv import registry
from tierkv.host.policies.arc import ARCPolicy
from tierkv.host.policies.base import Policy
from tierkv.host.policies.lru import LRUPolicy

POLICIES: list[type[Policy]] = [LRUPolicy, ARCPolicy]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class SlowLRU(Policy):
    """One list; the next victim is its first that may go."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.order: list[bytes] = []

    def inserted(self, keys: Sequence[bytes]) -> None:
        for k in list(keys)[::-1]:
            self.order = [other for other in self.order if other != k] + [k]

    def accessed(self, keys: Sequence[bytes]) -> None:
        self.inserted([k for k in keys if k in self.order])

    def removed(self, keys: Sequence[bytes], evicted: bool) -> None:
        self.order = [k for k in self.order if k not in keys]

    def victims(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        return [k for k in self.order if evictable(k)][:count]


class SlowARC(Policy):
    """The four lists of the paper as plain lists; victims one at a time, each after looking at everything again."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0

    def inserted(self, keys: Sequence[bytes]) -> None:
        for k in list(keys)[::-1]:
            if k in self.b1:
                self.p = min(self.capacity, self.p + max(len(self.b2) / len(self.b1), 1))
                self.b1.remove(k)
                self.t2.append(k)
            elif k in self.b2:
                self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
                self.b2.remove(k)
                self.t2.append(k)
            else:
                self.t1.append(k)
        self.bound()

    def accessed(self, keys: Sequence[bytes]) -> None:
        for k in list(keys)[::-1]:
            if k in self.t1 or k in self.t2:
                (self.t1 if k in self.t1 else self.t2).remove(k)
                self.t2.append(k)

    def removed(self, keys: Sequence[bytes], evicted: bool) -> None:
        for k in keys:
            if k in self.t1:
                self.t1.remove(k)
                self.b1 += [k] * evicted
            elif k in self.t2:
                self.t2.remove(k)
                self.b2 += [k] * evicted
        self.bound()

    def bound(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.capacity:
            del self.b1[0]
        while self.b2 and len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.capacity:
            del self.b2[0]

    def victims(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        t1, t2, chosen = list(self.t1), list(self.t2), []
        for _ in range(count):
            lists = (t1, t2) if len(t1) > self.p else (t2, t1)
            found = [(k, where) for where in lists for k in where if evictable(k)]
            if found:
                k, where = found[0]
                where.remove(k)
                chosen.append(k)
        return chosen


TWINS: list[tuple[type[Policy], type[Policy]]] = [(LRUPolicy, SlowLRU), (ARCPolicy, SlowARC)]

batches = st.lists(st.integers(0, 12), max_size=5, unique=True)
steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "forget", "evict"]), batches, st.frozensets(st.integers(0, 12), max_size=4)
    ),
    max_size=60,
)


@pytest.mark.parametrize(("fast_type", "slow_type"), TWINS)
@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 6), steps=steps)
def test_every_decision_is_that_of_the_slow_twin(
    fast_type: type[Policy],
    slow_type: type[Policy],
    capacity: int,
    steps: list[tuple[str, list[int], frozenset[int]]],
) -> None:
    fast, slow = fast_type(capacity), slow_type(capacity)
    resident: set[bytes] = set()

    def evict(count: int, pinned: set[bytes]) -> None:
        chosen = fast.victims(count, lambda k: k not in pinned)
        assert chosen == slow.victims(count, lambda k: k not in pinned)
        assert len(chosen) == len(set(chosen)) == min(count, len(resident - pinned))
        for policy in (fast, slow):
            policy.removed(chosen, True)
        resident.difference_update(chosen)

    for what, numbers, pins in steps:
        keys, pinned = [key(n) for n in numbers], {key(n) for n in pins}
        if what == "use":
            hits = [k for k in keys if k in resident]
            for policy in (fast, slow):
                policy.accessed(hits)
            new = [k for k in keys if k not in resident]
            evict(max(0, len(resident) + len(new) - capacity), pinned | set(hits))
            new = new[: capacity - len(resident)]
            for policy in (fast, slow):
                policy.inserted(new)
            resident.update(new)
        elif what == "forget":
            gone = [k for k in keys if k in resident]
            for policy in (fast, slow):
                policy.removed(gone, False)
            resident.difference_update(gone)
        else:
            evict(len(numbers), pinned)
        if isinstance(fast, ARCPolicy) and isinstance(slow, SlowARC):
            assert [list(part) for part in (fast._t1, fast._t2, fast._b1, fast._b2)] == [
                slow.t1, slow.t2, slow.b1, slow.b2,
            ]  # fmt: skip
            assert fast._p == slow.p
            assert len(slow.t1) + len(slow.b1) <= capacity
            assert len(slow.t1 + slow.t2 + slow.b1 + slow.b2) <= 2 * capacity


@pytest.mark.parametrize("policy_type", POLICIES)
def test_the_head_of_a_batch_outlives_its_tail(policy_type: type[Policy]) -> None:
    policy = policy_type(4)
    policy.inserted([key(n) for n in range(4)])
    assert policy.victims(4, lambda k: True) == [key(n) for n in (3, 2, 1, 0)]
    policy.accessed([key(n) for n in range(4)])
    assert policy.victims(4, lambda k: True) == [key(n) for n in (3, 2, 1, 0)]


@pytest.mark.parametrize("policy_type", POLICIES)
def test_asking_for_victims_changes_nothing(policy_type: type[Policy]) -> None:
    policy = policy_type(8)
    policy.inserted([key(n) for n in range(8)])
    first = policy.victims(5, lambda k: k != key(6))
    assert policy.victims(5, lambda k: k != key(6)) == first
    assert policy.victims(0, lambda k: True) == []


def test_arc_keeps_what_is_used_again_through_a_scan_and_lru_does_not() -> None:
    kept = {}
    for policy in (LRUPolicy(8), ARCPolicy(8)):
        hot = [key(n) for n in range(4)]
        policy.inserted(hot)
        policy.accessed(hot)
        resident = set(hot)
        for number in range(100, 200):  # a long scan, each chunk once
            if len(resident) == 8:
                gone = policy.victims(1, lambda k: True)
                policy.removed(gone, True)
                resident.difference_update(gone)
            policy.inserted([key(number)])
            resident.add(key(number))
        kept[type(policy)] = len(resident & set(hot))
    assert kept == {LRUPolicy: 0, ARCPolicy: 4}


@pytest.mark.parametrize("policy_type", POLICIES)
def test_the_registry_finds_it(policy_type: type[Policy]) -> None:
    name = policy_type.__name__.removesuffix("Policy").lower()
    assert registry.load("policy", name, field="eviction_policy") is policy_type
