"""Models with windows: what lies where, for which group, and that it is one decision."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from audit import audit
from puppet import puppet, puppet_of
from tiering_harness import TOKENS, Bench, group

from tierkv.layout.spec import GroupSpec
from tierkv.types import Chunks

FULL = group(0)
WINDOW = group(1, "sliding_window", window=3 * TOKENS)  # reaches back 11 tokens: three chunks, four where it must
LOCAL = group(1, "chunked_local", window=4 * TOKENS)


def store(bench: Bench, chunks: Sequence[Chunks]) -> None:
    """Store these chunks, of several groups, and wait for the tiers."""
    batch = Chunks.concat(list(chunks))
    ticket = bench.manager.begin_store(batch, "s")
    assert ticket is not None
    bench.copy(batch, ticket)
    bench.manager.finish_store(ticket, ok=True)
    bench.settle()


@pytest.mark.parametrize("where", ["host", "tier"])
@pytest.mark.parametrize(("only", "longer", "shorter"), [(WINDOW, 23, 0), (LOCAL, 36, 16)], ids=["sliding", "chunked"])
def test_a_model_of_nothing_but_windows(only: GroupSpec, longer: int, shorter: int, where: str) -> None:
    """Only the end counts: what lies before the window may be gone. Where a local one begins, nothing is needed."""
    spec = group(0, only.kind, window=only.window)
    with Bench([spec], slots=64, tiers=[puppet()]) as bench:
        chunks = bench.chunks("a", 23)[0]
        store(bench, [chunks.slice(20, 23)])
        if where == "tier":
            bench.forget_host()
        assert bench.load("a", 23, "r") == 23 * TOKENS
        assert bench.load("a", 39, "r2") == longer * TOKENS
        assert bench.load("a", 19, "r3") == shorter * TOKENS
        tier = puppet_of(bench)
        assert len(tier.loaded) == (3 if where == "tier" else 0)
        bench.assert_at_rest()
        audit(bench)


@pytest.mark.parametrize("where", ["host", "tier"])
def test_a_hit_needs_the_one_state_at_its_end(where: str) -> None:
    """Of states only a few are kept; the longest prefix of attention that ends at one of them is served."""
    with Bench([group(0), group(1, "state", page=700)], slots=64, tiers=[puppet()]) as bench:
        attention, states = bench.chunks("a", 20)
        store(bench, [attention.slice(0, 17), states.slice(3, 4), states.slice(11, 12), states.slice(18, 19)])
        if where == "tier":
            bench.forget_host()
        assert bench.load("a", 20, "r") == 12 * TOKENS  # not 19: attention ends before
        assert bench.load("a", 11, "r2") == 4 * TOKENS
        assert bench.load("a", 3, "r3") == 0
        if where == "tier":
            wanted = {attention.name(i) for i in range(12)} | {states.name(11), states.name(3)}
            assert set(puppet_of(bench).loaded) == wanted
        bench.assert_at_rest()
        audit(bench)


def test_a_hole_in_a_window_moves_the_boundary_before_it() -> None:
    spec = group(0, "sliding_window", window=3 * TOKENS)
    with Bench([spec], slots=64, tiers=[puppet()]) as bench:
        chunks = bench.chunks("a", 30)[0]
        store(bench, [chunks.slice(0, 10), chunks.slice(11, 13), chunks.slice(28, 30)])
        bench.forget_host()
        assert bench.load("a", 30, "r") == 10 * TOKENS
        assert set(puppet_of(bench).loaded) == {chunks.name(i) for i in (7, 8, 9)}


def test_a_far_hole_is_found_in_two_questions() -> None:
    """First the end of the prompt, and if that is of no use, all of it."""
    spec = group(0, "sliding_window", window=3 * TOKENS)
    with Bench([spec], slots=64, tiers=[puppet()]) as bench:
        store(bench, [bench.chunks("a", 3)[0]])
        bench.forget_host()
        assert bench.load("a", 3000, "r") == 3 * TOKENS
        asked = puppet_of(bench).asked
        assert sum(asked) == 3000 and len(asked) <= 6


@pytest.mark.parametrize(("full", "window"), [("tier", "host"), ("host", "tier"), ("tier", "tier"), ("host", "host")])
def test_of_a_hybrid_each_group_comes_from_where_it_is(full: str, window: str) -> None:
    with Bench([FULL, WINDOW], slots=64, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        chunks = bench.chunks("a", 12)
        store(bench, chunks)
        bench.forget_host()
        in_host = [c for c, place in zip(chunks, (full, window), strict=True) if place == "host"]
        if in_host:
            store(bench, in_host)
        assert bench.boundary("a", 12, "r") == 12 * TOKENS
        audit(bench)
        wanted = {chunks[0].name(i) for i in range(12) if full == "tier"}
        wanted |= {chunks[1].name(i) for i in range(9, 12) if window == "tier"}
        assert set(tier.loaded) == wanted and set(tier.loaded.values()) <= {1}
        plan = bench.manager.begin_load("r")
        assert plan is not None
        bench.check(plan, chunks, 0)
        assert plan.sources == {"host" if full == "host" else "external_unspecified": 12 * TOKENS}
        assert (plan.offsets[1] >= 0).tolist() == [False] * 9 + [True] * 3
        bench.manager.finish_load("r", ok=True)
        bench.assert_at_rest()


@pytest.mark.parametrize("missing", ["full", "window", "both"])
def test_of_a_hybrid_a_tier_that_has_one_group_serves_as_far_as_the_other_goes(missing: str) -> None:
    with Bench([FULL, WINDOW], slots=64, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        chunks = bench.chunks("a", 20)
        store(bench, chunks)
        bench.forget_host()
        if missing in ("full", "both"):
            del tier.records[chunks[0].name(15)]
        if missing in ("window", "both"):
            del tier.records[chunks[1].name(13)]
        # Beyond the hole in the window, from four chunks on, all is well again.
        expected = {"full": 15, "window": 20, "both": 13}[missing]
        assert bench.load("a", 20, "r") == expected * TOKENS
        assert max(tier.loaded.values()) == 1
        bench.assert_at_rest()
        audit(bench)


def test_a_window_that_cannot_be_loaded_after_all_is_tried_further_ahead() -> None:
    """The tier says that it has it; the load says that it has not. The boundary moves, once, and is served."""
    with Bench([FULL, WINDOW], slots=64, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        chunks = bench.chunks("a", 20)
        store(bench, chunks)
        bench.forget_host()
        lies = chunks[1].name(18)
        del tier.records[lies]
        look_up = tier.lookup_batch
        tier.lookup_batch = lambda asked, request, required=None: [  # type: ignore[method-assign]
            has or asked.name(i) == lies for i, has in enumerate(look_up(asked, request))
        ]
        assert bench.load("a", 20, "r") == 18 * TOKENS
        assert max(tier.loaded.values()) == 1
        # The second time, the host has all but what nobody has, and it is asked for again: once a request.
        assert bench.load("a", 20, "r2") == 18 * TOKENS
        assert {name for name, times in tier.loaded.items() if times > 1} == {lies}
        bench.assert_at_rest()


def test_chunks_of_different_sizes_end_where_the_largest_does() -> None:
    groups = [group(0, blocks=2), group(1, "sliding_window", window=3 * TOKENS), group(2, blocks=4, page=1000)]
    with Bench(groups, slots=40, tiers=[puppet()]) as bench:
        bench.store("a", 11)  # 5, 11 and 2 complete chunks: 10, 11 and 8 blocks
        bench.settle()
        bench.forget_host()
        assert bench.load("a", 11, "r") == 8 * TOKENS
        audit(bench)
        assert bench.load("a", 11, "r2", local=3 * TOKENS) == 8 * TOKENS  # from within a chunk on
        bench.assert_at_rest()
        assert set(puppet_of(bench).loaded.values()) == {1}


# Eviction: from the end of a prompt on, in all groups alike.


def fill(bench: Bench, text: str, count: int) -> None:
    """Other chunks, which evict ``count`` of each group."""
    bench.store(text, count)


@pytest.mark.parametrize("how", ["stored", "loaded", "loaded behind the device's"])
def test_what_is_left_of_a_prompt_is_a_prefix_in_all_groups(how: str) -> None:
    """Room for two prompts of two groups; after half of another one, half of the older one can still be served."""
    with Bench([group(0), group(1)], slots=80) as bench:
        # As the connector gives them: by position, not by group.
        first = Chunks.concat(list(bench.chunks("a", 20))).take([i // 2 + 20 * (i % 2) for i in range(40)])
        store(bench, [first])
        if how == "loaded":
            store(bench, [Chunks.concat(list(bench.chunks("b", 20)))])
            assert bench.load("a", 20, "r") == 20 * TOKENS
            fill(bench, "c", 20)  # the second one goes
        elif how != "stored":
            store(bench, [Chunks.concat(list(bench.chunks("b", 20)))])
            assert bench.load("a", 20, "r", local=8 * TOKENS) == 20 * TOKENS
            fill(bench, "c", 20)
        else:
            fill(bench, "c", 20)
        fill(bench, "d", 10)
        left = bench.ask("a", 20, "r2")
        assert left is not None and 9 * TOKENS <= left <= 11 * TOKENS
        bench.manager.finish_request("r2")
        audit(bench)


def test_a_state_goes_with_the_attention_before_it() -> None:
    """A state that is used is not older than what needs it."""
    with Bench([group(0), group(1, "state", page=256)], slots=24) as bench:
        attention, states = bench.chunks("a", 16)
        store(bench, [attention, states.slice(15, 16)])
        assert bench.load("a", 16, "r") == 16 * TOKENS
        store(bench, [bench.chunks("b", 7)[0]])  # all that is free
        assert bench.load("a", 16, "r2") == 16 * TOKENS
        bench.manager.touch(states.slice(15, 16))
        store(bench, [bench.chunks("c", 7)[0]])  # what was used least lately goes: "b", and not the state
        assert bench.load("a", 16, "r3") == 16 * TOKENS
        audit(bench)
