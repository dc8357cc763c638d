"""Prefixes against the room in the host: who waits, who is cut short, and that nobody waits for nothing."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from audit import audit
from puppet import PuppetTier, puppet, puppet_of
from tiering_harness import TOKENS, Bench, content, group, wait_until

from tierkv.types import ChunkName

SLOT = 512  # bytes


def fill(tier: PuppetTier, bench: Bench, *prompts: tuple[str, int]) -> None:
    """Give the tier these prompts without the host's help."""
    for text, count in prompts:
        for chunks in bench.chunks(text, count):
            for i in range(len(chunks)):
                name = chunks.name(i)
                tier.records[name] = content(name, bench.model.chunk_bytes(name.group))


def letter(number: int) -> str:
    return chr(ord("A") + number)


@pytest.mark.parametrize("chunks", [17, 32, 1000])
def test_fifty_requests_at_once_that_are_each_larger_than_the_host(chunks: int) -> None:
    """All end, what is read is read at most once a request, nobody is asked without end, and stores go on meanwhile."""
    with Bench(slots=16, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        waiting = {letter(n): f"r{n}" for n in range(50)}
        fill(tier, bench, *[(text, chunks) for text in waiting])
        queries = {text: bench.query(text, chunks, request_id) for text, request_id in waiting.items()}
        reads: dict[str, Counter[ChunkName]] = {}
        served, turns, end = 0, 0, time.monotonic() + 60
        while waiting:
            assert time.monotonic() < end, repr(bench.manager)
            turns += 1
            for text, request_id in list(waiting.items()):
                before = tier.loaded.copy()
                answer = bench.manager.lookup(queries[text])
                reads.setdefault(request_id, Counter()).update(tier.loaded - before)
                if answer is not None:
                    assert 0 < answer <= 16 * TOKENS
                    served += answer // TOKENS
                    bench.load(text, chunks, request_id)
                    bench.manager.finish_request(request_id)
                    del waiting[text]
            audit(bench)
            time.sleep(0.0005)
        bench.assert_at_rest()
        audit(bench)
        assert set(tier.loaded.values()) == {1}, "no request wants what another one does, and none chases its tail"
        assert bench.manager.metrics["promotions"] == sum(tier.loaded.values()) == served == 50 * 16
        pieces = 1 + (chunks > 256)
        assert len(tier.asked) == 50 * pieces
        assert bench.manager.metrics["hit_chunks_tier"] == 50 * 16


def test_a_request_that_is_loading_ends_while_others_wait() -> None:
    with Bench(slots=16, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        fill(tier, bench, ("a", 16), *[(letter(n), 32) for n in range(20)])
        assert bench.boundary("a", 16, "running") == 16 * TOKENS
        plan = bench.manager.begin_load("running")
        assert plan is not None
        for _ in range(20):
            for n in range(20):
                assert bench.ask(letter(n), 32, f"r{n}") is None
            time.sleep(0.001)
        bench.check(plan, bench.chunks("a", 16), 0)
        bench.manager.finish_load("running", ok=True)
        for n in range(20):
            assert bench.load(letter(n), 32, f"r{n}") == 16 * TOKENS
        bench.assert_at_rest()
        assert set(tier.loaded.values()) == {1}


def test_waiting_requests_hold_no_more_than_their_share_and_stores_go_on() -> None:
    with Bench(slots=32, tiers=[puppet()], promotion_share=0.5) as bench:
        tier = puppet_of(bench)
        fill(tier, bench, ("a", 100), ("b", 100))
        tier.loads_at_once = False
        for request, text in (("ra", "a"), ("rb", "b")):
            assert bench.ask(text, 100, request) is None
        wait_until(lambda: tier.open)
        for n in range(20):
            assert [bench.ask("a", 100, "ra"), bench.ask("b", 100, "rb")] == [None, None]
            counts = bench.manager.counts()
            assert counts["bytes_waiting"] == 16 * SLOT and counts["slots_writing"] == 16
            assert bench.store(letter(n), 8) == 8, "running requests store on"
            bench.settle_stores()
            audit(bench)
        first = "a" if tier.open[0].chunks.name(0) == bench.chunks("a", 1)[0].name(0) else "b"
        tier.loads_at_once = True
        tier.do()
        for text in sorted("ab", key=lambda text: text != first):
            assert bench.load(text, 100, f"r{text}") == 16 * TOKENS
        bench.assert_at_rest()
        assert bench.manager.metrics["stores_no_room"] == 0


def test_a_share_of_less_than_a_chunk_promotes_nothing() -> None:
    with Bench(slots=32, tiers=[puppet()], promotion_share=0.01) as bench:
        fill(puppet_of(bench), bench, ("a", 4))
        bench.store("a", 2)
        bench.settle()
        assert bench.load("a", 4, "r") == 2 * TOKENS
        assert bench.manager.metrics["promotions"] == 0
        bench.assert_at_rest()


def test_one_who_has_been_answered_does_not_keep_younger_ones_waiting() -> None:
    """It did wait for room, and that is over: however long the engine takes to come for it, nobody waits for that."""
    with Bench(slots=16, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        fill(tier, bench, ("a", 8), ("b", 12), ("c", 4))
        assert bench.boundary("a", 8, "ra") == 8 * TOKENS
        wait_until(lambda: bench.ask("b", 12, "rb") is None and bench.manager.metrics["waits_for_room"])
        # All that it wants comes from elsewhere, and so it need not promote anything.
        assert bench.load("a", 8, "ra") == 8 * TOKENS
        bench.manager._hits["rb"].dirty = False
        assert bench.store("b", 12) == 12
        assert bench.boundary("b", 12, "rb") == 12 * TOKENS
        began = time.monotonic()
        assert bench.load("c", 4, "rc") == 4 * TOKENS
        assert time.monotonic() - began < 5
        assert bench.load("b", 12, "rb") == 12 * TOKENS
        bench.assert_at_rest()


def test_one_who_waits_for_room_and_is_aborted_keeps_nobody_waiting() -> None:
    with Bench(slots=16, tiers=[puppet()]) as bench:
        fill(puppet_of(bench), bench, ("a", 10), ("b", 12), ("c", 4))
        assert bench.boundary("a", 10, "ra") == 10 * TOKENS
        wait_until(lambda: bench.ask("b", 12, "rb") is None and bench.manager.metrics["waits_for_room"])
        wait_until(lambda: bench.ask("c", 4, "rc") is None and bench.manager.metrics["waits_for_room"] == 2)
        bench.manager.finish_request("rb")
        assert bench.load("c", 4, "rc") == 4 * TOKENS
        bench.manager.finish_request("ra")
        bench.assert_at_rest()


def test_older_ones_come_first() -> None:
    with Bench(slots=16, tiers=[puppet()]) as bench:
        fill(puppet_of(bench), bench, ("a", 10), ("b", 12), ("c", 4))
        assert bench.boundary("a", 10, "ra") == 10 * TOKENS
        wait_until(lambda: bench.ask("b", 12, "rb") is None and bench.manager.metrics["waits_for_room"])
        for _ in range(50):
            assert bench.ask("c", 4, "rc") is None, "there would be room, which the older one waits for"
            assert bench.ask("b", 12, "rb") is None
            time.sleep(0.001)
        assert bench.load("a", 10, "ra") == 10 * TOKENS
        assert bench.boundary("b", 12, "rb") == 12 * TOKENS
        assert bench.load("c", 4, "rc") == 4 * TOKENS
        assert bench.load("b", 12, "rb") == 12 * TOKENS
        bench.assert_at_rest()


def test_what_is_shared_is_promoted_once_and_held_by_each() -> None:
    with Bench(slots=32, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        fill(tier, bench, ("ab", 8), ("ac", 8))
        tier.loads_at_once = False
        requests = {"r1": "ab", "r2": "ab", "r3": "ac"}
        for request, text in requests.items():
            assert bench.ask(text, 8, request) is None
        wait_until(lambda: [bench.ask(t, 8, r) for r, t in requests.items()] and len(tier.loaded) == 15)
        assert set(tier.loaded.values()) == {1}
        audit(bench)
        bench.manager.finish_request("r1")
        audit(bench)
        tier.do()
        for request in ("r2", "r3"):
            assert bench.load(requests[request], 8, request) == 8 * TOKENS
        bench.assert_at_rest()
        assert set(tier.loaded.values()) == {1}


def test_a_promotion_goes_on_for_others_when_the_one_who_started_it_is_aborted() -> None:
    with Bench(tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        fill(tier, bench, ("a", 4))
        tier.loads_at_once = False
        wait_until(lambda: bench.ask("a", 4, "r1") is None and tier.open)
        bench.manager.finish_request("r1")
        audit(bench)
        assert bench.ask("a", 4, "r2") is None
        assert bench.manager.counts()["slots_writing"] == 4
        tier.do()
        assert bench.load("a", 4, "r2") == 4 * TOKENS
        assert set(tier.loaded.values()) == {1}
        bench.assert_at_rest()


def test_of_size_classes_each_gets_the_room_that_it_needs() -> None:
    groups = [group(0), group(1, page=1000, blocks=2), group(2, "sliding_window", window=5 * TOKENS, page=3000)]
    with Bench(groups, slots=16, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        fill(tier, bench, *[(text, 24) for text in "abcdef"])
        for text in "abcdef":
            boundary = bench.load(text, 24, f"r{text}")
            assert boundary > 0
            audit(bench)
            assert bench.store(text + "x", 4) > 0
            audit(bench)
        bench.assert_at_rest()
        assert set(tier.loaded.values()) == {1}
