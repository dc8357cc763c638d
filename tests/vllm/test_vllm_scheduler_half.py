"""The scheduler half against sequences of calls that are hard to bring about in a running engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tiering_harness import TOKENS, Bench, hashes

# Importing vLLM within the test's own process brings its warnings along.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def half(bench: Bench) -> Any:
    from tierkv.connector.config import Deployment
    from tierkv.connector.scheduler import SchedulerHalf

    return SchedulerHalf(
        Deployment(bench.config, bench.model, (0,), (TOKENS,), TOKENS, TOKENS), bench.manager, bench.region
    )


def request(request_id: str, text: str, chunks: int) -> Any:
    tokens = chunks * TOKENS + 1
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=None,
        block_hashes=hashes(text, chunks),
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        skip_reading_prefix_cache=False,
    )


def blocks(ids: Iterable[int]) -> Any:
    return SimpleNamespace(blocks=([SimpleNamespace(block_id=i) for i in ids],))


def step(new: Iterable[Any] = (), scheduled: Mapping[str, int] | None = None, table: Iterable[int] = ()) -> Any:
    """A scheduler's output; ``table`` is the block table of whoever is scheduled."""
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=cached,
        kv_cache_block_copies=None,
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
        assert stored == ([1, 2, 3, 4] if device_is_empty else [4])


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
