"""The benchmarks at tiny sizes: what they print and that they check what they time; never how fast anything is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv import cli
from tierkv.bench import BenchError, fs, index, report, sides, tiering

SMALL = ["--chunks", "64", "--batch", "8", "--rounds", "2"]
INDEX = ["index", *SMALL, "--policy", "lru", "arc", "--cold-chunks", "32", "--processes", "1"]
TIERING = ["tiering", *SMALL, "--promote-bytes", "1048576", "--latency", "0.01"]
FS = ["fs", "--bytes", "4194304", "--threads", "2", "--rounds", "2"]

RESIDENT = {"name", "lookup", "load", "store"}
LIFE = {f"life: {part}" for part in ("store", "lookup", "load", "all", "on a processor", "steps to the answer")}
PREFIX = {f"prefix: {what}" for what in ("served", "read", "asked")}
STEP = {f"step: {what}" for what in ("p50", "p99", "p99 on a processor", "longest")}


@pytest.fixture(autouse=True)
def few_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fresh processes do not compile: that takes long, and is what they are there to measure."""
    monkeypatch.setattr(tiering, "PREFIXES", (17,))
    monkeypatch.setattr(index, "_environment", lambda directory: {**os.environ, "NUMBA_DISABLE_JIT": "1"})


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def check_figures(found: list[dict[str, Any]], bench: str, rounds: int, side: str = "tierkv") -> dict[Any, Any]:
    """Every line is as a program expects it; the figures by measure and case."""
    head, *figures = found
    assert head["bench"] == bench and head["settings"]["rounds"] == rounds
    assert set(head["environment"]) == {"tierkv", "vllm", "python", "cpus", "load", "jit"}
    for figure in figures:
        assert set(figure) == {"bench", "measure", "case", "unit", "tierkv", "vllm", "ratio", "details"}
        assert figure["bench"] == bench
        if figure[side] is not None:
            values = figure[side]["values"]
            assert len(values) in (1, rounds) and all(v is None or v >= 0 for v in values)
            assert set(figure[side]) == {"median", "min", "max", "values"}
    by_name = {(f["measure"], f["case"]): f for f in figures}
    assert len(by_name) == len(figures)
    return by_name


def test_index_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *INDEX, "--json"]) == 0
    found = check_figures(lines(capsys.readouterr().out), "index", 2)
    for policy in ("lru", "arc"):
        for measure in RESIDENT:
            assert found[measure, policy]["unit"] == "µs/chunk"
            assert found[measure, policy]["tierkv"]["median"] > 0
            assert found[measure, policy]["vllm"] is None and found[measure, policy]["ratio"] is None
        assert ("memory", policy) in found
    for case in index.COLD_CASES:
        assert found["cold", case]["tierkv"]["median"] > 0
        assert found["cold", case]["unit"] == "ms"


def test_index_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *INDEX, "--processes", "0"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("tierkv bench index: chunks 64, batch 8, policy lru, arc")
    assert output[2].split() == ["what", "case", "unit", "tierkv"]
    rows = [line.split()[:3] for line in output if "µs/chunk" in line]
    assert rows == [[m, p, "µs/chunk"] for p in ("lru", "arc") for m in ("name", "lookup", "load", "store")]


def test_tiering_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TIERING, "--json"]) == 0
    found = check_figures(lines(capsys.readouterr().out), "tiering", 2)
    assert {measure for measure, _ in found} == LIFE | PREFIX | STEP
    for tier in tiering.LIFE_TIERS:
        assert found["life: all", f"lru, {tier}"]["tierkv"]["median"] > 0
    # Each chunk that fits is read once, and served.
    assert found["prefix: served", "lru, 17 chunks"]["tierkv"]["median"] == tiering.ROOM
    assert found["prefix: read", "lru, 17 chunks"]["tierkv"]["median"] == tiering.ROOM
    alone, promoting = (found["step: p50", f"lru, {case}"]["details"]["steps"] for case in ("alone", "promoting"))
    assert alone == promoting


def test_tiering_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TIERING, "--promote-bytes", "65536", "--latency", "0", "--rounds", "1"]) == 0
    output = capsys.readouterr().out
    for measure in LIFE | PREFIX | STEP:
        assert f"\n{measure} " in output


