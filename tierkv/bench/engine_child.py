"""One engine in a process of its own, told what to do: ``run_child`` is the process's function."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tierkv.bench import BenchError
from tierkv.bench.demo.scenario import KV_BYTES_PER_TOKEN, conversation
from tierkv.layout import canonical

#: Tokens of a block: the engine's default on the CPU.
BLOCK_TOKENS = 128

#: Tokens of the request that runs while others wait, and its steps before any is timed.
RUNNER_TOKENS, WARM_STEPS = 64, 10

#: A request that is not told anything within that many steps waits for nothing.
TOO_MANY_STEPS = 2000

ALONE, PROMOTING, COPYING = "alone", "promoting", "plain copy"


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """model: its folder. connector: ``kv_transfer_config``, None for no offload. log: where what it prints goes.

    cores: that compute; aside: the one that tierkv's threads get, None for whatever they inherit. (With the engine in
    this process they inherit the core of the thread that computes.)
    """

    model: str
    connector: dict[str, Any] | None
    log: str
    cores: tuple[int, ...]
    aside: int | None
    device_tokens: int
    max_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Compute the first token of new prompts, all together. The answer: seconds."""

    names: Sequence[str]
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Time the steps of a request that decodes. The answer: seconds of each.

    kind: ``ALONE``, for ``count`` steps. ``PROMOTING``: while the prompts of ``names`` wait for what only the tier
    has. ``COPYING``: for ``count`` steps, while another process copies, and reads once more, as many bytes as these
    prompts have.
    """

    kind: str
    names: Sequence[str]
    tokens: int
    count: int = 0


def run_child(setup: EngineSetup, connection: Connection) -> None:
    """Start the engine, say so, and do what comes through ``connection`` until it says None."""
    log = os.open(setup.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        OMP_NUM_THREADS=str(len(setup.cores)),
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, setup.cores)),
    )
    engine = Engine(setup)
    try:
        connection.send(None)
        while (command := connection.recv()) is not None:
            connection.send(engine.prefill(command) if isinstance(command, Prefill) else engine.steps(command))
    finally:
        engine.close()


class Engine:
    """Thread safety: none."""

    def __init__(self, setup: EngineSetup) -> None:
        import torch
        from vllm import LLM, SamplingParams

        torch.set_num_threads(len(setup.cores))
        self._setup = setup
        self._sampling = SamplingParams
        self._llm = LLM(
            setup.model,
            max_model_len=setup.max_tokens,
            kv_cache_memory_bytes=setup.device_tokens * KV_BYTES_PER_TOKEN,
            block_size=BLOCK_TOKENS,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=2048,
            kv_transfer_config=setup.connector,
            enforce_eager=True,
            seed=0,
        )
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._runners = 0

    def prefill(self, command: Prefill) -> float:
        prompts = [{"prompt_token_ids": conversation(name, command.tokens)} for name in command.names]
        begin = time.perf_counter()
        self._llm.generate(prompts, self._sampling(max_tokens=1, temperature=0), use_tqdm=False)
        return time.perf_counter() - begin

    def steps(self, command: Steps) -> list[float]:
        engine = self._llm.llm_engine
        self._llm.reset_prefix_cache(reset_connector=True)
        self._move_threads()
        self._add(f"runner {self._runners}", RUNNER_TOKENS, self._setup.max_tokens - RUNNER_TOKENS - 1)
        self._runners += 1
        while not self._scheduler.running:  # the tier is asked for its prompt, too, and is slow
            engine.step()
            time.sleep(0.001)
        for _ in range(WARM_STEPS):
            engine.step()
        with _copier(command, self._setup.aside) if command.kind == COPYING else contextlib.nullcontext():
            if command.kind == PROMOTING:
                for name in command.names:
                    self._add(name, command.tokens, 1)
            seconds = self._time(command)
        engine.abort_request([f"runner {self._runners - 1}"])
        while engine.has_unfinished_requests():
            engine.step()
        return seconds

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _time(self, command: Steps) -> list[float]:
        pool = self._scheduler.kv_cache_manager.block_pool
        seconds: list[float] = []
        enough = pool.get_num_free_blocks() - command.tokens // BLOCK_TOKENS // 2
        while command.kind == PROMOTING or len(seconds) < command.count:
            begin = time.perf_counter()
            self._llm.llm_engine.step()
            spent = time.perf_counter() - begin
            if command.kind == PROMOTING and pool.get_num_free_blocks() < enough:
                break  # what waited has its blocks and is being loaded, which is no waiting any more
            seconds.append(spent)
            if len(seconds) > TOO_MANY_STEPS:
                raise BenchError(f"no request went on within {TOO_MANY_STEPS} steps")
        return seconds

    def _add(self, name: str, tokens: int, new_tokens: int) -> None:
        sampling = self._sampling(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": conversation(name, tokens)}, sampling)

    def _move_threads(self) -> None:
        if self._setup.aside is None:
            return
        for thread in threading.enumerate():
            if thread.name.startswith("tierkv") and thread.native_id is not None:
                os.sched_setaffinity(thread.native_id, {self._setup.aside})


@contextlib.contextmanager
def _copier(command: Steps, core: int | None) -> Iterator[None]:
    """Another process at work, from here on."""
    context = get_context("spawn")
    ready = context.Barrier(2)
    total = len(command.names) * command.tokens * KV_BYTES_PER_TOKEN
    process = context.Process(target=_copy, args=(total, core, ready))
    process.start()
    try:
        ready.wait()  # it has its memory
        ready.wait()  # it begins
        yield
    finally:
        process.join()


def _copy(total: int, core: int | None, ready: Any) -> None:
    """What a tier does to a chunk, without a tier: copy it to another place and read it there."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    size = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    ready.wait()
    ready.wait()
    for at in range(0, total, size):
        target[at : at + size] = source[at : at + size]
        canonical.checksum(target[at : at + size])
