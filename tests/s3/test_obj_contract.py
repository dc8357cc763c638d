"""The contract of a tier, run by the obj tier on a server and on a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from s3_server import Server

from tierkv.testing.tier_contract import TierContract
from tierkv.tiers.base import Tier, TierContext
from tierkv.tiers.obj import ObjTier
from tierkv.tiers.obj.config import ObjTierConfig
from tierkv.tiers.paths import record_path, space_path
from tierkv.types import ChunkName


def path_of(name: ChunkName) -> str:
    return record_path(space_path(name.space), name.group, name.block_hash)


def config_of(s3: Server, bucket: str, **fields: Any) -> ObjTierConfig:
    keys = {"access_key": s3.access_key, "secret_key": s3.secret_key, "endpoint_override": s3.endpoint}
    return ObjTierConfig(type="obj", bucket=bucket, **{**keys, **fields})


class TestObjTierContract(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3: Server, bucket: str) -> None:
        self.s3, self.bucket = s3, bucket

    def make_tier(self, context: TierContext) -> Tier:
        return ObjTier(config_of(self.s3, self.bucket, prefix="a/b"), context)

    def read_record(self, tier: Tier, name: ChunkName) -> bytes | None:
        return self.s3.read(self.bucket, f"a/b/{path_of(name)}")

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        self.s3.write(self.bucket, f"a/b/{path_of(name)}", raw)


class TestObjTierOfADirectoryContract(TierContract):
    @pytest.fixture(autouse=True)
    def _root(self, s3: Server, tmp_path: Path) -> None:
        self.root = tmp_path / "root"

    def make_tier(self, context: TierContext) -> Tier:
        return ObjTier(ObjTierConfig(type="obj", url=self.root.as_uri()), context)

    def read_record(self, tier: Tier, name: ChunkName) -> bytes | None:
        path = self.root / path_of(name)
        return path.read_bytes() if path.exists() else None

    def write_record(self, tier: Tier, name: ChunkName, raw: bytes) -> None:
        path = self.root / path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
