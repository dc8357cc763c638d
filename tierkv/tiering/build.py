"""Put a manager together: region, host cache, tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tierkv import registry
from tierkv.config import CacheConfig, at, decode, parse_tier
from tierkv.errors import ConfigError
from tierkv.events import Trace
from tierkv.host.cache import HostCache, warm_up
from tierkv.host.policies.base import Policy
from tierkv.host.region import Region
from tierkv.host.slabs import plan_slabs, region_size, smallest_region
from tierkv.keys import Namespace
from tierkv.layout.spec import ModelSpec
from tierkv.tiering.manager import TieringManager
from tierkv.tiers.base import Deadlines, Tier, TierContext
from tierkv.tiers.throttle import BackpressureConfig, Throttle, build_throttle

#: A small region is ready before the engine is: it is waited for this long.
START_S = 0.25


def open_manager(
    config: CacheConfig, model: ModelSpec, namespace: Namespace, *, align: int
) -> tuple[TieringManager, Region]:
    """The manager of one engine, and the region that its workers open.

    Compiles the kernels, which takes some seconds where they are not on disk yet. The region is made present in the
    background; what is not yet is not used.

    Args:
        align: boundaries of hits are multiples of this many tokens.

    Raises:
        ConfigError: a field cannot be used: too little memory for one chunk, an unknown policy or
            tier, a tier that cannot be opened.
    """
    chunk_bytes = [model.chunk_bytes(i) for i in range(len(model.groups))]
    if config.cpu_bytes_to_use < smallest_region(chunk_bytes):
        raise ConfigError(
            "cpu_bytes_to_use",
            f"{config.cpu_bytes_to_use} bytes are less than one chunk of each size",
            f"at least {smallest_region(chunk_bytes)}",
        )
    plan = plan_slabs(config.cpu_bytes_to_use, chunk_bytes)
    policy_class: type[Policy] = registry.load(
        "policy", config.eviction_policy, config.cache_policy_module_path, field="eviction_policy"
    )
    warm_up(policy_class)
    try:
        trace = Trace(config.trace_path)
    except OSError as error:
        raise ConfigError("trace_path", f"cannot be opened: {error}", "a file that can be appended to") from error
    wake = threading.Event()
    region = Region.create(region_size(plan), huge_pages=config.huge_pages, numa=config.numa)
    try:
        throttles = make_throttles(config)
        tiers = open_tiers(config, region.view, namespace, wake.set, chunk_bytes)
    except BaseException:
        region.close()
        raise
    cache = HostCache(plan, chunk_bytes, policy_class)
    manager = TieringManager(
        config,
        model,
        cache,
        region.view,
        tiers,
        namespace.digest,
        align=align,
        trace=trace,
        throttles=throttles,
        wake=wake,
    )
    region.populate(manager.grow).wait(START_S)
    return manager, region


def make_throttles(config: CacheConfig) -> list[Throttle | None]:
    """For each tier, what drops its stores when they have become slow; None without ``backpressure``.

    Raises:
        ConfigError: a field of ``backpressure`` is unknown or cannot be used.
    """
    if config.backpressure is not None:
        decode(config.backpressure, BackpressureConfig, "backpressure")  # without tiers, nobody else would
    throttles = []
    for number, raw in enumerate(config.secondary_tiers):
        path = f"secondary_tiers[{number}]"
        tier = parse_tier(raw, path)[1]
        locality = getattr(tier, "locality", None)
        throttles.append(
            build_throttle(config.backpressure, tier.backpressure, tier_type=tier.type, locality=locality, path=path)
        )
    return throttles


def open_tiers(
    config: CacheConfig,
    view: memoryview,
    namespace: Namespace,
    wake: Callable[[], None],
    chunk_bytes: Sequence[int],
) -> Sequence[Tier]:
    """The configured tiers, in order; none is left open if one cannot be opened."""
    opened: list[Tier] = []
    taken: set[str] = set()
    deadlines = Deadlines(config.lookup_timeout_s, config.load_timeout_s, config.store_timeout_s)
    try:
        for number, raw in enumerate(config.secondary_tiers):
            path = f"secondary_tiers[{number}]"
            tier_class, tier_config = parse_tier(raw, path)
            name = _unique(tier_config.name or tier_config.type, taken)
            context = TierContext(
                name, view, namespace.digest, namespace.describe(), wake, tuple(chunk_bytes), deadlines
            )
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
