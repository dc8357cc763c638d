"""The manager with real tiers: what is stored comes back, from where it is, and nothing stays pinned."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiering_harness import TOKENS, Bench, fs, group, memory, wait_until

from tierkv.errors import ConfigError
from tierkv.tiers.base import Tier, TierConfig, TierContext
from tierkv.types import ChunkName, Chunks, JobResult, LoadJob, RequestContext, StoreJob


def test_what_is_stored_is_loaded_from_the_host() -> None:
    with Bench() as bench:
        assert bench.store("abc", 8) == 8
        assert bench.load("abc", 8, "r") == 8 * TOKENS
        assert bench.load("abd", 8, "r2") == 2 * TOKENS  # what the prompts share
        assert bench.load("x", 8, "r3") == 0
        bench.assert_at_rest()
        assert bench.manager.metrics["loads"] == 10


def test_a_store_of_what_is_there_copies_nothing() -> None:
    with Bench() as bench:
        assert bench.store("a", 4) == 4
        assert bench.store("a", 6) == 2


def test_the_host_evicts_what_was_used_longest_ago_and_tails_first() -> None:
    with Bench(slots=8) as bench:
        bench.store("a", 4)
        bench.store("b", 4)
        bench.load("a", 4, "r")
        bench.store("c", 6)
        assert bench.load("b", 4, "r2") == 0
        assert bench.load("a", 4, "r3") == 2 * TOKENS


def test_promotion_from_a_tier(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 8)
        bench.settle()
        bench.forget_host()
        assert bench.ask("a", 8, "r") is None  # tiers are asked off this thread
        assert bench.load("a", 8, "r") == 8 * TOKENS
        bench.assert_at_rest()
        assert bench.manager.metrics["promotions"] == 8


def test_a_new_manager_finds_what_another_has_left(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 8)
        bench.settle()
    with Bench(tiers=[fs(tmp_path)]) as bench:
        assert bench.load("a", 8, "r") == 8 * TOKENS
    with Bench(tiers=[fs(tmp_path)], label="other") as bench:
        assert bench.load("a", 8, "r") == 0


def test_one_request_is_served_by_several_tiers(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path / "one")]) as bench:
        bench.store("a", 3)
        bench.settle()
    with Bench(tiers=[fs(tmp_path / "two")]) as bench:
        bench.store("a", 6)
        bench.settle()
    with Bench(tiers=[fs(tmp_path / "one"), fs(tmp_path / "two", name="second")]) as bench:
        bench.store("a", 1)
        assert bench.boundary("a", 6, "r") == 6 * TOKENS
        plan = bench.manager.begin_load("r")
        assert plan is not None and plan.sources == {"host": TOKENS, "disk": 5 * TOKENS}
        bench.manager.finish_load("r", ok=True)
        assert bench.load("a", 6, "r2") == 6 * TOKENS
        bench.assert_at_rest()


def test_several_groups_are_one_decision() -> None:
    groups = [group(0), group(1, "sliding_window", window=2 * TOKENS), group(2, page=512, blocks=1)]
    with Bench(groups, slots=30, tiers=[memory()]) as bench:
        bench.store("a", 6)
        bench.settle()
        assert bench.load("a", 6, "r") == 6 * TOKENS
        assert bench.load("ab", 6, "r2") == TOKENS
        bench.forget_host()
        assert bench.load("a", 6, "r3") == 6 * TOKENS
        # Of the window's group only the window was read: tokens 5 … 7 of a boundary at 24 reach back to 17.
        assert bench.manager.metrics["promotions"] == 6 + 2 + 6
        bench.assert_at_rest()


@pytest.mark.parametrize("chunks", [17, 32, 1000])
def test_a_prefix_larger_than_the_host_is_served_as_far_as_it_fits(tmp_path: Path, chunks: int) -> None:
    with Bench(slots=1024, tiers=[fs(tmp_path)]) as bench:
        bench.store("a", chunks)
        bench.settle()
    with Bench(slots=16, tiers=[fs(tmp_path)]) as bench:
        assert bench.load("a", chunks, "r") == 16 * TOKENS
        bench.assert_at_rest()
        assert bench.manager.metrics["promotions"] == 16


def test_many_requests_larger_than_the_host_take_turns(tmp_path: Path) -> None:
    with Bench(slots=512, tiers=[fs(tmp_path)]) as bench:
        for text in "abcdefgh":
            bench.store(text, 24)
        bench.settle()
    with Bench(slots=16, tiers=[fs(tmp_path)]) as bench:
        waiting = set("abcdefgh")
        end = time.monotonic() + 30
        while waiting:
            assert time.monotonic() < end, repr(bench.manager)
            for text in sorted(waiting):
                answer = bench.ask(text, 24, f"r{text}")
                if answer is not None:
                    assert answer == 16 * TOKENS
                    bench.load(text, 24, f"r{text}")
                    waiting.discard(text)
        bench.assert_at_rest()
        assert bench.manager.metrics["promotions"] == 8 * 16


def test_requests_that_wait_for_room_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with Bench(slots=512, tiers=[fs(tmp_path)]) as bench:
        for text, count in (("a", 16), ("b", 16), ("c", 4)):
            bench.store(text, count)
        bench.settle()
    with Bench(slots=16, tiers=[fs(tmp_path)]) as bench:
        for text, count in (("a", 6), ("b", 6), ("c", 4)):
            bench.store(text, count)
        bench.settle()
        assert bench.boundary("c", 4, "rc") == 4 * TOKENS  # holds a quarter
        for text in "ab":  # each has a part in the host and wants more than is left
            end = time.monotonic() + 10
            while not bench.manager.metrics["waits_for_room"] > "ab".index(text):
                assert bench.ask(text, 16, f"r{text}") is None
                assert time.monotonic() < end
                time.sleep(0.001)
        assert bench.load("c", 4, "rc") == 4 * TOKENS
        assert bench.load("a", 16, "ra") == 16 * TOKENS
        assert bench.load("b", 16, "rb") == 16 * TOKENS
        bench.assert_at_rest()


def test_requests_that_want_the_same_chunks_share_one_promotion(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 8)
        bench.settle()
        bench.forget_host()
        for request in ("r1", "r2"):
            bench.ask("a", 8, request)
        assert bench.boundary("a", 8, "r1") == bench.boundary("a", 8, "r2") == 8 * TOKENS
        assert bench.load("a", 8, "r1") == bench.load("a", 8, "r2") == 8 * TOKENS
        assert bench.manager.metrics["promotions"] == 8
        bench.assert_at_rest()


def test_an_aborted_request_leaves_nothing_pinned(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 8)
        bench.settle()
        bench.forget_host()
        bench.ask("a", 8, "waiting")
        bench.manager.finish_request("waiting")
        assert bench.boundary("a", 8, "found") == 8 * TOKENS
        bench.manager.finish_request("found")
        bench.assert_at_rest()


def test_a_failed_load_is_not_tried_again_by_the_same_request(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 4)
        bench.settle()
        assert bench.boundary("a", 4, "r") == 4 * TOKENS
        assert bench.manager.begin_load("r") is not None
        bench.manager.finish_load("r", ok=False)
        assert bench.ask("a", 4, "r") == 0, "a tier has it, and it is not tried again"
        bench.manager.finish_request("r")
        bench.assert_at_rest()
        assert bench.manager.counts()["slots_free"] == 16, "the copies in the host are not trusted any more"
        assert bench.load("a", 4, "r2") == 4 * TOKENS
        assert bench.manager.metrics["promotions"] == 4


def test_a_failed_store_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 4, ok=False)
        assert bench.load("a", 4, "r") == 0
        assert bench.store("a", 4) == 4
        bench.assert_at_rest()


def test_a_request_waits_for_a_store_that_is_under_way() -> None:
    with Bench() as bench:
        batch = Chunks.concat(bench.chunks("a", 4))
        ticket = bench.manager.begin_store(batch, "s")
        assert ticket is not None
        assert bench.ask("a", 4, "r") is None
        bench.manager.finish_store(ticket, ok=True)
        assert bench.ask("a", 4, "r") == 4 * TOKENS
        bench.manager.finish_request("r")
        bench.assert_at_rest()


def test_store_threshold_counts_sights() -> None:
    with Bench(store_threshold=3) as bench:
        assert [bench.store("a", 4) for _ in range(4)] == [0, 0, 4, 0]


@pytest.mark.parametrize("scope", ["all", "host"])
def test_reset(tmp_path: Path, scope: str) -> None:
    with Bench(tiers=[fs(tmp_path)], reset_scope=scope) as bench:
        bench.store("a", 4)
        bench.settle()
        bench.manager.reset()
        assert bench.load("a", 4, "r") == (0 if scope == "all" else 4 * TOKENS)
        bench.assert_at_rest()


def test_a_store_that_a_reset_overtakes_is_dropped(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as bench:
        batch = Chunks.concat(bench.chunks("a", 4))
        ticket = bench.manager.begin_store(batch, "s")
        assert ticket is not None
        bench.manager.reset()
        bench.manager.finish_store(ticket, ok=True)
        assert bench.load("a", 4, "r") == 0
        bench.assert_at_rest()
        assert bench.manager.counts()["slots_free"] == 16


def test_chunks_of_an_earlier_generation_are_not_stored() -> None:
    with Bench() as bench:
        batch = Chunks.concat(bench.chunks("a", 4))
        bench.manager.invalidate()
        assert bench.manager.begin_store(batch, "s") is None


def test_a_reset_during_the_checksum_keeps_the_chunk_from_the_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summing, reset = threading.Event(), threading.Event()

    def slow_checksum(data: memoryview) -> int:
        summing.set()
        assert reset.wait(10)
        return 1

    monkeypatch.setattr("tierkv.tiering.cascades.canonical.checksum", slow_checksum)
    with Bench(tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 2)
        assert summing.wait(10)
        bench.manager.reset("all")
        reset.set()
        bench.assert_at_rest()
        assert bench.manager.metrics["cascades"] == bench.manager.metrics["cascades_missed"] == 0


def test_replicas_agree_on_a_named_generation(tmp_path: Path) -> None:
    with Bench(tiers=[fs(tmp_path)]) as one, Bench(tiers=[fs(tmp_path)]) as two:
        for bench in (one, two):
            bench.manager.invalidate("step-1")
        one.store("a", 4)
        one.settle()
        assert two.load("a", 4, "r") == 4 * TOKENS
        two.manager.invalidate()
        assert two.load("a", 4, "r2") == 0


class GateTier(Tier):
    """Has everything and delivers nothing until its gate opens. In a module of its own it would be a user's tier."""

    gate = threading.Event()

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.jobs: list[LoadJob | StoreJob] = []

    def lookup(self, name: ChunkName, request: RequestContext) -> bool:
        return True

    def submit_store(self, job: StoreJob) -> None:
        self.jobs.append(job)

    def submit_load(self, job: LoadJob) -> None:
        self.jobs.append(job)

    def get_finished_jobs(self) -> list[JobResult]:
        if not self.gate.is_set():
            return []
        jobs, self.jobs = self.jobs, []
        none = [np.zeros(len(j.chunks), np.bool_) for j in jobs]
        return [JobResult(j.job_id, n, n.astype(np.uint64)) for j, n in zip(jobs, none, strict=True)]


