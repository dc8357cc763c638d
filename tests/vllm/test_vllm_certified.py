"""Which layers have canonical pages, and on how many ranks: a table of models and groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tierkv.errors import UnsupportedError
from tierkv.layout.spec import LayerPage, Plane

# Importing vLLM within the test's own process brings its warnings along.
pytestmark = pytest.mark.filterwarnings("default")

LAYER = "model.layers.3.self_attn.attn"


class Layer(NamedTuple):
    """One layer of a model as it is released: its KV heads in all, and what else its spec says."""

    kind: str
    heads: int
    head_size: int = 128
    shards: int | None = None


#: Every attention group of these must be certified, on 1, 2, 4 and 8 ranks.
ATTENTION = {
    "Llama 3 8B": Layer("full", 8),
    "Qwen3 0.6B": Layer("full", 8),
    "Mistral 7B": Layer("sliding_window", 8),
    "Gemma 3 1B, local": Layer("sliding_window", 1, 256),
    "Gemma 3 1B, global": Layer("full", 1, 256),
    "Gemma 3 27B, local": Layer("sliding_window", 16),
    "gpt-oss 20B, local": Layer("sliding_window", 8, 64),
    "gpt-oss 20B, global": Layer("full", 8, 64),
    "Llama 4 Scout, local": Layer("chunked_local", 8),
    "DeepSeek V2": Layer("mla", 1, 576, shards=1),
    "Qwen3-Next, attention": Layer("full", 2, 256),
    "GraniteMoeHybrid, attention": Layer("full", 8),
    "FalconH1, attention": Layer("full", 2),
    "NemotronH, attention": Layer("full", 8),
}


def spec_of(layer: Layer, ranks: int, **other: Any) -> Any:
    """As vLLM makes it on each of ``ranks`` ranks."""
    import torch

    from tierkv.connector.config import KINDS

    made = {kind: cls for cls, kind in KINDS.items()}[layer.kind]
    extra: dict[str, Any] = {"sliding_window": 512} if layer.kind == "sliding_window" else {}
    if layer.kind == "chunked_local":
        extra = {"attention_chunk_size": 8192}
    fields = {
        "block_size": 16,
        "num_kv_heads": max(1, layer.heads // ranks),
        "head_size": layer.head_size,
        "dtype": torch.bfloat16,
        "max_tp_shards": layer.shards,
    }
    return made(**{**fields, **extra, **other})


def total_kv_heads(layer: str, spec: Any, vllm_config: Any) -> int | None:
    from tierkv.connector import compat

    return compat.total_kv_heads(layer, spec, vllm_config)


def config(heads: Any, ranks: int, **released: Any) -> Any:
    """What is read of vLLM's configuration; ``released``: what the model's own says beside ``num_key_value_heads``."""
    architecture = heads if hasattr(heads, "__getitem__") else _Uniform(heads)
    text = {"num_key_value_heads": heads if isinstance(heads, int) else None, "num_attention_heads": 64, **released}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, world_size=ranks),
        model_config=SimpleNamespace(
            model_arch_config=architecture, hf_text_config=SimpleNamespace(to_dict=lambda: text)
        ),
    )


class _Uniform:
    def __init__(self, heads: int) -> None:
        self.total_num_kv_heads = heads

    def __getitem__(self, layer: int) -> _Uniform:
        return self


class _PerLayer(list[_Uniform]):
    """What vLLM makes of a configuration whose layers differ, if it notices."""

    per_layer_overrides = ()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ATTENTION)
def test_attention_is_certified(model: str, ranks: int) -> None:
    layer = ATTENTION[model]
    assert total_kv_heads(LAYER, spec_of(layer, ranks), config(layer.heads, ranks)) == layer.heads


def test_layers_may_differ() -> None:
    per_layer = _PerLayer([_Uniform(8)] * 3 + [_Uniform(2)])
    assert total_kv_heads(LAYER, spec_of(Layer("full", 2), 4), config(per_layer, 4)) == 2
    assert total_kv_heads("model.layers.0.attn", spec_of(Layer("full", 8), 4), config(per_layer, 4)) == 8


@pytest.mark.parametrize(
    ("local", "other", "heads", "ranks"),
    [
        (3, {}, 8, 2),  # not what the model's configuration says of this layer
        (2, {}, 5, 2),  # neither divides the other
        (2, {"num_head_slots": 3}, 4, 2),  # packed in another way than a slot a head
        (2, {"num_head_slots": 2}, 8, 4),  # keys and values for heads, which happen to be as many
        (2, {"num_head_slots": 4}, 2, 1),  # also on one rank
        (2, {"state_content_bytes": 300}, 2, 1),  # cells of a backend's own
        (1, {"max_tp_shards": 3}, 1, 4),  # distinct parts that four ranks cannot share evenly
        (1, {}, SimpleNamespace(__getitem__=None), 2),  # a configuration that does not say
    ],
)
def test_what_cannot_be_told_is_opaque(local: int, other: dict[str, Any], heads: Any, ranks: int) -> None:
    spec = spec_of(Layer("full", 1), 1, num_kv_heads=local, **other)
    assert total_kv_heads(LAYER, spec, config(heads, ranks)) is None


@pytest.mark.parametrize(
    "released",
    [
        {"swa_num_key_value_heads": 8},  # MiMo V2: other layers have more heads than the model's one number
        {"layers": [{"attention": {"n_kv_heads": 8}}]},
        {"num_key_value_heads": None, "block_configs": [{"attention": {"n_heads_in_group": 4}}]},  # Nemotron NAS
    ],
)
def test_several_ranks_with_one_head_are_not_believed_to_have_the_same(released: dict[str, Any]) -> None:
    """A layer with eight heads on eight ranks looks like one with four, each twice. As many heads as ranks are safe."""
    spec = spec_of(Layer("full", 8), 8)
    assert total_kv_heads(LAYER, spec, config(4, 8, **released)) == 8
    assert total_kv_heads(LAYER, spec, config(4, 8)) == 4


def test_views_of_the_device() -> None:
    """The engine's tensor as bytes in the canonical order, kernel blocks put together; what it is not is refused."""
    import torch

    from tierkv.connector.worker import device_parts

    page = LayerPage("a", (Plane("kv", 2, 8, 12),))
    cache = torch.arange(6 * 2 * 8 * 6, dtype=torch.int16).view(6, 2, 8, 6)
    (((whole,)),) = device_parts(page, cache, 6)
    assert torch.equal(whole.contiguous().view(6, 2, 8, 12), cache.view(torch.int8))
    halves = torch.arange(12 * 2 * 4 * 6, dtype=torch.int16).view(12, 2, 4, 6)
    (((grouped,)),) = device_parts(page, halves, 6)
    expected = torch.cat([halves[0::2], halves[1::2]], dim=2)
    assert torch.equal(grouped.reshape(6, 2, 8, 12), expected.view(torch.int8).view(6, 2, 8, 12))
    of_heads = LayerPage("a", (Plane("kv:cpu-amx", 2, 1, 96),))
    (((heads,)),) = device_parts(of_heads, cache, 6)
    assert torch.equal(heads.reshape(6, 2, 96), cache.view(torch.int8).view(6, 2, 96))
    for other in (cache.transpose(1, 2).contiguous().transpose(1, 2), halves):
        with pytest.raises(UnsupportedError, match="expected 1 of 96 bytes"):
            device_parts(of_heads, other, 6)
    for wrong in (cache[:5], cache.transpose(2, 3), cache[:, :, :7], cache[..., :5], cache[0]):
        with pytest.raises(UnsupportedError, match="layer a"):
            device_parts(page, wrong, 6)
    opaque = LayerPage.opaque("a", 192)
    (((pages,)),) = device_parts(opaque, cache, 6)
    assert torch.equal(pages, cache.view(6, -1).view(torch.int8))
    with pytest.raises(UnsupportedError, match="dense page"):
        device_parts(opaque, cache.transpose(1, 2), 6)
