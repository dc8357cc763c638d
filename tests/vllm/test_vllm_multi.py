"""Inside a MultiConnector, beside another connector that stores and loads on its own account."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, connector, fs, most_hits, same, settle, tokens

if TYPE_CHECKING:
    from vllm_harness import Engines, Json, Oracle

PROMPTS = [tokens(seed, length) for seed, length in ((0, 6 * BLOCK), (1, 515), (2, 9 * BLOCK + 20))]
HITS = [most_hits(len(p), BLOCK) for p in PROMPTS]


def _multi(*connectors: Json) -> Json:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_another_connector(ours_first: bool, engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    """Whoever is asked first serves what both have; the other serves what the first has not."""
    ours = connector(secondary_tiers=[fs(tmp_path / "kv")])
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    config = _multi(ours, other) if ours_first else _multi(other, ours)
    expected = oracle("llama", PROMPTS)
    engine = engines.start("llama", config)
    assert same(engine.generate(PROMPTS), expected)
    engine.forget_device()
    again = engine.generate(PROMPTS)
    assert all(a["external"] > 0 for a in again)
    if ours_first:
        assert [a["external"] for a in again] == HITS
    assert same(again, expected)
    engine.drain()
    settle(tmp_path / "kv")
    engine.close()

    alone = engines.start("llama", connector(secondary_tiers=[fs(tmp_path / "kv")]))
    answers = alone.generate(PROMPTS)
    assert [a["external"] for a in answers] == HITS
    assert same(answers, expected)
