from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, SSLError
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store
from s3_proxy import (
    AlterBody,
    CutBody,
    Delay,
    Drop,
    Fault,
    FaultProxy,
    Hang,
    Slow,
    Status,
    Times,
    flip_middle_bit,
    s3_error,
)
from s3_server import REGION, Server

DATA = bytes(range(256)) * 1000


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, s3: Server, bucket: str) -> S3Store:
    return new_store(proxy.url, s3, bucket)


def new_store(url: str, s3: Server, bucket: str, **client_options: Any) -> S3Store:
    return S3Store(
        bucket,
        endpoint=url,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "10s", **client_options},
        retry_config={"max_retries": 0},
    )


def put(store: S3Store, key: str, data: bytes = DATA, **options: Any) -> None:
    obstore.put(store, key, data, use_multipart=False, **options)


def got(store: S3Store, key: str) -> bytes:
    return bytes(obstore.get(store, key).bytes())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def threads() -> int:
    """Of proxies."""
    return sum(thread.name.startswith("fault-proxy") for thread in threading.enumerate())


def is_put(method: str, path: str) -> bool:
    return method == "PUT"


# Without faults


def test_requests_pass_unchanged(proxy: FaultProxy, store: S3Store, s3: Server, bucket: str) -> None:
    put(store, "a/x=1 é")
    assert s3.read(bucket, "a/x=1 é") == DATA
    assert got(store, "a/x=1 é") == DATA
    assert bytes(obstore.get_range(store, "a/x=1 é", start=5, end=300)) == DATA[5:300]
    assert obstore.head(store, "a/x=1 é")["size"] == len(DATA)
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "b")
    with pytest.raises(AlreadyExistsError):
        put(store, "a/x=1 é", mode="create")
    put(store, "new", b"", mode="create")
    assert [item["path"] for item in obstore.list(store, "a").collect()] == ["a/x=1 é"]
    obstore.delete(store, "a/x=1 é")  # a POST with a list
    assert s3.objects(bucket) == {"new": 0}
    assert [(seen.method, seen.status) for seen in proxy.requests] == [
        ("PUT", 200),
        ("GET", 200),
        ("GET", 206),
        ("HEAD", 200),
        ("GET", 404),
        ("PUT", 412),
        ("PUT", 200),
        ("GET", 200),
        ("POST", 200),
    ]
    first, *_, last = proxy.requests
    assert first.path == f"/{bucket}/a/x%3D1%20%C3%A9" and first.size == len(DATA) and first.reached
    assert first.headers["host"] == f"127.0.0.1:{proxy.port}"
    assert last.query == "delete"
    assert proxy.count("PUT") == 3 and proxy.count("PUT", lambda path: path.endswith("new")) == 1
    proxy.reset_counts()
    assert proxy.count("PUT") == 0 and not proxy.requests


def test_another_client_passes_too(proxy: FaultProxy, s3: Server, bucket: str) -> None:
    client = s3.client(proxy.url)
    client.put_object(Bucket=bucket, Key="a", Body=DATA)
    assert proxy.requests[0].headers["expect"] == "100-continue"
    answer = client.get_object(Bucket=bucket, Key="a")
    assert answer["Body"].read() == DATA
    with pytest.raises(ClientError, match="304"):
        client.get_object(Bucket=bucket, Key="a", IfNoneMatch=answer["ETag"])
    client.delete_object(Bucket=bucket, Key="a")
    assert [seen.status for seen in proxy.requests] == [200, 200, 304, 204]
    client.close()


def test_many_connections_carry_large_bodies(proxy: FaultProxy, store: S3Store, s3: Server, bucket: str) -> None:
    size = 4 << 20

    def there_and_back(i: int) -> bool:
        data = bytes([i]) * size
        put(store, f"{i}", data)
        return got(store, f"{i}") == data

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(there_and_back, range(16)))
    assert proxy.count("PUT") == proxy.count("GET") == 16
    assert s3.objects(bucket) == {f"{i}": size for i in range(16)}


