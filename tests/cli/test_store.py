"""``tierkv store`` on real directories."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierkv import cli
from tierkv.keys import new_generation
from tierkv.testing.driver import NAMESPACE, SPACE, TierDriver, some_chunks
from tierkv.tiers.fs import FsTier, FsTierConfig
from tierkv.types import Space

OTHER = Space(NAMESPACE, new_generation("step-1"))
THEIRS = Space(bytes(16), SPACE.generation)


def open_driver(root: Path, **fields: Any) -> TierDriver:
    return TierDriver(lambda context: FsTier(FsTierConfig(type="fs", root_dir=str(root), **fields), context))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten records of one generation, three of another, two of another namespace."""
    with open_driver(tmp_path / "root") as driver:
        driver.fill(range(10))
        assert driver.store(some_chunks(10), range(10)).ok.all()
        assert driver.store(some_chunks(3, space=OTHER, group=1), range(3)).ok.all()
        assert driver.store(some_chunks(2, space=THEIRS), range(2)).ok.all()
    return tmp_path / "root"


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def run(command: str, *args: str, code: int = 0) -> str:
        capsys.readouterr()
        assert cli.main(["store", command, str(root), *args]) == code
        return capsys.readouterr().out

    yield run


def paths(root: Path) -> list[Path]:
    return sorted(root.rglob("*.tkv"))


def age(paths: list[Path], seconds: float) -> None:
    then = time.time() - seconds
    for path in paths:
        os.utime(path, (then, then))


def test_ls(run: Any) -> None:
    lines = run("ls").splitlines()
    assert lines[0].split() == ["namespace", "model", "generation", "records", "size", "last", "used"]
    assert lines[1].split()[:-3] == ["000102030405", "a", "model", "as", "the", "files", "10", "45.0", "KiB"]
    assert lines[2].split()[3:5] == [OTHER.generation.hex()[:12], "3"]
    assert lines[3].split()[0] == "000000000000" and len(lines) == 4
    described = [json.loads(line) for line in run("ls", "--json").splitlines()]
    assert [(each["model"], each["records"], each["bytes"], each["groups"]) for each in described] == [
        ("a model", 10, 10 * 4608, {"0": 10}),
        ("a model", 3, 3 * 4608, {"1": 3}),
        ("", 2, 2 * 4608, {"0": 2}),
    ]
    assert len(run("ls", "--namespace", "0001").splitlines()) == 3


def test_stats(run: Any, root: Path) -> None:
    age(paths(root)[:4], 2 * 3600)
    age(paths(root)[:1], 30 * 86_400)
    out = run("stats")
    assert "15 records, 67.5 KiB" in out and "last used: 1h 11, 1d 3, 7d 0, older 1" in out
    (totals,) = map(json.loads, run("stats", "--json").splitlines())
    assert (totals["records"], totals["ledger_bytes"], len(totals["spaces"])) == (15, None, 3)


def test_verify_finds_and_removes_what_is_damaged(run: Any, root: Path) -> None:
    assert run("verify") == "15 records, 67.5 KiB: 0 damaged\n"
    bad = paths(root)[3:6]
    for number, path in enumerate(bad):
        raw = bytearray(path.read_bytes())
        raw[[0, 100, -1][number]] ^= 1
        path.write_bytes(raw)
    bad.append(paths(root)[8])
    bad[-1].write_bytes(b"")
    out = run("verify", code=1)
    assert "15 records, 63.0 KiB: 4 damaged" in out
    assert all(str(path) in out for path in bad)
    found = [json.loads(line) for line in run("verify", "--json", code=1).splitlines()]
    assert {each["path"]: each["reason"] for each in found[:-1]} == {
        str(bad[0]): "bad_magic",
        str(bad[1]): "header_checksum",
        str(bad[2]): "checksum",
        str(bad[3]): "truncated",
    }
    assert found[-1]["damaged"] == 4
    assert "4 damaged, 4 removed" in run("verify", "--remove")
    assert not any(path.exists() for path in bad) and len(paths(root)) == 11


def test_prune_by_namespace(run: Any, root: Path) -> None:
    assert run("prune", "--namespace", "00000", "--dry-run") == "2 records, 9.0 KiB, would go\n"
    assert len(paths(root)) == 15
    assert run("prune", "--namespace", "00000") == "2 records, 9.0 KiB, removed\n"
    assert len(paths(root)) == 13
    assert not any(path.relative_to(root).parts[0] == THEIRS.namespace.hex() for path in paths(root))


def test_prune_by_age(run: Any, root: Path) -> None:
    age(paths(root)[:5], 8 * 86_400)
    assert json.loads(run("prune", "--unused-for", "7d", "--json")) == {
        "records": 5,
        "bytes": 5 * 4608,
        "dry_run": False,
    }
    assert len(paths(root)) == 10


