"""The configuration: ``kv_connector_extra_config`` of vLLM, decoded and checked.

The fields of vLLM's own ``TieringOffloadingSpec`` are accepted as they are, so that a deployment
changes two fields to move. A field that is not listed here is an error that names it.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tierkv import registry
from tierkv.errors import ConfigError

Positive = Annotated[int, Meta(gt=0)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]

_StructT = TypeVar("_StructT", bound=msgspec.Struct)


class TierConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What every tier's configuration has; a tier's own class adds its fields.

    type: the tier's name in the registry, or of a class in ``module_path``.
    module_path: ``package.module:Class`` of a tier that is not built in.
    name: what metrics and threads call it; the type, with a number if needed, by default.
    backpressure: as the configuration's own, for this tier; its fields come first.
    """

    type: str
    module_path: str | None = None
    name: str | None = None
    backpressure: dict[str, Any] | None = None


class CacheConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``.

    cpu_bytes_to_use: bytes of host memory for one engine, all ranks together.
    huge_pages: of host memory: ``auto`` asks for transparent ones where the system allows them to shared memory, ``on``
        takes reserved ones, ``off`` neither.
    numa: the nodes that host memory lies on: ``off`` leaves that to the system, ``interleave`` uses all turn by turn,
        ``local`` that of the process, and ``0,1``, say, these turn by turn.
    blocks_per_chunk, block_size: the size of a chunk, in device blocks or in tokens; not both.
    eviction_policy: ``lru``, ``arc``, ``s3fifo``, or a class of ``cache_policy_module_path``.
    store_threshold: a chunk is stored the n-th time that it is computed (0 and 1: the first).
    max_tracker_size: how many chunks ``store_threshold`` remembers.
    offload_prompt_only: keep only chunks that end within the prompt.
    secondary_tiers: asked, and written to, in this order.
    cache_namespace: keeps deployments apart that would share otherwise.
    weights_check: ``samples`` hashes 64 pages of each weight file at start, ``full`` everything.
    reset_scope: what vLLM's ``reset_cache`` forgets: ``all`` starts a new generation, so that no tier
        serves what was stored before; ``host`` empties the host cache only.
    lookup_timeout_s, load_timeout_s, store_timeout_s: a tier that takes longer to find or to deliver is a miss; one
        that takes longer to store has failed.
    promotion_share: the share of host memory that requests which wait for their prefix may hold, at most 1.
    backpressure: drop stores to tiers that have become slow (``tierkv.tiers.throttle``); None: never.
    trace_path: append a JSON line for each event in the life of a chunk to this file.
    """

    cpu_bytes_to_use: Positive
    huge_pages: Literal["off", "auto", "on"] = "auto"
    numa: str = "off"
    blocks_per_chunk: Positive | None = None
    block_size: Positive | None = None
    eviction_policy: str = "lru"
    cache_policy_module_path: str | None = None
    store_threshold: NonNegative = 0
    max_tracker_size: Positive = 64_000
    offload_prompt_only: bool = True
    secondary_tiers: list[dict[str, Any]] = []
    cache_namespace: str = ""
    weights_check: Literal["samples", "full"] = "samples"
    reset_scope: Literal["all", "host"] = "all"
    lookup_timeout_s: Seconds = 10.0
    load_timeout_s: Seconds = 60.0
    store_timeout_s: Seconds = 60.0
    promotion_share: Share = 0.8
    backpressure: dict[str, Any] | None = None
    trace_path: str | None = None
    # Accepted so that a configuration of vLLM's own tiering is valid as it is. What has no effect is logged.
    spec_name: str | None = None
    spec_module_path: str | None = None
    canonical_layout: bool = True
    self_describing_kv_events: bool = False


#: Fields of vLLM's own tiering that are accepted and have no effect (yet).
WITHOUT_EFFECT = ("spec_name", "spec_module_path", "canonical_layout", "self_describing_kv_events")


def decode(raw: Mapping[str, Any], type_: type[_StructT], path: str = "") -> _StructT:
    """``raw`` as a ``type_``.

    Raises:
        ConfigError: a field is unknown, missing, of another type or out of range.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(path or "configuration", f"{raw!r} is not an object", "an object of fields and values")
    fields = {f.name: f for f in msgspec.structs.fields(type_)}
    for name in raw:
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(_join(path, str(name)), f"unknown field{hint}", ", ".join(fields))
    try:
        return msgspec.convert(dict(raw), type_)
    except msgspec.ValidationError as error:
        raise _as_config_error(error, path, fields) from error


def parse(raw: Mapping[str, Any]) -> CacheConfig:
    """The whole configuration, each tier's part excepted: that is decoded by ``parse_tier``.

    Raises:
        ConfigError: as ``decode``, and when both ``block_size`` and ``blocks_per_chunk`` are given.
    """
    config = decode(raw, CacheConfig)
    if config.block_size is not None and config.blocks_per_chunk is not None:
        raise ConfigError(
            "block_size",
            "given together with blocks_per_chunk",
            "one of block_size (tokens of a chunk) and blocks_per_chunk (device blocks of a chunk)",
        )
    return config


def parse_tier(raw: Mapping[str, Any], path: str) -> tuple[type[Any], TierConfig]:
    """The class and the configuration of one entry of ``secondary_tiers``.

    Args:
        path: where the entry stands, for errors, such as ``secondary_tiers[0]``.
    """
    if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
        raise ConfigError(_join(path, "type"), "missing", ", ".join(registry.names("tier")))
    tier_class = registry.load("tier", raw["type"], raw.get("module_path"), field=_join(path, "type"))
    return tier_class, decode(raw, tier_class.Config, path)


def at(path: str, error: ConfigError) -> ConfigError:
    """``error``, raised by a tier about its own field, with the field's full path."""
    return ConfigError(_join(path, error.field), error.problem, error.accepted)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _as_config_error(error: msgspec.ValidationError, path: str, fields: Mapping[str, Any]) -> ConfigError:
    message, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        name = _join(field, missing.group(1))
        return ConfigError(_join(path, name), "missing", _accepted(fields.get(name)))
    expected = re.match(r"Expected (.+?)(?:, got .*)?$", message)
    known = fields.get(field.partition("[")[0])
    accepted = expected.group(1) if expected else ", ".join(map(repr, typing.get_args(known and known.type)))
    return ConfigError(_join(path, field) if field else path, message, accepted.replace("`", ""))


def _accepted(field: Any) -> str:
    """What a field accepts, in words."""
    if field is None:
        return ""
    words = {
        Positive: "an integer above 0",
        NonNegative: "an integer, 0 or above",
        Seconds: "seconds above 0",
        Share: "above 0, at most 1",
    }
    return words.get(field.type) or str(getattr(field.type, "__name__", field.type))
