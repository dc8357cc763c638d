"""Models with recurrent states: a hit is a prefix of attention and the one state at its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_harness import Engine, connector, fs, same, settle, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Json

#: Model → the engine's options: delta nets run in bfloat16 only.
MODELS: dict[str, Json] = {
    "granite": {},
    "falcon-h1": {},
    "nemotron-h": {},
    "qwen3-next": {"dtype": "bfloat16"},
}


def _start(engines: Engines, model: str, config: Json | None, **other: object) -> Engine:
    engine = engines.process()
    engine("allow_states")
    options = {
        "max_model_len": 4096,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        **MODELS[model],
        **other,
    }
    engine.start(model, config, **options)
    return engine


@pytest.mark.parametrize("model", MODELS)
def test_states(model: str, engines: Engines, tmp_path: Path) -> None:
    alone = _start(engines, model, None)
    size = alone("block_sizes")[0]
    prompts = [tokens(seed, length) for seed, length in ((0, 2 * size), (1, 2 * size + 1), (2, 3 * size + 17))]
    hits = [(len(p) - 1) // size * size for p in prompts]
    cold = alone.generate(prompts)
    local = alone.generate(prompts)
    assert [a["local"] for a in local] == hits
    alone.close()

    config = connector(cpu_bytes=256 << 20, secondary_tiers=[fs(tmp_path / "kv")])
    first = _start(engines, model, config)
    assert same(first.generate(prompts), cold)
    first.forget_device()
    again = first.generate(prompts)
    assert [a["external"] for a in again] == hits
    assert same(again, local)
    first.drain()
    settle(tmp_path / "kv")
    first.close()

    second = _start(engines, model, config)
    loaded = second.generate(prompts)
    assert [a["external"] for a in loaded] == hits
    assert same(loaded, local)


def test_storm(engines: Engines, tmp_path: Path) -> None:
    """Little device memory and many requests: blocks are preempted and reused while they are stored and loaded."""
    alone = _start(engines, "granite", None)
    size = alone("block_sizes")[0]
    roots = [tokens(1000 + i, (1 + i % 2) * size) for i in range(3)]
    prompts = [roots[i % 3] + tokens(1100 + i, 17 + size * (i % 3) // 2) for i in range(9)]
    expected = [a["tokens"] for a in alone.generate(prompts, max_tokens=size, logprobs=None)]
    alone.close()

    config = connector(64 << 20, offload_prompt_only=False, secondary_tiers=[fs(tmp_path / "kv")])
    options = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 4 * size, "max_num_seqs": 6}
    engine = _start(engines, "granite", config, **{**options, "max_model_len": 6 * size})
    engine("call", function="slow_copies", arguments={"store": True, "seconds": 0.02})
    engine("call", function="slow_copies", arguments={"store": False, "seconds": 0.004})
    for attempt in ("computed", "reloaded"):
        answers = engine.generate(prompts, together=True, max_tokens=size, logprobs=None)
        assert [a["tokens"] for a in answers] == expected, attempt
        engine.forget_device()
    counters = engine("metrics")
    assert counters["num_preemptions"] > 0
    assert counters["external_prefix_cache_hits"] > 5 * size
    engine.drain()
    settle(tmp_path / "kv")
    assert engine("free_blocks") == engine.device_blocks
    engine.close()
    reader = _start(engines, "granite", config)
    answers = reader.generate(prompts, max_tokens=size, logprobs=None)
    assert [a["tokens"] for a in answers] == expected
    assert sum(a["external"] for a in answers) > 5 * size
