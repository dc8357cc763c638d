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


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "begin", "replace"]), WORDS, st.sets(WORDS))))
def test_as_a_set(steps: list[tuple[str, int, set[int]]]) -> None:
    known, model = Known(), set[int]()
    added, removed = set[int](), set[int]()
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
        elif what == "begin":
            known.begin_replacing()
            added, removed = set(), set()
        else:
            known.replace(words(walked))
            model = (walked | added) - removed
        assert known.has(words(range(21))).tolist() == [word in model for word in range(21)]


def test_many_are_sorted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "_MOST_ADDED", 10)
    known = Known()
    for word in range(0, 2000, 2):
        known.add(word)
    assert len(known._added) < 10 and len(known) == 1000
    assert known.has(words(range(2000))).tolist() == [True, False] * 1000
    assert known.has(words([2**64 - 1])).tolist() == [False] and known.has(words([])).tolist() == []
