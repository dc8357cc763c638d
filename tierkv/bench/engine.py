"""``tierkv bench engine``: what a real engine and its requests notice of offloading.

* *prefill*: how much longer prompts take that nobody will ever ask for again, stored to the host and a file system:
  two engines, with and without offload, turn by turn.
* *step*: how long the steps of a running request take while others wait for much that is promoted from a slow tier;
  and while another process moves the same bytes, which is what any tier costs a machine. One core is left to tierkv.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from tierkv.bench import BenchError, require
from tierkv.bench.demo import model
from tierkv.bench.demo.scenario import KV_BYTES_PER_TOKEN, transfer_config
from tierkv.bench.engine_child import (
    ALONE,
    BLOCK_TOKENS,
    COPYING,
    PROMOTING,
    EngineSetup,
    Prefill,
    Steps,
    run_child,
)
from tierkv.bench.report import Figure, Report

#: *prefill*: prompts of a turn, and their tokens; what the device and the host hold; the pause in which stores end.
PROMPTS, PROMPT_TOKENS, DEVICE_TOKENS, HOST_TOKENS, PAUSE_S = 4, 1024, 8192, 24_576, 0.7

#: *step*: tokens of each prompt that waits.
WAITING_TOKENS = 3840

NOTES = (
    "median over the rounds (smallest–largest)",
    f"prefill: {PROMPTS} prompts of {PROMPT_TOKENS} tokens a turn, new ones each time; host + fs; all cores compute",
    "step: a request decodes; alone: nothing else; promoting: others wait for what the tier has, until the first is "
    "loaded; plain copy: meanwhile another process copies and reads as many bytes",
    "step: with one core for tierkv (and for the plain copy), the others compute",
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """turns: of each engine in *prefill*. rounds: of *step*. promote_bytes and latency_s: of its tier."""

    turns: int = 20
    rounds: int = 5
    promote_bytes: int = 1 << 30
    latency_s: float = 0.5


def run(options: EngineOptions, report: Report) -> None:
    """Measure everything.

    Raises:
        MissingExtraError: vLLM, or the model, is not installed.
        BenchError: an engine ended early.
    """
    require(["vllm", "torch"], f"to install: {model.INSTALL}")
    folder = model.model_folder()
    report.start(
        {
            "turns": options.turns,
            "rounds": options.rounds,
            "promote_bytes": options.promote_bytes,
            "latency_s": options.latency_s,
        }
    )
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as directory:
        if options.turns:
            _measure_prefill(options, str(folder), Path(directory), report)
        if options.rounds:
            _measure_steps(options, str(folder), Path(directory), report)
    report.close(NOTES)


def _measure_prefill(options: EngineOptions, folder: str, directory: Path, report: Report) -> None:
    tier = {"type": "fs", "root_dir": str(directory / "tier")}
    cores = tuple(sorted(os.sched_getaffinity(0)))
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                _engine(
                    EngineSetup(
                        model=folder,
                        connector=connector,
                        log=_log(name),
                        cores=cores,
                        aside=None,
                        device_tokens=DEVICE_TOKENS,
                        max_tokens=PROMPT_TOKENS + BLOCK_TOKENS,
                        max_num_seqs=PROMPTS,
                    )
                )
            )
            for name, connector in (("without", None), ("with", _connector(HOST_TOKENS, tier)))
        }
        for number in range(-1, options.turns):
            names = [f"turn {number} {i}" for i in range(PROMPTS)]
            for name in sorted(engines, reverse=bool(number % 2)):
                report.progress(f"prefill, turn {number + 1}, {name} offload")
                spent = engines[name].ask(Prefill(names=names, tokens=PROMPT_TOKENS))
                time.sleep(PAUSE_S)
                if number >= 0:  # the first of all warms up
                    seconds.setdefault(name, []).append(spent)
    for name, values in seconds.items():
        report.add(Figure(measure="prefill", case=f"{name} offload", unit="s", values={"tierkv": values}))
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    report.add(Figure(measure="prefill", case="with / without", unit="ratio", values={"tierkv": ratios}))


def _measure_steps(options: EngineOptions, folder: str, directory: Path, report: Report) -> None:
    prompts = max(1, round(options.promote_bytes / (WAITING_TOKENS * KV_BYTES_PER_TOKEN)))
    names, tokens = [f"waiting {i}" for i in range(prompts)], prompts * WAITING_TOKENS
    tier = {
        "type": "latency",
        "module_path": "tierkv.testing.faults:LatencyTier",
        "inner": {"type": "memory"},
        "lookup_delay_s": options.latency_s,
        "load_delay_s": options.latency_s,
    }
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        raise BenchError("step: one core is not enough: the engine computes on it and tierkv has none")
    setup = EngineSetup(
        model=folder,
        connector=_connector(tokens + tokens // 4, tier),
        log=_log("step"),
        cores=cores[:-1],
        aside=cores[-1],
        device_tokens=tokens + 2 * WAITING_TOKENS,
        max_tokens=WAITING_TOKENS + BLOCK_TOKENS,
        max_num_seqs=prompts + 1,
    )
    found: dict[str, list[list[float]]] = {ALONE: [], PROMOTING: [], COPYING: []}
    with _engine(setup) as engine:
        report.progress(f"step: {tokens:,} tokens go to the tier")
        engine.ask(Prefill(names=names, tokens=WAITING_TOKENS))
        time.sleep(1 + options.latency_s)
        for number in range(-1, options.rounds):
            report.progress(f"step, round {number + 1}")
            times: dict[str, list[float]] = {}
            for kind in (PROMOTING, ALONE, COPYING):
                count = len(times[PROMOTING]) if times else 0
                times[kind] = engine.ask(Steps(kind=kind, names=names, tokens=WAITING_TOKENS, count=count))
            for kind, one in times.items():
                if number >= 0:  # the first of all warms up
                    found[kind].append(one)
    measures = (("p50", 50), ("p99", 99), ("longest", 100))
    details = {kind: [len(one) for one in rounds] for kind, rounds in found.items()}
    for measure, share in measures:
        ms = {k: [1e3 * float(np.percentile(one, share)) for one in rounds] for k, rounds in found.items()}
        for kind, values in ms.items():
            report.add(_step_figure(measure, kind, "ms", values, details))
        for kind in (PROMOTING, COPYING):
            ratios = [a / b for a, b in zip(ms[kind], ms[ALONE], strict=True)]
            report.add(_step_figure(measure, f"{kind} / {ALONE}", "ratio", ratios, details))


def _step_figure(measure: str, case: str, unit: str, values: Sequence[float], details: dict[str, Any]) -> Figure:
    return Figure(
        measure=f"step: {measure}", case=case, unit=unit, values={"tierkv": values}, details={"steps": details}
    )


def _connector(host_tokens: int, tier: dict[str, Any]) -> dict[str, Any]:
    return transfer_config(host_tokens, [tier], reset_scope="host")  # so that a reset leaves the tier what it has


class _Child:
    """The other end of an engine's process."""

    def __init__(self, setup: EngineSetup) -> None:
        context = get_context("spawn")
        self._setup = setup
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_child, args=(setup, theirs))
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise BenchError(f"an engine ended early; see {self._setup.log}") from None

    def ask(self, command: Prefill | Steps) -> Any:
        self._connection.send(command)
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join()
        self._connection.close()


@contextlib.contextmanager
def _engine(setup: EngineSetup) -> Iterator[_Child]:
    child = _Child(setup)
    try:
        child.answer()
        yield child
    finally:
        child.close()


def _log(name: str) -> str:
    """Kept when the benchmark is over, for whoever is told to look there."""
    return str(Path(tempfile.gettempdir()) / f"tierkv-bench-engine-{os.getuid()}-{name}.log")
