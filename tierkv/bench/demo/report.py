"""The demo's results, as tables, as a chart and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

import tierkv
from tierkv.bench.demo.check import Check
from tierkv.bench.demo.scenario import AMPLE, HOST, HOST_FS, NONE, EngineResult, RoundDone, Scenario

#: Colour and marker of each mode's line; grey for what is a bound and not a choice.
_STYLE = {
    NONE: ("#c0392b", "o", "-"),
    AMPLE: ("#7f8c8d", "", ":"),
    HOST: ("#2980b9", "s", "-"),
    HOST_FS: ("#27ae60", "^", "-"),
}


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run of the demo found."""

    scenario: Scenario
    results: list[EngineResult]
    check: Check

    def last(self, pool: int, mode: str) -> RoundDone:
        """The last round of a run."""
        return next(r for r in self.results if (r.pool, r.mode) == (pool, mode)).rounds[-1]


def requests_per_second(done: RoundDone) -> float:
    return len(done.outputs) / done.seconds


def speedup(demo: Demo, mode: str = HOST_FS) -> float:
    """Requests/s over those of no offload, in the last round of the largest pool."""
    pool = max(demo.scenario.pools)
    return requests_per_second(demo.last(pool, mode)) / requests_per_second(demo.last(pool, NONE))


def print_tables(demo: Demo, console: Console) -> None:
    """Requests/s and hit ratios by round, then what the check found."""
    scenario = demo.scenario
    table = Table(
        title="requests/s by round, and the share of the prompts' tokens found on the device | in host or tiers"
    )
    table.add_column("conversations", justify="right")
    table.add_column("mode")
    for round_ in range(1, scenario.rounds + 1):
        table.add_column(f"round {round_}\n{scenario.prompt_tokens(round_):,} tokens", justify="right")
    for pool in scenario.pools:
        for result in demo.results:
            if result.pool == pool:
                table.add_row(
                    str(pool), result.mode, *map(_cell, result.rounds), end_section=result.mode == scenario.modes[-1]
                )
    console.print(table)
    console.print(
        f"device memory for {scenario.device_tokens:,} tokens, host memory for {scenario.host_tokens:,}; "
        f"{max(scenario.pools)} conversations, round {scenario.rounds}: "
        f"{HOST_FS} serves {speedup(demo):.1f} × the requests/s of {NONE}"
    )
    _print_check(demo.check, console)


def _cell(done: RoundDone) -> str:
    device, external = done.counts.device / done.counts.prompt, done.counts.external / done.counts.prompt
    return f"{requests_per_second(done):.2f}  {device:3.0%} +{external:3.0%}"


def _print_check(check: Check, console: Console) -> None:
    table = Table(title=f"outputs against those of {NONE}", padding=(0, 0))
    for name in ("runs", "outputs", "identical", "max diff", "draws", "wrong"):
        table.add_column(name, justify="left" if name == "runs" else "right", no_wrap=True)
    for c in check.single:
        table.add_row(f"{c.what}, one at a time", *_counts(c))
    for c in check.batched:
        table.add_row(f"{c.what}, together", *_counts(c))
    console.print(table)
    console.print(
        f"one prompt at a time: bit for bit ({check.loaded_probes} loaded from the host or a tier). Together: the log "
        f"probability of the next token within {check.tolerance:.3f}, twice the largest difference of two runs without "
        "offload; a draw is another token where the run without offload had two within that."
    )
    if check.passed:
        console.print("[bold green]check passed[/]: outputs are those without offload")
    for failure in check.failures:
        console.print(f"[bold red]check failed[/]: {failure}")


def _counts(c: Any) -> Sequence[str]:
    return str(c.compared), str(c.identical), f"{c.largest_difference:.3f}", str(c.draws), str(c.wrong)


def write_chart(demo: Demo, path: Path) -> None:
    """Requests/s of the last round over the number of conversations, a line for each mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scenario = demo.scenario
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for mode in scenario.modes:
        colour, marker, line = _STYLE[mode]
        values = [requests_per_second(demo.last(pool, mode)) for pool in scenario.pools]
        axes.plot(scenario.pools, values, color=colour, marker=marker or "_", linestyle=line, label=mode)
    axes.set_xscale("log", base=2)
    axes.set_xticks(scenario.pools, [str(pool) for pool in scenario.pools])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("conversations")
    axes.set_ylabel("requests/s")
    axes.set_title(
        f"Round {scenario.rounds}: prefill of {scenario.prompt_tokens(scenario.rounds):,} tokens, "
        f"{scenario.growth} of them new\n"
        f"KV memory: device {scenario.device_tokens:,} tokens, host {scenario.host_tokens:,}",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def write_json(demo: Demo, path: Path) -> None:
    """All figures as one JSON object."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(as_dict(demo)), indent=2) + b"\n")


def as_dict(demo: Demo) -> dict[str, Any]:
    """The figures, without the outputs themselves."""
    return {
        "tierkv": tierkv.__version__,
        "engine": demo.results[0].started.engine_version,
        "scenario": msgspec.to_builtins(demo.scenario),
        "runs": [
            {
                "conversations": result.pool,
                "mode": result.mode,
                "engine_start_s": result.started.seconds,
                "rounds": [_round_dict(done) for done in result.rounds],
            }
            for result in demo.results
        ],
        "speedup": {mode: speedup(demo, mode) for mode in demo.scenario.modes if mode != NONE},
        "check": {**msgspec.to_builtins(demo.check), "passed": demo.check.passed},
    }


def _round_dict(done: RoundDone) -> dict[str, Any]:
    return {
        "round": done.round,
        "seconds": done.seconds,
        "requests_per_s": requests_per_second(done),
        "prompt_tokens": done.counts.prompt,
        "device_hit_ratio": done.counts.device / done.counts.prompt,
        "external_hit_ratio": done.counts.external / done.counts.prompt,
    }
