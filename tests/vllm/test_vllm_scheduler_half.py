"""The scheduler half against sequences of calls that are hard to bring about in a running engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tiering_harness import TOKENS, Bench, group, hashes

from tierkv.keys import new_generation

# Importing vLLM within the test's own process brings its warnings along.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def half(bench: Bench, extended: bool = False) -> Any:
    from tierkv.connector.config import Deployment
    from tierkv.connector.scheduler import SchedulerHalf

    ids = tuple(range(len(bench.model.groups)))
    deployment = Deployment(bench.config, bench.model, ids, (TOKENS,) * len(ids), TOKENS, TOKENS, extended)
    return SchedulerHalf(deployment, bench.manager, bench.region)


def report(answers: Mapping[int, int] | None = None, names: Iterable[str | None] = ()) -> Any:
    from tierkv.connector.metadata import StepReport

    return StepReport(answers=dict(answers or {}), names=list(names))


def request(request_id: str, text: str, chunks: int, params: Mapping[str, Any] | None = None) -> Any:
    tokens = chunks * TOKENS + 1
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=params,
        block_hashes=hashes(text, chunks),
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        skip_reading_prefix_cache=False,
    )


def blocks(ids: Iterable[int]) -> Any:
    return SimpleNamespace(blocks=([SimpleNamespace(block_id=i) for i in ids],))


def step(
    new: Iterable[Any] = (),
    scheduled: Mapping[str, int] | None = None,
    table: Iterable[int] = (),
    zeroed: Iterable[int] = (),
) -> Any:
    """A scheduler's output; ``table`` is the block table of whoever is scheduled."""
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=cached,
        kv_cache_block_copies=None,
        new_block_ids_to_zero=list(zeroed),
        num_scheduled_tokens=dict(scheduled or {}),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (list(table),)),
    )


def new_request(ids: Iterable[int], computed: int = 0) -> Any:
    return SimpleNamespace(block_ids=(list(ids),), num_computed_tokens=computed)


def test_blocks_that_another_connector_was_to_fill_are_not_stored() -> None:
    with Bench() as bench:
        ours, one = half(bench), request("r", "a", 4)
        ours.new_request(one)
        assert ours.matched_tokens(one, 0) == 0
        ours.allocated(one, blocks([1, 2, 3, 4]), 0)
        one.num_computed_tokens = 4 * TOKENS  # the engine counts them when the other's load begins
        ours.plan_step(step())
        ours.finished(one, ([1, 2, 3, 4],))
        assert ours.plan_step(step()).stores == []


@pytest.mark.parametrize("scheduled", [False, True])
def test_stores_are_fenced_against_another_connector_s_load(scheduled: bool) -> None:
    with Bench() as bench:
        ours, one, two = half(bench), request("r", "a", 4), request("q", "b", 4)
        ours.new_request(one)
        ours.matched_tokens(one, 0)
        ours.allocated(one, blocks([1, 2, 3, 4, 5]), 0)
        plan = ours.plan_step(step([new_request([1, 2, 3, 4, 5])], {"r": 17}, [1, 2, 3, 4, 5]))
        (store,) = plan.stores
        one.num_computed_tokens, one.num_tokens = 17, 18
        ours.finished(one, ([1, 2, 3, 4, 5],))
        ours.new_request(two)
        ours.matched_tokens(two, 0)
        ours.allocated(two, blocks([1, 2, 3, 4]), 0)
        later = step([new_request([1, 2, 3, 4, 6], 16)], {"q": 1}, [1, 2, 3, 4, 6]) if scheduled else step()
        assert ours.plan_step(later).flush == {store.job_id}


@pytest.mark.parametrize("stale", [False, True])
def test_states_are_stored_where_the_engine_names_them(stale: bool) -> None:
    """Not what the block table has: a block of states may hold one in mid-block."""
    with Bench([group(0), group(1, "state")]) as bench:
        ours, one = half(bench), request("r", "a", 6)
        if stale:  # the device may have kept part of a block, of which nobody tells
            ours.reset(device_is_empty=False)
        ours.new_request(one)
        assert ours.matched_tokens(one, 0) == 0
        attention, states = [1, 2, 3, 4, 5], [0, 11, 0, 12, 13]
        ours.allocated(one, SimpleNamespace(blocks=([SimpleNamespace(block_id=b) for b in attention], [])), 0)
        one.num_computed_tokens = 0
        output = step((), {"r": 5 * TOKENS})
        output.kv_connector_block_state = SimpleNamespace(
            get_block_ids=lambda _: (attention, states),
            # Of the right group, at the end of a block, within what is computed, and not the null block.
            boundary_state_offloads={
                "r": [
                    (1, 11, 2 * TOKENS),
                    (1, 12, 4 * TOKENS),
                    (1, 13, 5 * TOKENS - 1),
                    (1, 0, TOKENS),
                    (0, 9, TOKENS),
                ],
                "q": [(1, 14, TOKENS)],
            },
        )
        planned = ours.plan_step(output).stores
        if stale:
            assert planned == []
            return
        of_attention, of_states = planned[0].copies
        assert of_attention.blocks.tolist() == attention
        assert of_states.blocks.tolist() == [11, 12]
        again = step()  # named late, in a step that the request has no part in
        again.kv_connector_block_state = SimpleNamespace(
            get_block_ids=lambda _: (attention, states), boundary_state_offloads={"r": [(1, 15, 5 * TOKENS)]}
        )
        (late,) = ours.plan_step(again).stores
        assert [c.blocks.tolist() for c in late.copies] == [[15]]
        ours.finished(one, (attention, states))


