"""What tiers do not do in time, or not right: a miss for the request, fenced, and counted against the tier."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from audit import audit
from puppet import PuppetTier, puppet, puppet_of
from tiering_harness import TOKENS, Bench, wait_until

from tierkv.tiers.breaker import Breaker
from tierkv.types import JobResult

SHORT_S = 0.15


def with_records(*prompts: tuple[str, int], **fields: Any) -> tuple[Bench, PuppetTier]:
    """A manager whose one tier has these prompts and whose host cache is empty."""
    bench = Bench(tiers=[puppet()], **fields)
    for text, count in prompts:
        bench.store(text, count)
        bench.settle()
        bench.forget_host()
    return bench, puppet_of(bench)


def end_the_pause(breaker: Breaker) -> None:
    assert breaker.state == "open"
    breaker._retry_at = 0.0


# ---- deadlines


def test_a_lookup_that_takes_too_long_is_a_miss_for_that_request() -> None:
    bench, tier = with_records(("a", 4), lookup_timeout_s=SHORT_S)
    with bench:
        tier.answers.clear()
        assert bench.boundary("a", 4, "r") == 0
        assert bench.manager.metrics["lookup_timeouts"] == 1
        tier.answers.set()
        assert bench.ask("a", 4, "r") == 0
        assert bench.load("a", 4, "later") == 4 * TOKENS
        bench.manager.finish_request("r")
        bench.assert_at_rest()


def test_what_the_first_tier_has_does_not_wait_for_the_second_one_beyond_the_deadline() -> None:
    with Bench(tiers=[puppet(), puppet(name="stuck")], lookup_timeout_s=SHORT_S) as bench:
        one, two = puppet_of(bench, 0), puppet_of(bench, 1)
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        two.answers.clear()
        del one.records[bench.chunks("a", 4)[0].name(3)]
        assert bench.load("a", 4, "r") == 3 * TOKENS
        assert bench.manager.metrics["lookup_timeouts"] == 1
        bench.assert_at_rest()


@pytest.mark.parametrize("reports", ["ok", "failed"])
def test_a_late_load_changes_nothing_any_more(reports: str) -> None:
    bench, tier = with_records(("a", 4), slots=64, load_timeout_s=SHORT_S)
    with bench:
        tier.loads_at_once = False
        assert bench.boundary("a", 4, "r") == 0
        bench.manager.finish_request("r")
        counts = bench.manager.counts()
        assert (counts["promotions_late"], counts["slots_late"], counts["slots_pinned"]) == (4, 4, 4)
        audit(bench)
        (late,) = tier.open
        assert bench.load("b", 4, "r2") == 0
        assert bench.store("b", 60) == 60  # every slot but those four
        wait_until(lambda: bench.manager.counts()["slots_pinned"] == 4)
        assert bench.store("c", 1) == 1  # by eviction
        audit(bench)
        # Now the tier writes, and reports.
        if reports == "ok":
            tier.do(late)
        else:
            tier.open.remove(late)
            tier.reports.append(tier.failed(late, "eio"))
        wait_until(lambda: not bench.manager.counts()["jobs"])
        audit(bench)
        assert bench.manager._lanes[0].reading._failures == 1, "that it has come at last does not say that it is quick"
        counts = bench.manager.counts()
        assert counts["slots_late"] == counts["slots_pinned"] == counts["slots_dead"] == 0
        assert counts["slots_free"] == 4
        assert bench.manager._cache.find(bench.chunks("a", 4)[0].keys).tolist() == [-1] * 4
        assert bench.store("d", 4) == 4
        audit(bench)


def test_a_late_load_does_not_take_the_place_of_the_one_that_came_after_it() -> None:
    bench, tier = with_records(("a", 4), slots=64, load_timeout_s=SHORT_S)
    with bench:
        tier.loads_at_once = False
        assert bench.boundary("a", 4, "r") == 0
        bench.manager.finish_request("r")
        (late,) = tier.open
        tier.loads_at_once = True
        assert bench.boundary("a", 4, "r2") == 4 * TOKENS  # another job, other slots
        where = bench.manager._cache.find(bench.chunks("a", 4)[0].keys)
        tier.do(late)
        wait_until(lambda: not bench.manager.counts()["jobs"])
        audit(bench)
        assert (bench.manager._cache.find(bench.chunks("a", 4)[0].keys) == where).all()
        assert bench.load("a", 4, "r2") == 4 * TOKENS
        bench.assert_at_rest()


def test_a_load_that_a_reset_overtakes_is_forgotten() -> None:
    bench, tier = with_records(("a", 4))
    with bench:
        tier.loads_at_once = False
        assert bench.ask("a", 4, "r") is None
        wait_until(lambda: bench.ask("a", 4, "r") is None and tier.open)
        bench.manager.reset("host")
        audit(bench)
        tier.do()
        bench.settle()
        assert bench.manager.counts()["slots_free"] == 16
        audit(bench)


def test_a_store_that_takes_too_long_keeps_its_pins_and_counts_as_a_failure() -> None:
    with Bench(tiers=[puppet()], store_timeout_s=SHORT_S) as bench:
        tier, lane = puppet_of(bench), bench.manager._lanes[0]
        tier.stores_at_once = False
        bench.store("a", 4)
        wait_until(lambda: bench.manager.counts()["cascades_late"] == 4)
        assert bench.manager.counts()["slots_pinned"] == lane.held == 4
        assert lane.writing._failures == 1
        audit(bench)
        time.sleep(2 * SHORT_S)
        assert bench.manager.counts()["cascades_late"] == 4  # once each
        tier.do()
        bench.settle()
        assert bench.manager.counts()["slots_pinned"] == lane.held == 0
        assert lane.writing._failures == 1, "as for loads"
        audit(bench)


def test_a_request_does_not_wait_for_a_copy_from_the_device_for_ever() -> None:
    """Of which there may never be an end: the engine has its own reasons."""
    with Bench(load_timeout_s=SHORT_S) as bench:
        bench.store("a", 2)
        batch = bench.chunks("a", 4)[0]
        ticket = bench.manager.begin_store(batch, "s")
        assert ticket is not None
        assert bench.boundary("a", 4, "r") == 2 * TOKENS
        assert bench.manager.metrics["waits_given_up"] == 2
        audit(bench, [ticket])
        bench.copy(batch, ticket)
        bench.manager.finish_store(ticket, ok=True)
        bench.manager.finish_request("r")
        assert bench.load("a", 4, "r2") == 4 * TOKENS


@pytest.mark.parametrize("asks", [False, True], ids=["silent", "asking"])
def test_an_answer_is_not_kept_for_ever(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not come for it, be it that it has no device blocks: pins go, by the manager's own thread."""
    monkeypatch.setattr("tierkv.tiering.manager.EXPIRY_S", 0.01)
    bench, _ = with_records(("a", 4), load_timeout_s=SHORT_S)
    with bench:
        assert bench.boundary("a", 4, "r") == 4 * TOKENS
        assert bench.manager.counts()["bytes_waiting"] == bench.manager.counts()["slots_pinned"] * 512 == 4 * 512
        end = time.monotonic() + 20
        while not bench.manager.metrics["hits_expired"]:
            assert time.monotonic() < end
            if asks:
                bench.ask("a", 4, "r")
            time.sleep(0.001)
        if not asks:
            assert bench.manager.counts()["bytes_waiting"] == bench.manager.counts()["slots_pinned"] == 0
        audit(bench)
        assert bench.load("a", 4, "r") == 4 * TOKENS, "still there"
        bench.assert_at_rest()


