from __future__ import annotations

import math
from typing import Any

import pytest

from tierkv.config import decode
from tierkv.errors import ConfigError
from tierkv.tiers.throttle import PROBE_S, BackpressureConfig, Throttle, build_throttle

MIB = 1 << 20
VLLM = "vllm.v1.kv_offload.tiering.backpressure"
#: As an operator of vLLM has it.
TUNED = {
    "backpressure_cls": "EMABackpressureDetector",
    "high_water_s": 0.050,
    "low_water_s": 0.010,
    "alpha": 0.15,
    "warmup_completions": 10,
}


def a_throttle(**fields: Any) -> Throttle:
    """One whose average is the latest store's latency, at once, and which forgets nothing."""
    given = {"high_water_s": 1.0, "low_water_s": 0.5, "alpha": 1.0, "warmup_completions": 0, "decay_half_life_s": 0}
    return Throttle(BackpressureConfig(**{**given, **fields}))


def built(top: dict[str, Any] | None, own: dict[str, Any] | None, **where: Any) -> BackpressureConfig:
    """The configuration of the throttle that these make."""
    throttle = build_throttle(top, own, **{"tier_type": "fs", "locality": None, "path": "secondary_tiers[0]", **where})
    assert throttle is not None
    return throttle._config


def admitted(throttle: Throttle, jobs: int, now: float, count: int = 1) -> int:
    return sum(throttle.admits(count, now) for _ in range(jobs))


# ---- when


def test_without_pressure_all_is_admitted() -> None:
    throttle = a_throttle()
    assert admitted(throttle, 10, 0.0) == 10
    throttle.finished(0.99, MIB, 0.0)
    assert admitted(throttle, 10, 0.0) == 10 and not throttle.under_pressure
    assert (throttle.jobs_dropped, throttle.chunks_dropped) == (0, 0)


