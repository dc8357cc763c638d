"""Very little device memory and many requests: blocks are preempted and reused while they are stored and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, connector, fs, settle, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

DECODED = 48

#: Device blocks: enough for two or three of the requests. The groups of a model share them.
DEVICE_BLOCKS = {"llama": 16, "gemma3": 70, "gpt-oss": 24}


def _prompts() -> list[list[int]]:
    """Three families that share two or three blocks, of different lengths."""
    roots = [tokens(1000 + i, (2 + i % 2) * BLOCK) for i in range(3)]
    return [roots[i % 3] + tokens(1100 + i, 17 + 13 * (i % 7)) for i in range(10)]


@pytest.mark.parametrize(
    ("model", "prompt_only", "blocks"),
    [("llama", False, 1), ("gemma3", False, 1), ("gpt-oss", True, 2)],
)
def test_storm(model: str, prompt_only: bool, blocks: int, engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    prompts = _prompts()
    expected = [a["tokens"] for a in oracle(model, prompts, max_tokens=DECODED, logprobs=None)]
    config = connector(
        16 << 20, offload_prompt_only=prompt_only, blocks_per_chunk=blocks, secondary_tiers=[fs(tmp_path / "kv")]
    )
    options = {
        "num_gpu_blocks_override": DEVICE_BLOCKS[model],
        "max_model_len": 256,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    }
    with engines.running(model, config, **options) as engine:
        # Stores that read late, and loads that write late, meet blocks that have changed hands if nothing waits.
        engine("call", function="slow_copies", arguments={"store": True, "seconds": 0.02})
        engine("call", function="slow_copies", arguments={"store": False, "seconds": 0.004})
        for attempt in ("computed", "reloaded"):
            answers = engine.generate(prompts, together=True, max_tokens=DECODED, logprobs=None)
            assert [a["tokens"] for a in answers] == expected, attempt
            engine.forget_device()
        counters = engine("metrics")
        print(f"\n{model}: {counters['num_preemptions']:.0f} preemptions, ", end="")
        print(f"{counters['external_prefix_cache_hits']:.0f} tokens reloaded")
        assert counters["num_preemptions"] > 0
        assert counters["external_prefix_cache_hits"] > 500
        engine.drain()
        settle(tmp_path / "kv")
        assert engine("free_blocks") == engine.device_blocks
    # Whatever the storm has stored is right: another process answers from it.
    with engines.running(model, config) as engine:
        answers = engine.generate(prompts, max_tokens=DECODED, logprobs=None)
        assert [a["tokens"] for a in answers] == expected
        assert sum(a["external"] for a in answers) > 300