def test_a_request_that_is_not_asked_about_any_more_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, among others, for a load: what it holds beside that goes, too."""
    monkeypatch.setattr("tierkv.tiering.manager.EXPIRY_S", 0.01)
    bench, tier = with_records(("a", 4), load_timeout_s=SHORT_S)
    with bench:
        bench.store("a", 2)
        bench.settle()
        tier.loads_at_once = False
        assert bench.ask("a", 4, "r") is None
        wait_until(lambda: bench.ask("a", 4, "r") is None and tier.open)
        assert bench.manager.counts()["bytes_waiting"] == 4 * 512
        wait_until(lambda: not bench.manager.counts()["bytes_waiting"])
        assert bench.manager.metrics["hits_expired"] == 1
        tier.do()
        bench.settle()
        audit(bench)
        assert bench.boundary("a", 4, "r") == 2 * TOKENS


@pytest.mark.parametrize("what", ["abort", "reset", "invalidate", "release", "deadline"])
def test_a_load_that_is_under_way_keeps_its_pins(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are copying from its slots: whatever happens, these are nobody else's until they have ended."""
    monkeypatch.setattr("tierkv.tiering.manager.EXPIRY_S", 0.01)
    with Bench(slots=8, load_timeout_s=SHORT_S) as bench:
        bench.store("a", 4)
        assert bench.boundary("a", 4, "r") == 4 * TOKENS
        plan, chunks = bench.manager.begin_load("r"), bench.chunks("a", 4)
        assert plan is not None
        if what == "abort":
            bench.manager.finish_request("r")
        elif what == "release":
            bench.manager.release("r")
        elif what == "deadline":
            time.sleep(3 * SHORT_S)
        else:
            bench.manager.reset("host" if what == "reset" else "all")
        audit(bench)
        assert bench.manager.counts()["slots_pinned"] == 4 and bench.manager.counts()["bytes_waiting"] == 0
        assert bench.store("b", 8) == 4
        bench.check(plan, chunks, 0)
        bench.manager.finish_load("r", ok=True)
        bench.manager.finish_request("r")
        bench.assert_at_rest()
        audit(bench)
        assert bench.manager.metrics["hits_expired"] == 0


