from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.tiers import known as known_module
from tierkv.tiers.known import Known

WORDS = st.integers(0, 20)


def words(values: object) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(list(values), np.uint64)  # type: ignore[call-overload]


STEPS = st.sampled_from(["add", "add_all", "remove", "begin", "end", "replace"])


@given(st.lists(st.tuples(STEPS, WORDS, st.sets(WORDS))))
def test_as_a_set(steps: list[tuple[str, int, set[int]]]) -> None:
    known, model = Known(), set[int]()
    added, removed, walking = set[int](), set[int](), False
    for what, word, walked in steps:
        if what == "add":
            known.add(word)
            model.add(word)
            added.add(word)
            removed.discard(word)
        elif what == "remove":
            known.remove(word)
            model.discard(word)
            removed.add(word)
            added.discard(word)
        elif what == "add_all":
            known.add_all(words(walked))
            model |= walked
            added |= walked
            removed -= walked
        elif what == "begin" or not walking:
            known.begin_replacing()
            added, removed, walking = set(), set(), True
        elif what == "end":
            known.end_replacing(words(walked))
            model |= walked - removed
            walking = False
        else:
            known.replace(words(walked))
            model = (walked | added) - removed
            walking = False
        assert known.has(words(range(21))).tolist() == [word in model for word in range(21)]


def test_what_was_never_there_costs_nothing_and_walks_that_fail_little() -> None:
    known = Known()
    for word in range(10_000):
        known.remove(word)
    assert not known._removed
    for start in range(0, 3000, 3):
        known.begin_replacing()
        known.end_replacing(words(range(start, start + 3)))
    assert len(known._before) + len(known._since) < 20
    assert known.has(words(range(3001))).tolist() == [True] * 3000 + [False]


def test_many_are_sorted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "_MOST_ADDED", 10)
    known = Known()
    for word in range(0, 2000, 2):
        known.add(word)
    assert len(known._added) < 10 and len(known) == 1000
    assert known.has(words(range(2000))).tolist() == [True, False] * 1000
    assert known.has(words([2**64 - 1])).tolist() == [False] and known.has(words([])).tolist() == []
