"""``tierkv explain``: why two deployments share what they store, or do not."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tierkv.cli import reach
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Says which fields of two namespaces differ: each of them keeps the chunks of one deployment from the other. A and B
are namespace.json files of fs and obj tiers, or directories that have one, such as root_dir/<namespace> or
s3://bucket/prefix/<namespace>. Exit code 1 if they differ.
"""

#: What follows from other fields, or is not part of the namespace.
_DERIVED = ("digest", "trusted")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="which field keeps two deployments from sharing",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help="a namespace.json, or its directory; or the URL of either")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, one for each difference")
    reach.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not (reach.is_url(args.a) or reach.is_url(args.b)):
        reach.refuse_options(args, "A and B are directories")
    found = list(differences(_read("A", args.a, args), _read("B", args.b, args)))
    if args.json:
        for field, mine, theirs in found:
            print(json.dumps({"field": field, "a": mine, "b": theirs}))
    elif not found:
        print("The same namespace: what one has stored serves the other.")
    else:
        for field, mine, theirs in found:
            print(f"{field}:\n  A: {_shown(mine)}\n  B: {_shown(theirs)}")
    return 1 if found else 0


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two descriptions differ, as deep down as can be told, with both values; None: missing."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if path or key not in _DERIVED:
                yield from differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (mine, theirs) in enumerate(zip(a, b, strict=True)):
            yield from differences(mine, theirs, f"{path}[{i}]")
    elif a != b:
        yield path, a, b


def _read(name: str, path: str, args: argparse.Namespace) -> dict[str, Any]:
    from tierkv.tiers.paths import DESCRIPTION

    accepted = "a namespace.json of a tier, or its directory (tierkv store ls PATH lists them)"
    try:
        if reach.is_url(path):
            fields = json.loads(_read_object(name, path, args, accepted))
        else:
            if os.path.isdir(path):
                path = os.path.join(path, DESCRIPTION)
            with open(path, encoding="utf-8") as file:
                fields = json.load(file)
    except OSError as error:
        raise ConfigError(name, f"{path!r} cannot be read ({error.strerror})", accepted) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(name, f"{path!r} is not JSON ({error})", accepted) from error
    if not isinstance(fields, dict) or "groups" not in fields:
        raise ConfigError(name, f"{path!r} does not describe a namespace", accepted)
    return fields


def _read_object(name: str, url: str, args: argparse.Namespace, accepted: str) -> bytes:
    from tierkv.tiers.obj.admin import read_description
    from tierkv.tiers.paths import DESCRIPTION

    with reach.naming(name, url, args):
        found = read_description(reach.config_of(name, url.removesuffix(f"/{DESCRIPTION}"), args))
    if found is None:
        raise ConfigError(name, f"{url!r} has no {DESCRIPTION}", accepted)
    return found


def _shown(value: Any) -> str:
    """A value on one line; of a long list, that it is one: its parts do not correspond."""
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} entries, from {json.dumps(value[0])} on"
    return "nothing" if value is None else json.dumps(value)