def test_blocks_that_are_cleared_are_fenced() -> None:
    """They may be of a request that was preempted in the same pass, and so is not in the output."""
    with Bench() as bench:
        ours, one = half(bench), request("r", "a", 4)
        ours.new_request(one)
        ours.matched_tokens(one, 0)
        ours.allocated(one, blocks([1, 2, 3, 4]), 0)
        (store,) = ours.plan_step(step([new_request([1, 2, 3, 4])], {"r": 16}, [1, 2, 3, 4])).stores
        assert ours.plan_step(step(zeroed=[7])).flush == set()
        assert ours.plan_step(step(zeroed=[7, 3])).flush == {store.job_id}


def test_a_hit_of_the_device_that_ends_within_a_block_is_left_alone() -> None:
    with Bench([group(0), group(1, "state")]) as bench:
        bench.store("a", 4)
        ours, one = half(bench), request("r", "a", 4)
        ours.new_request(one)
        assert ours.matched_tokens(one, TOKENS + 1) == 0
        assert ours.matched_tokens(one, TOKENS) == 3 * TOKENS


def test_a_load_whose_chunks_are_gone_is_reported_as_failed_and_stores_nothing() -> None:
    with Bench() as bench:
        bench.store("a", 4)
        ours, one = half(bench), request("r", "a", 4)
        ours.new_request(one)
        assert ours.matched_tokens(one, 0) == 4 * TOKENS
        bench.manager.reset("host")
        ours.allocated(one, blocks([1, 2, 3, 4]), 4 * TOKENS)
        one.num_computed_tokens = 4 * TOKENS
        assert ours.plan_step(step()).failed_loads == ["r"]
        ours.finished(one, ([1, 2, 3, 4],))
        assert ours.plan_step(step()).stores == []
        assert not ours.busy


@pytest.mark.parametrize("device_is_empty", [False, True])
def test_what_the_device_kept_over_a_reset_is_not_stored(device_is_empty: bool) -> None:
    with Bench() as bench:
        ours, one = half(bench), request("r", "a", 4)
        ours.reset(device_is_empty)
        ours.new_request(one)
        assert ours.matched_tokens(one, 3 * TOKENS) == 0
        ours.allocated(one, blocks([1, 2, 3, 4, 5]), 0)
        one.num_computed_tokens = 3 * TOKENS
        plan = ours.plan_step(step([new_request([1, 2, 3, 4, 5], 12)], {"r": 5}, [1, 2, 3, 4, 5]))
        stored = [b for t in plan.stores for c in t.copies for b in c.blocks.tolist()]
        assert stored == ([1, 2, 3, 4] if device_is_empty else [])  # block 4 attends to them


def test_a_reset_cancels_stores_and_revokes_loads() -> None:
    with Bench() as bench:
        bench.store("a", 4)
        ours, one, two = half(bench), request("r", "a", 4), request("q", "b", 4)
        for each in (one, two):
            ours.new_request(each)
        assert ours.matched_tokens(one, 0) == 4 * TOKENS
        ours.allocated(one, blocks([1, 2, 3, 4]), 4 * TOKENS)
        ours.matched_tokens(two, 0)
        ours.allocated(two, blocks([5, 6, 7, 8, 9]), 0)
        plan = ours.plan_step(step([new_request([5, 6, 7, 8, 9])], {"q": 17}, [5, 6, 7, 8, 9]))
        ours.reset()
        after = ours.plan_step(step())
        assert after.cancel == {t.job_id for t in plan.stores}
        assert after.revoke == {t.job_id for _, t in plan.loads}
        assert ours.busy  # until the workers have said that they are done with the memory


@pytest.mark.parametrize(("most", "loaded"), [(None, 4), (4 * TOKENS, 4), (2 * TOKENS, 2), (2 * TOKENS - 1, 1), (0, 0)])
def test_max_load_tokens(most: int | None, loaded: int) -> None:
    """Counted from what the device has; whole blocks."""
    with Bench() as bench:
        bench.store("a", 5)
        ours, one = half(bench), request("r", "a", 5, {"max_load_tokens": most})
        ours.new_request(one)
        assert ours.matched_tokens(one, TOKENS) == loaded * TOKENS


