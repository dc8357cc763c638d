"""``tierkv bench``: what tierkv costs the engine, alone or beside an installed vLLM's own offloading."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierkv.cli import reach

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_INDEX = """\
Fills a host cache with --chunks chunks of 16 tokens and measures, for each chunk, what lookups, loads and stores that
evict take on the scheduler's thread, and the memory of index and policy; then the first step of a long cold request in
fresh processes.
"""

_TIERING = """\
Measures the whole life of a chunk through a tier on the scheduler's thread, what is served of a prefix that is larger
than the host, and how long the manager takes in an engine's step while much is being promoted from a slow tier.
"""

_ENGINE = """\
Runs a small model on a real engine and measures what offloading costs when nothing is used again, and how long the
steps of a running request take while much is being promoted for others from a slow tier.
"""

_COPY = """\
Copies blocks of many layers between device and host memory with the engine that a worker uses, compares what comes
back, and measures its share of the speed of one plain copy: pages as they lie, and pages that must be transposed.
"""

_LAYOUT = """\
Measures what one layout for all costs on the CPU: planning copies, making them (as `tierkv bench copy` does), and the
host memory that models with chunks of several sizes leave unused.
"""

_FS = """\
Stores chunks in the fs tier and loads them, from the device and from the page cache, compares every byte, and measures
the share of what plain threads read and write below the same directory; then what promoting a chunk from there takes on
the scheduler's thread.
"""

_OBJ = """\
Stores chunks in the obj tier and loads them, compares every byte, and measures the share of what plain obstore does on
the same server with as many connections; then lookups. Credentials come from the environment or from AWS's files.
Everything is written below a name of its own, and removed.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="measure what tierkv costs the engine")
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    index = _add(benches, "index", "index and policy of a full host cache", _INDEX, chunks=1_000_000)
    index.add_argument(
        "--cold-chunks",
        type=_positive,
        default=65_536,
        metavar="N",
        help="chunks of the cold request (default: %(default)s)",
    )
    index.add_argument(
        "--processes",
        type=_not_negative,
        default=3,
        metavar="N",
        help="fresh processes for each cold start (default: %(default)s)",
    )
    index.add_argument("--tiered", action="store_true", help="managers with a tier, too (with --against)")
    index.set_defaults(run=run_index)
    tiering = _add(benches, "tiering", "promotions, cascades and stepping", _TIERING, chunks=65_536)
    _add_promotion(tiering)
    tiering.set_defaults(run=run_tiering)
    engine = _bench(benches, "engine", "what a real engine and its requests notice", _ENGINE)
    engine.add_argument(
        "--turns",
        type=_not_negative,
        default=20,
        metavar="N",
        help="turns with and without offload (default: %(default)s)",
    )
    engine.add_argument(
        "--rounds", type=_not_negative, default=5, metavar="N", help="promotions (default: %(default)s)"
    )
    _add_promotion(engine)
    engine.set_defaults(run=run_engine)
    layout = _bench(benches, "layout", "what the canonical layout costs", _LAYOUT)
    _add_copies(layout)
    layout.add_argument(
        "--host-bytes",
        type=_positive,
        default=4 << 30,
        metavar="N",
        help="of the cache that is filled, in numbers only (default: %(default)s)",
    )
    layout.set_defaults(run=run_layout)
    copy = _bench(benches, "copy", "the copies between device and host", _COPY)
    copy.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    _add_copies(copy)
    copy.set_defaults(run=run_copy)
    fs = _bench(benches, "fs", "the fs tier, and what its directory can do", _FS)
    fs.add_argument(
        "--root-dir", default=".", metavar="DIR", help="where to write; removed afterwards (default: this directory)"
    )
    fs.add_argument(
        "--threads",
        type=_positive,
        default=8,
        metavar="N",
        help="that read and write without a tier (default: %(default)s)",
    )
    _add_copies(fs, rounds=5)
    _add_against(fs)
    fs.set_defaults(run=run_fs)
    obj = _bench(benches, "obj", "the obj tier, and what its store can do", _OBJ)
    obj.add_argument("--url", required=True, help="where to write: s3://bucket/prefix, or what else the tier knows")
    reach.add_options(obj)
    _add_copies(obj, rounds=5, nbytes=512 << 20)
    obj.set_defaults(run=run_obj)


