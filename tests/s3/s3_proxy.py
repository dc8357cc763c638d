"""An HTTP proxy in front of an S3 server that can be told to fail.

    with FaultProxy(server.endpoint) as proxy:
        proxy.fault = Times(2, s3_error(503, "SlowDown"), when=lambda method, path: method == "PUT")
        ...  # a client of proxy.url
        assert proxy.count("PUT") == 1

Requests reach the server as they were sent, byte by byte, ``Host`` included, so signatures stay valid. Each message is
read to its end before it goes on: a fault sees all of it.
"""

from __future__ import annotations

import datetime
import ipaddress
import select
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

#: Whether a fault is for the request of this method and path (as sent: percent-encoded, without the query).
When: TypeAlias = Callable[[str, str], bool]

_POLL_S = 0.02


def _always(method: str, path: str) -> bool:
    return True


def flip_middle_bit(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :] if body else body


@dataclass(eq=False)
class Fault:
    """What happens to requests that ``when`` is true for. What has begun ends when the proxy's fault is replaced."""

    when: When = field(default=_always, kw_only=True)

    def chosen(self, method: str, path: str) -> Fault | None:
        """The fault for a request, if there is one."""
        return self if self.when(method, path) else None


@dataclass(eq=False)
class Status(Fault):
    """Answer ``code`` in the server's place. With ``forward`` the server is asked first, and its answer thrown away."""

    code: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    forward: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Delay(Fault):
    """Wait before the request goes to the server."""

    seconds: float


@dataclass(eq=False)
class Hang(Fault):
    """Do not answer; when the fault is replaced, close. With ``forward`` the server has done what it was asked."""

    forward: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Drop(Fault):
    """Close the connection instead of an answer. With ``forward`` the server has done what it was asked."""

    forward: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class CutBody(Fault):
    """Announce the whole body, and close after a share of it. Answers without a body pass."""

    share: float = 0.5


@dataclass(eq=False)
class AlterBody(Fault):
    """Change the body; its announced length follows. Answers without a body pass."""

    how: Callable[[bytes], bytes] = flip_middle_bit


@dataclass(eq=False)
class Slow(Fault):
    """Send the body of the answer at this speed."""

    bytes_per_second: float


@dataclass(eq=False)
class Times(Fault):
    """``fault`` for the first ``n`` requests that it is for; later ones pass."""

    n: int
    fault: Fault

    def __post_init__(self) -> None:
        self._left = iter(range(self.n))  # asked by several threads

    def chosen(self, method: str, path: str) -> Fault | None:
        for_it = self.when(method, path) and self.fault.when(method, path)
        return self.fault if for_it and next(self._left, None) is not None else None


def s3_error(code: int, name: str, *, when: When = _always, forward: bool = False, **elements: str) -> Status:
    """The answer of an S3 server that fails: ``s3_error(503, "SlowDown")``; ``elements`` are further XML elements."""
    fields = {"Code": name, "Message": name, "RequestId": "proxy"} | elements
    xml = "".join(f"<{tag}>{text}</{tag}>" for tag, text in fields.items())
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error>{xml}</Error>'.encode()
    return Status(code, body, {"Content-Type": "application/xml"}, when=when, forward=forward)


