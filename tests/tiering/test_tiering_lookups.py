"""What is asked of tiers, how often, and by whom they may be asked."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from audit import audit
from puppet import puppet, puppet_of
from tiering_harness import TOKENS, Bench, group, wait_until

from tierkv.tiering.requests import FIRST_PIECE
from tierkv.types import ANY_TIER, Locality, Medium, RequestContext, TierFilter, TierMatch

WINDOW = group(0, "sliding_window", window=2 * TOKENS + 1)


def test_a_long_prompt_that_nobody_has_costs_one_piece() -> None:
    with Bench(tiers=[puppet(), puppet(name="two")]) as bench:
        query = bench.query("a", 65_536, "r")
        while (answer := bench.manager.lookup(query)) is None:
            time.sleep(0.001)
        assert answer == 0
        assert [puppet_of(bench, n).asked for n in (0, 1)] == [[FIRST_PIECE]] * 2


def test_a_long_prompt_is_asked_about_in_pieces_that_grow() -> None:
    with Bench(slots=6000, tiers=[puppet()]) as bench:
        bench.store("a", 5000)
        bench.settle()
        bench.forget_host()
        assert bench.boundary("a", 16_000, "r") == 5000 * TOKENS
        asked = puppet_of(bench).asked
        assert asked == [256, 1024, 4096]
        assert bench.manager.metrics["promotions"] == 5000


def test_what_is_in_the_host_is_not_asked_about() -> None:
    with Bench(tiers=[puppet()]) as bench:
        bench.store("a", 4)
        bench.settle()
        assert bench.load("a", 4, "r") == 4 * TOKENS
        assert bench.load("a", 7, "r2") == 4 * TOKENS
        assert puppet_of(bench).asked == [3]


def test_what_the_first_tier_has_is_not_asked_of_the_second_one() -> None:
    with Bench(tiers=[puppet(), puppet(name="two")]) as bench:
        one, two = puppet_of(bench, 0), puppet_of(bench, 1)
        bench.store("a", 6)
        bench.settle()
        bench.forget_host()
        names = [bench.chunks("a", 6)[0].name(i) for i in range(6)]
        for name in names[4:]:
            del one.records[name]
        assert bench.load("a", 6, "r") == 6 * TOKENS
        assert (one.asked, two.asked) == ([6], [2])
        assert list(one.loaded) == names[:4] and list(two.loaded) == names[4:]


@pytest.mark.parametrize(
    ("load_tiers", "found"),
    [
        (ANY_TIER, "one"),
        (TierFilter(()), None),
        (TierFilter((TierMatch("STORAGE", "LOCAL"),)), "one"),
        (TierFilter((TierMatch("STORAGE", "REMOTE"),)), "two"),
        (TierFilter((TierMatch(None, "REMOTE"),)), "two"),
        (TierFilter((TierMatch("CPU"),)), "three"),
        (TierFilter((TierMatch("CPU"), TierMatch("STORAGE", "REMOTE"))), "two"),
    ],
)
def test_kv_load_tiers(load_tiers: TierFilter, found: str | None) -> None:
    places: list[tuple[str, Medium | None, Locality | None]] = [
        ("one", "STORAGE", "LOCAL"),
        ("two", "STORAGE", "REMOTE"),
        ("three", "CPU", None),
    ]
    tiers = [puppet(name=name, medium=medium, locality=locality) for name, medium, locality in places]
    with Bench(tiers=tiers) as bench:
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        query = replace(bench.query("a", 4, "r"), context=RequestContext("r", {}, load_tiers))
        while (answer := bench.manager.lookup(query)) is None:
            time.sleep(0.001)
        assert answer == (4 * TOKENS if found else 0)
        assert [name for n, (name, *_) in enumerate(places) if puppet_of(bench, n).loaded] == ([found] if found else [])
        # What is in the host serves everyone, wherever it has come from.
        assert bench.boundary("a", 4, "any") == 4 * TOKENS
        none = replace(bench.query("a", 4, "none"), context=RequestContext("none", {}, TierFilter(())))
        assert bench.manager.lookup(none) == 4 * TOKENS


def test_a_request_that_has_grown_keeps_what_it_knows() -> None:
    with Bench(slots=64, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        bench.store("a", 20)
        bench.settle()
        bench.forget_host()
        assert bench.boundary("a", 8, "r") == 8 * TOKENS
        # It was preempted, and comes back longer, with a part on the device.
        assert bench.boundary("a", 12, "r", local=2 * TOKENS) == 12 * TOKENS
        assert tier.asked == [8, 4]
        assert set(tier.loaded.values()) == {1}
        assert bench.load("a", 12, "r", local=2 * TOKENS) == 12 * TOKENS
        bench.assert_at_rest()


def test_a_request_that_comes_back_shorter() -> None:
    with Bench(slots=64, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        bench.store("a", 20)
        bench.settle()
        bench.forget_host()
        tier.answers.clear()
        assert bench.ask("a", 20, "r") is None
        wait_until(lambda: tier.asked)
        assert bench.ask("a", 6, "r", local=TOKENS) is None
        tier.answers.set()
        assert bench.load("a", 6, "r", local=TOKENS) == 6 * TOKENS
        bench.assert_at_rest()


def test_a_question_that_is_open_is_not_asked_again_with_another_local() -> None:
    with Bench(slots=64, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        bench.store("a", 8)
        bench.settle()
        bench.forget_host()
        tier.answers.clear()
        for local in range(4):
            assert bench.ask("a", 8, "r", local=local * TOKENS) is None
        tier.answers.set()
        assert bench.load("a", 8, "r", local=3 * TOKENS) == 8 * TOKENS
        assert tier.asked == [8]
        assert len(tier.loaded) == 5


def test_a_question_about_a_window_that_is_put_again_with_another_local() -> None:
    """The first question is about the end of the prompt; what lies before has its turn, whoever asks how often."""
    with Bench([WINDOW], slots=64, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        tier.answers.clear()
        assert bench.ask("a", 400, "r") is None
        wait_until(lambda: tier.asked)
        assert bench.ask("a", 400, "r", local=TOKENS) is None
        tier.answers.set()
        assert bench.boundary("a", 400, "r", local=TOKENS) == 4 * TOKENS
        assert bench.manager._lookups.broken == 0
        bench.manager.finish_request("r")
        bench.assert_at_rest()


def test_an_abort_ends_the_question() -> None:
    with Bench(slots=6000, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        bench.store("a", 2000)
        bench.settle()
        bench.forget_host()
        tier.answers.clear()
        assert bench.ask("a", 2000, "r") is None
        wait_until(lambda: tier.asked)
        bench.manager.finish_request("r")
        tier.answers.set()
        bench.assert_at_rest()
        assert bench.load("b", 4, "r2") == 0  # behind it in the queue
        assert tier.asked == [256, 4]
        audit(bench)


def test_a_reset_ends_the_question_and_the_next_one_is_about_the_new_generation() -> None:
    with Bench(tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        tier.answers.clear()
        old = bench.query("a", 4, "r")
        assert bench.manager.lookup(old) is None
        wait_until(lambda: tier.asked)
        bench.manager.reset("all")
        tier.answers.set()
        assert bench.manager.lookup(old) == 0, "of the generation before"
        assert bench.load("a", 4, "r") == 0
        assert len(tier.asked) == 2 and not tier.loaded
        bench.assert_at_rest()


def test_a_tier_that_invents_what_it_has_costs_one_load_a_request() -> None:
    with Bench(tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        tier.lookup_batch = lambda chunks, request, required=None: [True] * len(chunks)  # type: ignore[method-assign]
        bench.store("a", 2)
        bench.settle()
        assert bench.load("a", 6, "r") == 2 * TOKENS
        assert set(tier.loaded.values()) == {1} and len(tier.loaded) == 4
        assert bench.manager.counts()["reason:absent"] == 4
        assert bench.manager._lanes[0].reading.state == "closed", "it is there, and says so"
        bench.assert_at_rest()


def test_answers_are_counted_by_what_they_are() -> None:
    """Absent, pending and no room are different answers."""
    with Bench(slots=8, tiers=[puppet()]) as bench:
        tier, metrics = puppet_of(bench), bench.manager.metrics
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        tier.answers.clear()
        for _ in range(3):
            assert bench.ask("a", 12, "r") is None
        assert (metrics["answers_pending"], metrics["answers_absent"], metrics["promotions_no_room"]) == (3, 0, 0)
        bench.manager.finish_request("r")
        tier.answers.set()
        assert bench.load("x", 4, "absent") == 0
        assert (metrics["answers_absent"], metrics["promotions_no_room"]) == (1, 0)
        for text in "bc":
            bench.store(text, 8)
            bench.settle()
        bench.forget_host()
        names = [bench.chunks("b", 12)[0].name(i) for i in range(12)]
        tier.records.update(dict.fromkeys(names[8:], tier.records[names[0]]))
        assert bench.boundary("b", 12, "long") == 8 * TOKENS
        assert (metrics["answers_absent"], metrics["promotions_no_room"]) == (1, 1)
        assert metrics["lookups"] == 3
