"""Eviction policies of the host cache, by name in ``tierkv.registry``."""
