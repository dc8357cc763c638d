"""The OpenAI server with the connector: reloads, ``kill -9``, two servers on one directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import BLOCK, Server, assert_shm_clean, connector, fs, settle, shm_names, tokens, wait_for

if TYPE_CHECKING:
    from vllm_harness import Engines


class Stopwatch:
    """Times that are printed, not asserted on: ``pytest -s`` shows them."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.times.items())

    def ask(self, name: str, server: Server, prompt: list[int]) -> tuple[str, float]:
        """The text, and the tokens that the connector served."""
        before = server.external_hits()
        text, self.times[name] = server.complete(prompt)
        # The counters follow the answer.
        with_hits = name.startswith("cold") or wait_for(lambda: server.external_hits() > before, 5.0, f"hits, {name}")
        return text, server.external_hits() - before if with_hits else 0.0


def _check(servers: list[Server], start: Any, root: Path, length: int, least: float) -> Stopwatch:
    """Two servers on one directory: each its own reload, the other's chunks, and a restart after ``kill -9``."""
    before = shm_names()
    watch = Stopwatch()
    one, other = start("one"), start("other")
    servers += [one.wait(), other.wait()]
    mine, yours = tokens(0, length), tokens(1, length)

    cold, hits = watch.ask("cold", one, mine)
    assert hits == 0
    one.forget_device()
    again, hits = watch.ask("from the host", one, mine)
    assert again == cold
    assert hits >= least * length
    cold_other, _ = watch.ask("cold, other server", other, yours)
    settle(root, quiet=1.0)
    for server, prompt, text in ((other, mine, cold), (one, yours, cold_other)):
        again, hits = watch.ask(f"what the {'first' if server is other else 'other'} one has stored", server, prompt)
        assert again == text
        assert hits >= least * length

    settle(root, quiet=1.0)
    one.kill()
    assert_shm_clean(before)
    restarted = start("restarted")
    servers.append(restarted.wait())
    again, hits = watch.ask("first request after kill -9", restarted, mine)
    assert again == cold
    assert hits >= least * length
    other.terminate()
    restarted.kill()
    assert_shm_clean(before)
    return watch


def test_server(engines: Engines, servers: list[Server], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    model = engines.models.folder("llama")

    def start(name: str) -> Server:
        config = connector(secondary_tiers=[fs(root)])
        options = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}
        return Server(model, tmp_path / f"{name}.log", config, **options)

    print(f"\n{_check(servers, start, root, 20 * BLOCK + 7, 0.9)}")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """A small model with real weights; the demo makes its folder."""
    from tierkv.bench import MissingExtraError
    from tierkv.bench.demo.model import model_folder

    try:
        return model_folder()
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.mark.soak
def test_server_with_a_real_model(smollm2: Path, servers: list[Server], tmp_path: Path) -> None:
    root = tmp_path / "kv"

    def start(name: str) -> Server:
        config = connector(2 << 30, secondary_tiers=[fs(root)])
        options = {"kv_cache_memory_bytes": 512 << 20, "max_model_len": 8192}
        return Server(smollm2, tmp_path / f"{name}.log", config, all_cores=True, **options)

    watch = _check(servers, start, root, 4000, 0.9)
    print(f"\n{watch}")
    # Far from the limit, so that a busy machine does not decide: reloading is another order of magnitude.
    assert watch.times["from the host"] < watch.times["cold"] / 4
