"""Bad input gets an error that names the field and says what is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.config import CacheConfig, parse
from tierkv.errors import ConfigError


@pytest.mark.parametrize(
    ("raw", "field", "accepted"),
    [
        ({}, "cpu_bytes_to_use", "an integer above 0"),
        ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use", "int >= 1"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use", "int >= 1"),
        ({"cpu_bytes_to_use": "1 GiB"}, "cpu_bytes_to_use", "int"),
        ({"cpu_bytes_tu_use": 1}, "cpu_bytes_tu_use", "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 1, "blocks_per_chunk": 0}, "blocks_per_chunk", "int >= 1"),
        ({"cpu_bytes_to_use": 1, "block_size": 16, "blocks_per_chunk": 2}, "block_size", "one of block_size"),
        ({"cpu_bytes_to_use": 1, "reset_scope": "disk"}, "reset_scope", "'all', 'host'"),
        ({"cpu_bytes_to_use": 1, "load_timeout_s": 0}, "load_timeout_s", "float > 0"),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": [3]}, "secondary_tiers[0]", "object"),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": {}}, "secondary_tiers", "array"),
    ],
)
def test_an_error_names_the_field_and_what_is_accepted(raw: dict[str, Any], field: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    assert caught.value.field == field
    assert accepted in caught.value.accepted
    assert str(caught.value).startswith(f"{field}: ")


def test_a_misspelt_field_is_told_which_was_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cpu_bytes_to_use'"):
        parse({"cpu_bytes_tu_use": 1})


def test_a_configuration_of_the_engine_s_own_tiering_is_valid_as_it_is() -> None:
    config = parse(
        {
            "spec_name": "TieringOffloadingSpec",
            "spec_module_path": "some.module",
            "cpu_bytes_to_use": 1 << 30,
            "block_size": 256,
            "eviction_policy": "arc",
            "store_threshold": 2,
            "max_tracker_size": 1000,
            "offload_prompt_only": False,
            "canonical_layout": True,
            "self_describing_kv_events": True,
            "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
            "secondary_tiers": [{"type": "fs", "root_dir": "/x", "backpressure": {}}],
        }
    )
    assert isinstance(config, CacheConfig)
    assert config.eviction_policy == "arc"
