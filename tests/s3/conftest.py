from __future__ import annotations

from collections.abc import Iterator

import obstore
import pytest
from obstore.store import S3Store
from s3_server import REGION, Server, fresh_bucket, running

from tierkv.testing.leaks import no_leaked_fds, no_leaked_shm, no_leaked_threads  # noqa: F401


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """The server, and the threads and descriptors that obstore keeps: there before a test looks for what it has left.

    A first object is stored, for which a server may have to make room: two seconds of a new gateway.
    """
    with running() as server:
        with fresh_bucket(server) as name:
            store = S3Store(
                name,
                endpoint=server.endpoint,
                access_key_id=server.access_key,
                secret_access_key=server.secret_key,
                region=REGION,
                virtual_hosted_style_request=False,
                client_options={"allow_http": True},
            )
            obstore.put(store, "first", b"object")
            del store
        yield server


@pytest.fixture
def bucket(s3: Server) -> Iterator[str]:
    """A bucket of the test's own."""
    with fresh_bucket(s3) as name:
        yield name


@pytest.fixture(autouse=True)
def no_leaks(s3: Server, no_leaked_fds: None, no_leaked_shm: None, no_leaked_threads: None) -> None:  # noqa: F811
    """Every test leaves nothing behind."""
