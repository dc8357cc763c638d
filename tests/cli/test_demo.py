"""The demo's plan and its check of outputs; the engines are tests of their own."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest

from tierkv.bench import BenchError
from tierkv.bench.demo import parent
from tierkv.bench.demo.check import check
from tierkv.bench.demo.scenario import (
    AMPLE,
    FULL,
    HOST,
    HOST_FS,
    KV_BYTES_PER_TOKEN,
    MODES,
    NONE,
    QUICK,
    Counts,
    EngineResult,
    EngineRun,
    Output,
    ProbesDone,
    RoundDone,
    Scenario,
    Started,
    conversation,
)
from tierkv.config import parse

SURE = Output(7, {7: -0.1, 8: -4.0})
DRAW = Output(7, {7: -1.0, 8: -1.01})
LOADED = Output(7, {7: -0.2, 8: -4.0}, cached_tokens=896)


def result(mode: str, outputs: list[Output], again: Output, reference: list[Output] | None = None) -> EngineResult:
    return EngineResult(
        pool=2,
        mode=mode,
        started=Started(1.0, "0"),
        rounds=[RoundDone(1, 1.0, Counts(10, 0, 0), outputs)],
        probes=ProbesDone([SURE], [again], reference or []),
    )


def results(**changed: Any) -> list[EngineResult]:
    """A demo whose check passes; ``changed`` replaces results by mode."""
    found = {
        NONE: result(NONE, [SURE, DRAW], SURE, [LOADED]),
        AMPLE: result(AMPLE, [shifted(SURE, 0.01), DRAW], LOADED, [LOADED]),
        HOST: result(HOST, [SURE, DRAW], LOADED),
        HOST_FS: result(HOST_FS, [SURE, DRAW], LOADED),
    }
    return list({**found, **{changed_mode: r for changed_mode, r in changed.items()}}.values())


def shifted(output: Output, by: float) -> Output:
    return msgspec.structs.replace(output, logprobs={t: p - by for t, p in output.logprobs.items()})


def test_equal_outputs_pass() -> None:
    verdict = check(results())
    assert verdict.passed
    assert verdict.tolerance == pytest.approx(0.02)
    assert verdict.loaded_probes == 2


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (shifted(SURE, 0.019), True),
        (shifted(SURE, 0.021), False),
        (Output(8, {8: -0.1, 7: -0.1}), False),  # another token, where the reference was sure
        (Output(8, {8: -0.1}), False),  # the reference's token is not among the most probable
    ],
)
def test_one_output_differs(found: Output, passes: bool) -> None:
    verdict = check(results(**{HOST_FS: result(HOST_FS, [found, DRAW], LOADED)}))
    assert verdict.passed == passes
    assert bool(verdict.failures) != passes


def test_a_draw_may_fall_either_way() -> None:
    other = Output(8, {8: -1.0, 7: -1.01})
    verdict = check(results(**{HOST: result(HOST, [SURE, other], LOADED)}))
    assert verdict.passed
    assert [c.draws for c in verdict.batched] == [0, 1, 0]


def test_one_at_a_time_is_bit_for_bit() -> None:
    verdict = check(results(**{HOST_FS: result(HOST_FS, [SURE, DRAW], shifted(LOADED, 1e-6))}))
    assert not verdict.passed


def test_a_check_that_loaded_nothing_fails() -> None:
    verdict = check(results(**{HOST_FS: result(HOST_FS, [SURE, DRAW], SURE)}))
    assert verdict.failures == [f"{HOST_FS}, one at a time: no output used the cache, so the check shows nothing"]


@pytest.mark.parametrize("scenario", [FULL, QUICK])
def test_the_scenario_fits_the_engine(scenario: Scenario) -> None:
    longest = scenario.prompt_tokens(scenario.rounds)
    assert scenario.first_prompt % scenario.block_size == scenario.growth % scenario.block_size == 0
    assert longest * scenario.max_num_seqs <= scenario.device_tokens
    assert longest * max(scenario.pools) > scenario.host_tokens


def test_every_pool_in_every_mode() -> None:
    runs = parent.plan(FULL, pathlib.Path("model"))
    assert [(r.pool, r.mode) for r in runs] == [(p, m) for p in (4, 12, 32) for m in MODES]


def test_the_quick_one_leaves_the_host_alone_out() -> None:
    runs = parent.plan(QUICK, pathlib.Path("model"))
    assert [r.mode for r in runs] == [NONE, AMPLE, HOST_FS]
    verdict = check(r for r in results() if r.mode != HOST)
    assert verdict.passed
    assert [c.what for c in verdict.batched] == [AMPLE, HOST_FS]
    assert [c.what for c in verdict.single] == [HOST_FS]


@pytest.mark.parametrize(("mode", "root_dir"), [(HOST, None), (HOST_FS, "/tmp/somewhere")])
def test_the_configuration_is_valid(mode: str, root_dir: str | None) -> None:
    run = EngineRun(scenario=FULL, model="m", pool=4, mode=mode, root_dir=root_dir)
    connector = run.connector()
    assert connector is not None
    config = parse(connector["kv_connector_extra_config"])
    assert config.cpu_bytes_to_use == 24_576 * KV_BYTES_PER_TOKEN
    assert len(config.secondary_tiers) == (root_dir is not None)


def test_no_connector_without_offload() -> None:
    assert EngineRun(scenario=FULL, model="m", pool=4, mode=NONE).connector() is None


def test_conversations_grow_and_differ() -> None:
    assert conversation("1", 300)[:200] == conversation("1", 200)
    assert conversation("1", 200) != conversation("2", 200)
    assert conversation("1", 3) == [17_727, 24_531, 23_592]  # the same on every machine


def test_an_engine_that_ends_early_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = EngineRun(scenario=QUICK, model="/no/such/model", pool=1, mode=NONE)
    monkeypatch.setattr(parent.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match=r"see .*no-offload-1\.log"):
        parent.run_child(run, tmp_path, lambda *_: None)