def test_latency_is_per_mebibyte() -> None:
    throttle = a_throttle()
    throttle.finished(8.0, 16 * MIB, 0.0)
    assert throttle.latency == 0.5
    throttle.finished(8.0, MIB // 2, 0.0)
    assert throttle.latency == 16.0


def test_a_store_without_bytes_says_nothing() -> None:
    throttle = a_throttle()
    throttle.finished(100.0, 0, 0.0)
    assert throttle.latency == 0.0 and admitted(throttle, 5, 0.0) == 5


def test_the_average_starts_as_that_of_the_warm_up_and_then_moves() -> None:
    throttle = a_throttle(warmup_completions=3, alpha=0.25)
    for seconds in (9.0, 30.0):
        throttle.finished(seconds, MIB, 0.0)
        assert throttle.latency == 0.0 and not throttle.under_pressure
    throttle.finished(3.0, MIB, 0.0)
    assert throttle.latency == 14.0 and throttle.under_pressure
    throttle.finished(2.0, MIB, 0.0)
    assert throttle.latency == 11.0


def test_pressure_begins_above_the_high_watermark_and_ends_below_the_low_one() -> None:
    throttle, seen = a_throttle(), []
    for seconds in (0.7, 1.0, 1.1, 0.7, 0.5, 0.4, 0.7):
        throttle.finished(seconds, MIB, 0.0)
        seen.append(throttle.under_pressure)
    assert seen == [False, False, True, True, True, False, False]


# ---- how much


@pytest.mark.parametrize(
    ("latency", "share"), [(0.9, 0.0), (1.0, 0.0), (1.5, 0.25), (2.0, 0.5), (2.5, 0.75), (3.0, 1.0), (9.0, 1.0)]
)
@pytest.mark.parametrize("count", [1, 7])
def test_the_share_that_is_dropped_grows_with_the_latency(latency: float, share: float, count: int) -> None:
    throttle = a_throttle()
    throttle.finished(1.1, MIB, 0.0)
    throttle.finished(latency, MIB, 0.0)
    assert admitted(throttle, 400, 0.0, count) == 400 * (1 - share)
    assert (throttle.jobs_dropped, throttle.chunks_dropped) == (400 * share, 400 * share * count)


def test_the_share_is_one_of_chunks_and_evenly_spread() -> None:
    throttle = a_throttle()
    throttle.finished(2.0, MIB, 0.0)
    offered = dropped = 0
    for number in range(1000):
        count = 1 + number % 13
        offered += count
        dropped += 0 if throttle.admits(count, 0.0) else count
        assert abs(dropped - offered / 2) <= 13
    assert throttle.chunks_dropped == dropped


def test_the_policy_that_drops_all_does_so_between_the_watermarks_too() -> None:
    throttle = a_throttle(policy_cls="DropStorePolicy")
    throttle.finished(1.1, MIB, 0.0)
    assert admitted(throttle, 10, 0.0) == 0
    throttle.finished(0.6, MIB, 0.0)
    assert admitted(throttle, 10, 0.0) == 0
    assert repr(throttle) == "Throttle(latency=0.6, under_pressure=True, jobs_dropped=20, chunks_dropped=20)"


# ---- how it ends


def test_after_pressure_half_is_dropped_for_a_while() -> None:
    throttle = a_throttle(cooldown_s=1.0)
    throttle.finished(9.0, MIB, 0.0)
    throttle.finished(0.1, MIB, 5.0)
    assert not throttle.under_pressure
    assert admitted(throttle, 10, 5.0) == 5 and admitted(throttle, 10, 5.9) == 5
    assert admitted(throttle, 10, 6.0) == 10


@pytest.mark.parametrize("policy", ["ThrottledDropPolicy", "DropStorePolicy"])
def test_a_tier_that_gets_nothing_gets_something_again(policy: str) -> None:
    throttle = a_throttle(policy_cls=policy, decay_half_life_s=2.0, cooldown_s=0.0)
    throttle.finished(8.0, MIB, 0.0)
    assert admitted(throttle, 10, 0.0) == 0
    assert admitted(throttle, 10, 2.0) == 0 and throttle.latency == 4.0
    assert admitted(throttle, 10, 8.0) == (10 if policy == "ThrottledDropPolicy" else 0) and throttle.latency == 0.5
    assert throttle.under_pressure, "not below the low watermark yet"
    assert admitted(throttle, 10, 8.1) == 10 and not throttle.under_pressure


def test_without_decay_a_job_is_admitted_now_and_then_to_see() -> None:
    throttle = a_throttle(policy_cls="DropStorePolicy")
    throttle.finished(9.0, MIB, 0.0)
    assert admitted(throttle, 100, PROBE_S - 0.1) == 0
    for visit in (1, 2, 3):
        assert admitted(throttle, 100, visit * PROBE_S) == 1
        assert throttle.under_pressure
    throttle.finished(0.1, MIB, 3 * PROBE_S + 1)
    assert admitted(throttle, 100, 4 * PROBE_S) == 100


def test_without_pressure_nothing_decays() -> None:
    throttle = a_throttle(decay_half_life_s=1.0)
    throttle.finished(0.9, MIB, 0.0)
    assert throttle.admits(1, 1000.0) and throttle.latency == 0.9


@pytest.mark.parametrize("policy", ["ThrottledDropPolicy", "DropStorePolicy"])
@pytest.mark.parametrize("bytes_per_s", [20e6, 100e6, 1e9])
def test_with_the_defaults_a_slow_disk_is_spared_and_a_recovered_one_is_used(policy: str, bytes_per_s: float) -> None:
    """A disk that takes one job of 8 MiB after the other, and is offered 200 MiB/s. From second 60 on it is fast."""
    throttle = Throttle(decode({"policy_cls": policy}, BackpressureConfig))
    busy_until = 0.0
    waiting: list[tuple[float, float]] = []
    for step in range(120 * 25):
        now = step / 25
        while waiting and waiting[0][1] <= now:
            submitted, ended = waiting.pop(0)
            throttle.finished(ended - submitted, 8 * MIB, ended)
        if throttle.admits(8, now):
            speed = bytes_per_s if now < 60 else 5e9
            busy_until = max(now, busy_until) + 8 * MIB / speed
            waiting.append((now, busy_until))
        if now == 60:
            assert busy_until - now < 5, "it was not given much more than it could write"
            assert (throttle.jobs_dropped > 60 * 25 * 0.2) == (bytes_per_s < 200 * MIB)
        if now == 90:
            dropped = throttle.jobs_dropped
    assert throttle.jobs_dropped == dropped and not throttle.under_pressure


# ---- configuration


def test_the_defaults_are_those_of_the_engine() -> None:
    assert built(None, {"backpressure_cls": "EMABackpressureDetector"}) == BackpressureConfig(
        backpressure_cls="EMABackpressureDetector",
        policy_cls="ThrottledDropPolicy",
        high_water_s=0.010,
        low_water_s=0.002,
        alpha=0.15,
        warmup_completions=10,
        decay_half_life_s=2.0,
        cooldown_s=1.0,
    )
    assert built(None, {}) == BackpressureConfig() == built({}, None)


@pytest.mark.parametrize(
    ("where", "high", "low"),
    [
        ({"tier_type": "fs"}, 0.010, 0.002),
        ({"tier_type": "memory"}, 0.010, 0.002),
        ({"tier_type": "fs", "locality": "LOCAL"}, 0.010, 0.002),
        ({"tier_type": "fs", "locality": "REMOTE"}, 0.050, 0.010),
        ({"tier_type": "obj"}, 0.050, 0.010),
        ({"tier_type": "obj", "locality": "LOCAL"}, 0.050, 0.010),
    ],
)
def test_watermarks_depend_on_where_the_storage_is(where: dict[str, Any], high: float, low: float) -> None:
    config = built({"backpressure_cls": "EMABackpressureDetector"}, None, **where)
    assert (config.high_water_s, config.low_water_s) == (high, low)
    given = built(TUNED, {"low_water_s": 0.001}, **where)
    assert (given.high_water_s, given.low_water_s) == (0.050, 0.001)


def test_without_configuration_there_is_no_throttle() -> None:
    assert build_throttle(None, None, tier_type="fs", locality=None, path="secondary_tiers[0]") is None


def test_a_tier_s_fields_come_before_those_of_all() -> None:
    own = {"high_water_s": 0.2, "policy_cls": "DropStorePolicy"}
    config = built({**TUNED, "cooldown_s": 3}, own)
    assert (config.high_water_s, config.low_water_s, config.cooldown_s) == (0.2, 0.010, 3.0)
    assert config.drops_all and not built(TUNED, None).drops_all


@pytest.mark.parametrize("policy", [None, "ThrottledDropPolicy", "DropStorePolicy"])
@pytest.mark.parametrize("prefix", ["", f"{VLLM}."])
def test_classes_of_the_engine_may_be_named_in_full(policy: str | None, prefix: str) -> None:
    named = policy and prefix + policy
    config = built({"backpressure_cls": f"{prefix}EMABackpressureDetector", "policy_cls": named}, None)
    assert config.drops_all == (policy == "DropStorePolicy")


@pytest.mark.parametrize(
    ("fields", "field", "accepted"),
    [
        ({"high_water": 1}, "high_water", "high_water_s"),
        ({"high_water_s": 0}, "high_water_s", "float > 0"),
        ({"high_water_s": "fast"}, "high_water_s", "float"),
        ({"high_water_s": math.nan}, "high_water_s", "float > 0"),
        ({"low_water_s": -1}, "low_water_s", "float > 0"),
        ({"low_water_s": 2}, "low_water_s", "at most high_water_s"),
        ({"high_water_s": 0.001}, "low_water_s", "at most high_water_s"),
        ({"alpha": 0}, "alpha", "float > 0"),
        ({"alpha": 1.5}, "alpha", "float <= 1"),
        ({"warmup_completions": -1}, "warmup_completions", "int >= 0"),
        ({"decay_half_life_s": -1}, "decay_half_life_s", "float >= 0"),
        ({"cooldown_s": None}, "cooldown_s", "float"),
        ({"backpressure_cls": "mine.Detector"}, "backpressure_cls", "EMABackpressureDetector"),
        ({"policy_cls": "mine.Policy"}, "policy_cls", "ThrottledDropPolicy"),
    ],
)
def test_a_field_that_is_wrong_is_named(fields: dict[str, Any], field: str, accepted: str) -> None:
    for top, own, place in ((fields, None, "backpressure"), (None, fields, "secondary_tiers[0].backpressure")):
        with pytest.raises(ConfigError) as caught:
            built(top, own)
        assert caught.value.field == f"{place}.{field}" and accepted in caught.value.accepted
    with pytest.raises(ConfigError) as caught:
        built({}, fields)
    assert caught.value.field == f"secondary_tiers[0].backpressure.{field}"


def test_watermarks_that_contradict_across_places_are_the_tier_s_fault() -> None:
    with pytest.raises(
        ConfigError, match=r"^secondary_tiers\[0\]\.backpressure\.low_water_s: 0\.01 is above .* 0\.005"
    ):
        built(TUNED, {"high_water_s": 0.005})


@pytest.mark.vllm
def test_the_engine_s_own_module_has_these_defaults() -> None:
    theirs = pytest.importorskip(VLLM).EMABackpressureDetector
    ours = decode({}, BackpressureConfig)
    assert theirs.default_config("fs") == {"high_water_s": ours.high_water_s, "low_water_s": ours.low_water_s}
    assert (ours.alpha, ours.warmup_completions) == (theirs.DEFAULT_ALPHA, theirs.DEFAULT_WARMUP_COMPLETIONS)
    assert (ours.decay_half_life_s, ours.cooldown_s) == (theirs.DEFAULT_DECAY_HALF_LIFE_S, theirs.DEFAULT_COOLDOWN_S)
