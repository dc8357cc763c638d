"""The manager with a faulty tier and a slow one, driven at random: no wrong byte, and nothing stays pinned."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiering_harness import TOKENS, Bench, group, memory

PROMPTS = st.text("abc", min_size=1, max_size=4)
COUNTS = st.integers(1, 12)


def faulty(seed: int) -> dict[str, Any]:
    return {
        "type": "faulty",
        "module_path": "tierkv.testing.faults:FaultyTier",
        "inner": memory(),
        "seed": seed,
        "fails": 0.15,
        "partial": 0.2,
        "late": 0.15,
        "late_s": 0.05,
        "twice": 0.2,
        "raises": 0.1,
        "lookup_raises": 0.1,
    }


SLOW = {
    "type": "latency",
    "module_path": "tierkv.testing.faults:LatencyTier",
    "inner": memory(),
    "load_delay_s": 0.004,
    "store_delay_s": 0.002,
}


class FaultyTiers(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16), slots=st.integers(4, 40), policy=st.sampled_from(["lru", "arc"]))
    def start(self, seed: int, slots: int, policy: str) -> None:
        self.bench = Bench(
            [group(0), group(1, "sliding_window", window=2 * TOKENS)],
            slots=slots,
            tiers=[faulty(seed), SLOW],
            eviction_policy=policy,
            load_timeout_s=0.02,
            lookup_timeout_s=0.02,
        )
        self.requests: dict[str, tuple[str, int]] = {}
        self.number = 0

    @rule(text=PROMPTS, count=COUNTS, ok=st.integers(0, 5))
    def store(self, text: str, count: int, ok: int) -> None:
        self.bench.store(text, count, ok=ok > 0)

    @rule(text=PROMPTS, count=COUNTS)
    def ask(self, text: str, count: int) -> None:
        self.number += 1
        request = f"r{self.number}"
        self.requests[request] = (text, count)
        self.bench.ask(text, count, request)

    @rule(index=st.integers(0, 100))
    def load(self, index: int) -> None:
        """Wait for the answer of a request; every byte of its prefix is checked."""
        if self.requests:
            request = sorted(self.requests)[index % len(self.requests)]
            text, count = self.requests.pop(request)
            patience = time.monotonic() + 0.1
            while self.bench.ask(text, count, request) is None:
                if time.monotonic() > patience:  # it may wait for room that others hold who are not loaded here
                    self.abort_all()
                time.sleep(0.001)
            self.bench.load(text, count, request)
            self.bench.manager.finish_request(request)

    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        if self.requests:
            request = sorted(self.requests)[index % len(self.requests)]
            del self.requests[request]
            self.bench.manager.finish_request(request)

    def abort_all(self) -> None:
        for request in self.requests:
            self.bench.manager.finish_request(request)
        self.requests.clear()

    @rule(scope=st.sampled_from(["host", "host", "all"]))
    def reset(self, scope: str) -> None:
        self.bench.manager.reset(scope)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        if hasattr(self, "bench"):
            counts = self.bench.manager.counts()
            assert counts["slots_free"] + counts["slots_ready"] <= self.bench.manager.num_slots

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.abort_all()
            self.bench.assert_at_rest()
            self.bench.close()


TestFaultyTiers = FaultyTiers.TestCase
TestFaultyTiers.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
