"""The contract of ``tierkv.tiers.base``, as tests that any tier can run.

Subclass ``TierContract``, give it a tier and a way to its storage, and let pytest collect it::

    class TestMyTier(TierContract):
        def make_tier(self, context):
            return MyTier(MyTier.Config(type="my"), context)

        def read_record(self, tier, name):
            return tier._bucket.get(path_of(name))

        def write_record(self, tier, name, raw):
            tier._bucket[path_of(name)] = raw

``read_record`` and ``write_record`` go round the tier: a tier is not asked whether it did right.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tierkv.errors import TierClosedError
from tierkv.keys import new_generation
from tierkv.testing.driver import NAMESPACE, SPACE, TierDriver, some_chunks
from tierkv.tiers import record
from tierkv.tiers.base import BatchLookup, Tier, TierContext
from tierkv.types import ChunkName, RequestContext, Space

REQUEST = RequestContext("request-1")
OTHER_SPACES = {
    "namespace": Space(bytes(16), SPACE.generation),
    "generation": Space(NAMESPACE, new_generation("other weights")),
}


def _flip(position: int) -> Callable[[bytes], bytes]:
    def flip(raw: bytes) -> bytes:
        damaged = bytearray(raw)
        damaged[position] ^= 0x10
        return bytes(damaged)

    return flip


#: Ways in which storage damages a record.
CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "flip_magic": _flip(0),
    "flip_version": _flip(8),
    "flip_name": _flip(60),
    "flip_reserved": _flip(300),
    "flip_header_checksum": _flip(record.HEADER_BYTES - 1),
    "flip_first_byte": _flip(record.HEADER_BYTES),
    "flip_last_byte": _flip(-1),
    "empty": lambda raw: b"",
    "header_only": lambda raw: raw[: record.HEADER_BYTES],
    "cut_in_header": lambda raw: raw[:100],
    "cut_in_payload": lambda raw: raw[:-1],
    "lengthened": lambda raw: raw + b"\0",
    "zeroed_tail": lambda raw: raw[:-512] + bytes(512),
    "doubled": lambda raw: raw + raw,
}


class TierContract:
    """What every tier must do."""

    def make_tier(self, context: TierContext) -> Tier:
        """A new tier, on empty storage."""
        raise NotImplementedError

    def read_record(self, tier: Tier, name: ChunkName) -> bytes | None:
        """The stored record of ``name``, not by way of the tier; None if there is none."""
        raise NotImplementedError

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        """Put ``raw`` in the place of the record of ``name``, not by way of the tier."""
        raise NotImplementedError

    def corrupt(self, tier: Tier, name: ChunkName, how: str) -> None:
        """Damage the record of ``name`` in one of the ways of ``CORRUPTIONS``."""
        raw = self.read_record(tier, name)
        assert raw is not None, "there is a record to damage"
        self.write_record(tier, name, CORRUPTIONS[how](raw))

    @pytest.fixture
    def driver(self) -> Iterator[TierDriver]:
        with TierDriver(self.make_tier) as driver:
            yield driver

    # What goes in comes out.

    def test_round_trip(self, driver: TierDriver) -> None:
        chunks, lengths = some_chunks(5), [4096, 1, 512, 4095, 2048]
        payloads = driver.fill(range(5), lengths)
        job = driver.store_job(chunks, range(5), lengths)
        stored = driver.wait([driver.submit(job)])[0]
        assert stored.ok.all() and stored.checksums is None and not stored.reasons

        driver.wipe()
        slots = [17, 3, 40, 9, 63]
        loaded = driver.load(chunks, slots, lengths)
        assert loaded.ok.all() and not loaded.reasons
        assert loaded.checksums is not None and loaded.checksums.dtype == np.uint64
        assert (loaded.checksums == job.checksums).all()
        assert [driver.payload(s, n) for s, n in zip(slots, lengths, strict=True)] == payloads

    def test_the_record_is_the_format_and_carries_the_checksum_of_the_job(self, driver: TierDriver) -> None:
        chunks = some_chunks(1)
        (payload,) = driver.fill([0])
        job = driver.store_job(chunks, [0])
        driver.wait([driver.submit(job)])
        raw = self.read_record(driver.tier, chunks.name(0))
        header = record.encode_header(chunks.name(0), len(payload), int(job.checksums[0]))
        assert raw == header + payload

    def test_touches_only_the_bytes_of_its_jobs(self, driver: TierDriver) -> None:
        chunks = some_chunks(3)
        driver.fill(range(3))
        before = driver.memory.copy()
        driver.store(chunks, range(3))
        assert (driver.memory == before).all(), "a store does not write to the region"

        driver.wipe()
        # Slots that touch each other, lengths that end before their slots do, and one chunk that is not there.
        driver.load(chunks, [10, 11, 20], [4096, 4096, 4096])
        driver.load(some_chunks(1, seed=9), [30])
        untouched = np.ones(driver.n_slots, np.bool_)
        untouched[[10, 11, 20, 30]] = False
        rows = driver.memory.reshape(driver.n_slots, -1)
        assert (rows[untouched] == rows[0, 0]).all() and rows[0, 0] == 0xA5

    def test_stores_a_chunk_that_is_there_without_writing_it_again(self, driver: TierDriver) -> None:
        chunks = some_chunks(1)
        (payload,) = driver.fill([0])
        driver.store(chunks, [0])
        driver.fill([1], seed=1)  # other bytes under the same name: recognisable, should they be written
        assert driver.store(chunks, [1]).ok.all()
        assert driver.load(chunks, [2]).ok.all()
        assert driver.payload(2) == payload

    def test_stores_one_chunk_twice_at_the_same_time(self, driver: TierDriver) -> None:
        chunks = some_chunks(1)
        (payload,) = driver.fill([0])
        jobs = [driver.submit(driver.store_job(chunks.take([0, 0]), [0, 0])) for _ in range(4)]
        assert all(result.ok.all() for result in driver.wait(jobs))
        assert driver.load(chunks, [1]).ok.all()
        assert driver.payload(1) == payload

    # What is not there, or is something else, is a miss.

    def test_a_chunk_that_is_not_there_is_absent(self, driver: TierDriver) -> None:
        chunks = some_chunks(2)
        assert not driver.tier.lookup(chunks.name(0), REQUEST)
        result = driver.load(chunks, [0, 1])
        assert not result.ok.any() and result.reasons == {0: "absent", 1: "absent"}
        assert result.checksums is not None and not result.checksums.any()

    def test_a_failed_chunk_hurts_no_other(self, driver: TierDriver) -> None:
        chunks = some_chunks(4)
        payloads = driver.fill([0, 1])
        driver.store(chunks.take([1, 3]), [0, 1])
        driver.wipe()
        result = driver.load(chunks, [10, 11, 12, 13])
        assert result.ok.tolist() == [False, True, False, True]
        assert result.reasons == {0: "absent", 2: "absent"}
        assert [driver.payload(11), driver.payload(13)] == payloads

    @pytest.mark.parametrize("what", ["namespace", "generation", "group", "hash"])
    def test_never_serves_another_name(self, driver: TierDriver, what: str) -> None:
        mine, other = some_chunks(1), self._other(what)
        driver.fill([0])
        driver.store(other, [0])
        assert not driver.tier.lookup(mine.name(0), REQUEST)
        assert driver.load(mine, [1]).reasons == {0: "absent"}

    @pytest.mark.parametrize("what", ["namespace", "generation", "group", "hash"])
    def test_never_serves_a_record_in_the_wrong_place(self, driver: TierDriver, what: str) -> None:
        mine, other = some_chunks(1), self._other(what)
        driver.fill([0, 1])
        driver.store(mine, [0])
        driver.store(other, [1])
        raw = self.read_record(driver.tier, other.name(0))
        assert raw is not None
        self.write_record(driver.tier, mine.name(0), raw)
        result = driver.load(mine, [2])
        assert not result.ok[0] and result.reasons == {0: what}

    @pytest.mark.parametrize("how", CORRUPTIONS)
    def test_never_serves_a_corrupted_record_and_writes_it_anew(self, driver: TierDriver, how: str) -> None:
        chunks = some_chunks(2)
        payloads = driver.fill([0, 1])
        driver.store(chunks, [0, 1])
        self.corrupt(driver.tier, chunks.name(0), how)

        result = driver.load(chunks, [10, 11])
        assert result.ok.tolist() == [False, True]
        assert result.reasons[0] in (*record.REASONS, "absent")
        assert result.checksums is not None and result.checksums[0] == 0
        assert driver.payload(11) == payloads[1]

        assert not driver.tier.lookup(chunks.name(0), REQUEST), "what was refused once is gone"
        assert driver.store(chunks.take([0]), [0]).ok.all()
        assert driver.load(chunks.take([0]), [12]).ok.all()
        assert driver.payload(12) == payloads[0]

    @pytest.mark.parametrize("length", [0, 1, 2047, 2049, 4096])
    def test_a_chunk_of_another_length_is_a_miss(self, driver: TierDriver, length: int) -> None:
        chunks = some_chunks(1)
        driver.fill([0], [2048])
        driver.store(chunks, [0], [2048])
        result = driver.load(chunks, [1], [length])
        assert not result.ok.any() and result.reasons == {0: "length"}

    def test_memory_overwritten_after_the_commit_is_not_signed(self, driver: TierDriver) -> None:
        chunks = some_chunks(1)
        driver.fill([0])
        job = driver.store_job(chunks, [0])
        driver.fill([0], seed=1)
        driver.wait([driver.submit(job)])
        result = driver.load(chunks, [1])
        assert not result.ok.any() and result.reasons[0] in ("checksum", "absent")

    # Lookups.

    def test_finds_what_was_stored(self, driver: TierDriver) -> None:
        chunks = some_chunks(4)
        driver.fill([0, 1])
        driver.store(chunks.take([0, 2]), [0, 1])
        expected = [True, False, True, False]
        assert [driver.tier.lookup(chunks.name(i), REQUEST) for i in range(4)] == expected
        if isinstance(driver.tier, BatchLookup):
            assert list(driver.tier.lookup_batch(chunks, REQUEST)) == expected
            assert list(driver.tier.lookup_batch(chunks.take([]), REQUEST)) == []

    # Jobs are reported exactly once.

    def test_a_job_without_chunks_is_reported(self, driver: TierDriver) -> None:
        nothing = some_chunks(1).take([])
        assert len(driver.store(nothing, []).ok) == 0
        assert len(driver.load(nothing, []).ok) == 0

    def test_each_of_many_jobs_is_reported_once(self, driver: TierDriver) -> None:
        chunks = some_chunks(32)
        payloads = driver.fill(range(32))
        stores = [driver.submit(driver.store_job(chunks.take([i]), [i])) for i in range(32)]
        assert all(result.ok.all() for result in driver.wait(stores))
        rng = random.Random(0)
        jobs: dict[int, list[int]] = {}
        for round_ in range(20):
            order = rng.sample(range(32), 5)
            slots = [32 + (5 * round_ + k) % 32 for k in range(5)]
            if round_ % 4 == 0:
                driver.wait(list(jobs))  # so that no two jobs in flight write to one slot
            jobs[driver.submit(driver.load_job(chunks.take(order), slots))] = order
        for job_id, result in zip(jobs, driver.wait(list(jobs)), strict=True):
            assert result.job_id == job_id and result.ok.all()
        assert [driver.payload(slot) for slot in slots] == [payloads[i] for i in order]
        assert set(driver.reports()) == {*stores, *jobs}, "and nothing is reported that was not asked for"

    def test_wakes_when_a_job_has_ended(self, driver: TierDriver) -> None:
        driver.load(some_chunks(1), [0])
        driver.close()
        assert driver.wakes >= 1

    def test_close_reports_every_job_and_lets_go_of_the_region(self, driver: TierDriver) -> None:
        chunks = some_chunks(32)
        driver.fill(range(32))
        stores = [driver.submit(driver.store_job(chunks.take([i, (i + 1) % 32]), [i, (i + 1) % 32])) for i in range(32)]
        loads = [driver.submit(driver.load_job(chunks.take([i]), [32 + i])) for i in range(32)]
        driver.close()
        before = driver.memory.copy()
        reports = driver.reports()
        assert set(reports) == {*stores, *loads}
        for result in reports.values():
            assert set(np.flatnonzero(~result.ok)) == set(result.reasons)
            assert set(result.reasons.values()) <= {"closed", "absent"}
        assert (driver.memory == before).all()

    def test_close_twice_and_use_afterwards(self, driver: TierDriver) -> None:
        driver.close()
        driver.close()
        with pytest.raises(TierClosedError):
            driver.submit(driver.store_job(some_chunks(1), [0]))
        with pytest.raises(TierClosedError):
            driver.submit(driver.load_job(some_chunks(1), [0]))
        assert driver.reports() == {}

    # Threads.

    def test_lookups_from_several_threads_while_jobs_run(self, driver: TierDriver) -> None:
        chunks = some_chunks(32)
        driver.fill(range(32))
        driver.store(chunks.take(range(16)), range(16))
        problems: list[Any] = []
        stop = threading.Event()

        def look_up() -> None:
            try:
                while not stop.is_set():
                    problems.extend(i for i in range(16) if not driver.tier.lookup(chunks.name(i), REQUEST))
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=look_up) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for i in range(16, 32):
                store = driver.submit(driver.store_job(chunks.take([i]), [i]))
                load = driver.submit(driver.load_job(chunks.take([i - 16]), [32 + i]))
                assert all(result.ok.all() for result in driver.wait([store, load]))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not problems

    def _other(self, what: str) -> Any:
        """A chunk whose name differs from that of ``some_chunks(1)`` in ``what`` alone."""
        if what in OTHER_SPACES:
            return some_chunks(1, space=OTHER_SPACES[what])
        return some_chunks(1, group=1) if what == "group" else some_chunks(1, seed=1)
