"""What the obj tier asks of a store, and what it does not."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_proxy import Delay, FaultProxy, Hang, Times, s3_error
from s3_server import REGION, Server, needs_signatures
from s3_tiers import config_of, driver_of, is_record, path_of, tier_of

from tierkv.config import parse_tier
from tierkv.errors import ConfigError
from tierkv.keys import new_generation
from tierkv.testing.driver import NAMESPACE, SPACE, TierDriver, some_chunks
from tierkv.tiers import record
from tierkv.tiers.base import Deadlines
from tierkv.tiers.breaker import verdict
from tierkv.tiers.lookups import LookupPool, Piece
from tierkv.tiers.obj import ObjTier
from tierkv.tiers.obj.config import ObjTierConfig, StoreConfig
from tierkv.types import RequestContext, Space

REQUEST = RequestContext()


def _found(driver: TierDriver, chunks: Any) -> list[bool]:
    assert isinstance(driver.tier, ObjTier)
    return list(driver.tier.lookup_batch(chunks, REQUEST))


def _wait(condition: Any, what: str) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


# ── what is there is not sent again ──────────────────────────────────────────────────────────────────────────────────


def test_what_is_there_is_not_sent_again(s3: Server, bucket: str) -> None:
    chunks = some_chunks(20)
    with FaultProxy(s3.endpoint) as proxy:
        with driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
            driver.fill(range(20))
            assert driver.store(chunks, range(20)).ok.all()
            assert proxy.count("PUT", is_record) == 20
            proxy.reset_counts()
            assert driver.store(chunks, range(20)).ok.all()
            assert not [seen for seen in proxy.requests if is_record(seen.path)], "this process knows that it is there"
        proxy.reset_counts()
        with driver_of(s3, bucket, endpoint_override=proxy.url, list_interval_s=0) as other:
            other.fill(range(20))
            assert other.store(chunks, range(20)).ok.all()
            assert proxy.count("PUT", is_record) == 0 and proxy.count("HEAD", is_record) == 20
    assert len([name for name in s3.objects(bucket) if is_record(name)]) == 20


def test_what_was_absent_just_now_is_not_asked_for_again(s3: Server, bucket: str) -> None:
    chunks = some_chunks(5)
    with FaultProxy(s3.endpoint) as proxy, driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
        assert not any(_found(driver, chunks))
        asked = proxy.count("HEAD", is_record)
        assert not any(_found(driver, chunks))
        driver.fill(range(5))
        assert driver.store(chunks, range(5)).ok.all()
        assert proxy.count("HEAD", is_record) == asked == 5
        assert all(_found(driver, chunks)) and proxy.count("HEAD", is_record) == asked


def test_two_writers_race_for_one_key(s3: Server, bucket: str) -> None:
    """Both have seen that it is not there, and send it at the same time: one object, and both have succeeded."""
    chunks = some_chunks(8)
    both = threading.Barrier(2)
    statuses: list[int] = []
    with FaultProxy(s3.endpoint) as proxy:
        make = tier_of(s3, bucket, endpoint_override=proxy.url)
        with TierDriver(make) as one, TierDriver(make) as other:
            for driver in (one, other):
                driver.fill(range(8))
                assert not any(_found(driver, chunks))
            proxy.reset_counts()
            proxy.fault = Delay(0.2, when=lambda method, path: method == "PUT")
            results = []

            def store(driver: TierDriver) -> None:
                both.wait()
                results.append(driver.store(chunks, range(8)))

            threads = [threading.Thread(target=store, args=(driver,)) for driver in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            statuses = [seen.status for seen in proxy.requests if seen.method == "PUT" and is_record(seen.path)]
            proxy.fault = None
            assert all(result.ok.all() for result in results)
            one.wipe()
            assert one.load(chunks, range(8)).ok.all()
    assert sorted(statuses) == [200] * 8 + [412] * 8
    assert len([name for name in s3.objects(bucket) if is_record(name)]) == 8


def test_a_store_without_conditions_gets_none(s3: Server, bucket: str) -> None:
    chunks = some_chunks(3)
    with FaultProxy(s3.endpoint) as proxy, driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
        driver.fill(range(3))

        def conditional(method: str, path: str) -> bool:
            return method == "PUT" and bool(proxy.requests) and "if-none-match" in proxy.requests[-1].headers

        proxy.fault = s3_error(501, "NotImplemented", when=conditional)
        result = driver.store(chunks, range(3))
        proxy.fault = None
        assert result.ok.all(), result
        assert all(_found(driver, chunks))


def test_large_records_are_sent_in_parts(s3: Server, bucket: str) -> None:
    chunks, size = some_chunks(2), 17 << 20
    with (
        FaultProxy(s3.endpoint) as proxy,
        driver_of(
            s3, bucket, slot_bytes=size, n_slots=3, endpoint_override=proxy.url, multipart_bytes=5 << 20, timeout_s=30.0
        ) as driver,
    ):
        payloads = driver.fill([0, 1])
        assert driver.store(chunks, [0, 1]).ok.all()
        assert proxy.count("POST") == 4 and proxy.count("PUT", is_record) >= 6
        driver.wipe()
        assert driver.load(chunks.take([1, 0]), [0, 2]).ok.all()
        assert [driver.payload(2), driver.payload(0)] == payloads


@pytest.mark.parametrize("checksum", ["sha256", "crc64nvme", "none"])
def test_the_store_checks_what_it_gets(s3: Server, bucket: str, checksum: str) -> None:
    with FaultProxy(s3.endpoint) as proxy:
        with driver_of(s3, bucket, endpoint_override=proxy.url, checksum=checksum) as driver:
            (payload,) = driver.fill([0])
            assert driver.store(some_chunks(1), [0]).ok.all()
            assert driver.load(some_chunks(1), [1]).ok.all() and driver.payload(1) == payload
        (put,) = [seen for seen in proxy.requests if seen.method == "PUT" and is_record(seen.path)]
        unsigned = put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert unsigned == (checksum != "sha256")
        assert ("x-amz-checksum-crc64nvme" in put.headers) == (checksum == "crc64nvme")


# ── lookups ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_others_have_stored_is_known_from_a_listing(s3: Server, bucket: str) -> None:
    chunks = some_chunks(30)
    with driver_of(s3, bucket) as driver:
        driver.fill(range(30))
        assert driver.store(chunks, range(30)).ok.all()
    s3.write(bucket, path_of(some_chunks(1, seed=1), 0), b"too short to be a record")
    s3.write(bucket, f"{NAMESPACE.hex()}/{SPACE.generation.hex()}/00/something-else.txt", bytes(10_000))
    with FaultProxy(s3.endpoint) as proxy, driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
        assert not driver.tier.lookup(some_chunks(1, seed=9).name(0), REQUEST)
        _wait(lambda: "known=30" in repr(driver.tier), "the listing")
        proxy.reset_counts()
        assert _found(driver, chunks) == [True] * 30
        assert not proxy.requests
        # What goes meanwhile is a miss, and known to be one from then on.
        s3.delete(bucket, path_of(chunks, 7))
        assert driver.load(chunks.take([6, 7]), [0, 1]).reasons == {1: "absent"}
        assert _found(driver, chunks) == [i != 7 for i in range(30)]


def test_a_listing_is_made_again_and_for_each_generation(s3: Server, bucket: str) -> None:
    chunks, later = some_chunks(3), some_chunks(4, space=Space(NAMESPACE, new_generation("step-2")))
    with driver_of(s3, bucket) as writer, driver_of(s3, bucket, list_interval_s=0.1) as reader:
        assert not any(_found(reader, chunks.take([0])))
        writer.fill(range(4))
        assert writer.store(chunks, range(3)).ok.all()
        _wait(lambda: "known=3" in repr(reader.tier), "what was stored since")
        s3.delete(bucket, path_of(chunks, 0))
        _wait(lambda: "known=2" in repr(reader.tier), "what has gone since")
        assert writer.store(later, range(4)).ok.all()
        reader.tier.lookup(later.name(0), REQUEST)
        _wait(lambda: "known=4" in repr(reader.tier), "the other generation")


def test_a_question_ends_where_what_is_needed_is_missing(s3: Server, bucket: str) -> None:
    stored, none = some_chunks(10), some_chunks(500, seed=3)
    with FaultProxy(s3.endpoint) as proxy:
        fields = {"endpoint_override": proxy.url, "list_interval_s": 0}
        with driver_of(s3, bucket, **fields) as driver:
            driver.fill(range(10))
            assert driver.store(stored, range(10)).ok.all()
        with driver_of(s3, bucket, **fields) as driver:
            proxy.reset_counts()
            needed = np.arange(500) >= 30
            assert not any(driver.tier.lookup_batch(none, REQUEST, needed))  # type: ignore[attr-defined]
            assert proxy.count("HEAD") == 8 + 16 + 32, "as many as are asked for together with the first needed one"
            proxy.reset_counts()
            assert _found(driver, stored) == [True] * 10 and proxy.count("HEAD") == 10


def test_many_unknown_ones_are_listed_instead(s3: Server, bucket: str) -> None:
    chunks = some_chunks(200)
    with (
        FaultProxy(s3.endpoint) as proxy,
        driver_of(s3, bucket, n_slots=200) as writer,
        driver_of(s3, bucket, endpoint_override=proxy.url) as reader,
    ):
        assert not any(_found(reader, some_chunks(1, seed=5)))
        assert isinstance(reader.tier, ObjTier)
        _wait(lambda: reader.tier._names is not None, "the first listing")  # type: ignore[attr-defined]
        writer.fill(range(200))
        assert writer.store(chunks, range(200)).ok.all()
        proxy.reset_counts()
        assert _found(reader, chunks) == [True] * 200
        assert proxy.count("HEAD") == 8 and proxy.count("GET") == 1
        assert _found(reader, chunks) == [True] * 200
        assert proxy.count("HEAD") == 8 and proxy.count("GET") == 1


def test_what_is_not_needed_is_looked_for_to_the_end(s3: Server, bucket: str) -> None:
    """Of windows and of states, often only the last ones are kept."""
    chunks = some_chunks(100)
    with driver_of(s3, bucket) as driver:
        driver.fill([0, 1])
        assert driver.store(chunks.take([98, 99]), [0, 1]).ok.all()
    with driver_of(s3, bucket, list_interval_s=0) as driver:
        lookup = driver.tier.lookup_batch  # type: ignore[attr-defined]
        assert np.flatnonzero(lookup(chunks, REQUEST, np.zeros(100, np.bool_))).tolist() == [98, 99]
    with driver_of(s3, bucket, list_interval_s=0) as driver:
        assert np.flatnonzero(_found(driver, chunks)).tolist() == [98, 99]


def test_a_listing_that_hangs_costs_no_lookup(s3: Server, bucket: str) -> None:
    chunks = some_chunks(60)
    with FaultProxy(s3.endpoint) as proxy:
        fields: dict[str, Any] = {"endpoint_override": proxy.url, "timeout_s": 30.0}
        with driver_of(s3, bucket, deadlines=Deadlines(6.0, 30.0, 30.0), **fields) as driver:
            assert not driver.tier.lookup(some_chunks(1, seed=5).name(0), REQUEST)
            tier = driver.tier
            _wait(lambda: tier._names is not None, "the first listing")  # type: ignore[attr-defined]
            with driver_of(s3, bucket) as writer:
                writer.fill(range(60))
                assert writer.store(chunks, range(60)).ok.all()
            proxy.fault = Hang(when=lambda method, path: method == "GET" and not is_record(path))
            assert _found(driver, chunks) == [True] * 60, "in time, and by asking for each"
            proxy.fault = None


# ── what is there, and no good ────────────────────────────────────────────────────────────────────────────────────────


def test_what_another_has_mended_is_served(s3: Server, bucket: str) -> None:
    chunks = some_chunks(2)
    with driver_of(s3, bucket) as writer:
        payloads = writer.fill(range(2))
        assert writer.store(chunks, range(2)).ok.all()
        good = s3.read(bucket, path_of(chunks, 0))
        assert good is not None
        with driver_of(s3, bucket, mode="read", list_interval_s=0.1) as reader:
            s3.write(bucket, path_of(chunks, 0), good[:-1] + b"?")
            assert reader.load(chunks, [0, 1]).reasons == {0: "checksum"}
            assert _found(reader, chunks) == [False, True]
            s3.write(bucket, path_of(chunks, 0), good)
            _wait(lambda: _found(reader, chunks) == [True, True], "a listing that shows it")
            assert reader.load(chunks, [0, 1]).ok.all() and reader.payload(0) == payloads[0]


def test_what_another_has_mended_is_not_sent_again(s3: Server, bucket: str) -> None:
    chunks = some_chunks(1)
    with FaultProxy(s3.endpoint) as proxy, driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
        driver.fill([0])
        assert driver.store(chunks, [0]).ok.all()
        good = s3.read(bucket, path_of(chunks, 0))
        assert good is not None
        s3.write(bucket, path_of(chunks, 0), good[:-1] + b"?")
        assert driver.load(chunks, [1]).reasons == {0: "checksum"}
        s3.write(bucket, path_of(chunks, 0), good)
        proxy.reset_counts()
        assert driver.store(chunks, [0]).ok.all()
        assert proxy.count("PUT") == 0 and driver.load(chunks, [1]).ok.all()


def test_an_object_that_is_too_short_is_replaced(s3: Server, bucket: str) -> None:
    """Also if it came after the lookup, so that the store believes that there is none."""
    chunks = some_chunks(2)
    with driver_of(s3, bucket) as driver:
        driver.fill(range(2))
        s3.write(bucket, path_of(chunks, 0), b"short")
        assert not any(_found(driver, chunks))
        s3.write(bucket, path_of(chunks, 1), b"short")
        assert driver.store(chunks, range(2)).ok.all()
        assert driver.load(chunks, [2, 3]).ok.all()


def test_a_conflict_is_no_success(s3: Server, bucket: str) -> None:
    """Some stores answer 409 to two that write one object at the same time; there may be none."""
    chunks = some_chunks(3)
    with FaultProxy(s3.endpoint) as proxy, driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
        driver.fill(range(3))
        for i in range(3):
            fault = s3_error(409, "ConditionalRequestConflict", when=lambda method, path: method == "PUT")
            proxy.fault = Times(1, fault)
            assert driver.store(chunks.take([i]), [i]).ok.all()
        proxy.fault = None
        assert driver.load(chunks, range(3, 6)).ok.all()
        proxy.fault = s3_error(409, "OperationAborted", when=lambda method, path: method == "PUT")
        assert set(driver.store(some_chunks(3, seed=1), range(3)).reasons.values()) == {"busy"}
        proxy.fault = s3_error(404, "NoSuchKey", when=lambda method, path: method == "PUT")
        result = driver.store(some_chunks(3, seed=1), range(3))
        assert set(result.reasons.values()) == {"refused"} and verdict(result) is False
        proxy.fault = None


# ── reading only ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reader_writes_nothing(s3: Server, bucket: str) -> None:
    chunks = some_chunks(4)
    with driver_of(s3, bucket) as driver:
        payloads = driver.fill(range(4))
        assert driver.store(chunks, range(4)).ok.all()
    before = s3.objects(bucket)
    with FaultProxy(s3.endpoint) as proxy:
        with driver_of(s3, bucket, endpoint_override=proxy.url, mode="read") as driver:
            assert not driver.tier.stores
            assert _found(driver, chunks) == [True] * 4
            assert driver.load(chunks, range(4)).ok.all()
            assert [driver.payload(i) for i in range(4)] == payloads
        assert {seen.method for seen in proxy.requests} <= {"GET", "HEAD"}
    assert s3.objects(bucket) == before


# ── closing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_close_does_not_wait_for_a_server_that_hangs(s3: Server, bucket: str) -> None:
    chunks = some_chunks(32)
    with FaultProxy(s3.endpoint) as proxy:
        driver = driver_of(s3, bucket, endpoint_override=proxy.url, timeout_s=60.0)
        driver.fill(range(32))
        assert driver.store(chunks.take(range(8)), range(8)).ok.all()
        proxy.fault = Hang()
        jobs = [
            driver.submit(driver.store_job(chunks.take(range(8, 32)), range(8, 32))),
            driver.submit(driver.load_job(chunks.take(range(8)), range(40, 48))),
        ]
        _wait(lambda: any(is_record(seen.path) for seen in proxy.requests[-8:]), "requests that hang")
        begin = time.monotonic()
        driver.close()
        assert time.monotonic() - begin < 20.0, "no statement about speed: each attempt would take a minute"
        reports = driver.reports()
        assert set(jobs) <= set(reports)
        assert all(set(reports[job].reasons.values()) == {"closed"} for job in jobs)
        proxy.fault = None


def test_close_while_a_listing_ends(s3: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that lists learns of it, whatever it is doing."""
    listing, go_on = threading.Event(), threading.Event()
    listed = ObjTier._list

    def slow(self: ObjTier, space: Space, until: float) -> bool:
        answer = listed(self, space, until)
        listing.set()
        assert go_on.wait(30)
        return answer

    monkeypatch.setattr(ObjTier, "_list", slow)
    driver = driver_of(s3, bucket)
    driver.tier.lookup(some_chunks(1).name(0), REQUEST)
    assert listing.wait(30)
    closing = threading.Thread(target=driver.close)
    closing.start()
    time.sleep(0.2)
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()