# ---- reports that are wrong


def test_a_second_report_is_ignored() -> None:
    bench, tier = with_records(("a", 4))
    with bench:
        tier.loads_at_once = tier.stores_at_once = False
        assert bench.ask("a", 4, "r") is None
        wait_until(lambda: bench.ask("a", 4, "r") is None and tier.open)
        (load,) = tier.open
        tier.reports.append(tier.carry_out(load))
        assert bench.boundary("a", 4, "r") == 4 * TOKENS
        bench.store("b", 4)
        wait_until(lambda: len(tier.open) == 2)
        store = tier.open[1]
        result = tier.carry_out(store)
        for report in (tier.failed(load, "eio"), tier.carry_out(load), result, result, tier.failed(store, "eio")):
            tier.reports.append(report)
        tier.open.clear()
        wait_until(lambda: bench.manager.idle and not tier.reports)
        audit(bench)
        assert bench.load("a", 4, "r") == 4 * TOKENS
        assert bench.manager.metrics["promotions_failed"] == bench.manager.metrics["cascades_failed"] == 0
        bench.assert_at_rest()


def test_a_tier_cannot_end_the_jobs_of_another_one() -> None:
    with Bench(tiers=[puppet(), puppet(name="other")]) as bench:
        one, two = puppet_of(bench, 0), puppet_of(bench, 1)
        bench.store("a", 4)
        bench.settle()
        bench.forget_host()
        one.loads_at_once = False
        assert bench.ask("a", 4, "r") is None
        wait_until(lambda: bench.ask("a", 4, "r") is None and one.open)
        two.reports.append(replace(two.failed(one.open[0], ""), ok=np.ones(4, np.bool_)))
        wait_until(lambda: not two.reports)
        assert bench.ask("a", 4, "r") is None
        audit(bench)
        one.do()
        assert bench.load("a", 4, "r") == 4 * TOKENS
        bench.assert_at_rest()


