"""A real trace through the host cache and through the slow twins: the same hits, request by request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numba import config as numba_config
from twins import BUILT_IN, TWIN_OF, Shadow, TwinCache, as_keys, cache_of, chunks, request, trace

from tierkv.host.policies.base import Policy
from tierkv.types import Chunks

TRACE = Path(__file__).parent.parent / "data" / "mooncake_conversation.jsonl.gz"

#: The kernels as plain Python take minutes for all of it.
NUM_REQUESTS = 300 if numba_config.DISABLE_JIT else 1500


@pytest.fixture(scope="module")
def requests() -> list[Chunks]:
    return [chunks(*numbers) for numbers in trace(TRACE)[:NUM_REQUESTS]]


def test_the_trace_is_what_it_says() -> None:
    requests = trace(TRACE)
    assert (len(requests), sum(map(len, requests))) == (1500, 41702)
    assert len(set().union(*requests)) == 30634


@pytest.mark.parametrize("capacity", [NUM_REQUESTS // 3, NUM_REQUESTS * 2, NUM_REQUESTS * 25])
@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_the_hits_of_a_trace_are_those_of_the_twin(
    requests: list[Chunks], policy_type: type[Policy], capacity: int
) -> None:
    cache, twin = cache_of(capacity, policy_type), TwinCache(capacity, TWIN_OF[policy_type](capacity))
    hits = 0
    for number, batch in enumerate(requests):
        got = request(cache, batch)
        assert got == twin.request(as_keys(batch.keys.tolist())), number
        hits += got
    assert hits and cache.policy_faults == 0
    assert cache.ready == len(twin.resident) and cache.pinned == 0


@pytest.mark.parametrize("policy_type", BUILT_IN)
def test_each_decision_of_a_trace_is_the_twins(requests: list[Chunks], policy_type: type[Policy]) -> None:
    """With a few requests under way at any time, whose chunks are pinned, as in an engine."""
    cache = cache_of(NUM_REQUESTS // 2, policy_type)
    shadow = Shadow(cache)
    under_way: list[np.ndarray] = []
    for number, batch in enumerate(requests[: NUM_REQUESTS // 3]):
        request(cache, batch)
        slots = cache.find(batch.keys)
        under_way.append(slots[slots >= 0])
        cache.pin(under_way[-1])
        if len(under_way) > 4:
            cache.unpin(under_way.pop(0))
        if number % 10 == 0:
            shadow.check()
    shadow.check()
    assert shadow.victims_checked > NUM_REQUESTS
