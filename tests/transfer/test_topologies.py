"""What one topology and device layout writes, every other reads: the stored bytes are the same, and the elements.

The reference is one array with all heads; every rank of every topology gets its part of it by plain indexing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")

from copy_backends import NAMES, Backend, open_backend  # noqa: E402

from tierkv.host.region import Region  # noqa: E402
from tierkv.layout import canonical  # noqa: E402
from tierkv.layout.packing import GroupPacking  # noqa: E402
from tierkv.layout.spec import GroupSpec, LayerPage, Plane  # noqa: E402
from tierkv.transfer.engine import CopyEngine, DeviceGroup  # noqa: E402
from tierkv.transfer.plan import BlockCopies, Transfer  # noqa: E402

LAYERS, BLOCKS, PER_CHUNK, SLOT, REGION_BYTES = 3, 10, 2, 128, 1 << 15
#: Device blocks of the two chunks that are stored, and others that they are loaded into.
STORED, LOADED = (7, 2, 3, 8), (1, 9, 4, 5)

#: By name: KV heads, elements of a key, elements of a value; each of two bytes. MLA has a latent and no value.
MODELS = {"gqa": (8, 4, 4), "mqa": (1, 8, 8), "two heads": (2, 4, 6), "mla": (1, 12, 0)}
#: The order in which a device keeps layer, block, head, token and element; ``split``: keys and values in arrays apart;
#: a kernel block of half a block's tokens.
LAYOUTS = {
    "heads outermost": ("LBHNC", False, 1),
    "tokens outermost": ("LBNHC", False, 1),
    "blocks outermost": ("BLHNC", False, 1),
    "blocks, then tokens": ("BLNHC", False, 1),
    "heads before blocks": ("LHBNC", False, 1),
    "split": ("LBHNC", True, 1),
    "split, tokens outermost": ("LBNHC", True, 1),
    "kernel blocks": ("LBHNC", False, 2),
    "kernel blocks, tokens outermost": ("LBNHC", False, 2),
}

Reference = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Topology:
    """``reference`` of shape (layers, blocks, heads, tokens, elements) on ``ranks`` ranks."""

    reference: Reference
    key_size: int
    ranks: int
    layout: str

    def page(self) -> LayerPage:
        _, _, heads, tokens, elements = self.reference.shape
        return LayerPage("", (Plane("kv", heads, tokens, 2 * elements),))

    def heads_of(self, rank: int) -> list[int]:
        """By the rule of the model: even parts, or each head on as many ranks that follow each other."""
        heads = self.reference.shape[2]
        if heads >= self.ranks:
            return list(range(heads))[rank * (heads // self.ranks) : (rank + 1) * (heads // self.ranks)]
        return [rank // (self.ranks // heads)]

    def device(self, rank: int, filled: bool) -> list[tuple[Any, ...]]:
        """For each layer its parts, as the engine would register them: (blocks, heads, [kernel blocks,] tokens, …)."""
        values = self.reference[:, :, self.heads_of(rank)]
        if not filled:
            values = np.zeros_like(values)
        order, split, kernel_blocks = LAYOUTS[self.layout]
        parts = [values[..., : self.key_size], values[..., self.key_size :]] if split else [values]
        layers: list[tuple[Any, ...]] = [() for _ in range(LAYERS)]
        for part in parts:
            if not part.shape[-1]:
                continue
            memory = _memory(part, order, kernel_blocks)
            for layer in range(LAYERS):
                layers[layer] = (*layers[layer], memory[layer])
        return layers


def _memory(values: Reference, order: str, kernel_blocks: int) -> Any:
    """A tensor of bytes whose memory has the dimensions in ``order``, seen as layer, block, head, (…,) token, bytes."""
    layers, blocks, heads, tokens, elements = values.shape
    split = values.reshape(layers, blocks, heads, kernel_blocks, tokens // kernel_blocks, elements)
    # Kernel blocks are blocks of their own to the device.
    names = order.replace("B", "BK")
    axes = ["LBHKNC".index(name) for name in names]
    memory = torch.from_numpy(np.ascontiguousarray(split.transpose(axes)))
    seen = memory.permute([axes.index(i) for i in range(6)]).view(torch.int8)
    return seen if kernel_blocks > 1 else seen.squeeze(3)


def reference(model: str, tokens: int) -> Reference:
    heads, key, value = MODELS[model]
    shape = (LAYERS, BLOCKS, heads, tokens, key + value)
    return np.random.default_rng(len(model) + tokens).integers(-(1 << 15), 1 << 15, shape, dtype=np.int16)


def chunks(values: Reference) -> list[bytes]:
    """The canonical bytes of the chunks of the blocks ``STORED``, by the specification alone."""
    return [
        canonical.assemble([[[values[layer, b].tobytes()] for layer in range(LAYERS)] for b in STORED[i : i + 2]])
        for i in range(0, len(STORED), PER_CHUNK)
    ]


def open_ranks(topology: Topology, backend: Backend, region: Region, filled: bool) -> Iterator[tuple[Any, CopyEngine]]:
    """Each rank's memory and its engine; one after the other: the last rank's turn ends before the next begins."""
    group = GroupSpec(0, "full", topology.reference.shape[3], PER_CHUNK, 0, (topology.page(),) * LAYERS)
    for rank in range(topology.ranks):
        memory = topology.device(rank, filled)
        engine = backend.make([DeviceGroup(GroupPacking(group, rank, topology.ranks), [(p,) for p in memory])], region)
        yield memory, engine
        engine.close()


def transfer(store: bool, slot_bytes: int) -> Transfer:
    blocks = STORED if store else LOADED
    slots = [SLOT, SLOT, SLOT + slot_bytes, SLOT + slot_bytes]
    return Transfer(1, store, (BlockCopies.of(0, blocks, slots, [0, 1, 0, 1]),))


def run(engine: CopyEngine, job: Transfer) -> int:
    engine.submit(job)
    engine.wait([1])
    (result,) = engine.get_finished()
    assert result.ok, result.error
    return result.nbytes


@pytest.fixture(params=[*NAMES, "cuda-stand-in as it lies"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The CUDA engine stages pages as small as these, unless it is told to copy what it can as it lies."""
    name, _, as_it_lies = request.param.partition(" ")
    if as_it_lies:
        monkeypatch.setattr("tierkv.transfer.staging.DIRECT_BYTES", 0)
    return open_backend(name, monkeypatch)


