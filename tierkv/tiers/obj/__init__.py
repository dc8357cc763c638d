"""The object store tier: chunks as objects in a bucket of an S3-compatible store, or of what else obstore reaches."""

from __future__ import annotations

from tierkv.tiers.obj.tier import ObjTier

__all__ = ["ObjTier"]
