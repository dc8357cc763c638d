"""Real engines for tests: each in a process of its own, driven over a socket, so that it can be killed.

``Engines`` (the ``engines`` fixture) starts them; ``Engine`` is one. What they do is in ``vllm_child``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tierkv

Json = dict[str, Any]
Prompt = list[int] | Json

BLOCK = 32
SHM = Path("/dev/shm")

#: One thread for each engine: two would wait for each other whenever another process wants a core.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Otherwise the first request with logprobs compiles for many seconds.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    **ONE_THREAD,
    # The engines run the tierkv that the tests import, installed or not.
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(tierkv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ),
}


class EngineError(Exception):
    """What the engine raised: ``type`` is the exception's name, ``message`` its text."""

    def __init__(self, type_: str, message: str, trace: str) -> None:
        self.type = type_
        self.message = message
        super().__init__(f"{type_}: {message}\n{trace}")


class EngineDiedError(Exception):
    """The engine's process has gone; the end of its log says more."""


def connector(cpu_bytes: int = 64 << 20, **extra: Any) -> Json:
    """``kv_transfer_config`` with these fields in ``kv_connector_extra_config``."""
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes, **extra},
    }


#: An option of an engine: its workers can be told that their weights have changed (``Engine.invalidate``).
EXTENSION = {"worker_extension_cls": "tierkv.connector.WorkerExtension"}


def fs(root: Path, layout: str = "files") -> Json:
    if layout == "files":
        return {"type": "fs", "root_dir": str(root)}
    return {"type": "fs", "root_dir": str(root), "layout": layout, "capacity_bytes": 64 << 20}


def tokens(seed: int, count: int) -> list[int]:
    """A random prompt; the same ``seed`` gives a prefix of the same."""
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