class RefusingTier(GateTier):
    def submit_store(self, job: StoreJob) -> None:
        raise OSError("no")

    submit_load = submit_store  # type: ignore[assignment]


def user_tier(name: str) -> dict[str, Any]:
    return {"type": name, "module_path": f"test_tiering_manager:{name}"}


@pytest.fixture
def gate() -> threading.Event:
    GateTier.gate = threading.Event()
    return GateTier.gate


def test_a_late_promotion_is_a_miss_and_its_slot_is_kept_from_others(gate: threading.Event) -> None:
    with Bench(slots=4, tiers=[user_tier("GateTier")], load_timeout_s=0.05) as bench:
        assert bench.boundary("a", 4, "r") == 0
        assert bench.manager.metrics["promotions_late"] == 4
        bench.manager.finish_request("r")
        assert bench.store("b", 4) == 0  # the tier may still write
        gate.set()
        bench.assert_at_rest()
        assert bench.store("b", 4) == 4


def test_a_slow_tier_keeps_its_share_of_the_slots_and_misses_what_is_evicted(gate: threading.Event) -> None:
    with Bench(slots=16, tiers=[user_tier("GateTier")]) as bench:
        for text in "abcdefgh":
            assert bench.store(text, 4) == 4  # the tier does not keep the host from storing
            end = time.monotonic() + 10
            while bench.manager._cascades.queued:
                assert time.monotonic() < end
                time.sleep(0.001)
        assert bench.manager.counts()["slots_pinned"] == 8
        gate.set()
        bench.assert_at_rest()
        assert bench.manager.metrics["cascades"] == 16
        assert bench.manager.metrics["cascades_missed"] == 16


