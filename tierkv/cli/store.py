"""``tierkv store``: what lies in a tier's storage, for people and scripts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierkv.cli import reach

if TYPE_CHECKING:
    from tierkv.tiers.admin import SpaceSummary

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Looks at the directory of an fs tier, or at the bucket of an obj tier, with or without engines that use it at the same
time. When an object was last used, no store knows: it counts as used when it was written.
"""

_PRUNE = """\
Removes records. Without --unused-for and --to-bytes, all of the namespace go; one of the three must be given. What an
engine uses meanwhile stays, and what it misses it computes again. Objects count as used when they were written, and go
whether an engine uses them or not.
"""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

#: Seconds between two updates of the progress bar, and its width.
_PROGRESS_S, _WIDTH = 0.1, 30


def add_parser(subparsers: Subparsers) -> None:
    store = subparsers.add_parser("store", help="what lies in a tier's storage", description=_DESCRIPTION)
    commands = store.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = _add(commands, "ls", "list namespaces and generations")
    listing.set_defaults(run=run_ls)
    stats = _add(commands, "stats", "count records and bytes, by namespace, group and age")
    stats.set_defaults(run=run_stats)
    verify = _add(commands, "verify", "read every record and check it; exit code 1 if one is damaged")
    verify.add_argument(
        "--remove", action="store_true", help="remove damaged records; not what a store fails to deliver"
    )
    verify.set_defaults(run=run_verify)
    prune = _add(commands, "prune", "remove records by namespace, age or size", _PRUNE)
    prune.add_argument(
        "--unused-for",
        type=_seconds,
        metavar="TIME",
        help="not used (objects: written) for this long: a number and s, m, h or d",
    )
    prune.add_argument(
        "--to-bytes", type=_bytes, metavar="N", help="the least recently used, until so much is left: 500G, say"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    prune.set_defaults(run=run_prune)


def run_ls(args: argparse.Namespace) -> int:
    from tierkv.tiers import admin

    with reach.open_storage(args) as storage:
        found = admin.summaries(storage, args.namespace)
    if args.json:
        _print_json([_fields(summary) for summary in found])
        return 0
    rows = [["namespace", "model", "generation", "records", "size", "last used"]]
    for summary in found:
        space = summary.space
        generation = space.generation.hex()[:12] if any(space.generation) else "as the files"
        used = _ago(summary.last_s)
        rows.append(
            [space.namespace.hex()[:12], summary.model, generation, f"{summary.records:,}", _size(summary.nbytes), used]
        )
    _print_table(rows, right=(3, 4, 5))
    return 0


def run_stats(args: argparse.Namespace) -> int:
    from tierkv.tiers import admin

    with reach.open_storage(args) as storage:
        found = admin.summaries(storage, args.namespace)
        ledger = storage.used_bytes()
    records, nbytes = sum(summary.records for summary in found), sum(summary.nbytes for summary in found)
    ages = {age: sum(summary.ages[age] for summary in found) for age in admin.AGES}
    if args.json:
        totals = {"records": records, "bytes": nbytes, "ledger_bytes": ledger, "ages": ages}
        _print_json([{**totals, "spaces": [_fields(summary) for summary in found]}])
        return 0
    print(f"{records:,} records, {_size(nbytes)}")
    if ledger is not None:
        print(f"ledger: {_size(ledger)} in use or promised to running processes")
    print("last used: " + ", ".join(f"{age} {count:,}" for age, count in ages.items()))
    for summary in found:
        groups = ", ".join(f"group {group}: {count:,}" for group, count in sorted(summary.groups.items()))
        print(f"{summary.space.namespace.hex()[:12]} {summary.model}: {groups}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from tierkv.tiers import admin

    problems = []
    with reach.open_storage(args) as storage:
        watched = sys.stderr.isatty()
        progress = _Progress(sum(each.nbytes for each in storage.stored(args.namespace)) if watched else 0)
        for problem in admin.verify(storage, args.namespace, progress.add):
            progress.clear()
            problems.append(problem)
            if args.json:
                where, place = problem.stored.path, problem.stored.place
                offset = {} if place is None else {"offset": place[0]}
                _print_json([{"path": where, **offset, "reason": problem.reason, "detail": problem.detail}])
            else:
                print(f"{problem.stored}: {problem.detail or problem.reason}", flush=True)
        progress.clear()
        removed = admin.remove_damaged(storage, problems) if args.remove else 0
    if args.json:
        _print_json([{"records": progress.records, "damaged": len(problems), "removed": removed}])
    else:
        tail = f", {removed:,} removed" if args.remove else ""
        print(f"{progress.records:,} records, {_size(progress.done)}: {len(problems):,} damaged{tail}")
    return 1 if len(problems) > removed else 0


def run_prune(args: argparse.Namespace) -> int:
    from tierkv.errors import ConfigError
    from tierkv.tiers import admin

    if not args.namespace and args.unused_for is None and args.to_bytes is None:
        raise ConfigError("prune", "nothing says what is to go", "--namespace, --unused-for or --to-bytes")
    prune = admin.Prune(namespace=args.namespace, unused_s=args.unused_for, to_bytes=args.to_bytes)
    with reach.open_storage(args) as storage:
        chosen = admin.choose(storage, prune)
        if args.dry_run:
            count, nbytes = len(chosen), sum(each.nbytes for each in chosen)
        else:
            count, nbytes = storage.remove(chosen)
    if args.json:
        _print_json([{"records": count, "bytes": nbytes, "dry_run": args.dry_run}])
    else:
        print(f"{count:,} records, {_size(nbytes)}, {'would go' if args.dry_run else 'removed'}")
    return 0


class _Progress:
    """A progress bar on standard error, if somebody sits before it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._shown_at = 0.0
        self.records = self.done = 0

    def add(self, nbytes: int) -> None:
        self.records += 1
        self.done += nbytes
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._shown_at > _PROGRESS_S:
            self._shown_at = now
            share = min(1.0, self.done / max(1, self._nbytes))
            bar = ("#" * round(_WIDTH * share)).ljust(_WIDTH, ".")
            print(f"\r[{bar}] {100 * share:3.0f} % of {_size(self._nbytes)}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown_at:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _add(commands: Subparsers, name: str, short: str, description: str | None = None) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=short, description=description or f"{short[0].upper()}{short[1:]}.")
    parser.add_argument(
        "path",
        metavar="PATH",
        help="the root_dir of an fs tier, or the URL of an obj tier: s3://bucket/prefix, gs://…, az://…, file:///…",
    )
    parser.add_argument("--namespace", type=_hex, default="", metavar="HEX", help="only those that begin with this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    reach.add_options(parser)
    return parser


def _fields(summary: SpaceSummary) -> dict[str, Any]:
    return {
        "namespace": summary.space.namespace.hex(),
        "generation": summary.space.generation.hex(),
        "model": summary.model,
        "records": summary.records,
        "bytes": summary.nbytes,
        "groups": {str(group): count for group, count in sorted(summary.groups.items())},
        "ages": summary.ages,
        "last_used": summary.last_s,
    }


def _print_json(objects: Sequence[dict[str, Any]]) -> None:
    for each in objects:
        print(json.dumps(each), flush=True)


def _print_table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def _size(nbytes: float) -> str:
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    unit, size = next((u, s) for u, s in reversed(_BYTES.items()) if nbytes >= s)
    return f"{nbytes / size:,.1f} {unit}iB"


def _ago(seconds: float) -> str:
    left = max(0.0, time.time() - seconds)
    unit, size = next(((u, s) for u, s in reversed(_SECONDS.items()) if left >= s), ("s", 1))
    return f"{left / size:.0f} {unit} ago"


def _hex(text: str) -> str:
    if not all(c in "0123456789abcdef" for c in text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal")
    return text.lower()


def _seconds(text: str) -> float:
    return _number(text, _SECONDS, "a number and s, m, h or d, such as 7d")


def _bytes(text: str) -> int:
    return int(_number(text.removesuffix("iB").removesuffix("B"), _BYTES, "bytes, or a number and K, M, G or T"))


def _number(text: str, units: dict[str, int], accepted: str) -> float:
    unit = text[-1:] if text[-1:].isalpha() else ""
    try:
        value = float(text.removesuffix(unit)) * units[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not {accepted}")
    return value