def run_index(args: argparse.Namespace) -> int:
    from tierkv.bench import index
    from tierkv.bench.report import Report

    options = index.IndexOptions(
        chunks=args.chunks,
        batch=args.batch,
        policies=_policies(args),
        against_vllm=args.against == "vllm",
        tiered=args.tiered,
        rounds=args.rounds,
        cold_chunks=args.cold_chunks,
        processes=args.processes,
    )
    index.run(options, Report("index", args.json))
    return 0


def run_tiering(args: argparse.Namespace) -> int:
    from tierkv.bench import tiering
    from tierkv.bench.report import Report

    options = tiering.TieringOptions(
        chunks=args.chunks,
        batch=args.batch,
        policies=_policies(args, "lru"),
        against_vllm=args.against == "vllm",
        rounds=args.rounds,
        promote_bytes=args.promote_bytes,
        latency_s=args.latency,
    )
    tiering.run(options, Report("tiering", args.json))
    return 0


def run_engine(args: argparse.Namespace) -> int:
    from tierkv.bench import engine
    from tierkv.bench.report import Report

    options = engine.EngineOptions(
        turns=args.turns, rounds=args.rounds, promote_bytes=args.promote_bytes, latency_s=args.latency
    )
    engine.run(options, Report("engine", args.json))
    return 0


def run_layout(args: argparse.Namespace) -> int:
    from tierkv.bench import layout
    from tierkv.bench.report import Report

    options = layout.LayoutOptions(nbytes=args.bytes, host_bytes=args.host_bytes, rounds=args.rounds)
    layout.run(options, Report("layout", args.json))
    return 0


def run_copy(args: argparse.Namespace) -> int:
    from tierkv.bench import copy
    from tierkv.bench.report import Report

    copy.run(copy.CopyOptions(device=args.device, nbytes=args.bytes, rounds=args.rounds), Report("copy", args.json))
    return 0


def run_fs(args: argparse.Namespace) -> int:
    from tierkv.bench import fs
    from tierkv.bench.report import Report

    options = fs.FsOptions(
        root_dir=args.root_dir,
        nbytes=args.bytes,
        threads=args.threads,
        rounds=args.rounds,
        against_vllm=args.against == "vllm",
    )
    fs.run(options, Report("fs", args.json))
    return 0


def run_obj(args: argparse.Namespace) -> int:
    from tierkv.bench import obj
    from tierkv.bench.report import Report

    options = obj.ObjOptions(
        url=args.url,
        endpoint=args.endpoint or "",
        region=args.region or "",
        ca_bundle=args.ca_bundle or "",
        profile=args.profile or "",
        nbytes=args.bytes,
        rounds=args.rounds,
    )
    obj.run(options, Report("obj", args.json))
    return 0


def _bench(benches: Subparsers, name: str, short: str, description: str) -> argparse.ArgumentParser:
    """A benchmark's parser, with what all of them have."""
    parser = benches.add_parser(
        name, help=short, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    return parser


def _add_copies(parser: argparse.ArgumentParser, rounds: int = 7, nbytes: int = 256 << 20) -> None:
    parser.add_argument(
        "--bytes", type=_positive, default=nbytes, metavar="N", help="moved in a turn (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=_positive, default=rounds, metavar="N", help="turns (default: %(default)s)")


def _add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", choices=["vllm"], help="measure vLLM's own beside it, turn by turn")


def _add_promotion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--promote-bytes",
        type=_positive,
        default=1 << 30,
        metavar="N",
        help="what is promoted while an engine steps (default: %(default)s)",
    )
    parser.add_argument(
        "--latency",
        type=_seconds,
        default=0.5,
        metavar="S",
        help="of the tier meanwhile, in seconds (default: %(default)s)",
    )


def _add(benches: Subparsers, name: str, short: str, description: str, chunks: int) -> argparse.ArgumentParser:
    """The parser of a benchmark of managers."""
    parser = _bench(benches, name, short, description)
    parser.add_argument(
        "--chunks",
        type=_positive,
        default=chunks,
        metavar="N",
        help="chunks that fit in the host (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=_positive,
        default=512,
        metavar="N",
        help="chunks stored in one step (default: %(default)s, 8192 tokens)",
    )
    parser.add_argument("--policy", nargs="+", metavar="NAME", help="eviction policies")
    _add_against(parser)
    parser.add_argument(
        "--rounds", type=_positive, default=5, metavar="N", help="turns of each side (default: %(default)s)"
    )
    return parser


def _policies(args: argparse.Namespace, *default: str) -> tuple[str, ...]:
    from tierkv import registry

    return tuple(args.policy or default or registry.names("policy"))


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 3600")
    return number