def test_chunked_bodies_pass() -> None:
    """Both ways, with a server of two lines."""
    chunked = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with FaultProxy(url) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as client:
            proxy.fault = AlterBody(bytes.upper)
            client.sendall(b"POST /a HTTP/1.1\r\nHost: x\r\n" + chunked)
            connection = listener.accept()[0]
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += connection.recv(1000)
            assert (
                received == b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
            )
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n" + chunked)
            connection.close()
            answer = b""
            while more := client.recv(1000):
                answer += more
            assert answer.endswith(b"\r\n\r\n5\r\nABCDE\r\n0\r\n\r\n")


# TLS


def test_tls_with_an_authority_of_its_own(s3: Server, bucket: str) -> None:
    with FaultProxy(s3.endpoint, tls=True) as proxy:
        assert proxy.url.startswith("https://")
        client = s3.client(proxy.url, verify=proxy.ca_file)
        client.put_object(Bucket=bucket, Key="a", Body=DATA)
        assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == DATA
        client.close()
        with pytest.raises(BaseError):
            got(new_store(proxy.url, s3, bucket), "a")
        assert got(new_store(proxy.url, s3, bucket, allow_invalid_certificates=True), "a") == DATA
        stranger = s3.client(proxy.url)
        with pytest.raises(SSLError):
            stranger.get_object(Bucket=bucket, Key="a")
        stranger.close()
        assert len(proxy.requests) == 3


def test_obstore_knows_the_authority_that_it_is_given(s3: Server, bucket: str) -> None:
    s3.write(bucket, "a", DATA)
    with FaultProxy(s3.endpoint, tls=True) as proxy:
        with open(proxy.ca_file) as file:
            authority = file.read()
        assert got(new_store(proxy.url, s3, bucket, root_certificate=authority), "a") == DATA


# Faults


def test_status_is_answered_in_the_servers_place(proxy: FaultProxy, store: S3Store, s3: Server, bucket: str) -> None:
    proxy.fault = s3_error(503, "SlowDown", when=is_put)
    with pytest.raises(BaseError, match="503 Service"):
        put(store, "a")
    assert [item["path"] for item in obstore.list(store).collect()] == []
    assert proxy.count("PUT") == 0
    assert [(seen.status, seen.reached) for seen in proxy.requests] == [(503, False), (200, True)]
    proxy.fault = s3_error(400, "AuthorizationHeaderMalformed", Region="eu-west-1")
    with pytest.raises(BaseError, match="<Region>eu-west-1</Region>"):
        put(store, "a")
    proxy.fault = Status(404)
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "a")
    assert s3.objects(bucket) == {}


def test_status_can_hide_what_was_done(proxy: FaultProxy, store: S3Store, s3: Server, bucket: str) -> None:
    proxy.fault = s3_error(500, "InternalError", forward=True)
    with pytest.raises(BaseError, match="500 Internal"):
        put(store, "a")
    assert proxy.count("PUT") == 1 and proxy.requests[0].status == 500
    assert s3.read(bucket, "a") == DATA


def test_times(proxy: FaultProxy, store: S3Store) -> None:
    proxy.fault = Times(2, Status(500, when=is_put))
    with pytest.raises(FileNotFoundError):
        got(store, "a")
    for _ in range(2):
        with pytest.raises(BaseError):
            put(store, "a")
    put(store, "a")
    assert got(store, "a") == DATA
    assert [seen.status for seen in proxy.requests] == [404, 500, 500, 200, 200]


def test_delay_ends_with_the_fault(proxy: FaultProxy, store: S3Store) -> None:
    proxy.fault = Delay(0.2)
    began = time.monotonic()
    put(store, "a")
    assert time.monotonic() - began > 0.2
    proxy.fault = Delay(60)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(got, store, "a")
        until(lambda: len(proxy.requests) == 2)
        assert proxy.requests[1].status is None and proxy.count("GET") == 0
        proxy.fault = None
        assert waiting.result(5) == DATA


@pytest.mark.parametrize("forward", [False, True])
def test_hang_ends_with_the_fault(proxy: FaultProxy, store: S3Store, s3: Server, bucket: str, forward: bool) -> None:
    proxy.fault = Hang(forward=forward)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(put, store, "a")
        until(lambda: len(proxy.requests) == 1)
        time.sleep(0.1)
        assert not waiting.done()
        if forward:
            until(lambda: proxy.count("PUT") == 1)
        proxy.fault = None
        with pytest.raises(BaseError):
            waiting.result(5)
    assert proxy.requests[0].status is None and proxy.count("PUT") == forward
    assert s3.read(bucket, "a") == (DATA if forward else None)
    put(store, "a")


