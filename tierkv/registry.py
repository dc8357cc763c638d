"""One registry for whatever plugs in: kind and name → ``module:Class``, loaded when it is asked for.

A ``module_path`` in the configuration loads a user's own class: ``package.module:Class``, or
``package.module`` alone, in which case the name is the class.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierkv.errors import ConfigError

_BUILTIN: dict[str, dict[str, str]] = {
    "tier": {
        "fs": "tierkv.tiers.fs:FsTier",
        "memory": "tierkv.tiers.memory:MemoryTier",
        "obj": "tierkv.tiers.obj:ObjTier",
    },
    "policy": {
        "lru": "tierkv.host.policies.lru:LRUPolicy",
        "arc": "tierkv.host.policies.arc:ARCPolicy",
        "s3fifo": "tierkv.host.policies.s3fifo:S3FIFOPolicy",
    },
}


def names(kind: str) -> list[str]:
    """The built-in names of ``kind``, sorted."""
    return sorted(_BUILTIN[kind])


def load(kind: str, name: str, module_path: str | None = None, *, field: str = "type") -> type[Any]:
    """The class that ``name`` stands for.

    Args:
        kind: ``tier`` or ``policy``.
        field: the path of the configuration field that gave ``name``, for the error.

    Raises:
        ConfigError: the name is unknown (lists the known ones), or ``module_path`` does not import
            (says why).
    """
    known = _BUILTIN[kind]
    if module_path is None:
        if name not in known:
            raise ConfigError(field, f"unknown {kind} {name!r}", f"{', '.join(names(kind))}, or a module_path")
        module_path = known[name]
    module_name, _, class_name = module_path.partition(":")
    path_field = f"{field.rpartition('.')[0]}.module_path".lstrip(".") if kind == "tier" else "cache_policy_module_path"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            path_field,
            f"{module_name!r} cannot be imported ({type(error).__name__}: {error})",
            "an importable 'package.module:Class'",
        ) from error
    found = getattr(module, class_name or name, None)
    if not isinstance(found, type):
        raise ConfigError(
            path_field,
            f"module {module_name!r} has no class {class_name or name!r}",
            "an importable 'package.module:Class'",
        )
    return found
