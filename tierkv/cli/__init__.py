"""The ``tierkv`` command. One module per subcommand, with ``add_parser(subparsers)`` and ``run(args) -> int``.

A subcommand's module imports little; what it needs beyond the core is imported when it runs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import tierkv
from tierkv.cli import bench, demo, explain, store
from tierkv.errors import TierKVError

_COMMANDS = (demo, bench, store, explain)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="tierkv", description=tierkv.__doc__)
    parser.add_argument("--version", action="version", version=f"tierkv {tierkv.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 if what was asked for was found not to hold, 2 for an error, 130 for Ctrl-C."""
    args = make_parser().parse_args(argv)
    # To be asked to end is no reason to leave child processes and temporary files behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return int(args.run(args))
    except TierKVError as error:
        print(f"tierkv: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)
