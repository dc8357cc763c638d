from __future__ import annotations

import threading

import numpy as np
import pytest

from tierkv.config import parse_tier
from tierkv.errors import ConfigError
from tierkv.testing.driver import TierDriver, some_chunks
from tierkv.testing.tier_contract import TierContract
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.memory import MemoryTier, MemoryTierConfig
from tierkv.types import ChunkName, RequestContext

RECORD_BYTES = 512 + 4096


def make_memory_tier(context: TierContext, capacity_bytes: int | None = None) -> MemoryTier:
    return MemoryTier(MemoryTierConfig(type="memory", capacity_bytes=capacity_bytes), context)


class TestMemoryTierContract(TierContract):
    def make_tier(self, context: TierContext) -> Tier:
        return make_memory_tier(context)

    def read_record(self, tier: Tier, name: ChunkName) -> bytes | None:
        assert isinstance(tier, MemoryTier)
        kept = tier._records.get(name)
        return None if kept is None else kept.tobytes()

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier._records[name] = np.frombuffer(raw, np.uint8)


def test_the_least_recently_used_goes_first() -> None:
    chunks = some_chunks(4)
    with TierDriver(lambda context: make_memory_tier(context, capacity_bytes=3 * RECORD_BYTES)) as driver:
        driver.fill(range(4))
        driver.store(chunks.take([0, 1, 2]), [0, 1, 2])
        driver.load(chunks.take([0]), [10])
        driver.store(chunks.take([3]), [3])
        found = [driver.tier.lookup(chunks.name(i), RequestContext()) for i in range(4)]
        assert found == [True, False, True, True]
        assert f"records=3, bytes={3 * RECORD_BYTES}" in repr(driver.tier)


def test_a_chunk_larger_than_the_capacity_is_not_stored() -> None:
    with TierDriver(lambda context: make_memory_tier(context, capacity_bytes=RECORD_BYTES - 1)) as driver:
        assert driver.store(some_chunks(1), [0]).reasons == {0: "capacity"}


def test_close_ends_the_worker_and_reports_what_waited() -> None:
    """The worker is held inside ``wake`` after its first job, so that the others wait for certain."""
    held, go = threading.Event(), threading.Event()

    def wake() -> None:
        held.set()
        go.wait()

    def make(context: TierContext) -> Tier:
        return make_memory_tier(TierContext(context.name, context.view, context.namespace, {}, wake))

    driver = TierDriver(make)
    jobs = [driver.submit(driver.load_job(some_chunks(2), [0, 1])) for _ in range(3)]
    assert held.wait(60)
    closer = threading.Thread(target=driver.close)
    closer.start()
    tier = driver.tier
    assert isinstance(tier, MemoryTier) and tier._closed.wait(60)
    go.set()
    closer.join()
    reports = driver.reports()
    assert set(reports) == set(jobs)
    assert reports[jobs[2]].reasons == {0: "closed", 1: "closed"}


def test_configuration() -> None:
    tier_class, config = parse_tier({"type": "memory", "capacity_bytes": 10}, "secondary_tiers[0]")
    assert tier_class is MemoryTier and config == MemoryTierConfig(type="memory", capacity_bytes=10)
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.capacity: unknown field.*capacity_bytes"):
        parse_tier({"type": "memory", "capacity": 10}, "secondary_tiers[0]")