MALFORMED: dict[str, dict[str, Any]] = {
    "longer": {"ok": np.ones(5, np.bool_), "checksums": np.ones(5, np.uint64)},
    "shorter": {"ok": np.ones(3, np.bool_), "checksums": np.ones(3, np.uint64)},
    "square": {"ok": np.ones((2, 2), np.bool_)},
    "flat": {"ok": True},
    "nothing": {"ok": None},
    "words": {"ok": ["no"] * 4},
    "numbers": {"ok": [0.5] * 4},
    "ragged": {"ok": [[True], [], [], []]},
    "no reasons": {"ok": np.zeros(4, np.bool_), "reasons": None},
    "reasons in a list": {"ok": np.zeros(4, np.bool_), "reasons": ["eio"] * 4},
    "one sum": {"checksums": 7},
    "fewer sums": {"checksums": np.ones(3, np.uint64)},
    "sums that are words": {"checksums": ["a"] * 4},
}


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
def test_a_malformed_report_is_a_failed_job(kind: str, load: bool) -> None:
    bench, tier = with_records(("a", 4))
    with bench:
        tier.loads_at_once = tier.stores_at_once = False
        if load:
            wait_until(lambda: bench.ask("a", 4, "r") is None and tier.open)
        else:
            bench.store("b", 4)
        wait_until(lambda: tier.open)
        job = tier.open.pop()
        good = JobResult(job.job_id, np.ones(4, np.bool_), np.ones(4, np.uint64) if load else None)
        tier.reports.append(replace(good, **MALFORMED[kind]))
        bench.settle()
        assert bench.manager.counts()["reason:malformed"] == 4
        assert bench.manager.metrics["promotions_failed" if load else "cascades_failed"] == 4
        if load:
            assert bench.boundary("a", 4, "r") == 0
            bench.manager.finish_request("r")
        bench.assert_at_rest()
        audit(bench)


@pytest.mark.parametrize("report", [None, "done", JobResult(10**9, np.ones(1, np.bool_)), JobResult([], True)])  # type: ignore[arg-type]
def test_what_is_no_report_is_ignored(report: Any) -> None:
    bench, tier = with_records(("a", 4))
    with bench:
        tier.reports.append(report)
        assert bench.load("a", 4, "r") == 4 * TOKENS
        bench.assert_at_rest()
        assert bench.manager._thread.is_alive()


def test_a_report_without_sums_of_a_load_of_which_nothing_is_ok_is_no_mistake() -> None:
    bench, tier = with_records(("a", 4))
    with bench:
        tier.loads_at_once = False
        wait_until(lambda: bench.ask("a", 4, "r") is None and tier.open)
        tier.reports.append(replace(tier.failed(tier.open.pop(), "absent"), checksums=None))
        assert bench.boundary("a", 4, "r") == 0
        assert bench.manager.counts()["reason:absent"] == 4


def test_a_tier_that_cannot_report_is_late_until_it_can() -> None:
    bench, tier = with_records(("a", 4), slots=64, load_timeout_s=SHORT_S)
    with bench:
        tier.report_error = OSError("not now")
        assert bench.boundary("a", 4, "r") == 0
        assert bench.manager.counts()["slots_late"] == 4
        tier.report_error = None
        bench.settle()
        audit(bench)
        assert bench.load("a", 4, "r2") == 4 * TOKENS


def test_what_a_tier_reports_as_the_checksum_is_what_is_kept() -> None:
    """It vouches for the bytes: they are not looked at again, so a wrong sum is found by whoever verifies next."""
    bench, tier = with_records(("a", 2))
    with bench:
        tier.loads_at_once = False
        wait_until(lambda: bench.ask("a", 2, "r") is None and tier.open)
        tier.reports.append(replace(tier.carry_out(tier.open.pop()), checksums=np.array([5, 6], np.uint64)))
        assert bench.load("a", 2, "r") == 2 * TOKENS
        cache = bench.manager._cache
        assert cache.checksums(cache.find(bench.chunks("a", 2)[0].keys)).tolist() == [5, 6]


# ---- tiers that fail again and again


def test_a_tier_whose_lookups_fail_is_not_asked_then_probed_then_back() -> None:
    bench, tier = with_records(("a", 4))
    with bench:
        lane = bench.manager._lanes[0]
        lane.asking = Breaker(failures=3, first_pause_s=60)
        tier.lookup_error = OSError("injected")
        for number in range(6):
            assert bench.load("a", 4, f"r{number}") == 0
        assert bench.manager.metrics["lookups_failed"] == len(tier.asked) == 3
        end_the_pause(lane.asking)
        assert bench.load("a", 4, "probe") == bench.load("a", 4, "after") == 0
        assert len(tier.asked) == 4, "one probe, which has failed"
        tier.lookup_error = None
        assert bench.load("a", 4, "too early") == 0
        end_the_pause(lane.asking)
        assert bench.load("a", 4, "back") == 4 * TOKENS
        assert lane.asking.state == "closed"