@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize("model", MODELS)
def test_all_write_the_same_bytes_and_read_each_others(model: str, tokens: int, backend: Backend) -> None:
    if backend.device == "cuda":
        pytest.skip("device memory is laid out on the CPU here")
    values = reference(model, tokens)
    expected = chunks(values)
    size = len(expected[0])
    after = np.zeros_like(values)
    after[:, LOADED] = values[:, STORED]
    for ranks in (1, 2, 4, 8):
        for layout in LAYOUTS:
            topology = Topology(values, MODELS[model][1], ranks, layout)
            with Region.create(REGION_BYTES) as region:
                moved = [run(engine, transfer(True, size)) for _, engine in open_ranks(topology, backend, region, True)]
                # Identical bytes, each written once: ranks that hold the same take turns.
                assert bytes(region.view[SLOT : SLOT + 2 * size]) == b"".join(expected), (ranks, layout)
                assert (
                    sum(moved) == 2 * size and not any(region.view[:SLOT]) and not any(region.view[SLOT + 2 * size :])
                )
                empty = Topology(after, MODELS[model][1], ranks, layout)
                for rank, (memory, engine) in enumerate(open_ranks(topology, backend, region, False)):
                    run(engine, transfer(False, size))
                    for found, wanted in zip(memory, empty.device(rank, True), strict=True):
                        assert all(map(torch.equal, found, wanted)), (ranks, layout, rank)


def test_each_of_the_ranks_that_hold_the_same_writes_something() -> None:
    values = reference("mla", 4)
    size = len(chunks(values)[0])
    with Region.create(REGION_BYTES) as region, pytest.MonkeyPatch.context() as patch:
        topology = Topology(values, 12, 2, "heads outermost")
        cpu = open_backend("cpu", patch)
        moved = [run(engine, transfer(True, size)) for _, engine in open_ranks(topology, cpu, region, True)]
    assert moved == [size, size]  # of the blocks 7, 2, 3 and 8 two are even