def test_prune_to_a_size_takes_the_least_recently_used(run: Any, root: Path) -> None:
    for number, path in enumerate(paths(root)):
        age([path], 1000 - number)
    kept = paths(root)[-6:]
    run("prune", "--to-bytes", "30K")
    assert paths(root) == kept
    run("prune", "--to-bytes", "0", "--unused-for", "1d")
    assert paths(root) == kept


def test_an_engine_can_use_what_was_pruned(run: Any, root: Path) -> None:
    """And it goes on, while it is told of nothing."""
    for path in paths(root):
        path.unlink()
    with open_driver(root, capacity_bytes=1 << 20) as driver:
        chunks = some_chunks(10)
        driver.fill(range(10))
        assert driver.store(chunks, range(10)).ok.all()
        before = driver.tier._layout._ledger.used  # type: ignore[attr-defined]
        run("prune", "--namespace", NAMESPACE.hex())
        after = driver.tier._layout._ledger.used  # type: ignore[attr-defined]
        assert before - after >= 10 * (4096 + 512)
        assert driver.load(chunks, range(10)).reasons == dict.fromkeys(range(10), "absent")
        assert driver.store(chunks, range(10)).ok.all() and driver.load(chunks, range(10, 20)).ok.all()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "/nowhere"], "PATH: '/nowhere' is no root of an fs tier"),
        (["prune", "{root}"], "nothing says what is to go; accepted: --namespace, --unused-for or --to-bytes"),
        (["prune", "{root}", "--unused-for", "7 weeks"], "'7 weeks' is not a number and s, m, h or d"),
        (["prune", "{root}", "--to-bytes", "-3"], "argument --to-bytes"),
        (["ls", "{root}", "--namespace", "xyz"], "'xyz' is not hexadecimal"),
    ],
)
def test_wrong_arguments(argv: list[str], message: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["store", *[arg.format(root=root) for arg in argv]])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err


def test_the_progress_is_shown_to_who_sits_before_it(
    run: Any, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    capsys.readouterr()
    assert cli.main(["store", "verify", str(root)]) == 0
    assert "% of 67.5 KiB" in capsys.readouterr().err


# Segments.


@pytest.fixture
def segments(tmp_path: Path) -> Path:
    """Ten records of one group, in segments, and two in files beside them."""
    with open_driver(tmp_path / "root", layout="segments", capacity_bytes=8 << 20) as driver:
        driver.fill(range(10))
        assert driver.store(some_chunks(10), range(10)).ok.all()
    with open_driver(tmp_path / "root") as driver:
        driver.fill(range(2))
        assert driver.store(some_chunks(2, space=OTHER), range(2)).ok.all()
    return tmp_path / "root"


def store(*argv: object, code: int = 0) -> None:
    assert cli.main(["store", *map(str, argv)]) == code


def test_ls_and_verify_look_into_segments(segments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store("ls", segments, "--json")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["records"], each["bytes"]) for each in found] == [(10, 10 * 4608), (2, 2 * 4608)]
    assert found[0]["ages"]["1h"] == 10
    store("verify", segments)
    assert capsys.readouterr().out == "12 records, 54.0 KiB: 0 damaged\n"


def test_damage_in_a_segment_is_found_and_removed(segments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tierkv.tiers.fs import admin

    each = [found for found in admin.open_root(str(segments)).stored() if found.place][4]
    assert each.place is not None
    with open(each.path, "r+b") as file:
        file.seek(each.place[1] + 1000)
        file.write(b"damage")
    store("verify", segments, "--json", code=1)
    bad, total = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (bad["path"], bad["offset"], bad["reason"]) == (each.path, each.place[0], "checksum")
    assert total == {"records": 12, "damaged": 1, "removed": 0}
    with open_driver(segments, layout="segments", capacity_bytes=8 << 20):
        assert cli.main(["store", "verify", str(segments), "--remove"]) == 2
        assert "is in use by another process" in capsys.readouterr().err
    store("verify", segments, "--remove")
    store("verify", segments)
    assert "11 records" in capsys.readouterr().out
    with open_driver(segments, layout="segments", capacity_bytes=8 << 20) as driver:
        result = driver.load(some_chunks(10), range(10))
        assert result.ok.sum() == 9 and set(result.reasons.values()) == {"absent"}


def test_prune_takes_from_both_layouts(segments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store("prune", segments, "--to-bytes", 3 * 4608)
    assert capsys.readouterr().out == "9 records, 40.5 KiB, removed\n"
    store("stats", segments, "--json")
    assert json.loads(capsys.readouterr().out)["records"] == 3