@pytest.mark.parametrize("how", ["fails", "late", "refused"])
def test_a_tier_whose_loads_fail_is_not_asked_then_probed_then_back(how: str) -> None:
    bench, tier = with_records(("a", 4), load_timeout_s=SHORT_S, slots=512)
    with bench:
        lane = bench.manager._lanes[0]
        lane.reading = Breaker(failures=5, first_pause_s=60)
        tier.loads_at_once = how == "refused"
        tier.submit_error = OSError("injected") if how == "refused" else None
        for number in range(5):
            wait_until(lambda n=number: bench.ask("a", 4, f"r{n}") is not None or tier.open)
            if how == "fails":
                tier.reports.append(tier.failed(tier.open.pop(), "eio"))
            assert bench.boundary("a", 4, f"r{number}") == 0
        assert lane.reading.state == "open", "though it has answered each lookup"
        asked = len(tier.asked)
        assert bench.load("a", 4, "cut off") == 0 and len(tier.asked) == asked
        assert lane.writing.state == "closed", "a slow reader still stores"
        tier.loads_at_once, tier.submit_error = True, None
        end_the_pause(lane.reading)
        assert bench.load("a", 4, "back") == 4 * TOKENS
        assert lane.reading.state == "closed"


def test_a_tier_whose_lookups_hang_is_cut_off() -> None:
    """Otherwise each request would wait for the deadline, for ever."""
    bench, tier = with_records(("a", 4), lookup_timeout_s=SHORT_S)
    with bench:
        lane = bench.manager._lanes[0]
        lane.asking = Breaker(failures=3, first_pause_s=60)
        tier.answers.clear()
        for number in range(3):
            assert bench.load("a", 4, f"r{number}") == 0
        assert bench.manager.metrics["lookup_timeouts"] == 3
        assert lane.asking.state == "open"
        assert bench.ask("a", 4, "at once") == 0
        time.sleep(SHORT_S)  # the last lookup may have begun later than it was asked for, and is to be late, too
        tier.answers.set()  # an answer that nobody waits for any more is none
        wait_until(lambda: bench.manager._lookups._lanes[id(tier)].questions.empty())
        time.sleep(SHORT_S)
        assert lane.asking.state == "open"


def test_the_tier_that_hangs_is_cut_off_and_not_the_one_before_it() -> None:
    with Bench(tiers=[puppet(), puppet(name="stuck")], lookup_timeout_s=SHORT_S) as bench:
        puppet_of(bench, 1).answers.clear()
        for number in range(3):
            assert bench.load("a", 4, f"r{number}") == 0
        one, two = bench.manager._lanes
        assert (one.asking._failures, two.asking._failures) == (0, 3)


@pytest.mark.parametrize("how", ["fails", "refused", "late"])
def test_a_tier_whose_stores_fail_gets_no_more_then_a_probe_then_all(how: str) -> None:
    with Bench(slots=64, tiers=[puppet()], store_timeout_s=SHORT_S) as bench:
        tier, lane = puppet_of(bench), bench.manager._lanes[0]
        lane.writing = Breaker(failures=3, first_pause_s=60)
        tier.stores_at_once = False
        tier.submit_error = OSError("injected") if how == "refused" else None
        for number in range(3):
            bench.store("abc"[number], 2)
            wait_until(lambda n=number: lane.writing._failures > n or lane.writing.state == "open" or tier.open)
            if how == "fails":
                tier.reports.append(tier.failed(tier.open.pop(), "enospc"))
            wait_until(lambda n=number: lane.writing._failures > n)
        assert lane.writing.state == "open" and lane.reading.state == "closed"
        tried = sum(tier.stored.values())
        bench.store("d", 2)
        wait_until(lambda: bench.manager.metrics["cascades_cut_off"] == 2)
        assert sum(tier.stored.values()) == tried
        tier.stores_at_once, tier.submit_error = True, None
        tier.do()
        bench.settle()
        end_the_pause(lane.writing)
        bench.store("e", 2)
        bench.settle()
        bench.store("f", 2)
        bench.settle()
        assert lane.writing.state == "closed"
        assert set(tier.records) >= {bench.chunks(t, 2)[0].name(i) for t in "ef" for i in range(2)}
        audit(bench)


