"""The other end of ``vllm_harness``: a process that has imported vLLM and forks one process per engine.

Started as ``python vllm_child.py SOCKET``. Each connection to the socket gets a fork of its own, with nothing
of tierkv imported yet, which serves commands until the connection closes: a line of JSON in
(``{"command": …, …}``), a line of JSON out (``{"result": …}`` or ``{"error": [type, message, traceback]}``).
The import of vLLM takes several seconds, which each engine would otherwise pay.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


class EngineProcess:
    """The commands; each public method is one. At most one engine at a time, in this process."""

    def __init__(self) -> None:
        self.llm: Any = None
        self._requests = 0

    # -- processes, files and mounts

    def hello(self, log_path: str, environment: dict[str, str]) -> int:
        """Send what the engine prints to ``log_path``, and return the process id."""
        log = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.update(environment)
        return os.getpid()

    def make_model(self, name: str, folder: str) -> None:
        import vllm_models

        vllm_models.make_model(name, folder)

    def mount(self, path: str, *, read_only: bool = False, size: str = "") -> None:
        """An empty file system at ``path``, seen by this process only; of ``size``, as tmpfs has it."""
        libc = ctypes.CDLL(None, use_errno=True)
        clone_newns, clone_newuser, ms_rdonly, ms_rec, ms_private = 0x20000, 0x10000000, 1, 0x4000, 1 << 18
        uid, gid = os.getuid(), os.getgid()
        if libc.unshare(clone_newuser | clone_newns) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
        _mount(None, b"/", None, ms_rec | ms_private, None)
        _mount(
            b"tmpfs", path.encode(), b"tmpfs", ms_rdonly if read_only else 0, f"size={size}".encode() if size else None
        )

    def grow(self, path: str, size: str) -> None:
        """What was mounted at ``path`` is of ``size`` from now on."""
        ms_remount = 32
        _mount(b"tmpfs", path.encode(), b"tmpfs", ms_remount, f"size={size}".encode())

    def allow_layout(self, name: str) -> None:
        """Let the CPU's attention run with another order of the KV cache's dimensions, too."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.kv_cache_interface import KVCacheLayout

        allowed = (KVCacheLayout.LBHNC, KVCacheLayout[name])
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: allowed)
        os.environ["VLLM_KV_CACHE_LAYOUT"] = name

    def allow_latent_prefix_caching(self) -> None:
        """Multi-head latent attention on the CPU has all that prefix caching needs, but is started without it."""
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config.__func__

        def check_and_keep(cls: Any, vllm_config: Any) -> None:
            scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
            kept = scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens
            check(cls, vllm_config)
            scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = kept

        CpuPlatform.check_and_update_config = classmethod(check_and_keep)

    def allow_states(self) -> None:
        """Mamba2 on the CPU: its kernel returns no states from within a prefill, so none must be asked for.

        The scheduler then ends a step at each boundary whose state is to be kept.
        """
        from dataclasses import replace

        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

        described = MambaMixer2.get_kv_cache_spec

        def without_checkpoints(mixer: Any, vllm_config: Any) -> Any:
            spec = described(mixer, vllm_config)
            return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

        MambaMixer2.get_kv_cache_spec = without_checkpoints

    # -- the engine's life

    def start(self, model: str, options: Json) -> Json:
        from vllm import LLM

        assert self.llm is None
        self.llm = LLM(
            model=model,
            **{
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "block_size": 32,
                "max_model_len": 2048,
                "kv_cache_memory_bytes": 64 << 20,
                "disable_log_stats": False,
                "seed": 0,
                **options,
            },
        )
        layout = str(self.llm.llm_engine.vllm_config.cache_config.kv_cache_layout)
        return {"device_blocks": self.free_blocks(), "layout": layout}

    def stop(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def free_blocks(self) -> int:
        """Device blocks that no request holds; cached ones are among them."""
        return int(self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def block_sizes(self) -> list[int]:
        """Tokens of a block, of each group."""
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups
        return [int(group.kv_cache_spec.block_size) for group in groups]

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, those of several labels added up, without the ``vllm:``."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                name = metric.name.removeprefix("vllm:")
                found[name] = found.get(name, 0.0) + metric.value
        return found

    # -- requests

    def generate(self, prompts: list[Any], together: bool, params: Json) -> list[Json]:
        """Answer the prompts, one after the other or ``together``.

        Each answer has ``tokens``, ``logprobs`` (a list of [token, logprob] for each) and, for one after
        the other, the tokens that came from the device's prefix cache (``local``) and from the connector
        (``external``).
        """
        if together:
            return self._generate(prompts, params)
        answers = []
        for prompt in prompts:
            before = self.metrics()
            answer = self._generate([prompt], params)[0]
            after = self.metrics()
            for name, counter in (("local", "prefix_cache_hits"), ("external", "external_prefix_cache_hits")):
                answer[name] = int(after.get(counter, 0) - before.get(counter, 0))
            answers.append(answer)
        return answers

    def _generate(self, prompts: list[Any], params: Json) -> list[Json]:
        outputs = self.llm.generate([_prompt(p) for p in prompts], self._sampling(params), use_tqdm=False)
        return [_answer(output.outputs[0]) for output in outputs]

    @staticmethod
    def _sampling(params: Json) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            **{"temperature": 0.0, "max_tokens": 8, "logprobs": 5, "ignore_eos": True, "detokenize": False, **params}
        )

    def submit(self, prompt: Any, params: Json) -> str:
        """Queue a request; ``step`` runs it."""
        request_id = f"submitted-{self._requests}"
        self._requests += 1
        self.llm.llm_engine.add_request(request_id, _prompt(prompt), self._sampling(params))
        return request_id

    def step(self, count: int | None, pause: float, timeout: float) -> Json:
        """Step the engine ``count`` times, or until no request is left.

        Returns ``samples`` (time and free device blocks after each step) and, by request, the ``answers``
        of those that finished.
        """
        samples: list[tuple[float, int]] = []
        answers: Json = {}
        until = time.monotonic() + timeout
        while (count is None or len(samples) < count) and self.llm.llm_engine.has_unfinished_requests():
            if time.monotonic() > until:
                raise TimeoutError(f"requests unfinished after {timeout} s; {len(answers)} finished")
            for output in self.llm.llm_engine.step():
                if output.finished:
                    answers[output.request_id] = _answer(output.outputs[0])
            samples.append((time.monotonic(), self.free_blocks()))
            if pause:
                time.sleep(pause)
        return {"samples": samples, "answers": answers}

    def abort(self, requests: list[str]) -> None:
        self.llm.llm_engine.abort_request(requests)

    def drain(self, timeout: float) -> None:
        """Step until the connector has nothing left to copy from the device, as a serving engine does."""
        until = time.monotonic() + timeout
        while self._core.scheduler.has_requests():
            if time.monotonic() > until:
                raise TimeoutError(f"the connector still has work after {timeout} s without a request")
            self.llm.llm_engine.step()
            time.sleep(0.001)

    # -- resets and faults

    def reset(self, running: bool, connector: bool) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def invalidate(self, name: str | None) -> None:
        """Tell all workers that their weights have changed, as a user does."""
        self.llm.collective_rpc("tierkv_invalidate", args=(name,))

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake_up(self) -> bool:
        return bool(self.llm.wake_up())

    def call(self, function: str, arguments: Json) -> Any:
        """``vllm_faults.function(engine process, **arguments)``."""
        import vllm_faults

        return getattr(vllm_faults, function)(self, **arguments)


def _mount(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    return {"prompt_token_ids": prompt["tokens"], "cache_salt": prompt["salt"]}


def _answer(completion: Any) -> Json:
    logprobs = [sorted((t, p.logprob) for t, p in position.items()) for position in completion.logprobs or ()]
    return {"tokens": list(completion.token_ids), "logprobs": logprobs}


def serve(connection: socket.socket) -> None:
    """Serve one connection until it closes."""
    commands = EngineProcess()
    stream = connection.makefile("rw", encoding="utf-8")
    for line in stream:
        request = json.loads(line)
        command: Callable[..., Any] = getattr(commands, request.pop("command"))
        try:
            reply: Json = {"result": command(**request)}
        except Exception as error:  # whatever the engine raises is the caller's to judge
            traceback.print_exc()
            reply = {"error": [type(error).__name__, str(error), traceback.format_exc()]}
        stream.write(json.dumps(reply) + "\n")
        stream.flush()


def main() -> None:
    # What every engine imports. No engine, no thread: forks of this process start as a fresh one would.
    from vllm import LLM, SamplingParams  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{sys.argv[1]}.new")
    listener.listen()
    os.rename(f"{sys.argv[1]}.new", sys.argv[1])  # whoever sees the name can connect
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    parent = os.getppid()
    listener.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            connection.settimeout(None)
            # A group of its own, so that the engine and its workers can be killed together.
            os.setsid()
            try:
                serve(connection)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        connection.close()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
