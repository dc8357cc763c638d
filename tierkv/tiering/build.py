"""Put a manager together: region, host cache, tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tierkv import registry
from tierkv.config import CacheConfig, at, parse_tier
from tierkv.errors import ConfigError
from tierkv.events import Trace
from tierkv.host.cache import HostCache
from tierkv.host.policies.base import Policy
from tierkv.host.region import Region
from tierkv.keys import Namespace
from tierkv.layout.spec import ModelSpec
from tierkv.tiering.manager import TieringManager
from tierkv.tiers.base import Tier, TierContext

#: Slots start on a page, so that a tier can use direct I/O and a device can be given whole pages.
SLOT_ALIGNMENT = 4096


def slot_bytes(model: ModelSpec) -> int:
    """The size of a slot: the largest group's chunk, rounded up to whole pages."""
    largest = max(model.chunk_bytes(i) for i in range(len(model.groups)))
    return -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def open_manager(
    config: CacheConfig, model: ModelSpec, namespace: Namespace, *, align: int
) -> tuple[TieringManager, Region]:
    """The manager of one engine, and the region that its workers open.

    Args:
        align: boundaries of hits are multiples of this many tokens.

    Raises:
        ConfigError: a field cannot be used: too little memory for one chunk, an unknown policy or
            tier, a tier that cannot be opened.
    """
    size = slot_bytes(model)
    count = config.cpu_bytes_to_use // size
    if count == 0:
        raise ConfigError(
            "cpu_bytes_to_use", f"{config.cpu_bytes_to_use} bytes are less than one chunk", f"at least {size}"
        )
    policy_class: type[Policy] = registry.load(
        "policy", config.eviction_policy, config.cache_policy_module_path, field="eviction_policy"
    )
    try:
        trace = Trace(config.trace_path)
    except OSError as error:
        raise ConfigError("trace_path", f"cannot be opened: {error}", "a file that can be appended to") from error
    wake = threading.Event()
    region = Region.create(count * size)
    try:
        tiers = open_tiers(config, region.view, namespace, wake.set)
    except BaseException:
        region.close()
        raise
    cache = HostCache(count, size, policy_class(count))
    manager = TieringManager(
        config, model, cache, region.view, tiers, namespace.digest, align=align, trace=trace, wake=wake
    )
    return manager, region


def open_tiers(config: CacheConfig, view: memoryview, namespace: Namespace, wake: Callable[[], None]) -> Sequence[Tier]:
    """The configured tiers, in order; none is left open if one cannot be opened."""
    opened: list[Tier] = []
    taken: set[str] = set()
    try:
        for number, raw in enumerate(config.secondary_tiers):
            path = f"secondary_tiers[{number}]"
            tier_class, tier_config = parse_tier(raw, path)
            name = _unique(tier_config.name or tier_config.type, taken)
            context = TierContext(name, view, namespace.digest, namespace.describe(), wake)
            try:
                opened.append(tier_class(tier_config, context))
            except ConfigError as error:
                raise at(path, error) from error
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return opened


def _unique(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    taken.add(candidate)
    return candidate
