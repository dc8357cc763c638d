"""What of the engine's configuration decides: the groups, their pages, and the namespace."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tierkv.config import WITHOUT_EFFECT, CacheConfig, parse
from tierkv.connector import compat
from tierkv.errors import ConfigError, UnsupportedError
from tierkv.keys import GroupNamespace, Namespace
from tierkv.layout import canonical
from tierkv.layout.spec import STATE, GroupSpec, LayerPage, ModelSpec, Plane
from tierkv.weights import weights_identity

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

logger = init_logger(__name__)

#: Which specs can be offloaded, by exact type: a subclass may keep its pages in another way.
KINDS: dict[type[Any], str] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "mla",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalAttentionSpec: "chunked_local",
    MambaSpec: "state",
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine, as both halves see it.

    group_ids: the engine's ids of the groups that are offloaded, in our order. block_sizes: tokens of a
    block of every group of the engine. align: tokens; the engine can only use hits that are multiples.
    extended: whether the workers have an extension, through which their weights may be given a name.
    """

    config: CacheConfig
    model: ModelSpec
    group_ids: tuple[int, ...]
    block_sizes: tuple[int, ...]
    align: int
    hash_block_size: int
    extended: bool = False

    @property
    def hashes_per_chunk(self) -> tuple[int, ...]:
        return tuple(g.tokens_per_chunk // self.hash_block_size for g in self.model.groups)


def read_deployment(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Deployment:
    """The deployment of ``kv_transfer_config``.

    Raises:
        ConfigError: ``kv_connector_extra_config`` cannot be used.
        UnsupportedError: the model or its parallelism cannot be offloaded (yet).
    """
    _check_parallelism(vllm_config)
    config = parse(_transfer_config(vllm_config).kv_connector_extra_config)
    group_ids = tuple(kv_cache_config.prefix_cacheable_group_ids)
    groups = [kv_cache_config.kv_cache_groups[i] for i in group_ids]
    if compat.zeroes_blocks_before_the_fence(vllm_config, kv_cache_config):
        raise UnsupportedError(
            "the V2 model runner with a KV cache of several precisions is not supported yet; "
            "supported: VLLM_USE_V2_MODEL_RUNNER=0, or one precision"
        )
    if not groups or len(groups) != len(kv_cache_config.kv_cache_groups):
        raise UnsupportedError("a model with KV-cache groups that cannot be offloaded; supported: all groups or none")
    blocks = _blocks_per_chunk(config, [g.kv_cache_spec.block_size for g in groups])
    specs = tuple(_group_spec(i, group, blocks, vllm_config) for i, group in enumerate(groups))
    hash_size = compat.hash_block_size(vllm_config, kv_cache_config)
    if any(g.tokens_per_block % hash_size for g in specs):
        raise UnsupportedError(
            f"block sizes {[g.tokens_per_block for g in specs]} with a hash block of {hash_size} tokens; "
            "supported: multiples of it"
        )
    block_sizes = tuple(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups)
    if any(g.kind == STATE for g in specs) and len(set(block_sizes)) > 1:
        raise UnsupportedError(f"recurrent states with blocks of {list(block_sizes)} tokens; supported: of one size")
    ranks = vllm_config.parallel_config.world_size
    return Deployment(
        config,
        ModelSpec(specs, ranks),
        group_ids,
        block_sizes,
        align=math.lcm(*block_sizes),
        hash_block_size=hash_size,
        extended=bool(vllm_config.parallel_config.worker_extension_cls),
    )


def make_namespace(deployment: Deployment, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Namespace:
    """Everything beside the tokens that changes the bytes of a chunk. Reads the weight files."""
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    algorithm = cache_config.prefix_caching_hash_algo
    config = deployment.config
    dtype = model_config.dtype if cache_config.cache_dtype == "auto" else cache_config.cache_dtype
    kv_dtype = str(dtype).removeprefix("torch.")
    if getattr(cache_config, "calculate_kv_scales", False):
        kv_dtype += f":scales-of-{uuid.uuid4().hex}"
        logger.warning("KV scales are computed at run time: nothing is shared with other processes or runs.")
    return Namespace(
        model=_model_identity(model_config),
        weights=_weights(model_config, vllm_config.load_config, config),
        draft_weights=_draft_weights(vllm_config, config),
        kv_dtype=kv_dtype,
        hash_algorithm=algorithm,
        hash_seed=compat.hash_seed(algorithm),
        hash_block_size=deployment.hash_block_size,
        groups=tuple(
            _group_namespace(spec, kv_cache_config.kv_cache_groups[i])
            for spec, i in zip(deployment.model.groups, deployment.group_ids, strict=True)
        ),
        layout=_layout(deployment, vllm_config, kv_cache_config),
        cache_namespace=config.cache_namespace,
    )


def log_notes(deployment: Deployment, vllm_config: VllmConfig) -> None:
    """Say at start what a user might not expect."""
    transfer = _transfer_config(vllm_config)
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a request whose load fails will fail. Set it to 'recompute'.",
            transfer.kv_load_failure_policy,
        )
    if vllm_config.lora_config is not None and deployment.config.secondary_tiers:
        logger.warning(
            "LoRA adapters are told apart by name and path: never replace an adapter's files under its path."
        )
    raw = transfer.kv_connector_extra_config
    unused = [name for name in WITHOUT_EFFECT if name in raw]
    if unused:
        logger.info("accepted without effect: %s", ", ".join(unused))


def _transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    assert vllm_config.kv_transfer_config is not None, "connectors are made only if there is one"
    return vllm_config.kv_transfer_config


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedError(f"{name}={getattr(parallel, name)} is not supported yet; supported: 1")
    if getattr(parallel, "nnodes_within_dp", 1) != 1:
        raise UnsupportedError("tensor parallelism over several nodes is not supported; supported: ranks on one host")


def _blocks_per_chunk(config: CacheConfig, block_sizes: list[int]) -> int:
    if config.block_size is None:
        return config.blocks_per_chunk or 1
    if len(set(block_sizes)) > 1:
        raise ConfigError(
            "block_size", f"the groups of this model have blocks of {block_sizes} tokens", "blocks_per_chunk instead"
        )
    if config.block_size % block_sizes[0]:
        raise ConfigError("block_size", f"{config.block_size} tokens", f"a multiple of {block_sizes[0]} tokens")
    return config.block_size // block_sizes[0]


def _group_spec(index: int, group: KVCacheGroupSpec, blocks_per_chunk: int, vllm_config: VllmConfig) -> GroupSpec:
    if group.host_resident or group.is_eagle_group:
        raise UnsupportedError("host-resident and draft-model (EAGLE, MTP) KV-cache groups are not supported yet")
    pages = []
    for layer in group.layer_names:
        spec = compat.layer_spec(group.kv_cache_spec, layer)
        if type(spec) not in KINDS or not _is_plain(spec):
            raise UnsupportedError(
                f"layer {layer} has a KV cache of kind {type(spec).__name__}, which is not supported yet; "
                f"supported: {', '.join(t.__name__ for t in KINDS)}"
            )
        pages.append(_page(layer, spec, vllm_config))
    first = compat.layer_spec(group.kv_cache_spec, group.layer_names[0])
    return GroupSpec(
        group=index,
        kind=KINDS[type(first)],
        tokens_per_block=group.kv_cache_spec.block_size,
        blocks_per_chunk=1 if isinstance(first, MambaSpec) else blocks_per_chunk,
        window=_window(first),
        pages=tuple(pages),
    )


def _is_plain(spec: Any) -> bool:
    """Attention: one cell a token. States: kept at the ends of blocks, and nothing speculative among them."""
    if isinstance(spec, MambaSpec):
        return bool(spec.mamba_cache_mode == "align" and not spec.num_speculative_blocks)
    return bool(spec.tokens_per_state == 1)


def _page(layer: str, spec: KVCacheSpec, vllm_config: VllmConfig) -> LayerPage:
    """The canonical page of a layer, or an opaque one where the heads of all ranks cannot be told.

    States are opaque: a MambaSpec has the shapes of this rank's part, and not along which of their dimensions, nor in
    how many sections (of a convolution: inputs, B and C, each by itself), a kernel's author has split them.
    """
    ranks = vllm_config.parallel_config.world_size
    if isinstance(spec, MambaSpec):
        return LayerPage.opaque(layer, spec.state_content_size_bytes, ranks)
    heads = compat.total_kv_heads(layer, spec, vllm_config)
    if heads is None:
        return LayerPage.opaque(layer, spec.unpadded_page_size_bytes, ranks)
    name = "latent" if isinstance(spec, MLAAttentionSpec) else "kv"
    packing = compat.cell_packing(spec, vllm_config)
    if packing:
        cell = spec.num_states * spec.state_content_size_bytes
        return LayerPage(layer, (Plane(f"{name}:{packing}", heads, 1, cell),))
    return LayerPage(layer, (Plane(name, heads, spec.num_states, spec.state_content_size_bytes),))


def _cell(spec: KVCacheSpec) -> str:
    """What a cell is made of, for the namespace."""
    if isinstance(spec, MambaSpec):
        shapes = "+".join(f"{tuple(s)}:{d}" for s, d in zip(spec.shapes, spec.dtypes, strict=True))
        return f"{spec.mamba_type.name}:{shapes}"
    return f"{spec.head_size}+{spec.head_size_v}:{spec.dtype}:{spec.kv_quant_mode.name}"


def _window(spec: KVCacheSpec) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window + spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 0


def _group_namespace(spec: GroupSpec, group: KVCacheGroupSpec) -> GroupNamespace:
    specs = [compat.layer_spec(group.kv_cache_spec, layer) for layer in group.layer_names]
    return GroupNamespace(
        kind=spec.kind,
        tokens_per_block=spec.tokens_per_block,
        tokens_per_chunk=spec.tokens_per_chunk,
        window=spec.window,
        layers=tuple(p.layer for p in spec.pages),
        pages=tuple(map(str, spec.pages)),
        cells=tuple(map(_cell, specs)),
    )


def _layout(deployment: Deployment, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    opaque = deployment.model.opaque_layers
    if not opaque:
        return canonical.LAYOUT
    topology = compat.topology(vllm_config, kv_cache_config)
    logger.warning(
        "The KV cache of %d layers (%s …) is kept as opaque bytes of %s: only engines of that topology share it.",
        len(opaque),
        opaque[0],
        topology,
    )
    return topology


def _model_identity(model_config: Any) -> str:
    """Architecture and whatever of the model's configuration is not in its weights: rope, windows, …"""
    described = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        described.pop(name, None)
    text = json.dumps(described, sort_keys=True, default=str)
    if "longrope" in text:  # which of its two scales a model uses depends on the longest context that it is served with
        text += f":{model_config.max_model_len}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    architectures = "+".join(getattr(model_config.hf_config, "architectures", None) or ["unknown"])
    dtype = str(model_config.dtype).removeprefix("torch.")
    return f"{architectures}:{digest}:{dtype}:{model_config.quantization or 'none'}"


def _weights(model_config: Any, load_config: Any, config: CacheConfig) -> str:
    if load_config.load_format == "dummy":
        return f"dummy:{model_config.seed}"
    directory = compat.weights_directory(model_config.model, model_config.revision, load_config.download_dir)
    try:
        if directory is not None:
            return weights_identity(directory, config.weights_check)
    except FileNotFoundError:
        pass
    logger.warning("No weight files of %s can be read: nothing is shared with other processes.", model_config.model)
    return f"unknown:{uuid.uuid4().hex}"


def _draft_weights(vllm_config: VllmConfig, config: CacheConfig) -> str:
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return ""
    return _weights(draft, vllm_config.load_config, config)
