"""Multi-head latent attention: what is loaded answers as what the device's own prefix cache has, bit for bit.

A computed prefix is no oracle here: on the CPU, vLLM computes latents that it has just made, and those that it finds in
its cache, in ways that differ by up to some hundredths of a logprob.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_harness import BLOCK, Engine, connector, fs, most_hits, same, settle, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Json

PROMPTS = [tokens(seed, length) for seed, length in ((0, 8 * BLOCK), (1, 131), (2, 20 * BLOCK + 5))]
HITS = [most_hits(len(p), BLOCK) for p in PROMPTS]


def _start(engines: Engines, config: Json | None) -> Engine:
    engine = engines.process()
    engine("allow_latent_prefix_caching")
    engine.start("deepseek", config, dtype="bfloat16")
    return engine


def test_latents(engines: Engines, tmp_path: Path) -> None:
    alone = _start(engines, None)
    expected = []
    for prompt, hit in zip(PROMPTS, HITS, strict=True):
        alone.one(prompt)
        expected.append(alone.one(prompt))
        assert expected[-1]["local"] == hit
    alone.close()

    config = connector(secondary_tiers=[fs(tmp_path / "kv")])
    first = _start(engines, config)
    assert [a["external"] for a in first.generate(PROMPTS)] == [0, 0, 0]
    first.forget_device()
    again = first.generate(PROMPTS)
    assert [a["external"] for a in again] == HITS
    assert same(again, expected)
    settle(tmp_path / "kv")
    first.close()

    second = _start(engines, config)
    loaded = second.generate(PROMPTS)
    assert [a["external"] for a in loaded] == HITS
    assert same(loaded, expected)