def test_a_tier_that_is_closed_keeps_no_connection(s3: Server, bucket: str) -> None:
    """The client's threads hold on to the last errors, which must not hold the client."""
    for seed in range(10):
        driver = driver_of(s3, bucket, list_interval_s=0.1)
        driver.tier.lookup(some_chunks(1, seed=seed).name(0), REQUEST)
        driver.fill([0, 1])
        driver.store(some_chunks(2, seed=seed), [0, 1])
        driver.load(some_chunks(2, seed=100), [2, 3])
        client = weakref.ref(driver.tier._bucket.objects)  # type: ignore[attr-defined]
        driver.close()
        _wait(lambda of=client: gc.collect() < 0 or of() is None, "the client's threads to let go of it")


def test_without_listings_there_is_no_thread_for_them(s3: Server, bucket: str) -> None:
    with driver_of(s3, bucket, list_interval_s=0) as driver:
        driver.tier.lookup(some_chunks(1).name(0), REQUEST)
        assert not [thread for thread in threading.enumerate() if thread.name.endswith("-list-0")]


def test_the_interpreter_may_end_without_close(s3: Server, bucket: str) -> None:
    code = f"""
import numpy as np
from tierkv.testing.driver import TierDriver, some_chunks
from tierkv.tiers.obj import ObjTier
from tierkv.tiers.obj.config import ObjTierConfig
config = ObjTierConfig(type="obj", bucket={bucket!r}, endpoint_override={s3.endpoint!r}, region={REGION!r},
                       access_key={s3.access_key!r}, secret_key={s3.secret_key!r})
driver = TierDriver(lambda context: ObjTier(config, context), slot_bytes=1 << 20)
driver.fill(range(64))
driver.submit(driver.store_job(some_chunks(64), range(64)))
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────────


def _refused(make: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        TierDriver(make)
    assert "secret" not in str(caught.value).replace("secret_key", "").replace("the secret of", "")
    return caught.value


def test_vllm_s_form_is_accepted(s3: Server, bucket: str) -> None:
    entry = {
        "type": "obj",
        "store_config": {
            "bucket": bucket,
            "endpoint_override": s3.endpoint.removeprefix("http://"),
            "access_key": s3.access_key,
            "secret_key": s3.secret_key,
            "scheme": "http",
        },
        "prefix": "kv",
        "io_threads": 2,
        "enable_kv_events": True,
    }
    tier_class, config = parse_tier(entry, "secondary_tiers[0]")
    with TierDriver(lambda context: tier_class(config, context)) as driver:
        driver.fill([0])
        assert driver.store(some_chunks(1), [0]).ok.all()
        assert driver.tier._jobs._reads.most == driver.tier._jobs._writes.most == 2  # type: ignore[attr-defined]
    assert f"kv/{path_of(some_chunks(1), 0)}" in s3.objects(bucket)
    assert s3.secret_key not in repr(config)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bucket": ""}, "bucket"),
        ({"bucket": "no name"}, "bucket"),
        ({"bucket": "x", "url": "s3://x"}, "url"),
        ({"bucket": "", "url": "x"}, "url"),
        ({"store_config": StoreConfig(bucket="x")}, "bucket"),
        ({"secret_key": ""}, "secret_key"),
        ({"access_key": ""}, "access_key"),
        ({"access_key": "", "secret_key": "", "session_token": "x"}, "session_token"),
        ({"endpoint_override": "ftp://x"}, "endpoint_override"),
        ({"endpoint_override": "http://x", "scheme": "https"}, "endpoint_override"),
        ({"ca_bundle": "/does/not/exist"}, "ca_bundle"),
        ({"ca_bundle": __file__}, "ca_bundle"),
        ({"options": {"colour": "green"}}, "options"),
        ({"prefix": "a//b"}, "prefix"),
        ({"prefix": "../b"}, "prefix"),
        ({"bucket": "", "url": "s3:///x"}, "url"),
        ({"bucket": "", "url": "s3://b/x?y=z"}, "url"),
        ({"bucket": "", "url": "s3://b/x//y"}, "url"),
        ({"bucket": "", "url": "memory:///"}, "url"),
        ({"bucket": "", "url": "file:///nowhere", "region": ""}, "endpoint_override"),
        ({"access_key": "", "secret_key": "", "profile": "nobody"}, "profile"),
    ],
)
def test_what_cannot_be_is_named(s3: Server, bucket: str, fields: dict[str, Any], field: str) -> None:
    error = _refused(tier_of(s3, bucket, **fields))
    assert error.field == field and error.accepted


def test_unknown_fields_are_named() -> None:
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]\.buckets: unknown field \(did you mean 'bucket'"):
        parse_tier({"type": "obj", "buckets": "x"}, "secondary_tiers[0]")
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]\.store_config.*buckets"):
        parse_tier({"type": "obj", "store_config": {"buckets": "x"}}, "secondary_tiers[0]")
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]\.mode"):
        parse_tier({"type": "obj", "bucket": "x", "mode": "write"}, "secondary_tiers[0]")


def test_wrong_at_start(s3: Server, bucket: str) -> None:
    assert _refused(tier_of(s3, "no-such-bucket-here")).field == "bucket"
    assert _refused(tier_of(s3, bucket, endpoint_override="http://127.0.0.1:9")).field == "endpoint_override"
    assert _refused(tier_of(s3, bucket, endpoint_override="http://nowhere.invalid")).field == "endpoint_override"
    nested = {"bucket": "", "access_key": "", "secret_key": "", "endpoint_override": "", "region": ""}
    wrong = StoreConfig(
        bucket="no-such-bucket-here",
        endpoint_override=s3.endpoint,
        access_key=s3.access_key,
        secret_key=s3.secret_key,
    )
    assert _refused(tier_of(s3, bucket, **nested, store_config=wrong)).field == "store_config.bucket"
    assert _refused(tier_of(s3, bucket, bucket="", url="s3://no-such-bucket-here/x")).field == "url"


def test_wrong_keys_at_start(s3: Server, bucket: str) -> None:
    needs_signatures(s3)
    assert _refused(tier_of(s3, bucket, access_key="nobody")).field == "access_key"
    assert _refused(tier_of(s3, bucket, secret_key="wrong-s3cret")).field == "secret_key"
    stranger = {"access_key": s3.other_access_key, "secret_key": s3.other_secret_key}
    assert _refused(tier_of(s3, bucket, **stranger)).field == "access_key"


def test_what_may_not_be_done_is_named_at_start(s3: Server, bucket: str) -> None:
    with FaultProxy(s3.endpoint) as proxy:
        fields = {"endpoint_override": proxy.url}
        proxy.fault = s3_error(403, "AccessDenied", when=lambda method, path: method == "PUT")
        error = _refused(tier_of(s3, bucket, **fields))
        assert error.field == "bucket" and "cannot write" in error.problem
        with driver_of(s3, bucket, mode="read", **fields):
            pass
        proxy.fault = s3_error(403, "AccessDenied", when=lambda method, path: path.endswith("namespace.json"))
        error = _refused(tier_of(s3, bucket, **fields))
        assert error.field == "bucket" and "cannot read" in error.problem
        proxy.fault = s3_error(403, "AccessDenied", when=lambda method, path: not path.endswith("namespace.json"))
        error = _refused(tier_of(s3, bucket, **fields))
        assert error.field == "access_key" and "cannot list" in error.problem
        proxy.fault = s3_error(400, "AuthorizationHeaderMalformed", Region="eu-west-1")
        error = _refused(tier_of(s3, bucket, **fields))
        assert error.field == "region" and "eu-west-1" in error.problem
        proxy.fault = s3_error(301, "PermanentRedirect")
        assert _refused(tier_of(s3, bucket, **fields)).field == "region"
        proxy.fault = s3_error(403, "ExpiredToken")
        assert _refused(tier_of(s3, bucket, **fields)).field == "session_token"
        proxy.fault = Hang()
        error = _refused(tier_of(s3, bucket, **fields, connect_timeout_s=0.2, timeout_s=0.5))
        assert error.field == "endpoint_override" and "no answer in time" in error.problem
        proxy.fault = None


def test_certificates(s3: Server, bucket: str, tmp_path: Path) -> None:
    with FaultProxy(s3.endpoint, tls=True) as proxy, FaultProxy(s3.endpoint, tls=True) as other:
        with driver_of(s3, bucket, endpoint_override=proxy.url, ca_bundle=str(proxy.ca_file)) as driver:
            driver.fill([0])
            assert driver.store(some_chunks(1), [0]).ok.all()
        assert _refused(tier_of(s3, bucket, endpoint_override=proxy.url)).field == "ca_bundle"
        wrong = {"endpoint_override": proxy.url, "ca_bundle": str(other.ca_file)}
        assert _refused(tier_of(s3, bucket, **wrong)).field == "ca_bundle"
    error = _refused(tier_of(s3, bucket, endpoint_override=s3.endpoint.replace("http:", "https:")))
    assert error.field == "endpoint_override" and "no TLS" in error.problem


def test_credentials_of_the_environment_and_of_files(
    s3: Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_signatures(s3)
    none = {"access_key": "", "secret_key": "", "region": ""}
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert _refused(tier_of(s3, bucket, **none)).field == "access_key"

    key, secret = s3.access_key, s3.secret_key
    credentials.write_text(f"[kv]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    with driver_of(s3, bucket, **none, profile="kv"):
        pass
    assert _refused(tier_of(s3, bucket, **none)).field == "access_key"
    monkeypatch.setenv("AWS_PROFILE", "kv")
    with driver_of(s3, bucket, **none):
        pass
    monkeypatch.delenv("AWS_PROFILE")

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert _refused(tier_of(s3, bucket, **none)).field == "secret_key"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with driver_of(s3, bucket, **none):
        pass
    # What the configuration says is whole: nothing of the environment is mixed with it.
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of something else")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of something else")
    with driver_of(s3, bucket):
        pass


def test_secrets_are_in_no_message(s3: Server, bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret, token = "a-s3cret-of-mine", "a-t0ken-of-mine"
    config = config_of(s3, bucket, secret_key=secret, session_token=token)
    assert secret not in repr(config) and token not in repr(config) and "***" in repr(config)
    with FaultProxy(s3.endpoint) as proxy:
        proxy.fault = s3_error(403, "SignatureDoesNotMatch", StringToSign=secret)
        with pytest.raises(ConfigError) as caught:
            TierDriver(tier_of(s3, bucket, endpoint_override=proxy.url, secret_key=secret, session_token=token))
        assert secret not in str(caught.value) and token not in str(caught.value)
        proxy.fault = None
        with driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
            proxy.fault = s3_error(403, "SignatureDoesNotMatch", StringToSign=secret)
            driver.fill([0])
            assert driver.store(some_chunks(1), [0]).reasons == {0: "forbidden"}
            assert s3.secret_key not in repr(driver.tier)
            pool = LookupPool()
            ticket = pool.submit([driver.tier], [Piece(some_chunks(1, seed=3), np.ones(1, np.bool_))], REQUEST)
            _wait(lambda: ticket.done, "the lookup")
            pool.close()
            assert pool.failures
            proxy.fault = None
    assert caplog.text and not any(word in caplog.text for word in (secret, token, s3.secret_key))
    others = ObjTierConfig(type="obj", url=f"az://{secret}@c/x?sas={secret}", options={"account_key": secret})
    assert secret not in repr(others) and "account_key" in repr(others)
    with pytest.raises(ConfigError) as caught:
        TierDriver(tier_of(s3, bucket, options={"virtual_hosted_style_request": secret}))
    assert secret not in "".join(traceback.format_exception(caught.value))


def test_the_environment_changes_nothing_that_is_said(s3: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    with FaultProxy(s3.endpoint) as proxy:
        with driver_of(s3, bucket, endpoint_override=proxy.url) as driver:
            driver.fill([0])
            assert driver.store(some_chunks(1), [0]).ok.all()
        (put,) = [seen for seen in proxy.requests if seen.method == "PUT" and is_record(seen.path)]
        assert put.headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD" and put.headers["if-none-match"] == "*"


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, s3: Server, bucket: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    error = _refused(tier_of(s3, bucket))
    assert error.field == "type" and "obstore" in error.problem and "tierkv[obj]" in error.accepted


def test_the_record_is_that_of_a_file(s3: Server, bucket: str, tmp_path: Path) -> None:
    """What is copied from a bucket into a directory is what the fs tier would have stored there."""
    from tierkv.tiers.fs import FsTier, FsTierConfig

    chunks = some_chunks(3)
    with driver_of(s3, bucket) as driver:
        payloads = driver.fill(range(3))
        assert driver.store(chunks, range(3)).ok.all()
    for name in s3.objects(bucket):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(s3.read(bucket, name) or b"")
    with TierDriver(lambda context: FsTier(FsTierConfig(type="fs", root_dir=str(tmp_path)), context)) as driver:
        assert driver.load(chunks, range(3)).ok.all()
        assert [driver.payload(i) for i in range(3)] == payloads
    with TierDriver(lambda context: ObjTier(ObjTierConfig(type="obj", url=tmp_path.as_uri()), context)) as driver:
        assert driver.load(chunks, range(3)).ok.all()
    assert record.HEADER_BYTES + 4096 in s3.objects(bucket).values() and REGION