def test_a_tier_that_does_not_deliver_is_cut_off_before_it_has_all_slots(gate: threading.Event) -> None:
    with Bench(slots=16, tiers=[user_tier("GateTier")], load_timeout_s=0.02) as bench:
        for text in "abcdef":
            assert bench.boundary(text, 2, text) == 0
            bench.manager.finish_request(text)
        assert bench.manager.counts()["slots_late"] == 2
        gate.set()
        bench.settle()
        bench.boundary("g", 2, "g")  # it has reported, so it is asked again
        assert bench.manager.metrics["promotions"] == 4


class MalformedTier(GateTier):
    def get_finished_jobs(self) -> list[JobResult]:
        jobs, self.jobs = self.jobs, []
        return [JobResult(j.job_id, np.ones(99, np.bool_), np.ones(99, np.uint64)) for j in jobs]


def test_a_malformed_report_is_a_failed_job() -> None:
    with Bench(tiers=[user_tier("MalformedTier")]) as bench:
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        assert bench.load("a", 4, "r") == 0
        bench.assert_at_rest()
        assert bench.manager.counts()["reason:malformed"] == 8


def test_a_request_does_not_wait_for_room_for_ever(tmp_path: Path) -> None:
    with Bench(slots=512, tiers=[fs(tmp_path)]) as bench:
        bench.store("a", 16)
        bench.store("b", 16)
        bench.settle()
    with Bench(slots=16, tiers=[fs(tmp_path)], load_timeout_s=0.2) as bench:
        assert bench.boundary("a", 10, "holder") == 10 * TOKENS
        assert bench.load("b", 16, "r") == 6 * TOKENS  # what fits beside the holder
        bench.manager.finish_request("holder")
        bench.assert_at_rest()


