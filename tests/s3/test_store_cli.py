"""``tierkv store`` and ``tierkv explain``: the same for a directory, for its URL, and for a bucket."""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_proxy import FaultProxy, Hang, s3_error
from s3_server import Server, needs_signatures

from tierkv import cli
from tierkv.keys import new_generation
from tierkv.testing.driver import NAMESPACE, SPACE, TierDriver, some_chunks, some_hashes
from tierkv.tiers import admin, record
from tierkv.tiers.obj import ObjTier
from tierkv.tiers.obj.admin import open_bucket
from tierkv.tiers.obj.config import ObjTierConfig
from tierkv.tiers.paths import DESCRIPTION, description_text, record_path, space_path
from tierkv.types import ChunkName, Space

PAYLOAD = 1024
NBYTES = record.HEADER_BYTES + PAYLOAD
NEXT = Space(NAMESPACE, new_generation("step-1"))
OTHER = Space(bytes(16), SPACE.generation)


class Place(ABC):
    """Where records lie, by their paths from the namespace on, and what is typed to look there."""

    argv: list[str]
    url: str

    @abstractmethod
    def write(self, path: str, raw: bytes) -> None: ...

    @abstractmethod
    def read(self, path: str) -> bytes | None: ...

    @abstractmethod
    def all_paths(self) -> list[str]: ...

    def paths(self) -> list[str]:
        """Of the records, in the order in which they sort."""
        return sorted(path for path in self.all_paths() if path.endswith(".tkv"))


class Directory(Place):
    def __init__(self, root: Path, *, as_url: bool) -> None:
        self._root = root
        self.url = root.as_uri() if as_url else str(root)
        self.argv = [self.url]

    def write(self, path: str, raw: bytes) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).write_bytes(raw)

    def read(self, path: str) -> bytes | None:
        return (self._root / path).read_bytes() if (self._root / path).exists() else None

    def all_paths(self) -> list[str]:
        """All but what an fs tier has for itself."""
        found = (path.relative_to(self._root) for path in self._root.rglob("*") if path.is_file())
        return [str(path) for path in found if not path.parts[0].startswith(".")]


class Bucket(Place):
    def __init__(self, s3: Server, bucket: str, prefix: str) -> None:
        self._s3, self._bucket, self._before = s3, bucket, f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.argv = [self.url, "--endpoint", s3.endpoint]

    def write(self, path: str, raw: bytes) -> None:
        self._s3.write(self._bucket, self._before + path, raw)

    def read(self, path: str) -> bytes | None:
        return self._s3.read(self._bucket, self._before + path)

    def all_paths(self) -> list[str]:
        return [path.removeprefix(self._before) for path in self._s3.objects(self._bucket, self._before)]


def path_of(name: ChunkName) -> str:
    return record_path(space_path(name.space), name.group, name.block_hash)


def record_of(name: ChunkName) -> bytes:
    payload = np.random.default_rng(name.block_hash[0]).bytes(PAYLOAD)
    return record.encode_header(name, PAYLOAD, record.payload_checksum(payload)) + payload


