"""The benchmark of the obj tier at a tiny size: what it prints, that it checks what it times, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import Server

from tierkv import cli
from tierkv.bench import BenchError, obj

SMALL = ["--bytes", "4194304", "--rounds", "2"]
KINDS = ("threads", "asyncio")
CASES = ("2 × 2 MiB", "2 × 256 KiB", "8 × 16 KiB")
LOOKUPS = {obj.HEADS, obj.UNKNOWN, "lookup: there, known", "lookup: not there", f"{obj.UNKNOWN}: share of {obj.HEADS}"}
STORES = {"store: all there, known", "store: all there, unknown"}


@pytest.fixture(autouse=True)
def few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obj, "LOOKUPS", (4, 40))


@pytest.fixture
def arguments(s3: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run on the server, whose credentials are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    return ["bench", "obj", "--url", f"s3://{bucket}/a/b", "--endpoint", s3.endpoint, "--region", "us-east-1", *SMALL]


@pytest.fixture
def place(arguments: list[str], s3: Server, bucket: str) -> Iterator[obj.Place]:
    options = obj.ObjOptions(url=f"s3://{bucket}", endpoint=s3.endpoint, region="us-east-1")
    with obj._place(options) as place:
        yield place


def check_figures(text: str) -> None:
    head, *figures = map(json.loads, text.splitlines())
    assert head["bench"] == "obj" and head["settings"]["rounds"] == 2
    found = {(f["measure"], f["case"]): f["tierkv"]["values"] for f in figures}
    assert len(found) == len(figures)
    assert all(len(values) == 2 and min(values) >= 0 for values in found.values())
    expected = {
        (what, case)
        for case in CASES
        for m in obj.MEASURES
        for what in (
            m,
            f"{m}: CPU",
            f"{m}: share of plain",
            f"plain, threads: {m}",
            f"plain, asyncio: {m}",
            f"plain: {m}: CPU",
        )
    }
    expected |= {(what, f"{count} chunks") for count in (4, 40) for what in LOOKUPS}
    assert set(found) == expected | {(what, "4 chunks") for what in STORES}
    for figure in figures:
        if figure["measure"].endswith("share of plain"):
            limits = [found[f"plain, {n}: {figure['measure'].partition(':')[0]}", figure["case"]] for n in KINDS]
            speeds = found[figure["measure"].partition(":")[0], figure["case"]]
            shares = [speed / max(both) for speed, *both in zip(speeds, *limits, strict=True)]
            assert figure["tierkv"]["values"] == pytest.approx(shares)
            assert figure["details"]["faster"] == [KINDS[a < b] for a, b in zip(*limits, strict=True)]


def test_as_json(arguments: list[str], s3: Server, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, "--json"]) == 0
    output = capsys.readouterr().out
    check_figures(output)
    assert s3.secret_key not in output
    assert s3.objects(bucket) == {}


def test_on_a_directory_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "obj", "--url", tmp_path.as_uri(), *SMALL, "--rounds", "1"]) == 0
    output = capsys.readouterr().out
    for measure in LOOKUPS | STORES | {"store: share of plain", "load: share of plain"}:
        assert f"\n{measure} " in output
    assert "- the faster of plain: store 2 × 2 MiB: " in output
    assert list(tmp_path.iterdir()) == []


def test_notices_other_bytes_and_leaves_nothing(
    arguments: list[str],
    s3: Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(obj.Memory, "take", lambda self, number, found: None)
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == "tierkv: threads: other bytes came back than were stored\n"
    assert s3.objects(bucket) == {}


def test_leaves_nothing_when_interrupted(
    arguments: list[str], s3: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def interrupted(self: obj.TierSide, store: bool, count: int) -> obj.Spent:
        seen.append(len(s3.objects(bucket)))
        raise KeyboardInterrupt

    monkeypatch.setattr(obj.TierSide, "move", interrupted)
    assert cli.main(arguments) == 130
    assert seen and seen[0] > 0
    assert s3.objects(bucket) == {}


def test_notices_what_is_not_loaded(place: obj.Place) -> None:
    memory = obj.Memory(obj.Case(4096, 4))
    for kind in (obj.Threads, obj.Asyncio, obj.TierSide):
        with contextlib.closing(kind(place, memory)) as side:
            side.rename("absent")
            with pytest.raises(BenchError, match=r"chunks failed: absent|plain obstore: absent"):
                side.move(False, 4)


def test_notices_what_is_not_found(place: obj.Place) -> None:
    with contextlib.closing(obj.Asked(place, 4)) as asked:
        asked._hashes[0] = bytes(32)
        with pytest.raises(BenchError, match="of 4 chunks were found"):
            asked.by_tiers(4)


def test_as_many_connections_as_the_tier(place: obj.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the comparison: neither side may have more requests under way than the other."""
    import obstore

    lock, open_, most = threading.Lock(), [0], [0]
    put = obstore.put

    def counted(*args: Any, **kwargs: Any) -> Any:
        with lock:
            open_[0] += 1
            most[0] = max(most[0], open_[0])
        try:
            return put(*args, **kwargs)
        finally:
            with lock:
                open_[0] -= 1

    monkeypatch.setattr(obstore, "put", counted)
    with contextlib.closing(obj.Threads(place, obj.Memory(obj.Case(4096, 64)))) as side:
        side.rename("many")
        side.move(True, 64)
    assert 1 < most[0] <= place.config().n_write_connections


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--endpoint", "http://127.0.0.1:1"], "no connection"),
        (["--url", "s3://tierkv-there-is-none/a"], "NoSuchBucket"),
        (["--url", "nowhere"], "'nowhere' has no scheme"),
        (["--ca-bundle", "none.pem"], "'none.pem' cannot be read"),
        (["--profile", "none"], "none"),
    ],
)
def test_refuses_what_cannot_be_used(
    fields: list[str], message: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, *fields]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("tierkv: ") and output.err.count("\n") == 1
    assert message in output.err


def test_without_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "obj"])
    assert stop.value.code == 2
    assert "required: --url" in capsys.readouterr().err


def test_without_obstore(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "obj", "--url", "s3://a"]) == 2
    assert capsys.readouterr() == ("", "tierkv: not installed: obstore; to install: pip install 'tierkv[obj]'\n")