@pytest.mark.vllm
@pytest.mark.parametrize("arguments", [INDEX, TIERING], ids=["index", "tiering"])
def test_against_vllm(arguments: list[str]) -> None:
    """In a process of its own, as vLLM's import leaves much behind."""
    command = [sys.executable, "-m", "tierkv.cli", "bench", *arguments, "--against", "vllm", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = check_figures(lines(done.stdout), arguments[0], 2, "vllm")
    assert all(figure["vllm"] is not None for figure in found.values())
    compared = [f for (measure, _), f in found.items() if measure in RESIDENT | STEP | {"life: all", "cold"}]
    assert compared and all(f["ratio"]["median"] > 0 for f in compared)
    if arguments is TIERING:  # the whole prefix cannot be had, and vLLM does not settle for less
        assert found["prefix: served", "lru, 17 chunks"]["vllm"]["median"] in (None, 0)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for arguments in (INDEX, TIERING, FS):
        assert cli.main(["bench", *arguments, "--against", "vllm"]) == 2
        assert capsys.readouterr() == ("", "tierkv: not installed: vllm; to install: pip install 'tierkv[vllm]'\n")


@pytest.mark.parametrize("arguments", [INDEX, TIERING], ids=["index", "tiering"])
def test_an_unknown_policy(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments, "--policy", "best"]) == 2
    assert "unknown policy 'best'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["index", "--chunks", "0"],
        ["index", "--processes", "-1"],
        ["index", "--against", "nobody"],
        ["tiering", "--latency", "-1"],
        ["tiering", "--batch", "many"],
        ["fs", "--threads", "0"],
    ],
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *argv])
    assert stop.value.code == 2
    assert "usage: tierkv bench" in capsys.readouterr().err


def test_a_cold_start_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="the cold start of tierkv failed"):
        index._fresh_process(index.ColdRun(side="tierkv", chunks=1, windows=(0,), root_dir="none"))


def test_what_is_not_there_is_not_timed() -> None:
    """A lookup that finds less than it should would be fast, and mean nothing."""
    side = sides.TierKV(sides.Setup(slots=4))
    try:
        hashes = [bytes([i]) * 32 for i in range(4)]
        index._stores(side, [hashes[:2]], 2, evicting=False)
        with pytest.raises(BenchError, match="has 2 of 4 chunks"):
            index._lookups(side, [hashes])
        with pytest.raises(BenchError, match="evicted 0 chunks, not 2"):
            index._stores(side, [hashes[2:]], 2)
    finally:
        side.close()


def test_a_figure() -> None:
    figure = report.Figure(
        measure="m", case="c", unit="ms", values={"tierkv": [1.0, 2.0, 4.0], "vllm": [3.0, 4.0, None]}, details={"n": 1}
    )
    assert figure.as_dict() == {
        "measure": "m",
        "case": "c",
        "unit": "ms",
        "tierkv": {"median": 2.0, "min": 1.0, "max": 4.0, "values": [1.0, 2.0, 4.0]},
        "vllm": {"median": 4.0, "min": 3.0, "max": None, "values": [3.0, 4.0, None]},
        "ratio": {"median": 2.5, "min": 2.0, "max": 3.0, "values": [3.0, 2.0]},
        "details": {"n": 1},
    }


def test_a_table() -> None:
    out = io.StringIO()
    shown = report.Report("index", as_json=False, out=out)
    shown.add(
        report.Figure(measure="fast", case="a", unit="µs", values={"tierkv": [0.5, 0.25], "vllm": [1234.5, 2000]})
    )
    shown.add(report.Figure(measure="alone", case="b", unit="ms", values={"tierkv": [0]}))
    shown.add(report.Figure(measure="much", case="c", unit="steps", values={"tierkv": [1], "vllm": [None]}))
    shown.close(["a note"])
    assert out.getvalue().splitlines() == [
        "what   case  unit             tierkv                 vLLM        vLLM / tierkv",
        "─────  ────  ─────  ────────────────  ───────────────────  ───────────────────",
        "fast   a     µs     0.375 (0.25–0.5)  1,617 (1,234–2,000)  5,234 (2,469–8,000)",
        "alone  b     ms                    0",
        "much   c     steps                 1                never",
        "- a note",
    ]


