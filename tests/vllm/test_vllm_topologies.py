"""Engines of different topologies and device layouts share what they store: by the bytes alone, through ``fs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, Engine, connector, fs, most_hits, same, settle, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Json, Oracle

CHUNK = 2 * BLOCK
PROMPTS = [tokens(seed, length) for seed, length in ((0, 6 * CHUNK), (1, 515), (2, 4 * CHUNK + 20))]
HITS = [most_hits(len(p), CHUNK) for p in PROMPTS]
#: Ranks add up in another order than one process does.
TOLERANCE = 1e-4


def two_ranks(engines: Engines, model: str, config: Json | None) -> Engine:
    return engines.start(model, config, tensor_parallel_size=2, distributed_executor_backend="mp")


def close(answers: list[Json], expected: list[Json]) -> bool:
    """Whether the tokens are equal, and the logprobs within ``TOLERANCE``."""
    for answer, other in zip(answers, expected, strict=True):
        if answer["tokens"] != other["tokens"]:
            return False
        for found, wanted in zip(answer["logprobs"], other["logprobs"], strict=True):
            logprobs = dict(wanted)
            if any(abs(value - logprobs[token]) > TOLERANCE for token, value in found if token in logprobs):
                return False
    return True


def written(engine: Engine, root: Path) -> list[Json]:
    """The answers to all prompts, computed; what is to be stored is on disk, and the engine has ended."""
    answers = engine.generate(PROMPTS)
    assert [a["external"] for a in answers] == [0, 0, 0]
    engine.drain()
    settle(root)
    engine.close()
    (path,) = root.glob("*/namespace.json")
    namespace = json.loads(path.read_text())
    assert namespace["layout"] == "canonical-1"
    # The bytes are those of this kind of processor, and say so.
    assert all(page.startswith("kv:cpu-") for group in namespace["groups"] for page in group["pages"])
    return answers


@pytest.mark.parametrize("model", ["llama", "mqa", "gemma3"])
def test_two_ranks_and_one_read_each_others_chunks(
    model: str, engines: Engines, oracle: Oracle, tmp_path: Path
) -> None:
    by_two = connector(blocks_per_chunk=2, secondary_tiers=[fs(tmp_path / "two")])
    cold = written(two_ranks(engines, model, by_two), tmp_path / "two")
    with engines.running(model, by_two) as single:
        answers = single.generate(PROMPTS)
    assert [a["external"] for a in answers] == HITS
    assert close(answers, oracle(model, PROMPTS)) and close(answers, cold)

    by_one = connector(blocks_per_chunk=2, secondary_tiers=[fs(tmp_path / "one")])
    assert same(written(engines.start(model, by_one), tmp_path / "one"), oracle(model, PROMPTS))
    reader = two_ranks(engines, model, by_one)
    answers = reader.generate(PROMPTS)
    reader.close()
    assert [a["external"] for a in answers] == HITS
    assert close(answers, cold)
    # Not because nothing differs: the tolerance is for what the two do add up differently.
    names = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert names <= {path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*") if path.is_file()}


@pytest.mark.parametrize("layout", ["BLHNC"])
def test_layouts_of_the_device_read_each_others_chunks(
    layout: str, engines: Engines, oracle: Oracle, tmp_path: Path
) -> None:
    """An engine that keeps all layers of a block together, and one that keeps all blocks of a layer together.

    (The attention of the CPU has no kernels for tokens outermost; ``tests/transfer/test_topologies.py`` has them.)
    """

    def start(other: bool, config: Json) -> Engine:
        engine = engines.process()
        if other:
            engine("allow_layout", name=layout)
        engine.start("llama", config)
        assert engine.layout == (layout if other else "LBHNC")
        return engine

    expected = oracle("llama", PROMPTS)
    for first in (True, False):
        root = tmp_path / str(first)
        config = connector(blocks_per_chunk=2, secondary_tiers=[fs(root)])
        assert same(written(start(first, config), root), expected)
        reader = start(not first, config)
        answers = reader.generate(PROMPTS)
        assert [a["external"] for a in answers] == HITS
        assert same(answers, expected)
        reader.close()