def most_hits(length: int, chunk_tokens: int) -> int:
    """Tokens that chunks can serve of a prompt: complete ones, and whole blocks before the last token."""
    return min(length // chunk_tokens * chunk_tokens, (length - 1) // BLOCK * BLOCK)


def same(answers: Sequence[Json], expected: Sequence[Json]) -> bool:
    """Whether tokens and logprobs are equal, bit for bit."""
    return [(a["tokens"], a["logprobs"]) for a in answers] == [(e["tokens"], e["logprobs"]) for e in expected]


def wait_for(condition: Callable[[], Any], timeout: float, what: str) -> Any:
    """Poll until ``condition()`` is true; its value."""
    until = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {timeout} s")
        time.sleep(0.02)
    return value


def files_under(root: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(root))


def settle(root: Path, quiet: float = 0.4, timeout: float = 20.0) -> int:
    """Wait until the number of files below ``root`` is above zero and no longer changes; that number."""
    seen, since = files_under(root), time.monotonic()
    until = since + timeout
    while time.monotonic() < until:
        time.sleep(0.05)
        now = files_under(root)
        if now != seen:
            seen, since = now, time.monotonic()
        elif seen and time.monotonic() - since > quiet:
            return seen
    raise TimeoutError(f"{seen} files below {root} after {timeout} s")


# -- shared memory

#: What vLLM itself, without a connector, leaves behind when all processes of a server or of several ranks are
#: killed at once: its message queues, and the semaphores of its multiprocessing.
VLLMS_OWN = ("psm_", "sem.mp-", "vllm_dist_")


def shm_names() -> set[str]:
    return set(os.listdir(SHM))


def orphaned_shm(before: set[str]) -> set[str]:
    """Names in ``/dev/shm`` that are not in ``before`` and that no process has open or mapped.

    Files are known by their numbers: a semaphore is made under another name than it has afterwards.
    """
    # Before anybody's maps are read: another test's engine may be making some just now, which it will have mapped then.
    numbers: dict[str, int] = {}
    for name in shm_names() - before:
        with contextlib.suppress(FileNotFoundError):
            numbers[name] = (SHM / name).stat().st_ino
    held: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if f" {SHM}/" in line:
                    held.add(int(line.split()[4]))
        with contextlib.suppress(OSError):
            for entry in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(process / "fd" / entry).startswith(f"{SHM}/"):
                        held.add(os.stat(process / "fd" / entry).st_ino)
    return {name for name, number in numbers.items() if number not in held}


def assert_shm_clean(before: set[str], timeout: float = 5.0) -> None:
    """Nothing of ours is left behind; a process that is just ending has ``timeout`` to do so.

    What vLLM leaves behind, here or in a test that runs beside this one, is removed.
    """
    until = time.monotonic() + timeout
    earlier: set[str] = set()
    while left := orphaned_shm(before):
        for name in left & earlier:  # not what a test beside this one hands over just now
            if name.startswith(VLLMS_OWN):
                (SHM / name).unlink(missing_ok=True)
        earlier = left
        assert time.monotonic() < until, f"left in {SHM}: {sorted(left)}"
        time.sleep(0.1)


# -- engines


class Engine:
    """One engine process, without an engine until ``start``. Not thread-safe."""

    def __init__(self, address: Path, log: Path, models: Models, environment: Json) -> None:
        self.log = log
        self._models = models
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        self._stream = self._socket.makefile("rw", encoding="utf-8")
        self.device_blocks, self.layout = 0, ""
        self.pid: int = self("hello", log_path=str(log), environment=environment)

    def __call__(self, command: str, patience: float = 120.0, /, **arguments: Any) -> Any:
        """Run a command of ``vllm_child.EngineProcess``.

        Raises:
            EngineError: it raised.
            EngineDiedError: the process ended meanwhile, or took longer than ``patience`` seconds.
        """
        self._socket.settimeout(patience)
        try:
            self._stream.write(json.dumps({"command": command, **arguments}) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError as error:
            raise EngineDiedError(f"{command}: {error or 'no answer'}\n{self.log_tail()}") from error
        if not line:
            raise EngineDiedError(f"{command}: the process ended\n{self.log_tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(*reply["error"])
        return reply["result"]

    def start(self, model: str, kv_transfer_config: Json | None = None, **options: Any) -> None:
        if kv_transfer_config is not None:
            options["kv_transfer_config"] = kv_transfer_config
        started = self("start", model=str(self._models.folder(model)), options=options)
        self.device_blocks, self.layout = started["device_blocks"], started["layout"]

    def generate(self, prompts: Sequence[Prompt], together: bool = False, **params: Any) -> list[Json]:
        return self("generate", prompts=list(prompts), together=together, params=params)

    def one(self, prompt: Prompt, **params: Any) -> Json:
        return self.generate([prompt], **params)[0]

    def submit(self, prompt: Prompt, **params: Any) -> str:
        return self("submit", prompt=prompt, params=params)

    def step(self, count: int | None = None, pause: float = 0.0, timeout: float = 60.0) -> Json:
        return self("step", timeout + 10, count=count, pause=pause, timeout=timeout)

    def drain(self, timeout: float = 20.0) -> None:
        self("drain", timeout + 10, timeout=timeout)

    def reset(self, *, running: bool = False, connector: bool = False) -> bool:
        """Empty the device's prefix cache, and with ``connector`` the connector's."""
        return self("reset", running=running, connector=connector)

    def invalidate(self, name: str | None) -> None:
        """Say that the weights are those of ``name`` now; for engines with ``EXTENSION``."""
        self("invalidate", name=name)

    def forget_device(self) -> None:
        """Finish the stores and empty the device's prefix cache only."""
        self.drain()
        assert self.reset()

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def kill(self) -> None:
        """``kill -9`` of the engine and its workers; returns when all have gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._gone()

    def close(self) -> None:
        """Shut the engine down in order and end the process; kill it if that fails."""
        try:
            self("stop", 60.0)
            self._stream.close()
            self._socket.close()
            self._gone()
        except (EngineError, EngineDiedError, OSError, TimeoutError):
            self.kill()

    def _gone(self, timeout: float = 20.0) -> None:
        self._socket.close()
        wait_for(lambda: not _group_alive(self.pid), timeout, f"the end of process group {self.pid}")


def _group_alive(group: int) -> bool:
    """Whether a process of the group lives; one that is dead and waits to be reaped does not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                return True
    return False


class Models:
    """Model folders, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._make: Callable[[str, Path], None] | None = None

    def made_by(self, make: Callable[[str, Path], None]) -> None:
        self._make = make

    def folder(self, name: str) -> Path:
        path = self._root / name
        if not path.exists():
            assert self._make is not None
            self._make(name, path)
        return path


class Engines:
    """Starts engine processes, all forked from one that has imported vLLM; closes what a test leaves open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = Models(folder / "models")
        self.models.made_by(self._make_model)
        self._address = folder / "socket"
        self._count = 0
        self._open: list[Engine] = []
        self._log = folder / "forks.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("vllm_child.py")), str(self._address)],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        wait_for(self._listening, 180.0, "the import of vLLM")

    def _listening(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return self._address.exists()

    def process(self, *, keep: bool = False, **environment: str) -> Engine:
        """A process without an engine, closed by ``close_all`` unless the caller is to ``keep`` it."""
        self._count += 1
        engine = Engine(self._address, self.folder / f"engine-{self._count}.log", self.models, environment)
        if not keep:
            self._open.append(engine)
        return engine

    def start(self, model: str, kv_transfer_config: Json | None = None, **options: Any) -> Engine:
        """A process with an engine."""
        engine = self.process()
        engine.start(model, kv_transfer_config, **options)
        return engine

    @contextlib.contextmanager
    def running(self, model: str, kv_transfer_config: Json | None = None, **options: Any) -> Iterator[Engine]:
        """An engine for the length of a ``with``."""
        engine = self.start(model, kv_transfer_config, **options)
        try:
            yield engine
        finally:
            engine.close()

    def close_all(self) -> None:
        while self._open:
            self._open.pop().close()

    def close(self) -> None:
        self.close_all()
        self._process.terminate()
        self._process.wait(10)

    def _make_model(self, name: str, path: Path) -> None:
        maker = self.process()
        partial = path.with_name(path.name + ".partial")
        maker("make_model", name=name, folder=str(partial))
        partial.rename(path)
        maker.close()


class Oracle:
    """Answers of an engine without a connector, one request at a time, each asked for once.

    ``oracle(…)`` computes every token. ``oracle.after_hit`` is what vLLM itself answers when its own prefix
    cache has the first tokens. The two are the same, bit for bit, unless only the last token is left to be
    computed: vLLM treats that one as a decode, which adds up in another order.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._running: dict[str, Engine] = {}
        self._answers: dict[str, Json] = {}

    def __call__(self, model: str, prompts: Sequence[Prompt], **params: Any) -> list[Json]:
        names = [json.dumps([model, prompt, params], sort_keys=True) for prompt in prompts]
        missing = {name: prompt for name, prompt in zip(names, prompts, strict=True) if name not in self._answers}
        for name, prompt in missing.items():
            assert self._engine(model).reset()
            self._answers[name] = self._engine(model).one(prompt, **params)
        return [self._answers[name] for name in names]

    def after_hit(self, model: str, prompt: list[int], hit: int, **params: Any) -> Json:
        """The answer when the first ``hit`` tokens, whole blocks, come from the device's prefix cache."""
        name = json.dumps([model, prompt, params, hit])
        if name not in self._answers:
            engine = self._engine(model)
            assert engine.reset()
            if hit:
                engine.one(prompt[: hit + 1], max_tokens=1)
            self._answers[name] = engine.one(prompt, **params)
            assert self._answers[name]["local"] == hit
        return self._answers[name]

    def _engine(self, model: str) -> Engine:
        if model not in self._running:
            engine = self._running[model] = self._engines.process(keep=True)
            engine.start(model)
        return self._running[model]

    def close(self) -> None:
        for engine in self._running.values():
            engine.close()


# -- the server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """vLLM's OpenAI server, in a process group of its own."""

    def __init__(
        self, model: Path, log: Path, kv_transfer_config: Json | None, *, all_cores: bool = False, **options: Any
    ) -> None:
        self.port = free_port()
        self.log = log
        arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        defaults = {"port": self.port, "host": "127.0.0.1", "served_model_name": "model", "block_size": 32}
        for name, value in {**defaults, **options}.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        if kv_transfer_config is not None:
            arguments += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", *(ONE_THREAD if all_cores else ())):
            del environment[name]
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [*arguments, "--enforce-eager"],
                env=environment,
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, timeout: float = 180.0) -> Server:
        """Until it answers."""
        wait_for(self._ready, timeout, f"the server's start, see {self.log}")
        return self

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            self.request("GET", "/health")
        except OSError:
            return False
        return True

    def request(self, method: str, path: str, body: Json | None = None, timeout: float = 120.0) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            content: bytes = response.read()
        return content

    def complete(self, prompt: list[int] | str, max_tokens: int = 16) -> tuple[str, float]:
        """The text and the time to its first token, in seconds."""
        body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        text, first, began = "", 0.0, time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as response:
            for raw in response:
                line = raw.decode().strip()
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - began
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text, first

    def counter(self, name: str) -> float:
        """The sum of ``vllm:NAME_total`` over its labels."""
        lines = self.request("GET", "/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}_total{{"))

    def external_hits(self) -> float:
        return self.counter("external_prefix_cache_hits")

    def forget_device(self) -> None:
        """Empty the device's prefix cache only."""
        self.request("POST", "/reset_prefix_cache")

    def kill(self) -> None:
        """``kill -9`` of the server and its engine; returns when all have gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        wait_for(lambda: not _group_alive(self.process.pid), 20.0, "the end of the server's processes")

    def terminate(self) -> None:
        """SIGTERM of the server, as a service manager sends it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.kill()
