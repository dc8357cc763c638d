"""One engine in a process of its own, so that its memory goes when it ends.

``python -m tierkv.bench.demo.engine FD`` reads an ``EngineRun`` from standard input and writes messages, a JSON line
each, to the file descriptor ``FD``. What the engine prints goes to standard output and error, as ever.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from tierkv.bench.demo.scenario import (
    KV_BYTES_PER_TOKEN,
    Counts,
    EngineRun,
    Message,
    Output,
    ProbesDone,
    Progressed,
    RoundDone,
    Started,
    conversation,
)

_LOGPROBS = 20
_COUNTERS = {
    "prompt": "vllm:prefix_cache_queries",
    "device": "vllm:prefix_cache_hits",
    "external": "vllm:external_prefix_cache_hits",
}

Report = Callable[[Message], None]


class Session:
    """The engine of one run."""

    def __init__(self, run: EngineRun, report: Report) -> None:
        from vllm import LLM, SamplingParams

        scenario = run.scenario
        self._report = report
        self._sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=_LOGPROBS)
        self._bar = _bar_class(report)
        self._llm = LLM(
            run.model,
            max_model_len=scenario.prompt_tokens(scenario.rounds) + scenario.block_size,
            kv_cache_memory_bytes=run.device_tokens * KV_BYTES_PER_TOKEN,
            block_size=scenario.block_size,
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=run.max_num_batched_tokens,
            kv_transfer_config=run.connector(),
            enforce_eager=True,  # there is no compiler to wait for on the CPU
            disable_log_stats=False,  # the hit counters are part of the statistics
            seed=0,
        )

    def send(self, prompts: Sequence[list[int]]) -> list[Output]:
        """The next token of each prompt, all submitted together."""
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [_as_output(r) for r in self._llm.generate(requests, self._sampling, use_tqdm=self._bar)]

    def send_singly(self, prompts: Sequence[list[int]]) -> list[Output]:
        return [self.send([prompt])[0] for prompt in prompts]

    def counts(self) -> Counts:
        values = {m.name: m.value for m in self._llm.get_metrics() if m.name in _COUNTERS.values()}
        return Counts(**{field: int(values.get(name, 0)) for field, name in _COUNTERS.items()})

    def forget_device(self) -> None:
        """Forget the engine's prefix cache; what is in host memory and in tiers stays."""
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def run_engine(run: EngineRun, report: Report) -> None:
    """Run one pool in one mode."""
    import vllm

    begin = time.perf_counter()
    session = Session(run, report)
    report(Started(time.perf_counter() - begin, vllm.__version__))
    try:
        probes = [conversation(f"probe {i}", run.scenario.first_prompt) for i in range(run.scenario.probes)]
        computed = session.send_singly(probes)
        for round_ in range(1, run.scenario.rounds + 1):
            report(_run_round(session, run, round_))
        session.forget_device()
        again = session.send_singly(probes)
        reference = [] if run.offloaded else session.send_singly(probes)
        report(ProbesDone(computed, again, reference))
    finally:
        session.close()


def _run_round(session: Session, run: EngineRun, round_: int) -> RoundDone:
    prompts = [conversation(str(i), run.scenario.prompt_tokens(round_)) for i in range(run.pool)]
    before = session.counts()
    begin = time.perf_counter()
    outputs = session.send(prompts)
    seconds = time.perf_counter() - begin
    after = session.counts()
    counts = Counts(
        prompt=sum(map(len, prompts)),
        device=after.device - before.device,
        external=after.external - before.external,
    )
    return RoundDone(round_, seconds, counts, outputs)


def _as_output(result: Any) -> Output:
    completion = result.outputs[0]
    logprobs = {int(token): float(entry.logprob) for token, entry in completion.logprobs[0].items()}
    return Output(int(completion.token_ids[0]), logprobs, int(result.num_cached_tokens or 0))


def _bar_class(report: Report) -> type[Any]:
    """The engine takes the class of its progress bar; this one reports instead of drawing."""
    from tqdm import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with open(os.devnull, "w") as nowhere:
                super().__init__(*args, **{**kwargs, "file": nowhere, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            report(Progressed())
            return None

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            pass

        def close(self) -> None:
            pass

    return ReportingBar


def main() -> None:
    run = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineRun)
    pipe: IO[bytes] = os.fdopen(int(sys.argv[1]), "wb", buffering=0)

    def report(message: Message) -> None:
        pipe.write(msgspec.json.encode(message) + b"\n")

    run_engine(run, report)


if __name__ == "__main__":
    main()
