"""Measurements of tierkv and what shows it at work, one module or package each.

Nothing here is needed by the library. The engine, torch and plotting are imported inside functions,
so that the command line starts without them; ``require`` says which extra is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from tierkv.errors import TierKVError


class MissingExtraError(TierKVError, ImportError):
    """An optional dependency is not installed; says what to install."""


class BenchError(TierKVError, RuntimeError):
    """A measurement could not be made; says where to look."""


def require(modules: Iterable[str], hint: str) -> None:
    """Check that ``modules`` are installed, without importing them.

    Raises:
        MissingExtraError: one is not; the message ends with ``hint``.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"not installed: {', '.join(missing)}; {hint}")