@dataclass
class Seen:
    """A request that came to the proxy."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """With names in lower case."""
    size: int
    """Of its body."""
    status: int | None = None
    """What the client was answered; None as long as it was not."""
    reached: bool = False
    """Whether the server has got it."""


class FaultProxy:
    """Listens on a port of its own from the start; ``close()`` ends all that it began.

    *Thread safety*: any thread may call any method.
    """

    def __init__(self, upstream: str, *, tls: bool = False) -> None:
        address = urlsplit(upstream)
        assert address.scheme == "http" and address.hostname and address.port, upstream
        self._upstream = (address.hostname, address.port)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._fault: Fault | None = None
        self._requests: list[Seen] = []
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._running = False
        self._context: ssl.SSLContext | None = None
        self._folder: Path | None = None
        self.ca_file = ""
        if tls:
            self._folder = Path(tempfile.mkdtemp(prefix="proxy-"))
            self._context, self.ca_file = _authority(self._folder)
        self._listener = _bound(0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    @property
    def fault(self) -> Fault | None:
        """What happens to requests from now on."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        with self._lock:
            self._fault = fault
            self._changed.notify_all()

    @property
    def requests(self) -> list[Seen]:
        """What has come so far, in this order: each is here before the client has its answer."""
        with self._lock:
            return [replace(seen) for seen in self._requests]

    def count(self, method: str, when: Callable[[str], bool] = lambda path: True) -> int:
        """How many requests of this method, with a path that ``when`` is true for, have reached the server."""
        return sum(seen.reached and seen.method == method and when(seen.path) for seen in self.requests)

    def reset_counts(self) -> None:
        with self._lock:
            self._requests.clear()

    def start(self) -> None:
        """Listen, again on the same port after ``stop()``."""
        with self._lock:
            assert not self._running
            self._running = True
            self._listener.listen(128)
            self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Close all connections, and refuse new ones until ``start()``."""
        with self._lock:
            if not self._running:
                return
            self._running = False
            self._changed.notify_all()
            threads = list(self._threads)
            for opened in (self._listener, *self._open):
                with suppress(OSError):
                    # Wakes up who reads or accepts. TLS would say goodbye first, and is used by another thread.
                    socket.socket.shutdown(opened, socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), thread
        self._listener.close()
        # Bound, but not listening: refuses, and nobody else gets the port.
        self._listener = _bound(self.port)

    def close(self) -> None:
        self.stop()
        self._listener.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, target: Callable[[socket.socket], None], opened: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(opened,), name=f"fault-proxy-{self.port}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                break
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context:
                client = self._context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                if not self._running:
                    client.close()
                    break
                self._open.add(client)
                self._spawn(self._serve, client)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _serve(self, client: socket.socket) -> None:
        link = _Link(client)
        # OSError: one side has gone, or stop() has closed the connection. ValueError: this is not HTTP.
        try:
            if isinstance(client, ssl.SSLSocket):
                client.do_handshake()
            while request := link.read_request():
                if not self._exchange(link, request):
                    break
        except (OSError, ValueError):
            pass
        finally:
            self._forget(link)
            if link.server:
                self._forget(link.server)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _exchange(self, client: _Link, request: _Message) -> bool:
        """Answer a request; whether there can be another one."""
        method, target, _ = request.start.split(" ")
        path, _, query = target.partition("?")
        seen = Seen(method, path, query, request.headers, len(request.body))
        with self._lock:
            self._requests.append(seen)
            set_fault = self._fault
        fault = set_fault.chosen(method, path) if set_fault else None
        if isinstance(fault, Delay):
            self._wait(set_fault, fault.seconds)

        answer: _Message | None = None
        if not isinstance(fault, Status | Hang | Drop) or fault.forward:
            if client.server and client.server.has_ended():
                self._forget(client.server)
                client.server = None
            if not client.server:
                client.server = self._connect()
            client.server.send(request.wire())
            seen.reached = True
            answer = client.server.read_answer(method)

        if isinstance(fault, Drop):
            return False
        if isinstance(fault, Hang):
            while not self._wait(set_fault, _POLL_S) and not client.has_ended():
                pass
            return False
        if isinstance(fault, Status):
            answer = _canned(fault, method)
        assert answer
        if isinstance(fault, AlterBody) and answer.body:
            answer.replace_body(fault.how(answer.body))
        seen.status = answer.code
        if isinstance(fault, CutBody) and answer.body:
            client.send(answer.wire(int(len(answer.body) * fault.share)))
            return False
        if isinstance(fault, Slow):
            self._trickle(client, answer, set_fault, fault.bytes_per_second)
        else:
            client.send(answer.wire())
        return not (request.last or answer.last)

    def _trickle(self, client: _Link, answer: _Message, set_fault: Fault | None, speed: float) -> None:
        whole = answer.wire()
        rest = memoryview(b"".join(whole))
        client.send([rest[: len(whole[0])]])
        rest = rest[len(whole[0]) :]
        began, sent = time.monotonic(), 0
        while rest:
            if self._wait(set_fault, _POLL_S):
                client.send([rest])
                return
            due = min(len(rest), int(speed * (time.monotonic() - began)) - sent)
            client.send([rest[:due]])
            rest, sent = rest[due:], sent + due

    def _wait(self, fault: Fault | None, seconds: float) -> bool:
        """Wait, but not longer than ``fault`` is the proxy's; whether it no longer is."""
        with self._lock:
            over = self._changed.wait_for(lambda: self._fault is not fault or not self._running, seconds)
            if not self._running:
                raise ConnectionAbortedError("the proxy stops")
            return over

    def _connect(self) -> _Link:
        opened = socket.create_connection(self._upstream)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if not self._running:
                opened.close()
                raise ConnectionAbortedError("the proxy stops")
            self._open.add(opened)
        return _Link(opened)

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._open.discard(link.socket)
        link.close()