def test_stores_of_a_tier_that_has_become_slow_are_dropped() -> None:
    backpressure = {"high_water_s": 1e-6, "low_water_s": 1e-9, "warmup_completions": 1, "policy_cls": "DropStorePolicy"}
    with Bench(slots=64, tiers=[puppet(backpressure=backpressure), puppet(name="quick")]) as bench:
        slow, quick = puppet_of(bench, 0), puppet_of(bench, 1)
        slow.stores_at_once = False
        bench.store("a", 4)
        wait_until(lambda: slow.open)
        time.sleep(0.01)
        slow.do()
        bench.settle()
        throttle = bench.manager._lanes[0].throttle
        assert throttle is not None and throttle.under_pressure
        assert throttle.latency > 0.01 / (4 * 256) * (1 << 20)
        bench.store("b", 4)
        bench.settle()
        assert bench.manager.metrics["cascades_throttled"] == throttle.chunks_dropped == 4
        assert (len(slow.records), len(quick.records)) == (4, 8)


def test_what_waits_for_a_slow_tier_and_is_written_anew_meanwhile_is_not_handed_over_half_written() -> None:
    """The same chunk in the same slot: only that its checksum is missing tells that it is not there yet."""
    with Bench(slots=2, tiers=[puppet()]) as bench:
        tier = puppet_of(bench)
        tier.stores_at_once = False
        bench.store("a", 2)
        wait_until(lambda: bench.manager._lanes[0].waiting == 1)  # its share is one slot
        ((waits, _),) = bench.manager._lanes[0].backlog
        bench.forget_host()
        batch = bench.chunks("a", 2)[0].slice(1, 2)
        ticket = bench.manager.begin_store(batch, "s")
        assert ticket is not None and (ticket.slots == waits).all()
        tier.do()
        wait_until(lambda: not bench.manager.counts()["jobs"] and not bench.manager._lanes[0].waiting)
        assert not tier.open and bench.manager.metrics["cascades_missed"] == 1
        bench.copy(batch, ticket)
        bench.manager.finish_store(ticket, ok=True)
        wait_until(lambda: tier.open)
        assert tier.open[0].checksums.all()
        tier.do()
        bench.settle()
        assert bench.load("a", 2, "r") == 2 * TOKENS
        bench.assert_at_rest()


# ---- the end


def test_what_a_tier_never_reports_is_given_back_at_close() -> None:
    bench, tier = with_records(("a", 4), slots=64, load_timeout_s=SHORT_S)
    tier.loads_at_once = tier.stores_at_once = False
    tier.close = lambda: None  # type: ignore[method-assign]  # reports nothing
    with bench:
        assert bench.boundary("a", 4, "r") == 0
        bench.manager.finish_request("r")
        bench.store("b", 4)
        wait_until(lambda: len(tier.open) == 2)
        assert bench.manager.counts()["slots_pinned"] == 8
    audit(bench_after(bench))
    counts = bench.manager.counts()
    assert counts["jobs"] == counts["slots_pinned"] == counts["slots_late"] == counts["slots_dead"] == 0
    assert counts["slots_free"] + counts["slots_ready"] == 64


def test_what_waits_for_a_tier_at_close_is_not_handed_to_it_any_more() -> None:
    with Bench(slots=16, tiers=[puppet(), puppet(name="other")]) as bench:
        tiers = [puppet_of(bench, n) for n in (0, 1)]
        for tier in tiers:
            tier.stores_at_once = False
        bench.store("a", 12)  # more than a share
        wait_until(lambda: not bench.manager._cascades.queued)
        assert [sum(len(job.chunks) for job in tier.open) for tier in tiers] == [4, 4]
    counts = bench.manager.counts()
    assert counts["jobs"] == counts["slots_pinned"] == 0
    assert [sum(tier.stored.values()) for tier in tiers] == [4, 4]
    assert counts["reason:closed"] == 8
    assert counts["cascades_missed"] == 16


def bench_after(bench: Bench) -> Bench:
    """``bench``, closed: its region is gone."""
    bench.manager._cache.clear()
    return bench
