"""The memory tier: the complete reference. To write a tier of your own, copy this one."""

from tierkv.tiers.memory.tier import MemoryTier, MemoryTierConfig

__all__ = ["MemoryTier", "MemoryTierConfig"]
