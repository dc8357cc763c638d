"""Tiers of a bucket, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from s3_server import REGION, Server

from tierkv.testing.driver import TierDriver
from tierkv.tiers.base import Deadlines, TierContext
from tierkv.tiers.obj import ObjTier
from tierkv.tiers.obj.config import ObjTierConfig
from tierkv.tiers.paths import record_path, space_path
from tierkv.types import Chunks


def path_of(chunks: Chunks, index: int) -> str:
    """The name of the object of a chunk."""
    name = chunks.name(index)
    return record_path(space_path(name.space), name.group, name.block_hash)


def is_record(path: str) -> bool:
    return path.endswith(".tkv")


def config_of(s3: Server, bucket_name: str, **fields: Any) -> ObjTierConfig:
    """The configuration of a tier with patience for tests, with ``fields`` beside or instead of what is needed."""
    needed = {
        "bucket": bucket_name,
        "access_key": s3.access_key,
        "secret_key": s3.secret_key,
        "endpoint_override": s3.endpoint,
        "region": REGION,
        "connect_timeout_s": 2.0,
        "timeout_s": 5.0,
    }
    return ObjTierConfig(type="obj", **{**needed, **fields})


def tier_of(
    s3: Server, bucket_name: str, deadlines: Deadlines | None = None, **fields: Any
) -> Callable[[TierContext], ObjTier]:
    def make(context: TierContext) -> ObjTier:
        if deadlines is not None:
            context = replace(context, deadlines=deadlines)
        return ObjTier(config_of(s3, bucket_name, **fields), context)

    return make


def driver_of(
    s3: Server,
    bucket_name: str,
    *,
    slot_bytes: int = 4096,
    n_slots: int = 64,
    deadlines: Deadlines | None = None,
    **fields: Any,
) -> TierDriver:
    """A tier of a bucket, with its driver."""
    return TierDriver(tier_of(s3, bucket_name, deadlines, **fields), slot_bytes=slot_bytes, n_slots=n_slots)
