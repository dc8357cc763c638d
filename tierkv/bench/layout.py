"""``tierkv bench layout``: what the layout costs: planning copies, making them, and host memory.

* Copies on the CPU, as ``tierkv bench copy`` has them.
* *held*: a host cache is filled with prompts of models whose groups have chunks of several sizes: its memory over the
  bytes that the layers need of what it then holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv import registry
from tierkv.bench import copy
from tierkv.bench.report import Figure, Report
from tierkv.bench.sides import some_hashes
from tierkv.host.cache import HostCache
from tierkv.host.slabs import plan_slabs, region_size
from tierkv.keys import make_chunks
from tierkv.layout.spec import FULL, SLIDING_WINDOW, STATE, GroupSpec, LayerPage, Plane
from tierkv.types import Chunks, Space


@dataclass(frozen=True)
class Shape:
    """A model as it is released, in bfloat16: its groups, as vLLM makes them, and tokens of a prompt."""

    groups: tuple[GroupSpec, ...]
    prompt: int


def _attention(index: int, layers: int, heads: int, head_size: int, block: int, window: int = 0) -> GroupSpec:
    page = (Plane("kv", heads, block, 2 * 2 * head_size),)
    kind = SLIDING_WINDOW if window else FULL
    return GroupSpec(index, kind, block, 1, window, tuple(LayerPage(f"{index}.{i}", page) for i in range(layers)))


def _states(index: int, layers: int, nbytes: int, block: int) -> GroupSpec:
    return GroupSpec(index, STATE, block, 1, 0, tuple(LayerPage.opaque(f"{index}.{i}", nbytes) for i in range(layers)))


#: Qwen3-Next's state: a convolution of 8,192 channels over three tokens and 32 heads of 128 × 128.
_DELTA_NET_BYTES, _QWEN_BLOCK = 2 * (8192 * 3 + 32 * 128 * 128), 544

SHAPES = {
    # 62 layers, every sixth global; the last group of local ones has two layers more.
    "Gemma 3 27B": Shape(
        (
            _attention(0, 10, 16, 128, 16),
            *(_attention(i, 10, 16, 128, 16, 1024) for i in range(1, 5)),
            _attention(5, 12, 16, 128, 16, 1024),
        ),
        8192,
    ),
    # 48 layers, every fourth attention; a state is kept where a prompt ends, and where half of it does.
    "Qwen3-Next 80B": Shape(
        (
            _attention(0, 12, 2, 256, _QWEN_BLOCK),
            *(_states(i, 12, _DELTA_NET_BYTES, _QWEN_BLOCK) for i in range(1, 4)),
        ),
        16 * _QWEN_BLOCK,
    ),
}

NOTES = (
    *copy.NOTES,
    "held: host memory over the bytes that the layers need of what it holds, once it is full, at each round's end",
)


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """nbytes: moved in each turn of a copy. host_bytes: of the cache that is filled."""

    nbytes: int = 256 << 20
    host_bytes: int = 4 << 30
    rounds: int = 7


def run(options: LayoutOptions, report: Report) -> None:
    """Measure everything.

    Raises:
        MissingExtraError: torch is not installed. BenchError: other bytes came back than were stored.
    """
    copies = copy.CopyOptions(nbytes=options.nbytes, rounds=options.rounds)
    copy.prepare(copies)
    report.start({"bytes": options.nbytes, "host_bytes": options.host_bytes, "rounds": options.rounds})
    copy.measure(copies, report)
    for name, shape in SHAPES.items():
        report.progress(f"held, {name}")
        values = held(shape, options.host_bytes, options.rounds)
        report.add(Figure(measure="held", case=name, unit="of needed", values={"tierkv": values}))
    report.close(NOTES)


def held(shape: Shape, host_bytes: int, rounds: int) -> list[float]:
    """Fill a cache of ``host_bytes`` over and over; its memory over the bytes of its chunks, after each time."""
    sizes = [group.blocks_per_chunk * group.block_bytes for group in shape.groups]
    plan = plan_slabs(host_bytes, sizes)
    cache = HostCache(plan, sizes, registry.load("policy", "lru"))
    cache.grow(region_size(plan))
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(rounds):
        filled = 0
        while filled < host_bytes:
            for chunks in _prompt(shape, rng):
                slots = cache.reserve(chunks).slots
                cache.commit(slots[slots >= 0])
                filled += sum(sizes[group] for group in chunks.groups.tolist())
        ratios.append(region_size(plan) / cache.bytes_ready)
    return ratios


def _prompt(shape: Shape, rng: np.random.Generator) -> list[Chunks]:
    """What is stored of a new prompt, a block's end at a time: all attention, and two states."""
    space = Space(bytes(16), bytes(16))
    batches = []
    for group in shape.groups:
        hashes = some_hashes(shape.prompt // group.tokens_per_chunk, rng)
        if group.kind == STATE:
            hashes = [hashes[len(hashes) // 2 - 1], hashes[-1]]
        batches.append(make_chunks(space, group.group, hashes))
    return batches
