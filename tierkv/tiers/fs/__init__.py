"""The file system tier: a file per chunk under a root that processes and hosts can share."""

from tierkv.tiers.fs.config import FsTierConfig
from tierkv.tiers.fs.tier import FsTier

__all__ = ["FsTier", "FsTierConfig"]
