"""The S3 server of the tests: the one that ``TIERKV_TEST_S3`` names, or moto in this process.

What tests need to know of a bucket is asked with boto3, which knows nothing of the client that the tier uses.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

#: Names the endpoint of a server which has the users below, as that of ``rgw.sh`` has.
VARIABLE = "TIERKV_TEST_S3"
REGION = "us-east-1"

T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """A server with two users; buckets are the first one's.

    *Thread safety*: any thread may call any method. No connection stays open after a call.
    """

    endpoint: str
    kind: str
    """``rgw``, or ``moto``."""
    checks_signatures: bool
    access_key: str = "tierkv"
    secret_key: str = "tierkvsecret"
    other_access_key: str = "other"
    other_secret_key: str = "othersecret"

    def make_bucket(self, name: str) -> None:
        self._ask(lambda client: client.create_bucket(Bucket=name))

    def delete_bucket(self, name: str) -> None:
        """Delete a bucket and all that is in it; one that does not exist is fine."""

        def delete(client: Any) -> None:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
                for item in page.get("Contents", ()):
                    client.delete_object(Bucket=name, Key=item["Key"])
            for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=name):
                for item in page.get("Uploads", ()):
                    client.abort_multipart_upload(Bucket=name, Key=item["Key"], UploadId=item["UploadId"])
            client.delete_bucket(Bucket=name)

        self._unless_missing(delete)

    def objects(self, bucket: str, prefix: str = "") -> dict[str, int]:
        """The size of each object by its key."""

        def listed(client: Any) -> dict[str, int]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}

        return self._ask(listed)

    def read(self, bucket: str, key: str) -> bytes | None:
        """The bytes of an object; None if there is none."""
        return self._unless_missing(lambda client: client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def write(self, bucket: str, key: str, data: bytes) -> None:
        self._ask(lambda client: client.put_object(Bucket=bucket, Key=key, Body=data))

    def delete(self, bucket: str, key: str) -> None:
        self._ask(lambda client: client.delete_object(Bucket=bucket, Key=key))

    def client(self, endpoint: str = "", **options: Any) -> Any:
        """A new boto3 client, of ``endpoint`` (a proxy's, say) if that is given; its ``close()`` is the caller's."""
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            region_name=REGION,
            **{"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret_key} | options,
            # Checksums in trailers are newer than some servers, and loopback needs no proxy of the environment.
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                retries={"total_max_attempts": 1},
                connect_timeout=10,
                proxies={},
            ),
        )

    @cached_property
    def _client(self) -> Any:
        return self.client()

    def _ask(self, request: Callable[[Any], T]) -> T:
        try:
            return request(self._client)
        finally:
            self._client.close()  # its connections; it makes new ones when it is used again

    def _unless_missing(self, request: Callable[[Any], T]) -> T | None:
        try:
            return self._ask(request)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "NoSuchBucket", "404"):
                return None
            raise


@contextmanager
def running() -> Iterator[Server]:
    """The server that ``TIERKV_TEST_S3`` names, else moto, which runs until the end of the ``with`` block."""
    if endpoint := os.environ.get(VARIABLE, "").rstrip("/"):
        yield _probed(endpoint)
        return
    with _moto() as endpoint:
        yield _probed(endpoint)


@contextmanager
def fresh_bucket(server: Server) -> Iterator[str]:
    """A bucket that nobody else uses, and that is deleted afterwards."""
    name = f"tierkv-{uuid.uuid4().hex}"
    server.make_bucket(name)
    try:
        yield name
    finally:
        server.delete_bucket(name)


def needs_signatures(server: Server) -> None:
    """Skip the test that calls this unless the server refuses who has a wrong secret."""
    if not server.checks_signatures:
        pytest.skip(f"needs a server that checks signatures: set {VARIABLE}, see CONTRIBUTING.md")


def _probed(endpoint: str) -> Server:
    """What a server is, by what it answers."""
    server = Server(endpoint, "rgw", False)
    answer = server._ask(lambda client: client.list_buckets())
    if answer["ResponseMetadata"]["HTTPHeaders"].get("server", "").startswith("Werkzeug"):
        server = replace(server, kind="moto")
    stranger = replace(server, secret_key="wrong")
    try:
        stranger._ask(lambda client: client.list_buckets())
    except ClientError as error:
        assert error.response["Error"]["Code"] == "SignatureDoesNotMatch", error
        return replace(server, checks_signatures=True)
    return server


@contextmanager
def _moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # takes half a second, and is not needed beside another server

    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.WARNING)  # or each request is a line on stderr
    # Larger objects would lie in temporary files, whose descriptors look like a leak of the test that stored them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(1 << 30))
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        try:
            host, port = moto.get_host_and_port()
            yield f"http://{host}:{port}"
        finally:
            moto.stop()
            log.setLevel(level)
