"""The ``obj`` tier under a real engine: shared by processes, and failing in every way while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from s3_proxy import AlterBody, CutBody, Delay, Fault, FaultProxy, Status, s3_error
from s3_server import REGION, Server, fresh_bucket, running
from vllm_harness import BLOCK, Engine, assert_shm_clean, connector, most_hits, same, shm_names, tokens, wait_for

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

LENGTH = 6 * BLOCK + 3


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def bucket(s3: Server) -> Iterator[str]:
    with fresh_bucket(s3) as name:
        yield name


def obj(s3: Server, bucket: str, **fields: Any) -> dict[str, Any]:
    needed = {
        "type": "obj",
        "bucket": bucket,
        "endpoint_override": s3.endpoint,
        "region": REGION,
        "access_key": s3.access_key,
        "secret_key": s3.secret_key,
    }
    return {**needed, **fields}


def _quiet(engine: Engine) -> None:
    """All that was to be stored is, or has failed."""
    engine.drain()
    wait_for(lambda: not engine("call", function="books", arguments={})["unanswered"], 60.0, "the tier's reports")


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_next_process_is_served(model: str, engines: Engines, oracle: Oracle, s3: Server, bucket: str) -> None:
    """Another process, which has nothing but the bucket, serves its first request from it; so does one that only
    reads, after a ``kill -9``."""
    before = shm_names()
    prompts = [tokens(seed, length) for seed, length in ((0, 6 * BLOCK), (1, 515), (2, 10 * BLOCK - 1))]
    hits = [most_hits(len(p), 2 * BLOCK) for p in prompts]
    expected = oracle(model, prompts)
    config = connector(blocks_per_chunk=2, secondary_tiers=[obj(s3, bucket, prefix="kv")])

    first = engines.start(model, config)
    assert same(first.generate(prompts), expected)
    _quiet(first)
    stored = s3.objects(bucket)
    assert len(stored) > sum(hits) // (2 * BLOCK) and all(name.startswith("kv/") for name in stored)
    first.kill()
    assert_shm_clean(before)

    with FaultProxy(s3.endpoint) as proxy:
        reader = obj(s3, bucket, prefix="kv", mode="read", endpoint_override=proxy.url)
        second = engines.start(model, connector(blocks_per_chunk=2, secondary_tiers=[reader]))
        answers = second.generate(prompts)
        assert [a["external"] for a in answers] == hits
        assert same(answers, expected)
        second.one(tokens(3, 300))
        _quiet(second)
        second.close()
        assert {seen.method for seen in proxy.requests} <= {"GET", "HEAD"}
    assert s3.objects(bucket) == stored

    # vLLM's own form of the same.
    fields = obj(s3, bucket)
    nested = {"type": fields.pop("type"), "store_config": {**fields, "scheme": "http"}, "prefix": "kv"}
    third = engines.start(model, connector(blocks_per_chunk=2, secondary_tiers=[nested]))
    answers = third.generate(prompts)
    assert [a["external"] for a in answers] == hits
    assert same(answers, expected)


class Trouble(NamedTuple):
    """What happens to the store: how it begins and ends, and which uses of the tier fail then."""

    begin: Callable[[Server, str, FaultProxy], Any]
    end: Callable[[Server, str, FaultProxy], Any]
    breaks: str


def _fault(fault: Fault, breaks: str, method: str = "") -> Trouble:
    if method:
        fault.when = lambda asked, path: asked == method

    def begin(s3: Server, bucket: str, proxy: FaultProxy) -> None:
        proxy.fault = fault

    def end(s3: Server, bucket: str, proxy: FaultProxy) -> None:
        proxy.fault = None

    return Trouble(begin, end, breaks)


TROUBLES = {
    "the bucket is deleted": Trouble(
        lambda s3, bucket, proxy: s3.delete_bucket(bucket), lambda s3, bucket, proxy: s3.make_bucket(bucket), "reading"
    ),
    "the credentials are revoked": _fault(s3_error(403, "InvalidAccessKeyId"), "reading"),
    "the server is stopped": Trouble(
        lambda s3, bucket, proxy: proxy.stop(), lambda s3, bucket, proxy: proxy.start(), "reading"
    ),
    "it answers 500": _fault(Status(500), "reading"),
    "it answers slowly": _fault(Delay(3.0), "reading"),
    "it cuts bodies short": _fault(CutBody(0.5), "reading", "GET"),
    "it returns other bytes": _fault(AlterBody(), "reading", "GET"),
}


def test_whatever_the_store_does(engines: Engines, oracle: Oracle, s3: Server, bucket: str) -> None:
    """The outputs are what they are without it, the tier is cut off, and used again when the store is well."""
    with FaultProxy(s3.endpoint) as proxy:
        tier = obj(s3, bucket, endpoint_override=proxy.url, timeout_s=0.5, max_retries=1, list_interval_s=1.0)
        config = connector(
            secondary_tiers=[tier],
            reset_scope="host",
            lookup_timeout_s=1.0,
            load_timeout_s=1.0,
            store_timeout_s=2.0,
        )
        with engines.running("llama", config) as engine:
            for number, (what, trouble) in enumerate(TROUBLES.items()):
                prompts = [tokens(1000 + 20 * number + i, LENGTH) for i in range(8)]
                new = [tokens(1000 + 20 * number + 10 + i, LENGTH) for i in range(2)]
                expected = oracle("llama", prompts + new)
                assert same(engine.generate(prompts), expected[:8]), what
                _quiet(engine)
                assert engine.reset(connector=True)
                opened = _breakers(engine)

                trouble.begin(s3, bucket, proxy)
                assert same(engine.generate(prompts + new), expected), what
                _quiet(engine)
                cut_off = _breakers(engine)
                assert cut_off[trouble.breaks][1] > opened[trouble.breaks][1], (what, opened, cut_off)

                trouble.end(s3, bucket, proxy)
                _recovers(engine, prompts[0], expected[0], what)


def _breakers(engine: Engine) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = engine("call", function="breakers", arguments={})
    return found


def _recovers(engine: Engine, prompt: list[int], expected: Any, what: str) -> None:
    """Sooner or later the prompt is stored again, if it has to be, and served by the tier; never anything else."""

    def served() -> bool:
        _quiet(engine)
        assert engine.reset(connector=True)
        answer = engine.one(prompt)
        assert same([answer], [expected]), what
        hits: int = answer["external"]
        return hits == most_hits(LENGTH, BLOCK)

    wait_for(served, 60.0, f"to be served again after: {what}")
    wait_for(lambda: all(state == "closed" for state, _ in _breakers(engine).values()) or served(), 60.0, what)
