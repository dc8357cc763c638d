"""The one file that knows how releases of vLLM differ. Supported now: 0.32."""

from __future__ import annotations

import os
import platform
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

SUPPORTED = (0, 32)


def check_version(version: str = vllm.__version__) -> str | None:
    """Refuse releases whose connector interface is older; return a warning for newer ones.

    Raises:
        UnsupportedError: with the releases that are supported.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"cannot tell the release of vLLM {version!r}; tierkv is tested with 0.32"
    release = (int(found[1]), int(found[2]))
    if release < SUPPORTED:
        raise UnsupportedError(f"vLLM {version} is not supported; supported: 0.32")
    return f"vLLM {version} is newer than what tierkv is tested with (0.32)" if release > SUPPORTED else None


def layout_name(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The engine's resolved order of KV-cache dimensions, such as ``LBHNC``."""
    return str(kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout or "unknown")


def total_kv_heads(layer: str, spec: Any, vllm_config: VllmConfig) -> int | None:
    """Distinct KV heads of one layer on all ranks together; None if that cannot be told.

    More than there are, each as often, is a safe answer, which costs only sharing; fewer would let ranks that hold
    different heads take each other's for their own. So that several ranks hold the same head is believed of layers
    that say so (``max_tp_shards``: one latent for all), of models whose configuration vLLM reads layer by layer, and
    of those whose configuration knows one number of KV heads only.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if spec.num_head_slots is not None or spec.state_content_bytes is not None:
        return None  # a backend's own packing, in which a slot need not be a head
    local = int(spec.num_heads)
    if ranks == 1:
        return local
    if spec.max_tp_shards is not None:
        shards = min(ranks, int(spec.max_tp_shards))
        return local * shards if ranks % shards == 0 else None
    try:
        numbers = [int(part) for part in layer.split(".") if part.isdigit()]
        architecture = vllm_config.model_config.model_arch_config
        total = int((architecture[numbers[0]] if len(numbers) == 1 else architecture).total_num_kv_heads)
    except (AttributeError, IndexError, TypeError):
        return None
    if local != max(1, total // ranks):
        return None
    if total % ranks == 0:
        return total
    by_layer = getattr(architecture, "per_layer_overrides", None) is not None
    sure = by_layer or _kv_heads_in(vllm_config.model_config.hf_text_config.to_dict()) == {total}
    return total if ranks % total == 0 and sure else ranks if local == 1 else None


def _kv_heads_in(config: Any, named: bool = False) -> set[int]:
    """All numbers of KV heads in a model's configuration, however deep and of whichever layers."""
    if isinstance(config, dict):
        found = [
            _kv_heads_in(v, named or re.search(r"(kv|key_value)_?head|head_?kv", str(k)) is not None)
            for k, v in config.items()
        ]
    elif isinstance(config, list | tuple):
        found = [_kv_heads_in(v, named) for v in config]
    else:
        return {config} if named and isinstance(config, int) and not isinstance(config, bool) else set()
    return set().union(*found)


def cell_packing(spec: Any, vllm_config: VllmConfig) -> str:
    """The name of the order in which a head's tokens lie in a block; empty where a token is a key and then a value.

    The attention of the CPU keeps keys transposed, and with matrix units in tiles: other bytes on another processor.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    units = "amx" if torch.cpu._is_amx_tile_supported() else "simd"
    return f"cpu-{units}-{_get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)}"


def topology(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """All that the bytes of a page may depend on of which nothing is known but its size."""
    from vllm.platforms import current_platform

    configured = getattr(vllm_config, "attention_config", None)
    capability = current_platform.get_device_capability()
    fields = {
        "tp": vllm_config.parallel_config.tensor_parallel_size,
        "layout": layout_name(vllm_config, kv_cache_config),
        "device": current_platform.device_name,
        "capability": capability.as_version_str() if capability is not None else platform.machine(),
        "backend": getattr(getattr(configured, "backend", None), "name", "auto"),
    }
    return "topology:" + ",".join(f"{name}={value}" for name, value in fields.items())


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one entry of ``request.block_hashes`` covers."""
    if kv_cache_config.hash_block_size is not None:
        return int(kv_cache_config.hash_block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def device_cache_is_empty(block_pool: BlockPool) -> bool:
    """Whether the device's prefix cache holds nothing: its last reset has succeeded."""
    return len(block_pool.cached_block_hash_to_block) == 0


def zeroes_blocks_before_the_fence(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether the model runner clears reused blocks before it calls the connector's ``handle_preemptions``."""
    return bool(vllm_config.use_v2_model_runner and getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def hash_seed(algorithm: str) -> str:
    """What the engine's block hashes start from; ``random:…`` if it is another one in each process.

    The engine draws the seed only after it has made the connector, so its rule is followed here.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED={seed}"
    if algorithm.startswith("sha256"):
        from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

        return str(DEFAULT_NONE_HASH_SEED)
    return f"random:{uuid.uuid4().hex}"


def weights_directory(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where the files of a model are: its directory, or that of the hub's cache. None if neither is there."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception:  # whatever the hub's client raises, the answer is that the files are not here
        return None


def shield_numba() -> None:
    """Let a second engine start in a process that has loaded Numba.

    When a worker of vLLM 0.32 for the CPU starts, it asks every global of every module for its ``__dict__``. One of
    llvmlite's answers any attribute with a function, which that code cannot deal with.
    """
    from llvmlite.binding import ffi

    functions = getattr(ffi.lib, "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})


def hit_source(name: str) -> CacheHitSource:
    """The engine's word for where a tier keeps its chunks; a user's tier may have one that the engine has not."""
    try:
        return CacheHitSource(name)
    except ValueError:
        return CacheHitSource.EXTERNAL_UNSPECIFIED


def connectors_of_this_worker() -> list[Any]:
    """The connectors of the worker that this process is, those of a MultiConnector one by one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return []
    connector = get_kv_transfer_group()
    return list(getattr(connector, "sub_connectors", [connector]))


def layer_spec(group_spec: Any, layer: str) -> Any:
    """The spec of one layer of a group whose layers may differ."""
    return getattr(group_spec, "kv_cache_specs", {}).get(layer, group_spec)
