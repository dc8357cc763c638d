from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from s3_server import VARIABLE, Server, needs_signatures, running

RGW = Path(__file__).with_name("rgw.sh")


def test_objects_come_and_go(s3: Server, bucket: str) -> None:
    assert s3.objects(bucket) == {}
    assert s3.read(bucket, "a") is None
    s3.write(bucket, "a/b=c", b"12345")
    s3.write(bucket, "d", b"")
    assert s3.objects(bucket) == {"a/b=c": 5, "d": 0}
    assert s3.objects(bucket, "a/") == {"a/b=c": 5}
    assert s3.read(bucket, "a/b=c") == b"12345" and s3.read(bucket, "d") == b""
    s3.delete(bucket, "d")
    s3.delete(bucket, "d")
    assert s3.objects(bucket) == {"a/b=c": 5}


def test_a_bucket_goes_with_all_that_is_in_it(s3: Server, bucket: str) -> None:
    name = f"{bucket}-2"
    s3.make_bucket(name)
    for i in range(3):
        s3.write(name, f"{i}", b"x" * i)
    client = s3.client()
    client.create_multipart_upload(Bucket=name, Key="never completed")
    client.close()
    s3.delete_bucket(name)
    assert s3.read(name, "1") is None
    with pytest.raises(ClientError, match="NoSuchBucket"):
        s3.objects(name)
    s3.delete_bucket(name)


def test_large_objects_leave_no_descriptors(s3: Server, bucket: str) -> None:
    s3.write(bucket, "a", b"x" * (20 << 20))
    assert s3.objects(bucket) == {"a": 20 << 20}


def test_the_other_user_may_not_use_a_bucket(s3: Server, bucket: str) -> None:
    needs_signatures(s3)
    other = replace(s3, access_key=s3.other_access_key, secret_key=s3.other_secret_key)
    for request in (lambda: other.objects(bucket), lambda: other.write(bucket, "a", b"x")):
        with pytest.raises(ClientError, match="AccessDenied"):
            request()
    own = f"{bucket}-other"
    other.make_bucket(own)
    other.delete_bucket(own)


def test_a_wrong_secret_is_refused(s3: Server, bucket: str) -> None:
    needs_signatures(s3)
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        replace(s3, secret_key="wrong").objects(bucket)
    with pytest.raises(ClientError, match="InvalidAccessKeyId"):
        replace(s3, access_key="wrong").objects(bucket)


def test_without_the_variable_it_is_moto_which_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with running() as server:
        assert server.kind == "moto" and not server.checks_signatures
        with pytest.raises(pytest.skip.Exception, match=r"set TIERKV_TEST_S3, see CONTRIBUTING\.md"):
            needs_signatures(server)
        server.make_bucket("bucket")
        server.write("bucket", "a", b"x")
        assert server.read("bucket", "a") == b"x"
        # A server that the variable names is looked at, whatever it is.
        monkeypatch.setenv(VARIABLE, server.endpoint + "/")
        with running() as named:
            assert named == server


# The script


def script(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(RGW), *args], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_the_script_says_how_it_is_used() -> None:
    for args in ((), ("start",), ("start", "dir"), ("stop",), ("stop", "dir", "1"), ("restart", "dir")):
        done = script(*args)
        assert done.returncode == 2 and "usage" in done.stderr


def test_the_script_says_what_is_not_installed(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "realpath"):
        (tools / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        [str(tools / "bash"), str(RGW), "start", str(tmp_path / "rgw"), "1"],
        capture_output=True,
        text=True,
        env={"PATH": str(tools)},
    )
    assert done.returncode == 1 and not done.stdout
    assert "apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common" in done.stderr
    assert not (tmp_path / "rgw").exists()


def test_stop_is_content_if_nothing_runs(tmp_path: Path) -> None:
    assert script("stop", str(tmp_path / "never")).returncode == 0
    assert not (tmp_path / "never").exists()


@pytest.mark.skipif(not shutil.which("radosgw"), reason="needs Ceph's programs, see CONTRIBUTING.md")
def test_a_gateway_that_starts_again_has_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
        taken = script("start", str(tmp_path / "rgw"), f"{port}")
    assert taken.returncode == 1 and "listens" in taken.stderr
    try:
        started = script("start", str(tmp_path / "rgw"), f"{port}")
        assert started.returncode == 0, started.stderr
        assert started.stdout == f"http://127.0.0.1:{port}\n"
        monkeypatch.setenv(VARIABLE, started.stdout.strip())
        with running() as server:
            assert server.kind == "rgw" and server.checks_signatures
            server.make_bucket("bucket")
            server.write("bucket", "a", b"12345" * 1000)
            assert "in use" in script("start", str(tmp_path / "rgw"), f"{port + 1}").stderr
            assert server.objects("bucket") == {"a": 5000}
            assert script("stop", str(tmp_path / "rgw")).returncode == 0
            assert script("start", str(tmp_path / "rgw"), f"{port}").returncode == 0
            assert server.read("bucket", "a") == b"12345" * 1000
            server.delete_bucket("bucket")
    finally:
        stopped = script("stop", str(tmp_path / "rgw"))
    assert stopped.returncode == 0, stopped.stderr
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
