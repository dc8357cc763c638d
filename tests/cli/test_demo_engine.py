"""The whole demo on real engines, with a scenario of a minute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierkv import cli
from tierkv.bench.demo import scenario

pytestmark = pytest.mark.soak

SMALL = scenario.Scenario(
    pools=(4,), rounds=2, first_prompt=384, growth=128, device_tokens=1_024, host_tokens=1_536, probes=1, max_num_seqs=1
)


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "QUICK", SMALL)
    figures = tmp_path / "figures.json"
    assert cli.main(["demo", "--quick", "--output-dir", str(tmp_path / "out"), "--json", str(figures)]) == 0
    assert (tmp_path / "out" / "throughput.png").stat().st_size > 10_000
    found = json.loads(figures.read_text())
    assert found["check"]["passed"]
    by_mode = {run["mode"]: run["rounds"] for run in found["runs"]}
    assert set(by_mode) == set(scenario.MODES)
    assert by_mode[scenario.NONE][-1]["external_hit_ratio"] == 0
    last = by_mode[scenario.HOST_FS][-1]
    assert last["device_hit_ratio"] + last["external_hit_ratio"] == 0.75  # all but the 128 tokens that are new