@dataclass
class _Message:
    """A request or an answer."""

    start: str
    head: bytes
    """As it came, with the empty line at its end."""
    headers: dict[str, str]
    body: bytes = b""
    chunked: bool = False
    last: bool = False
    """Whether the connection ends after it."""

    @property
    def code(self) -> int:
        return int(self.start.split(" ")[1])

    def replace_body(self, body: bytes) -> None:
        self.body = body
        lines = self.head.split(b"\r\n")
        self.head = b"\r\n".join(
            b"Content-Length: %d" % len(body) if line.lower().startswith(b"content-length:") else line for line in lines
        )

    def wire(self, cut: int | None = None) -> list[bytes | memoryview]:
        """What to send, of the body only the first ``cut`` bytes."""
        if not self.chunked:
            return [self.head, memoryview(self.body)[:cut]]
        # In one chunk: where chunks end means nothing.
        size = b"%x\r\n" % len(self.body) if self.body else b""
        return [
            self.head,
            size,
            memoryview(self.body)[:cut],
            b"" if cut is not None else b"\r\n0\r\n\r\n"[2 * (not size) :],
        ]


class _Link:
    """One side's connection: messages in, bytes out."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.server: _Link | None = None
        """Of a client's link: the one on which its requests go on."""
        self._file: BufferedReader = opened.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        for part in parts:
            if len(part):
                self.socket.sendall(part)

    def has_ended(self) -> bool:
        """Whether the other side has closed. (Nobody sends the next message before the current one is answered.)"""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def read_request(self) -> _Message | None:
        """The next request; None if the client has closed."""
        if not (message := self._read_head()):
            return None
        if message.headers.get("expect", "").lower() == "100-continue":
            self.send([b"HTTP/1.1 100 Continue\r\n\r\n"])
        self._read_body(message)
        return message

    def read_answer(self, method: str) -> _Message:
        """The answer to a request of this method."""
        while message := self._read_head():
            if message.code < 200:
                continue  # 100 Continue: the client had it from the proxy
            if method != "HEAD" and message.code not in (204, 304):
                if "content-length" not in message.headers and "transfer-encoding" not in message.headers:
                    message.body, message.last = self._file.read(), True
                else:
                    self._read_body(message)
            return message
        raise ConnectionResetError("the server has closed")

    def _read_head(self) -> _Message | None:
        lines = []
        while (line := self._file.readline(1 << 16)) not in (b"\r\n", b"\n"):
            if not line:
                return None
            lines.append(line)
        start, *fields = (each.decode("latin-1").rstrip("\r\n") for each in lines)
        headers = {}
        for each in fields:
            name, _, value = each.partition(":")
            headers[name.strip().lower()] = value.strip()
        last = headers.get("connection", "").lower() == "close" or "HTTP/1.0" in start
        return _Message(start, b"".join([*lines, line]), headers, last=last)

    def _read_body(self, message: _Message) -> None:
        message.chunked = message.headers.get("transfer-encoding", "").lower() == "chunked"
        if not message.chunked:
            message.body = self._read(int(message.headers.get("content-length", 0)))
            return
        chunks = []
        while size := int(self._file.readline().split(b";")[0], 16):
            chunks.append(self._read(size))
            self._file.readline()
        while self._file.readline() not in (b"\r\n", b""):
            pass  # trailers
        message.body = b"".join(chunks)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ConnectionResetError("closed within a body")
        return data


def _canned(fault: Status, method: str) -> _Message:
    phrase = HTTPStatus(fault.code).phrase
    start = f"HTTP/1.1 {fault.code} {phrase}"
    fields = {"Content-Length": str(len(fault.body))} | fault.headers
    head = "\r\n".join([start, *(f"{name}: {value}" for name, value in fields.items()), "", ""]).encode()
    return _Message(start, head, {}, b"" if method == "HEAD" else fault.body)


def _bound(port: int) -> socket.socket:
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.bind(("127.0.0.1", port))
    return opened


def _authority(folder: Path) -> tuple[ssl.SSLContext, str]:
    """A server's TLS, for 127.0.0.1 and localhost, and the file of the authority that has signed it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def builder(name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests of tierkv")]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )

    usage = {
        name: False
        for name in (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        )
    }
    ca = (
        builder("tests of tierkv", ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    leaf = (
        builder("localhost", key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    ca_file, chain = folder / "ca.pem", folder / "server.pem"
    ca_file.write_bytes(ca.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain.write_bytes(private + leaf.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return context, str(ca_file)
