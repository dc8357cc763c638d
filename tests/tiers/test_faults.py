"""The wrappers: right when they are to be right, and wrong in the way that they are told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tierkv.config import parse_tier
from tierkv.errors import ConfigError
from tierkv.testing.driver import FILLER, TierDriver, some_chunks
from tierkv.testing.faults import FaultyTier, LatencyTier
from tierkv.testing.tier_contract import TierContract
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.memory import MemoryTier
from tierkv.types import ChunkName, RequestContext

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
        raw: bytes | None = records_of(tier).get(name)
        return raw

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        records_of(tier)[name] = raw


class TestFaultyTierWithoutFaultsContract(TestLatencyTierContract):
    def make_tier(self, context: TierContext) -> Tier:
        raw = {"type": "faulty", "module_path": "tierkv.testing.faults:FaultyTier", "inner": {"type": "memory"}}
        tier_class, config = parse_tier(raw, "")
        tier = tier_class(config, context)
        assert isinstance(tier, Tier)
        return tier


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


def test_errors_of_the_inner_configuration_have_their_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^inner\.root_dri: unknown field"):
        driver_of(LatencyTier, {"type": "fs", "root_dri": "/x"})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^inner\.root_dir: .*cannot be written"):
        driver_of(LatencyTier, {"type": "fs", "root_dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.never: "):
        driver_of(FaultyTier, never=1.5)
    with pytest.raises(ConfigError, match="shares of jobs above 1"):
        driver_of(FaultyTier, never=0.6, late=0.6)


def test_fails() -> None:
    with driver_of(FaultyTier, on="loads", fails=1) as driver:
        driver.fill([0, 1])
        assert driver.store(some_chunks(2), [0, 1]).ok.all()
        result = driver.load(some_chunks(2), [2, 3])
        assert result.reasons == {0: "injected", 1: "injected"}
        assert not result.ok.any() and result.checksums is not None and not result.checksums.any()


def test_partial() -> None:
    with driver_of(FaultyTier, on="stores", partial=1) as driver:
        result = driver.store(some_chunks(32), range(32))
        assert 0 < result.ok.sum() < 32
        assert set(result.reasons.values()) == {"injected"} and len(result.reasons) == 32 - result.ok.sum()


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


def test_twice() -> None:
    with driver_of(FaultyTier, twice=1, late_s=0.001) as driver, pytest.raises(AssertionError, match="reported twice"):
        driver.wait([driver.submit(driver.load_job(some_chunks(1), [0])), -1])


def test_late_writes_to_the_region_late() -> None:
    with driver_of(FaultyTier, on="loads", late=1, late_s=0.05) as driver:
        (payload,) = driver.fill([0])
        driver.store(some_chunks(1), [0])
        late = driver.submit(driver.load_job(some_chunks(1), [1]))
        tier = driver.tier
        assert isinstance(tier, FaultyTier) and tier.faults == {"late": 1}
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