def test_a_miss_in_one_group_is_found_in_one_round(tmp_path: Path) -> None:
    groups = [group(0), group(1, "sliding_window", window=2 * TOKENS)]
    with Bench(groups, slots=300, tiers=[fs(tmp_path)]) as bench:
        full = bench.chunks("a", 100)[0]
        ticket = bench.manager.begin_store(full, "s")
        assert ticket is not None
        bench.manager.finish_store(ticket, ok=True)
        bench.settle()
        asked = []
        submit = bench.manager._lookups.submit
        bench.manager._lookups.submit = lambda *args: asked.append(args) or submit(*args)  # type: ignore[method-assign]
        assert bench.load("a", 100, "r") == 0
        assert len(asked) == 1


def test_the_backlog_of_a_stalled_tier_is_bounded(gate: threading.Event) -> None:
    with Bench(slots=16, tiers=[user_tier("GateTier")]) as bench:
        for number in range(40):
            bench.store(chr(ord("A") + number), 2)
            wait_until(lambda: not bench.manager._cascades.queued)
        assert bench.manager._lanes[0].waiting == 16
        assert bench.manager.metrics["cascades_missed"] == 80 - 16 - 8
        gate.set()
        bench.assert_at_rest()


def test_a_tier_that_refuses_jobs_costs_nothing_but_its_hits(gate: threading.Event) -> None:
    gate.set()
    with Bench(tiers=[user_tier("RefusingTier")]) as bench:
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        assert bench.load("a", 4, "r") == 0
        bench.assert_at_rest()


@pytest.mark.parametrize(
    ("fields", "field", "accepted"),
    [
        ({"tiers": [{"type": "fss", "root_dir": "x"}]}, "secondary_tiers[0].type", "fs, memory"),
        ({"tiers": [{"root_dir": "x"}]}, "secondary_tiers[0].type", "fs"),
        ({"tiers": [{"type": "fs"}]}, "secondary_tiers[0].root_dir", ""),
        ({"tiers": [{"type": "fs", "root_dir": "/dev/null/x"}]}, "secondary_tiers[0].root_dir", "writ"),
        ({"tiers": [{"type": "x", "module_path": "no.such:Tier"}]}, "secondary_tiers[0].module_path", "importable"),
        ({"tiers": [{"type": "memory", "capacity": 3}]}, "secondary_tiers[0].capacity", "capacity_bytes"),
        ({"slots": 0}, "cpu_bytes_to_use", ">= 1"),
        ({"trace_path": "/dev/null/x"}, "trace_path", "appended"),
        ({"eviction_policy": "mru"}, "eviction_policy", "arc, lru, s3fifo"),
        ({"cpu_bytes_to_use": 100}, "cpu_bytes_to_use", "at least 512"),
    ],
)
def test_bad_configuration_names_the_field_and_what_is_accepted(
    fields: dict[str, Any], field: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Bench(**fields)
    assert caught.value.field == field
    assert accepted in caught.value.accepted
