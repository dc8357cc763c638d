"""``tierkv demo``: what offloading is good for, on a real engine, on this machine's CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Runs growing conversations with a small model on vLLM's CPU engine: without offload (with the same memory, and with all
that it could want), with the host cache, and with the host cache and a file system tier. Prints requests/s and hit
ratios by round, draws throughput.png, and checks that the outputs are those without offload: exit code 1 if not.
The model's folder is made once, below ~/.cache/tierkv.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="growing conversations on a real engine, with and without tiers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="one small pool, without the host cache alone: within two minutes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("tierkv-demo"),
        metavar="DIR",
        help="where the chart and the engines' logs go (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tierkv.bench import require
    from tierkv.bench.demo import model
    from tierkv.bench.demo.scenario import FULL, QUICK

    require(["rich"], f"to install: {model.INSTALL}")
    from tierkv.bench.demo.run import run_demo

    return 0 if run_demo(QUICK if args.quick else FULL, args.output_dir, args.json) else 1