def test_copy_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")
    assert cli.main(["bench", "copy", "--bytes", "1000000", "--rounds", "2", "--json"]) == 0
    found = check_figures(lines(capsys.readouterr().out), "copy", 2)
    cases = {"direct, 4 KiB", "direct, 64 KiB", "direct, 1 MiB", "transposed, 256 B", "transposed, 4 KiB"}
    measures = {"store", "store: share", "load", "load: share", "descriptors"}
    assert set(found) == {(m, c) for m in measures for c in cases}
    assert all(figure["tierkv"]["median"] > 0 for figure in found.values())


def test_layout_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")
    from tierkv.bench import layout

    small = ["--bytes", "1000000", "--rounds", "2", "--host-bytes", str(1 << 30)]
    assert cli.main(["bench", "layout", *small, "--json"]) == 0
    found = check_figures(lines(capsys.readouterr().out), "layout", 2)
    for model in layout.SHAPES:
        assert 1 <= found["held", model]["tierkv"]["median"] < 1.2
    assert ("store: share", "direct, 64 KiB") in found


def test_copy_refuses_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert cli.main(["bench", "copy", "--device", "cuda"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_copy_notices_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")
    from tierkv.bench import copy
    from tierkv.layout.spec import Plane

    bed = copy.Bed("cpu", Plane("kv", 1, 1, 4096), False, 1 << 20)
    monkeypatch.setattr(bed, "run", lambda store: bed.host.zero_())
    with pytest.raises(BenchError, match="other bytes"):
        bed.check()
    bed.close()


def test_fs_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *FS, "--root-dir", str(tmp_path), "--json"]) == 0
    found = check_figures(lines(capsys.readouterr().out), "fs", 2)
    for case in ("4 × 1 MiB", "32 × 16 KiB"):
        assert {("raw: cold reads", case), ("raw: buffered writes", case)} <= set(found)
        for layout in fs.LAYOUTS:
            assert all(found[measure, f"{layout}, {case}"]["unit"] == "µs/chunk" for measure in fs.MEASURES)
            assert ("load, cold: share of cold reads", f"{layout}, {case}") in found
    for layout in ("files", "segments"):
        assert ("promotion", f"{layout}, 32 × 16 KiB") in found
    assert all(figure["tierkv"]["median"] > 0 and figure["vllm"] is None for figure in found.values())
    assert list(tmp_path.iterdir()) == []


def test_fs_without_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fs, "supports_direct", lambda directory: False)
    assert cli.main(["bench", *FS, "--root-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert fs.NO_DIRECT in output
    assert "\nraw: cold reads " in output and "direct writes" not in output.replace(fs.NO_DIRECT, "")


@pytest.mark.vllm
def test_fs_against_vllm(tmp_path: Path) -> None:
    """In a process of its own, as vLLM's import leaves much behind."""
    command = [sys.executable, "-m", "tierkv.cli", "bench", *FS, "--root-dir", str(tmp_path), "--against", "vllm"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = check_figures(lines(done.stdout), "fs", 2)
    for layout in fs.LAYOUTS:
        for measure in ("store", "load, cold", "load, cold: vLLM in 16 jobs"):
            assert found[measure, f"{layout}, 32 × 16 KiB"]["ratio"]["median"] > 0
    for layout in ("files", "segments"):
        assert found["promotion", f"{layout}, 32 × 16 KiB"]["ratio"]["median"] > 0
    assert list(tmp_path.iterdir()) == []


def test_fs_refuses_a_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "fs", "--root-dir", str(tmp_path / "absent")]) == 2
    assert "absent' cannot be used: " in capsys.readouterr().err


@pytest.mark.parametrize("layout", fs.LAYOUTS)
def test_fs_notices_what_is_not_loaded(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(fs.TierBed(str(tmp_path), fs.Case(4096, 4), layout)) as bed:
        bed.rename(sides.some_hashes(4, np.random.default_rng(0)))
        with pytest.raises(BenchError, match="chunks failed: absent"):
            bed.run(False, 1)
        monkeypatch.setattr(bed, "run", lambda store, jobs: 1.0)
        with pytest.raises(BenchError, match="other bytes"):
            bed.live(sides.some_hashes(4, np.random.default_rng(1)), 1)