@pytest.fixture(autouse=True)
def credentials(s3: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of the server's first user, and nothing else that a person may have."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture(params=["directory", "file-url", "bucket", "bucket-with-prefix"])
def place(request: pytest.FixtureRequest, s3: Server, tmp_path: Path) -> Place:
    """Ten records of one generation, three of another, two of another namespace; and what is no record."""
    found: Place
    if request.param in ("directory", "file-url"):
        found = Directory(tmp_path / "root", as_url=request.param == "file-url")
    else:
        prefix = "a/b" if request.param == "bucket-with-prefix" else ""
        found = Bucket(s3, request.getfixturevalue("bucket"), prefix)
    for space, group, count in ((SPACE, 0, 10), (NEXT, 1, 3), (OTHER, 0, 2)):
        for block_hash in some_hashes(count):
            name = ChunkName(space, group, block_hash)
            found.write(path_of(name), record_of(name))
    found.write(f"{NAMESPACE.hex()}/{DESCRIPTION}", description_text({"model": "a model", "groups": []}))
    found.write(f"{NAMESPACE.hex()}/notes.txt", b"not tierkv's")
    found.write(f"{space_path(SPACE)}/00/notes.txt", b"not tierkv's")
    found.write("elsewhere/notes.txt", b"not tierkv's")
    return found


@pytest.fixture
def run(place: Place, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(command: str, *args: str, code: int = 0) -> str:
        capsys.readouterr()
        assert cli.main(["store", command, *place.argv, *args]) == code
        return capsys.readouterr().out

    return run


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_ls(run: Callable[..., str]) -> None:
    lines = run("ls").splitlines()
    assert lines[0].split() == ["namespace", "model", "generation", "records", "size", "last", "used"]
    assert lines[1].split()[:-3] == ["000102030405", "a", "model", "as", "the", "files", "10", "15.0", "KiB"]
    assert lines[2].split()[3:5] == [NEXT.generation.hex()[:12], "3"]
    assert lines[3].split()[0] == "000000000000" and len(lines) == 4
    described = objects(run("ls", "--json"))
    assert [(each["model"], each["records"], each["bytes"], each["groups"]) for each in described] == [
        ("a model", 10, 10 * NBYTES, {"0": 10}),
        ("a model", 3, 3 * NBYTES, {"1": 3}),
        ("", 2, 2 * NBYTES, {"0": 2}),
    ]
    assert all(abs(each["last_used"] - time.time()) < 600 for each in described)
    assert len(run("ls", "--namespace", "0001").splitlines()) == 3
    assert len(run("ls", "--namespace", NAMESPACE.hex()).splitlines()) == 3


def test_stats(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("stats").splitlines()[:2] == ["15 records, 22.5 KiB", "last used: 1h 15, 1d 0, 7d 0, older 0"]
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 2 * 3600)
    (totals,) = objects(run("stats", "--json"))
    assert (totals["records"], totals["ledger_bytes"], len(totals["spaces"])) == (15, None, 3)
    assert totals["ages"] == {"1h": 0, "1d": 15, "7d": 0, "older": 0}


def damage(place: Place) -> dict[str, str]:
    """Damage five records in as many ways; their paths, and what is wrong."""
    paths = [path for path in place.paths() if path.startswith(space_path(SPACE))]
    for number, where in enumerate([0, 100, -1]):
        raw = bytearray(place.read(paths[number]) or b"")
        raw[where] ^= 1
        place.write(paths[number], raw)
    place.write(paths[3], (place.read(paths[3]) or b"")[:-100])
    place.write(paths[4], b"")
    place.write(paths[5], place.read(paths[6]) or b"")
    reasons = ["bad_magic", "header_checksum", "checksum", "truncated", "truncated", "hash"]
    return dict(zip(paths, reasons, strict=False))


def test_verify_finds_and_removes_what_is_damaged(run: Callable[..., str], place: Place) -> None:
    assert run("verify") == "15 records, 22.5 KiB: 0 damaged\n"
    before, bad = place.all_paths(), damage(place)
    out = run("verify", code=1)
    assert out.endswith("15 records, 20.9 KiB: 6 damaged\n")
    assert all(f"{place.url}/{path}: " in out for path in bad)
    *found, total = objects(run("verify", "--json", code=1))
    assert {each["path"]: each["reason"] for each in found} == {f"{place.url}/{p}": why for p, why in bad.items()}
    assert total == {"records": 15, "damaged": 6, "removed": 0}
    assert sorted(place.all_paths()) == sorted(before)
    assert run("verify", "--namespace", "00000") == "2 records, 3.0 KiB: 0 damaged\n"
    assert run("verify", "--remove").endswith(": 6 damaged, 6 removed\n")
    assert sorted(place.all_paths()) == sorted(set(before) - set(bad))
    assert run("verify") == "9 records, 13.5 KiB: 0 damaged\n"


def test_what_was_written_anew_is_not_removed(
    run: Callable[..., str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = sorted(damage(place))
    remove_damaged = admin.remove_damaged

    def written_meanwhile(storage: admin.Storage, problems: list[admin.Problem]) -> int:
        place.write(bad[0], record_of(ChunkName(SPACE, 0, bytes.fromhex(bad[0].rpartition("/")[2][:64]))))
        return remove_damaged(storage, problems)

    monkeypatch.setattr(admin, "remove_damaged", written_meanwhile)
    assert run("verify", "--remove", code=1).endswith(": 6 damaged, 5 removed\n")
    assert bad[0] in place.paths() and not set(bad[1:]) & set(place.paths())
    assert run("verify") == "10 records, 15.0 KiB: 0 damaged\n"


def test_what_went_meanwhile_is_no_problem(
    place: Place, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to remove it is none, either: somebody else does the same."""
    choose = admin.choose

    def gone_meanwhile(storage: admin.Storage, prune: admin.Prune) -> list[admin.Stored]:
        chosen = choose(storage, prune)
        storage.remove(chosen[:3])
        problems: list[admin.Problem] = []
        monkeypatch.setattr(storage, "stored", lambda _: iter(chosen), raising=False)
        problems += admin.verify(storage, "", lambda _: None)
        assert problems == []
        return chosen

    monkeypatch.setattr(admin, "choose", gone_meanwhile)
    run("prune", "--namespace", NAMESPACE.hex())
    assert len(place.paths()) == 2


def test_prune_by_namespace(run: Callable[..., str], place: Place) -> None:
    before = place.all_paths()
    assert run("prune", "--namespace", "00000", "--dry-run") == "2 records, 3.0 KiB, would go\n"
    assert sorted(place.all_paths()) == sorted(before)
    assert run("prune", "--namespace", "00000") == "2 records, 3.0 KiB, removed\n"
    assert sorted(place.all_paths()) == sorted(p for p in before if not p.startswith(OTHER.namespace.hex()))
    assert run("prune", "--namespace", "00000") == "0 records, 0 B, removed\n"


def test_prune_by_age(run: Callable[..., str], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert objects(run("prune", "--unused-for", "7d", "--json")) == [{"records": 0, "bytes": 0, "dry_run": False}]
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 8 * 86_400)
    gone = {"records": 15, "bytes": 15 * NBYTES}
    assert objects(run("prune", "--unused-for", "7d", "--json", "--dry-run")) == [{**gone, "dry_run": True}]
    assert objects(run("prune", "--unused-for", "7d", "--json")) == [{**gone, "dry_run": False}]
    assert place.paths() == [] and f"{NAMESPACE.hex()}/{DESCRIPTION}" in place.all_paths()
    assert run("stats").startswith("0 records, 0 B\n")


def test_prune_to_a_size_takes_the_oldest(run: Callable[..., str], place: Place) -> None:
    kept = place.paths()[3:7]
    time.sleep(1.1)  # some stores know the second only
    for path in kept:
        place.write(path, place.read(path) or b"")
    assert run("prune", "--to-bytes", f"{4 * NBYTES}") == f"11 records, {11 * NBYTES / 1024:.1f} KiB, removed\n"
    assert place.paths() == kept
    run("prune", "--to-bytes", "0", "--unused-for", "1d")
    assert place.paths() == kept


def test_the_progress_is_shown_to_who_sits_before_it(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cli.main(["store", "verify", *place.argv]) == 0
    assert "% of 22.5 KiB" in capsys.readouterr().err


def test_explain(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = f"{place.url}/{NAMESPACE.hex()}", f"{place.url}/{OTHER.namespace.hex()}"
    options = place.argv[1:]
    assert cli.main(["explain", a, f"{a}/{DESCRIPTION}", *options]) == 0
    assert cli.main(["explain", a, b, *options]) == 2
    assert capsys.readouterr().err.startswith(f"tierkv: B: '{b}")
    place.write(f"{OTHER.namespace.hex()}/{DESCRIPTION}", description_text({"model": "another", "groups": []}))
    assert cli.main(["explain", a, b, *options, "--json"]) == 1
    assert objects(capsys.readouterr().out.splitlines()[-1]) == [{"field": "model", "a": "a model", "b": "another"}]
    place.write(f"{OTHER.namespace.hex()}/{DESCRIPTION}", b"{")
    assert cli.main(["explain", a, b, *options]) == 2
    assert "is not JSON" in capsys.readouterr().err


# Buckets.


@pytest.fixture
def stored(s3: Server, bucket: str) -> Place:
    """Ten records that a tier has stored."""
    keys = {"access_key": s3.access_key, "secret_key": s3.secret_key, "endpoint_override": s3.endpoint}
    config = ObjTierConfig(type="obj", bucket=bucket, prefix="a/b", **keys)
    with TierDriver(lambda context: ObjTier(config, context)) as driver:
        driver.fill(range(10))
        assert driver.store(some_chunks(10), range(10)).ok.all()
    return Bucket(s3, bucket, "a/b")


def test_what_a_tier_has_stored(stored: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "ls", *stored.argv, "--json"]) == 0
    (space,) = objects(capsys.readouterr().out)
    assert (space["namespace"], space["model"], space["records"]) == (NAMESPACE.hex(), "a model", 10)
    assert cli.main(["store", "verify", *stored.argv]) == 0
    assert capsys.readouterr().out == "10 records, 45.0 KiB: 0 damaged\n"


def fails(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert err.startswith("tierkv: ")
    return err.removeprefix("tierkv: ")


@pytest.mark.parametrize("command", [["ls"], ["stats"], ["verify", "--remove"], ["prune", "--namespace", "00"]])
def test_where_there_is_nothing(command: list[str], stored: Place, s3: Server, capsys: Any, tmp_path: Path) -> None:
    endpoint = ["--endpoint", s3.endpoint]
    error = fails(["store", *command, stored.url.removesuffix("/b"), *endpoint], capsys)
    assert error.startswith("PATH: 's3://") and "has no namespace" in error
    error = fails(["store", *command, "s3://tierkv-is-not-there/a", *endpoint], capsys)
    assert error.startswith("PATH: cannot list") and "404 NoSuchBucket; accepted: a bucket that is there" in error
    error = fails(["store", *command, (tmp_path / "none").as_uri()], capsys)
    assert error.startswith("PATH: ") and not (tmp_path / "none").exists()


def test_a_server_that_does_not_answer(stored: Place, capsys: Any) -> None:
    error = fails(["store", "ls", stored.url, "--endpoint", "http://127.0.0.1:1"], capsys)
    assert error.startswith("--endpoint: cannot list http://127.0.0.1:1 s3://") and "no connection" in error
    with_slash = f"{stored.url}/{NAMESPACE.hex()}/"
    error = fails(["explain", with_slash, with_slash, "--endpoint", "http://127.0.0.1:1"], capsys)
    assert error.startswith("--endpoint: cannot read")


@pytest.mark.parametrize("command", [["ls"], ["prune", "--namespace", "00"]])
def test_credentials_that_are_wrong(
    command: list[str], stored: Place, s3: Server, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs_signatures(s3)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    error = fails(["store", *command, *stored.argv], capsys)
    assert error.startswith("AWS_SECRET_ACCESS_KEY: cannot list") and "403 SignatureDoesNotMatch" in error
    assert "guessed" not in error
    (tmp_path / "credentials").write_text(
        f"[good]\naws_access_key_id = {s3.access_key}\naws_secret_access_key = {s3.secret_key}\n"
        f"[bad]\naws_access_key_id = {s3.access_key}\naws_secret_access_key = guessed\n"
    )
    assert cli.main(["store", *command, *stored.argv, "--profile", "good"]) == 0
    capsys.readouterr()
    error = fails(["store", *command, *stored.argv, "--profile", "bad"], capsys)
    assert error.startswith("--profile: cannot list") and "guessed" not in error
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.other_access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.other_secret_key)
    error = fails(["store", *command, *stored.argv], capsys)
    assert error.startswith("AWS_ACCESS_KEY_ID: cannot list") and ": 403 " in error  # as the server knows them, or not
    assert s3.other_secret_key not in error


def test_no_credentials(stored: Place, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert fails(["store", "ls", *stored.argv], capsys).startswith("AWS_ACCESS_KEY_ID: missing")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["s3:///a"], "PATH: 's3:///a' names no bucket"),
        (["ftp://host/a"], "PATH: refused by the client"),
        (["s3://key:s3cret@bucket/a"], "PATH: has a password in it"),
        (["gs://bucket/a", "--endpoint", "http://127.0.0.1:1"], "--endpoint: given, but 'gs://bucket/a' is another"),
        (["/tmp", "--ca-bundle", "file"], "--ca-bundle: given, but '/tmp' is a directory"),
        (["s3://bucket/a", "--ca-bundle", "/none"], "--ca-bundle: '/none' cannot be read"),
        (["s3://bucket/a", "--profile", "none"], "--profile: cannot be found"),
        (["s3://bucket/a", "--endpoint", "ftp://127.0.0.1"], "--endpoint: 'ftp://127.0.0.1' has the scheme ftp"),
    ],
)
def test_wrong_arguments(argv: list[str], message: str, capsys: Any) -> None:
    error = fails(["store", "ls", *argv], capsys)
    assert error.startswith(message) and "s3cret" not in error


def test_a_certificate_of_ones_own(stored: Place, s3: Server, capsys: Any) -> None:
    with FaultProxy(s3.endpoint, tls=True) as proxy:
        argv = ["store", "ls", stored.url, "--endpoint", proxy.url]
        error = fails(argv, capsys)
        assert error.startswith("--ca-bundle: cannot list") and "signed by nobody who is trusted" in error
        assert cli.main([*argv, "--ca-bundle", proxy.ca_file]) == 0


def test_nothing_is_written_by_who_only_looks(stored: Place, s3: Server) -> None:
    with FaultProxy(s3.endpoint) as proxy:
        for command in (["ls"], ["stats"], ["verify", "--remove"], ["prune", "--to-bytes", "0", "--dry-run"]):
            assert cli.main(["store", *command, stored.url, "--endpoint", proxy.url]) == 0
        assert {seen.method for seen in proxy.requests} == {"GET"}


def test_what_the_store_fails_to_deliver_is_reported_and_stays(stored: Place, s3: Server, capsys: Any) -> None:
    bad = stored.paths()[4]
    with FaultProxy(s3.endpoint) as proxy:
        proxy.fault = s3_error(500, "InternalError", when=lambda method, path: method == "GET" and bad in path)
        argv = ["store", "verify", stored.url, "--endpoint", proxy.url]
        assert cli.main([*argv, "--json", "--remove"]) == 1
        *problems, total = objects(capsys.readouterr().out)
        assert [(each["path"], each["reason"]) for each in problems] == [(f"{stored.url}/{bad}", "server_error")]
        assert total == {"records": 10, "damaged": 1, "removed": 0} and bad in stored.paths()
        # Not this one but all: nothing is known of any.
        proxy.fault = s3_error(403, "ExpiredToken", when=lambda method, path: ".tkv" in path)
        assert "cannot read" in fails(argv, capsys)


def test_who_may_not_delete_is_told(stored: Place, s3: Server, capsys: Any) -> None:
    with FaultProxy(s3.endpoint) as proxy:
        proxy.fault = s3_error(403, "AccessDenied", when=lambda method, _: method in ("POST", "DELETE"))
        error = fails(["store", "prune", stored.url, "--endpoint", proxy.url, "--to-bytes", "0"], capsys)
    assert error.startswith("PATH: cannot delete from") and "no permission (403 AccessDenied)" in error


@pytest.fixture
def hanging(stored: Place, s3: Server) -> Iterator[admin.Storage]:
    """A store that answers no request for a record."""
    with FaultProxy(s3.endpoint) as proxy:
        proxy.fault = Hang(when=lambda _, path: ".tkv" in path)
        config = ObjTierConfig(type="obj", mode="read", url=stored.url, endpoint_override=proxy.url)
        with open_bucket(config) as storage:
            yield storage


def test_who_does_not_want_to_wait_any_more_does_not(hanging: admin.Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, say, which comes while five records are being read."""
    found = [*hanging.stored()][:5]

    def interrupted(_: str) -> Iterator[admin.Stored]:
        yield from found
        raise KeyboardInterrupt

    monkeypatch.setattr(hanging, "stored", interrupted)
    until = time.monotonic() + 5
    with pytest.raises(KeyboardInterrupt):
        list(admin.verify(hanging, "", lambda _: None))
    hanging.close()
    while any(thread.name.startswith("tierkv") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
