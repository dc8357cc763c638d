"""Other weights never get what these have computed; the same weights do, if they say that they are the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import BLOCK, EXTENSION, Engine, EngineError, connector, fs, most_hits, same, settle, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle

LENGTHS = (BLOCK - 1, 3 * BLOCK, 300)


def test_weights_that_are_swapped_under_one_path_do_not_share(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """One path, one architecture, one root, files of the same names and sizes: what differs is what they say."""
    config = connector(secondary_tiers=[fs(tmp_path / "kv")])
    prompts = [tokens(600 + n, length) for n, length in enumerate(LENGTHS)]
    hits = [most_hits(length, BLOCK) for length in LENGTHS]
    path = engines.models.folder("llama@2")  # which nobody else has open
    for weights, external in (("llama", [0, 0, 0]), ("llama@1", [0, 0, 0]), ("llama", hits)):
        shutil.rmtree(path)
        shutil.copytree(engines.models.folder(weights), path)
        with engines.running("llama@2", config) as engine:
            answers = engine.generate(prompts)
            engine.drain()
            settle(tmp_path / "kv")
        assert [a["external"] for a in answers] == external
        assert same(answers, oracle(weights, prompts))
    assert not same(oracle("llama", prompts), oracle("llama@1", prompts))


def _update(engine: Engine, name: str | None) -> None:
    """What a trainer does, the update itself left out."""
    assert engine.reset(connector=True)
    engine.invalidate(name)


def test_engines_whose_weights_have_one_name_share(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """The first request after the update shares already; what has no name, or another one, does not."""
    config = connector(secondary_tiers=[fs(tmp_path / "kv")])
    prompt = tokens(610, 300)
    hits = most_hits(len(prompt), BLOCK)
    expected = oracle("llama", [prompt])

    def ask(engine: Engine) -> int:
        answer = engine.one(prompt)
        assert same([answer], expected)
        engine.drain()
        settle(tmp_path / "kv")
        return int(answer["external"])

    with engines.running("llama", config, **EXTENSION) as engine:
        assert ask(engine) == 0
        _update(engine, "step-1")
        assert ask(engine) == 0
        assert engine.reset()
        assert ask(engine) == hits
    with engines.running("llama", config, **EXTENSION) as engine:
        assert ask(engine) == hits, "the weights are those of the files"
        _update(engine, "step-1")
        assert ask(engine) == hits
        _update(engine, "step-2")
        assert ask(engine) == 0
        _update(engine, None)
        assert ask(engine) == 0
        assert engine.reset(connector=True)  # no name is remembered beyond a reset
        assert ask(engine) == 0
        _update(engine, "step-1")
        assert ask(engine) == hits
    # Before its first request, without a reset: the weights of the files have not been asked for yet.
    with engines.running("llama", config, **EXTENSION) as engine:
        engine.invalidate("step-2")
        assert ask(engine) == hits


def test_a_wrong_name_is_refused(engines: Engines) -> None:
    wrong: Any
    with engines.running("llama", connector(), **EXTENSION) as engine:
        for wrong in ("", 7, ["step-1"]):
            with pytest.raises(EngineError, match=r"ConfigError: name: .* names no weights; accepted: "):
                engine.invalidate(wrong)
    with engines.running("llama", **EXTENSION) as engine, pytest.raises(EngineError, match="has no TierKVConnector"):
        engine.invalidate("step-1")
