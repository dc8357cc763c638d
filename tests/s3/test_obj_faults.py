"""A store that fails while it is used: each job is reported, in time, and no byte is believed that was not stored."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from s3_proxy import AlterBody, CutBody, Delay, Drop, Fault, FaultProxy, Hang, Slow, Status, Times, s3_error
from s3_server import Server
from s3_tiers import driver_of, is_record

from tierkv.errors import RemoteError
from tierkv.testing.driver import TierDriver, some_chunks
from tierkv.tiers.base import Deadlines
from tierkv.tiers.breaker import verdict
from tierkv.types import RequestContext

REQUEST = RequestContext()
N = 6
CHUNKS, ABSENT = some_chunks(N), some_chunks(N, seed=1)


def _records(method: str, path: str) -> bool:
    return is_record(path)


#: What a server does, and what is said of loads, stores and lookups then: the words that metrics count.
FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "answers 500": (Status(500, when=_records), {"server_error"}),
    "is busy": (s3_error(503, "SlowDown", when=_records), {"busy"}),
    "knows us no more": (s3_error(403, "InvalidAccessKeyId", when=_records), {"forbidden"}),
    "has no such bucket": (s3_error(404, "NoSuchBucket", when=_records), {"no_bucket"}),
    "hangs": (Hang(when=_records), {"timeout"}),
    "is slow": (Delay(6.0, when=_records), {"timeout"}),
    "hangs up": (Drop(when=_records), {"interrupted"}),
}


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def driver(s3: Server, bucket: str, proxy: FaultProxy) -> Iterator[TierDriver]:
    """A tier that has stored ``CHUNKS`` from the slots 0 to ``N`` - 1, and is not patient."""
    fields = {"endpoint_override": proxy.url, "timeout_s": 1.5, "max_retries": 1, "list_interval_s": 0}
    with driver_of(s3, bucket, deadlines=Deadlines(4.0, 4.0, 4.0), **fields) as driver:
        driver.fill(range(N))
        assert driver.store(CHUNKS, range(N)).ok.all()
        yield driver
        proxy.fault = None


def _loads(driver: TierDriver) -> bool:
    driver.fill(range(N))
    payloads = [driver.payload(i) for i in range(N)]
    ok: bool = driver.load(CHUNKS, range(10, 10 + N)).ok.all()
    return ok and [driver.payload(10 + i) for i in range(N)] == payloads


@pytest.mark.parametrize("what", FAULTS)
def test_a_store_that(driver: TierDriver, proxy: FaultProxy, what: str) -> None:
    proxy.fault, words = FAULTS[what]
    loaded, stored = driver.wait(
        [
            driver.submit(driver.load_job(CHUNKS, range(10, 10 + N))),
            driver.submit(driver.store_job(ABSENT, range(N))),
        ]
    )
    for result in (loaded, stored):
        assert not result.ok.any()
        assert set(result.reasons.values()) <= words, result
        assert verdict(result) is False, "this is held against the tier"
    if what != "has no such bucket":  # an answer to HEAD has no body: 404 is 404
        with pytest.raises(RemoteError) as caught:
            driver.tier.lookup(some_chunks(1, seed=2).name(0), REQUEST)
        assert caught.value.reason in words
    proxy.fault = None
    assert _loads(driver), "it is back"
    assert driver.store(ABSENT, range(N)).ok.all()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (CutBody(0.5), {"interrupted"}),
        (AlterBody(), {"checksum"}),
        (AlterBody(lambda body: b"\xff" + body[1:]), {"bad_magic"}),
        (AlterBody(lambda body: body[:-1]), {"truncated"}),
        (AlterBody(lambda body: body + b"\0"), {"length"}),
        (AlterBody(lambda body: b""), {"truncated"}),
        (AlterBody(lambda body: bytes(len(body))), {"bad_magic"}),
        (Slow(1000), {"timeout", "interrupted"}),
    ],
    ids=["cut", "flipped", "flipped-magic", "shorter", "longer", "empty", "zeros", "slow"],
)
def test_bodies_that_are_not_what_was_stored(
    driver: TierDriver, proxy: FaultProxy, fault: Fault, words: set[str]
) -> None:
    fault.when = lambda method, path: method == "GET" and is_record(path)
    proxy.fault = fault
    result = driver.load(CHUNKS, range(10, 10 + N))
    assert not result.ok.any() and set(result.reasons.values()) <= words, result
    assert result.checksums is not None and not result.checksums.any()
    proxy.fault = None
    refused = not words & {"interrupted", "timeout"}
    assert driver.tier.lookup(CHUNKS.name(0), REQUEST) != refused
    # The engine computes what it has not got, and stores it.
    driver.fill(range(N))
    proxy.reset_counts()
    assert driver.store(CHUNKS, range(N)).ok.all()
    assert proxy.count("PUT", is_record) == (N if refused else 0)
    assert _loads(driver)


@pytest.mark.parametrize("fault", [Status(500), s3_error(503, "SlowDown"), Drop()], ids=["500", "503", "hangs-up"])
def test_a_failure_that_passes_is_tried_again(driver: TierDriver, proxy: FaultProxy, fault: Fault) -> None:
    proxy.fault = Times(2, fault, when=_records)
    assert _loads(driver)
    if not isinstance(fault, Drop):  # who has not been answered may have been heard
        proxy.fault = Times(2, fault, when=lambda method, path: method == "PUT")
        assert driver.store(ABSENT, range(N)).ok.all()
    proxy.fault = Times(1, fault, when=lambda method, path: method == "HEAD")
    assert not driver.tier.lookup(some_chunks(1, seed=4).name(0), REQUEST)


def test_a_job_that_waits_behind_a_server_that_hangs_ends_in_time(s3: Server, bucket: str, proxy: FaultProxy) -> None:
    """32 chunks and two connections, each attempt would take longer than the job may."""
    chunks = some_chunks(32)
    fields = {"endpoint_override": proxy.url, "n_read_connections": 2, "timeout_s": 30.0}
    with driver_of(s3, bucket, deadlines=Deadlines(1.0, 1.0, 30.0), **fields) as driver:
        driver.fill(range(32))
        assert driver.store(chunks, range(32)).ok.all()
        proxy.fault = Hang(when=_records)
        begin = time.monotonic()
        result = driver.load(chunks, range(32, 64))
        assert time.monotonic() - begin < 15.0, "no statement about speed: two attempts would take a minute"
        assert set(result.reasons.values()) == {"timeout"} and len(result.reasons) == 32
        proxy.fault = None


def test_a_server_that_was_stopped_and_is_back(driver: TierDriver, proxy: FaultProxy) -> None:
    proxy.stop()
    assert set(driver.load(CHUNKS, range(10, 10 + N)).reasons.values()) <= {"unreachable", "interrupted", "timeout"}
    with pytest.raises(RemoteError):
        driver.tier.lookup(ABSENT.name(0), REQUEST)
    proxy.start()
    assert _loads(driver)


def test_an_upload_that_was_heard_but_not_answered_is_there(driver: TierDriver, proxy: FaultProxy) -> None:
    proxy.fault = Drop(forward=True, when=lambda method, path: method == "PUT")
    result = driver.store(ABSENT, range(N))
    proxy.fault = None
    proxy.reset_counts()
    assert driver.store(ABSENT, range(N)).ok.all()
    assert proxy.count("PUT", is_record) == 0 or result.ok.all()
    assert driver.load(ABSENT, range(10, 10 + N)).ok.all()
