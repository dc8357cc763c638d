"""What comes back from the host cache gives the same answers, bit for bit, as what was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, Engine, connector, most_hits, same, tokens
from vllm_models import MODELS, WINDOW

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

#: Blocks of a chunk, by model: every model and every size occurs.
CHUNKS = {"llama": 1, "qwen3": 3, "mistral": 2, "gemma3": 2, "gpt-oss": 4}


def _lengths(chunk: int) -> list[int]:
    """Around one, two and three chunks, within a block, and well beyond the window."""
    return [chunk - 1, chunk, chunk + 1, 2 * chunk + 7, 3 * chunk - 1, 3 * chunk, 3 * chunk + 1, 8 * BLOCK + 70, 617]


@pytest.mark.parametrize("model", MODELS)
def test_reloads_what_was_computed(model: str, engines: Engines, oracle: Oracle) -> None:
    chunk = CHUNKS[model] * BLOCK
    prompts = [tokens(seed, length) for seed, length in enumerate(_lengths(chunk))]
    # Short steps, so that a long prompt takes several and its window moves on while it is computed.
    options = {"max_num_batched_tokens": 2 * WINDOW, "max_num_seqs": 8}
    with engines.running(model, connector(blocks_per_chunk=CHUNKS[model]), **options) as engine:
        cold = engine.generate(prompts)
        assert [a["external"] for a in cold] == [0] * len(prompts)
        engine.forget_device()
        again = engine.generate(prompts)
    computed = oracle(model, prompts)
    for prompt, first, second, expected in zip(prompts, cold, again, computed, strict=True):
        hits = most_hits(len(prompt), chunk)
        assert second["local"] == 0
        assert second["external"] == hits
        assert same([second], [oracle.after_hit(model, prompt, hits)])
        if len(prompt) - hits > 1:
            assert same([second], [expected])
        if len(prompt) % options["max_num_batched_tokens"] != 1:  # else the last step is a decode to vLLM
            assert same([first], [expected])


@pytest.mark.parametrize(("model", "blocks"), [("llama", 1), ("llama", 2), ("llama", 4), ("gpt-oss", 4)])
def test_local_hits_within_a_chunk(model: str, blocks: int, engines: Engines, oracle: Oracle) -> None:
    """The device has the first ``b`` blocks of a prompt, for each ``b``; the rest is loaded from its chunks."""
    prompt = tokens(100, 9 * BLOCK + 5)
    [expected] = oracle(model, [prompt])
    hits = most_hits(len(prompt), blocks * BLOCK)
    with engines.running(model, connector(blocks_per_chunk=blocks)) as engine:
        assert same([engine.one(prompt)], [expected])
        for local in range(9):
            engine.forget_device()
            if local:
                engine.one(prompt[: local * BLOCK + 1], max_tokens=1)
            answer = engine.one(prompt)
            assert answer["local"] == local * BLOCK
            assert answer["local"] + answer["external"] == max(hits, answer["local"])
            assert same([answer], [expected]), f"with {local} blocks on the device"


def test_branches_of_one_prompt(engines: Engines, oracle: Oracle) -> None:
    """Prompts that share a prefix share its chunks, and only those."""
    root = tokens(200, 6 * BLOCK)
    branches = [root[: 4 * BLOCK] + tokens(201 + i, 3 * BLOCK + 5 * i + 2) for i in range(4)]
    expected = oracle("llama", branches)
    with engines.running("llama", connector(blocks_per_chunk=2)) as engine:
        engine.one(root)
        for branch, answer in zip(branches, expected, strict=True):
            engine.forget_device()
            first = engine.one(branch)
            assert (first["local"], first["external"]) == (0, 4 * BLOCK)
            assert same([first], [answer])
        engine.forget_device()
        assert same(engine.generate(branches), expected)


def test_answers_to_a_batch(engines: Engines, oracle: Oracle) -> None:
    """Many requests that load at once, some sharing chunks: the same tokens as one at a time."""
    prompts = [tokens(300 + i // 2, 64 + 37 * i) for i in range(12)]
    expected = [a["tokens"] for a in oracle("gemma3", prompts)]
    with engines.running("gemma3", connector()) as engine:
        assert [a["tokens"] for a in engine.generate(prompts, together=True)] == expected
        engine.forget_device()
        before = engine("metrics")["external_prefix_cache_hits"]
        assert [a["tokens"] for a in engine.generate(prompts, together=True)] == expected
        assert engine("metrics")["external_prefix_cache_hits"] - before > 2000


def test_decoded_tokens_are_kept_if_asked_for(engines: Engines, oracle: Oracle) -> None:
    """The next turn of a conversation: prompt, answer and a new question."""
    prompt = tokens(400, 2 * BLOCK + 9)
    for prompt_only in (True, False):
        with engines.running("llama", connector(offload_prompt_only=prompt_only)) as engine:
            first = engine.one(prompt, max_tokens=70)
            turn = prompt + first["tokens"] + tokens(401, 40)
            engine.forget_device()
            second = engine.one(turn)
        # The last token of the answer was never computed.
        kept = len(prompt) if prompt_only else len(prompt) + len(first["tokens"]) - 1
        assert second["external"] == kept // BLOCK * BLOCK
        assert second["tokens"] == oracle("llama", [turn])[0]["tokens"]


def test_cache_salt_separates(engines: Engines, oracle: Oracle) -> None:
    prompt = tokens(500, 5 * BLOCK + 3)
    expected = oracle("llama", [prompt])
    with engines.running("llama", connector()) as engine:
        _ask_salted(engine, prompt, "one")
        engine.forget_device()
        for salt, external in (("two", 0), ("one", 5 * BLOCK)):
            answer = _ask_salted(engine, prompt, salt)
            assert answer["external"] == external
            assert same([answer], expected)
        assert engine.one(prompt)["external"] == 0


def _ask_salted(engine: Engine, prompt: list[int], salt: str) -> dict[str, object]:
    return engine.one({"tokens": prompt, "salt": salt})
