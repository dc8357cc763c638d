"""``tierkv bench engine`` at a tiny size, on real engines."""

from __future__ import annotations

import json

import pytest

from tierkv import cli

pytestmark = pytest.mark.soak


def test_bench_engine(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--turns", "2", "--rounds", "1", "--promote-bytes", "100000000", "--latency", "0.2"]
    assert cli.main(["bench", "engine", *small, "--json"]) == 0
    _, *figures = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    found = {(f["measure"], f["case"]): f for f in figures}
    assert len(found["prefill", "with / without"]["tierkv"]["values"]) == 2
    steps = found["step: p99", "promoting"]
    assert steps["tierkv"]["median"] > 0
    # The wait was seen: of the tier's 400 ms, in steps, and the others took as many.
    counts = {kind: count for kind, (count,) in steps["details"]["steps"].items()}
    assert counts["promoting"] > 2 and len(set(counts.values())) == 1
