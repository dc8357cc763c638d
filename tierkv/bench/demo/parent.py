"""Starts the engines of the demo, one child process after the other, and gathers what they report."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tierkv.bench import BenchError
from tierkv.bench.demo.scenario import (
    HOST_FS,
    EngineResult,
    EngineRun,
    Message,
    ProbesDone,
    Progressed,
    RoundDone,
    Scenario,
    Started,
)

#: Offline; no usage statistics; no compiler, which the first request would wait for; the engine in the child itself.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

OnMessage = Callable[[EngineRun, Message], None]


def plan(scenario: Scenario, model: Path) -> list[EngineRun]:
    """All runs of a demo, the smallest pool first."""
    return [
        EngineRun(scenario=scenario, model=str(model), pool=pool, mode=mode)
        for pool in scenario.pools
        for mode in scenario.modes
    ]


def run_child(run: EngineRun, logs: Path, on_message: OnMessage) -> EngineResult:
    """Run one engine to its end. With a file system tier, its directory lives as long as the engine.

    Raises:
        BenchError: the engine ended early; the message names its log.
    """
    with contextlib.ExitStack() as stack:
        if run.mode == HOST_FS:
            root_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-demo-"))
            run = msgspec.structs.replace(run, root_dir=root_dir)
        log = logs / f"{run.mode.replace(' + ', '-').replace(' ', '-')}-{run.pool}.log"
        started: Started | None = None
        rounds: list[RoundDone] = []
        probes: ProbesDone | None = None
        for message in _messages(run, log):
            on_message(run, message)
            if isinstance(message, Started):
                started = message
            elif isinstance(message, RoundDone):
                rounds.append(message)
            elif isinstance(message, ProbesDone):
                probes = message
    if started is None or probes is None:
        raise BenchError(f"the engine of {run.mode!r} with {run.pool} conversations ended early; see {log}")
    return EngineResult(pool=run.pool, mode=run.mode, started=started, rounds=rounds, probes=probes)


def _messages(run: EngineRun, log: Path) -> Iterator[Message]:
    """What the child reports, until it has ended. Closing the iterator ends the child."""
    decoder = msgspec.json.Decoder(Started | Progressed | RoundDone | ProbesDone)
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, log.open("wb") as output:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "tierkv.bench.demo.engine", str(writing)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env={**os.environ, **_ENVIRONMENT},
            )
        finally:
            os.close(writing)
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once; its log says why
                child.stdin.write(msgspec.json.encode(run))
                child.stdin.close()
            for line in pipe:
                yield decoder.decode(line)
            if child.wait() != 0:
                raise BenchError(f"the engine of {run.mode!r} with {run.pool} conversations failed; see {log}")
        finally:
            child.kill()
            child.wait()