def test_a_client_that_leaves_ends_a_hang(proxy: FaultProxy, s3: Server, bucket: str) -> None:
    proxy.fault = Hang()
    with pytest.raises(BaseError, match=r"timed out|error sending"):
        put(new_store(proxy.url, s3, bucket, timeout="200ms"), "a")
    until(lambda: threads() == 1)  # the one that accepts


@pytest.mark.parametrize("forward", [False, True])
def test_drop(proxy: FaultProxy, store: S3Store, s3: Server, bucket: str, forward: bool) -> None:
    proxy.fault = Drop(forward=forward)
    with pytest.raises(BaseError):
        put(store, "a")
    assert proxy.count("PUT") == forward and proxy.requests[0].status is None
    assert s3.read(bucket, "a") == (DATA if forward else None)
    client = s3.client(proxy.url)
    with pytest.raises(ConnectionClosedError):
        client.get_object(Bucket=bucket, Key="a")
    client.close()


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_body_is_cut(proxy: FaultProxy, store: S3Store, share: float) -> None:
    put(store, "a")
    proxy.fault = CutBody(share)
    assert obstore.head(store, "a")["size"] == len(DATA)
    received = 0
    with pytest.raises(BaseError):
        answer = obstore.get(store, "a")
        assert answer.meta["size"] == len(DATA)
        for part in answer.stream(1):
            received += len(part)
    assert received <= share * len(DATA)
    proxy.fault = None
    assert got(store, "a") == DATA


def test_a_body_is_altered(proxy: FaultProxy, store: S3Store) -> None:
    put(store, "a")
    proxy.fault = AlterBody()
    changed = got(store, "a")
    assert [i for i, (ours, theirs) in enumerate(zip(DATA, changed, strict=True)) if ours != theirs] == [128000]
    assert changed == flip_middle_bit(DATA)
    proxy.fault = AlterBody(lambda body: body[:-7])
    assert got(store, "a") == DATA[:-7]


def test_a_slow_body_is_whole_and_hurries_when_the_fault_ends(proxy: FaultProxy, store: S3Store) -> None:
    put(store, "a")
    proxy.fault = Slow(2 * len(DATA))
    began = time.monotonic()
    assert got(store, "a") == DATA
    assert 0.4 < time.monotonic() - began < 5
    proxy.fault = Slow(1000)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(got, store, "a")
        time.sleep(0.1)
        assert not waiting.done()
        proxy.fault = None
        assert waiting.result(5) == DATA


# The end


def test_stop_refuses_and_start_has_the_same_port(proxy: FaultProxy, store: S3Store) -> None:
    put(store, "a")
    url = proxy.url
    for _ in range(2):
        proxy.stop()
        proxy.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port))
        with pytest.raises(BaseError):
            got(store, "a")
        proxy.start()
        assert got(store, "a") == DATA
    assert proxy.url == url


@pytest.mark.parametrize(
    "fault", [Hang(), Hang(forward=True), Delay(100), Slow(1000)], ids=lambda fault: type(fault).__name__
)
@pytest.mark.parametrize("tls", [False, True])
def test_close_ends_all_within_a_second(s3: Server, bucket: str, fault: Fault, tls: bool) -> None:
    s3.write(bucket, "a", DATA)
    proxy = FaultProxy(s3.endpoint, tls=tls)
    proxy.fault = fault
    store = new_store(proxy.url, s3, bucket, allow_invalid_certificates=True)
    with ThreadPoolExecutor() as pool, socket.create_connection(("127.0.0.1", proxy.port)):
        waiting = [pool.submit(got, store, "a") for _ in range(4)]
        until(lambda: len(proxy.requests) == 4)
        began = time.monotonic()
        proxy.close()
        for each in waiting:
            with pytest.raises(BaseError):
                each.result(5)
        assert time.monotonic() - began < 2  # a second, and a busy machine
        assert threads() == 0
    proxy.close()


def test_a_server_that_is_gone_drops_the_request(s3: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        with pytest.raises(BaseError):
            put(new_store(proxy.url, s3, "none"), "a")
        assert [(seen.status, seen.reached) for seen in proxy.requests] == [(None, False)]