@pytest.mark.parametrize(("most", "stored"), [(None, 4), (3 * TOKENS + 3, 3), (TOKENS, 1), (0, 0)])
def test_max_offload_tokens(most: int | None, stored: int) -> None:
    with Bench() as bench:
        ours, one = half(bench), request("r", "a", 4, {"max_offload_tokens": most})
        ours.new_request(one)
        ours.matched_tokens(one, 0)
        ours.allocated(one, blocks([1, 2, 3, 4, 5]), 0)
        plan = ours.plan_step(step([new_request([1, 2, 3, 4, 5])], {"r": 17}, [1, 2, 3, 4, 5]))
        assert [b for t in plan.stores for c in t.copies for b in c.blocks.tolist()] == [1, 2, 3, 4][:stored]


def test_kv_load_tiers_reach_the_manager_and_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    with Bench() as bench:
        ours, one = half(bench), request("r", "a", 4, {"kv_load_tiers": [{"medium": "cpu"}], "mine": 1})
        seen: list[Any] = []
        monkeypatch.setattr(bench.manager, "lookup", lambda query: seen.append(query.context) or query.local)
        ours.new_request(one)
        assert ours.matched_tokens(one, 0) == 0
        (context,) = seen
        assert context.params["mine"] == 1
        assert context.load_tiers.allows("CPU", "LOCAL") and not context.load_tiers.allows("STORAGE", "LOCAL")


def test_after_a_reset_requests_wait_until_the_workers_have_said_what_their_weights_are() -> None:
    with Bench() as bench:
        bench.store("a", 4)
        ours, one = half(bench, extended=True), request("r", "a", 4)
        ours.new_request(one)
        assert ours.matched_tokens(one, 0) is None  # at the start, too
        ask = ours.plan_step(step()).ask
        assert ask and ours.matched_tokens(one, 0) is None
        assert not ours.plan_step(step()).ask, "asked once"
        ours.take_report(report({ask: 1}))
        assert ours.matched_tokens(one, 0) == 4 * TOKENS

        ours.reset()
        assert not ours.plan_step(step()).ask, "asked when a request wants to know"
        assert ours.matched_tokens(one, 0) is None
        again = ours.plan_step(step()).ask
        ours.take_report(report({ask: 1}))  # an answer to what was asked before the reset
        assert again != ask and ours.matched_tokens(one, 0) is None
        ours.take_report(report({again: 1}, ["step-1"]))
        assert ours.matched_tokens(one, 0) == 0
        assert bench.manager.space.generation == new_generation("step-1")


def test_a_name_that_comes_late_counts_from_then_on() -> None:
    with Bench() as bench:
        ours, one, two = half(bench), request("r", "a", 4), request("q", "b", 4)
        for each in (one, two):
            ours.new_request(each)
            assert ours.matched_tokens(each, 0) == 0
            ours.allocated(each, blocks([1, 2, 3, 4, 5]), 0)
        plan = ours.plan_step(step([new_request([1, 2, 3, 4, 5])], {"r": 17}, [1, 2, 3, 4, 5]))
        ours.take_report(report(names=["step-1"]))
        after = ours.plan_step(step(scheduled={"q": 17}, table=[1, 2, 3, 4, 5]))
        assert after.cancel == {t.job_id for t in plan.stores}
        assert after.stores == [], "computed, in part, by the weights before"
        three = request("s", "a", 4)
        ours.new_request(three)
        assert ours.matched_tokens(three, 3 * TOKENS) == 0
        ours.allocated(three, blocks([1, 2, 3, 4, 5]), 0)
        three.num_computed_tokens = 3 * TOKENS
        plan = ours.plan_step(step([new_request([1, 2, 3, 4, 5], 12)], {"s": 5}, [1, 2, 3, 4, 5]))
        assert plan.stores == [], "the device was not reset, and what follows attends to what it has kept"


@pytest.mark.parametrize("names", [["step-1", "step-2"], [None, None], ["step-1", None]])
def test_without_one_name_of_all_ranks_the_generation_is_nobody_s(names: list[str | None]) -> None:
    with Bench() as bench:
        ours = half(bench)
        before = bench.manager.space.generation
        ours.take_report(report(names=names))
        known = {before, *(new_generation(n) for n in names if n)}
        assert bench.manager.space.generation not in known


def test_reports_of_ranks_add_up() -> None:
    one, two = report({3: 1}, ["step-1"]), report({3: 1}, ["step-1"])
    assert one and not report()
    total = one.aggregate(two)
    assert (total.answers, total.names) == ({3: 2}, ["step-1"] * 2)
