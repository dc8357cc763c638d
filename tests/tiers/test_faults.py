"""The wrappers: right when they are to be right, and wrong in the way that they are told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tierkv.config import parse_tier
from tierkv.errors import ConfigError
from tierkv.testing.driver import FILLER, TierDriver, some_chunks
from tierkv.testing.faults import GARBAGE, FaultyTier, LatencyTier
from tierkv.testing.tier_contract import TierContract
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.memory import MemoryTier
from tierkv.types import ChunkName, JobResult, RequestContext

REQUEST = RequestContext()


def driver_of(kind: type[Tier], inner: dict[str, Any] | None = None, **fields: Any) -> TierDriver:
    raw = {
        "type": "wrapped",
        "module_path": f"tierkv.testing.faults:{kind.__name__}",
        "inner": inner or {"type": "memory"},
        **fields,
    }
    tier_class, config = parse_tier(raw, "secondary_tiers[0]")
    assert tier_class is kind
    return TierDriver(lambda context: tier_class(config, context))


class TestLatencyTierContract(TierContract):
    """A wrapper keeps the contract of what it wraps."""

    def make_tier(self, context: TierContext) -> Tier:
        fields = {"load_delay_s": 0.002, "store_delay_s": 0.001, "lookup_delay_s": 0.0001}
        raw = {"type": "latency", "module_path": "tierkv.testing.faults:LatencyTier", "inner": {"type": "memory"}}
        tier_class, config = parse_tier({**raw, **fields}, "")
        tier = tier_class(config, context)
        assert isinstance(tier, Tier)
        return tier

    def read_record(self, tier: Tier, name: ChunkName) -> bytes | None:
        kept = records_of(tier).get(name)
        raw: bytes | None = None if kept is None else kept.tobytes()
        return raw

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        records_of(tier)[name] = np.frombuffer(raw, np.uint8)


class TestFaultyTierWithoutFaultsContract(TestLatencyTierContract):
    def make_tier(self, context: TierContext) -> Tier:
        raw = {"type": "faulty", "module_path": "tierkv.testing.faults:FaultyTier", "inner": {"type": "memory"}}
        tier_class, config = parse_tier(raw, "")
        tier = tier_class(config, context)
        assert isinstance(tier, Tier)
        return tier


def faulty(driver: TierDriver) -> FaultyTier:
    assert isinstance(driver.tier, FaultyTier)
    return driver.tier


def records_of(tier: Tier) -> Any:
    assert isinstance(tier, LatencyTier | FaultyTier) and isinstance(tier._inner, MemoryTier)
    return tier._inner._records


def test_latency_holds_reports_back_and_close_lets_them_go() -> None:
    driver = driver_of(LatencyTier, store_delay_s=3600, load_delay_s=0)
    driver.fill([0])
    store = driver.submit(driver.store_job(some_chunks(1), [0]))
    while not driver.load(some_chunks(1), [1]).ok.all():  # the inner tier has stored it, and keeps quiet
        pass
    assert store not in driver.reports()
    assert any(thread.name == "tierkv-tested-delay-0" for thread in threading.enumerate())
    driver.close()
    assert driver.reports()[store].ok.all()


def test_close_lets_a_delayed_lookup_go() -> None:
    driver = driver_of(LatencyTier, lookup_delay_s=3600)
    asking = threading.Thread(target=lambda: driver.tier.lookup(some_chunks(1).name(0), REQUEST))
    asking.start()
    driver.close()
    asking.join(60)
    assert not asking.is_alive()


def test_a_wrapper_says_where_the_chunks_of_its_inner_tier_are(tmp_path: Path) -> None:
    with driver_of(LatencyTier, {"type": "fs", "root_dir": str(tmp_path)}) as driver:
        assert driver.tier.hit_source == "disk"
        assert (driver.tier.medium, driver.tier.locality) == ("STORAGE", None)


def test_errors_of_the_inner_configuration_have_their_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^inner\.root_dri: unknown field"):
        driver_of(LatencyTier, {"type": "fs", "root_dri": "/x"})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^inner\.root_dir: .*cannot be written"):
        driver_of(LatencyTier, {"type": "fs", "root_dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.never: "):
        driver_of(FaultyTier, never=1.5)
    for shares in ({"never": 0.6, "late": 0.6}, {"lookup_raises": 0.6, "lookup_denies": 0.6}):
        with pytest.raises(ConfigError, match=r"^secondary_tiers|^\w+: shares above 1"):
            driver_of(FaultyTier, **shares)


def test_fails() -> None:
    with driver_of(FaultyTier, on="loads", fails=1) as driver:
        driver.fill([0, 1])
        assert driver.store(some_chunks(2), [0, 1]).ok.all()
        result = driver.load(some_chunks(2), [2, 3])
        assert result.reasons == {0: "injected", 1: "injected"}
        assert not result.ok.any() and result.checksums is not None and not result.checksums.any()
        assert set(driver.payload(2)) == set(driver.payload(3)) == {GARBAGE}


def test_partial() -> None:
    with driver_of(FaultyTier, on="stores", partial=1) as driver:
        result = driver.store(some_chunks(32), range(32))
        assert 0 < result.ok.sum() < 32
        assert set(result.reasons.values()) == {"injected"} and len(result.reasons) == 32 - result.ok.sum()


def test_of_a_partial_load_what_is_not_ok_is_garbage() -> None:
    with driver_of(FaultyTier, on="loads", partial=1) as driver:
        payloads = driver.fill(range(16))
        driver.store(some_chunks(16), range(16))
        result = driver.load(some_chunks(16), range(16, 32))
        assert 0 < result.ok.sum() < 16
        for i, ok in enumerate(result.ok):
            assert driver.payload(16 + i) == (payloads[i] if ok else bytes([GARBAGE]) * driver.slot_bytes)


def test_raises() -> None:
    with driver_of(FaultyTier, on="stores", raises=1, lookup_raises=1) as driver:
        with pytest.raises(OSError, match="injected"):
            driver.store(some_chunks(1), [0])
        with pytest.raises(OSError, match="injected"):
            driver.tier.lookup(some_chunks(1).name(0), REQUEST)
        assert driver.load(some_chunks(1), [0]).reasons == {0: "absent"}


def test_never() -> None:
    driver = driver_of(FaultyTier, on="loads", never=1)
    never = driver.submit(driver.load_job(some_chunks(1), [0]))
    store = driver.store(some_chunks(1), [0])
    driver.close()
    assert set(driver.reports()) == {store.job_id} and never not in driver.reports()
    assert faulty(driver).silent == {never}


def test_twice() -> None:
    with driver_of(FaultyTier, twice=1, late_s=0.001) as driver, pytest.raises(AssertionError, match="reported twice"):
        driver.wait([driver.submit(driver.load_job(some_chunks(1), [0])), -1])


def test_wrong_sums_are_of_the_right_bytes() -> None:
    with driver_of(FaultyTier, wrong_sums=1) as driver:
        (payload,) = driver.fill([0])
        assert driver.store(some_chunks(1), [0]).ok.all()  # a store has no sums to report
        result = driver.load(some_chunks(1), [1])
        assert result.ok.all() and result.checksums is not None
        assert driver.payload(1) == payload
        assert result.checksums[0] != xxhash.xxh3_64_intdigest(payload)


def test_malformed_reports_are_of_many_kinds() -> None:
    with driver_of(FaultyTier, on="loads", malformed=1) as driver:
        jobs = [driver.submit(driver.load_job(some_chunks(2), [0, 1])) for _ in range(200)]
        reports: list[Any] = []
        while len(reports) < len(jobs):
            reports += driver.tier.get_finished_jobs()
        named = [r for r in reports if isinstance(r, JobResult) and r.job_id in jobs]
        assert {r for r in reports if not isinstance(r, JobResult)} == {None, "done"}
        assert faulty(driver).silent == set(jobs) - {r.job_id for r in named}
        assert {np.shape(r.ok) for r in named if isinstance(r.ok, np.ndarray)} == {(2,), (3,)}
        assert {r.reasons is None for r in named} == {r.checksums is None for r in named} == {True, False}
        assert set(driver.payload(0)) == {GARBAGE}


def test_lookups_that_block_and_lookups_that_lie() -> None:
    chunks = some_chunks(2)
    for fault, answers in (("lookup_invents", [True, True]), ("lookup_denies", [False, False])):
        with driver_of(FaultyTier, **{fault: 1}) as driver:
            driver.store(chunks.take([0]), [0])
            tier = faulty(driver)
            assert [tier.lookup(chunks.name(i), REQUEST) for i in range(2)] == answers
            assert tier.lookup_batch(chunks, REQUEST) == answers
            assert tier.faults == {fault: 3}
    driver = driver_of(FaultyTier, lookup_blocks=1, late_s=3600)
    answered: list[bool] = []
    asking = threading.Thread(target=lambda: answered.append(driver.tier.lookup(chunks.name(0), REQUEST)))
    asking.start()
    asking.join(0.02)
    assert asking.is_alive()
    driver.close()
    asking.join(60)
    assert answered == [False]


def test_reports_that_raise_are_kept_for_the_next_time() -> None:
    with driver_of(FaultyTier, reports_raise=0.9) as driver:
        tier = faulty(driver)
        assert tier.get_finished_jobs() == [], "without a report there is nothing to keep"
        raised = 0
        while not raised:  # one in ten does not
            job, found = driver.submit(driver.load_job(some_chunks(1), [0])), []
            while not found:
                try:
                    found = tier.get_finished_jobs()
                except OSError:
                    raised += 1
            assert [r.job_id for r in found] == [job]
        assert tier.faults == {"reports_raise": raised}


def test_late_writes_to_the_region_late() -> None:
    with driver_of(FaultyTier, on="loads", late=1, late_s=0.05) as driver:
        (payload,) = driver.fill([0])
        driver.store(some_chunks(1), [0])
        late = driver.submit(driver.load_job(some_chunks(1), [1]))
        assert faulty(driver).faults == {"late": 1}
        assert driver.wait([late])[0].ok.all() and driver.payload(1) == payload


def test_what_is_late_at_close_is_closed_and_writes_nothing() -> None:
    driver = driver_of(FaultyTier, on="loads", late=1, late_s=3600)
    driver.fill([0])
    driver.store(some_chunks(1), [0])
    late = driver.submit(driver.load_job(some_chunks(1), [1]))
    driver.close()
    assert driver.reports()[late].reasons == {0: "closed"}
    assert set(driver.payload(1)) == {FILLER}


def test_the_same_seed_gives_the_same_faults() -> None:
    seen = []
    for _ in range(2):
        with driver_of(FaultyTier, seed=7, fails=0.3, partial=0.3) as driver:
            seen.append([driver.store(some_chunks(4, seed=i), range(4)).ok.tolist() for i in range(20)])
    assert seen[0] == seen[1] and len({str(ok) for ok in seen[0]}) > 2
