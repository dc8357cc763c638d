"""Every exception tierkv raises; each leaf is also the built-in that a caller would expect.

A foreign exception (of a file system, a client library, the engine) is mapped to one of these at the
edge where it enters. ``assert`` is for internal invariants only, never for what a user gave.
"""

from __future__ import annotations


class TierKVError(Exception):
    """The root: ``except TierKVError`` catches whatever tierkv raises on purpose."""


class ConfigError(TierKVError, ValueError):
    """A configuration that cannot be used.

    The message starts with the field's path (``secondary_tiers[0].root_dir``) and says what is accepted.
    """

    def __init__(self, field: str, problem: str, accepted: str = "") -> None:
        self.field = field
        self.problem = problem
        self.accepted = accepted
        tail = f"; accepted: {accepted}" if accepted else ""
        super().__init__(f"{field}: {problem}{tail}")


class UnsupportedError(TierKVError, NotImplementedError):
    """The model, the engine's version or its parallelism is not supported; says which is."""


class RecordError(TierKVError, ValueError):
    """A stored record that must not be loaded. ``reason`` is the word that metrics count."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class RemoteError(TierKVError, OSError):
    """An object store or a peer did not do what it was asked for. ``reason`` is the word that metrics count."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class TierClosedError(TierKVError, RuntimeError):
    """A tier was used after ``close()``."""


class RegionError(TierKVError, OSError):
    """The shared host region could not be created, or not be opened by a worker."""


class TransferError(TierKVError, RuntimeError):
    """A copy between the device and the host region failed."""
