"""``tierkv bench copy``: the copy engine between device and host memory, against the machine's own copy.

Blocks of many layers are stored into slots and loaded from them, both in random order, as a full cache has them. The
limit is one plain copy of as many bytes between the same two memories, turn by turn with the engine. What was stored
and loaded is compared, byte for byte, before anything is timed.

* *direct*: the device keeps its pages as the canonical layout wants them; a fragment is one layer's page.
* *transposed*: tokens outermost; a fragment is one token of one head.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.bench import BenchError, require
from tierkv.bench.report import Figure, Report, size_text
from tierkv.host.region import Region
from tierkv.layout import offsets
from tierkv.layout.mapping import as_table
from tierkv.layout.packing import GroupPacking
from tierkv.layout.spec import FULL, GroupSpec, LayerPage, Plane
from tierkv.transfer.engine import CopyEngine, DeviceGroup, make_engine
from tierkv.transfer.plan import BlockCopies, Transfer

if TYPE_CHECKING:
    import torch

#: Layers of a block; tokens and heads of a transposed page.
LAYERS, TOKENS, HEADS = 16, 16, 8

#: Bytes of a page, and of a token of a head.
DIRECT = (4 << 10, 64 << 10, 1 << 20)
TRANSPOSED = (256, 4 << 10)

NOTES = (
    "median over the rounds (smallest–largest); bytes are compared before anything is timed",
    f"a block has {LAYERS} layers; blocks and slots in random order",
    "share: of the speed of one plain copy of as many bytes between the same memories, in the same round",
    f"direct: a fragment is one layer's page; transposed: tokens outermost on the device, {HEADS} heads of {TOKENS} "
    "tokens, a fragment is one token of one head",
)


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """nbytes: moved in each turn."""

    device: str = "cpu"
    nbytes: int = 256 << 20
    rounds: int = 7


class Bed:
    """Device memory, a host region, and an engine between them."""

    def __init__(self, device: str, plane: Plane, transposed: bool, nbytes: int) -> None:
        import torch

        block = LAYERS * plane.nbytes
        self.blocks = max(2, nbytes // block)
        self.nbytes = self.blocks * block
        self.region = Region.create(-(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.host = torch.frombuffer(self.region.view, dtype=torch.int8)[: self.nbytes]
        self.host.zero_()  # its pages are present
        shape = (self.blocks, plane.heads, plane.cells, plane.cell_bytes)
        order = (0, 2, 1, 3) if transposed else (0, 1, 2, 3)
        self.layers: list[torch.Tensor] = []
        for number in range(LAYERS):
            kept = torch.empty([shape[i] for i in order], dtype=torch.int8, device=device)
            kept.random_(-128, 128, generator=torch.Generator(device).manual_seed(number))
            self.layers.append(kept.permute(order))
        pages = tuple(LayerPage(str(number), (plane,)) for number in range(LAYERS))
        packing = GroupPacking(GroupSpec(0, FULL, TOKENS, 1, 0, pages), 0, 1)
        self.group = DeviceGroup(packing, [((layer,),) for layer in self.layers])
        self.engine: CopyEngine = make_engine([self.group], self.region)
        self.plain = torch.ones(self.nbytes, dtype=torch.int8, device=device)
        rng = np.random.default_rng(0)
        self.copies = BlockCopies(
            0,
            rng.permutation(self.blocks).astype(np.int64),
            rng.permutation(self.blocks).astype(np.int64) * block,
            np.zeros(self.blocks, np.int64),
        )
        self._jobs = 0

    def check(self) -> None:
        """Store, forget and load, and compare.

        Raises:
            BenchError: other bytes came back.
        """
        before = [layer.clone() for layer in self.layers]
        self.run(store=True)
        for layer in self.layers:
            layer.zero_()
        self.run(store=False)
        for layer, expected in zip(self.layers, before, strict=True):
            if not bool((layer == expected).all()):
                raise BenchError("other bytes came back than were stored")

    def run(self, store: bool) -> float:
        """Copy every block; seconds, from the call to the report."""
        self._jobs += 1
        begin = time.perf_counter()
        self.engine.submit(Transfer(self._jobs, store, (self.copies,)))
        self.engine.wait([self._jobs])
        seconds = time.perf_counter() - begin
        (result,) = self.engine.get_finished()
        if not result.ok or result.nbytes != self.nbytes:
            raise BenchError(f"the copy engine failed: {result.error or f'{result.nbytes} of {self.nbytes} bytes'}")
        return seconds

    def limit(self, store: bool) -> float:
        """One plain copy of as many bytes; seconds."""
        target, source = (self.host, self.plain) if store else (self.plain, self.host)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if self.plain.is_cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def wait_until_pinned(self, patience_s: float = 60.0) -> None:
        """On CUDA, the region is page-locked in the background."""
        until = time.monotonic() + patience_s
        while getattr(self.engine, "registered_bytes", self.region.size) < self.region.size:
            if time.monotonic() > until:
                raise BenchError("the host region was not page-locked")
            time.sleep(0.01)

    def close(self) -> None:
        self.engine.close()
        del self.host
        self.region.close()


def run(options: CopyOptions, report: Report) -> None:
    """Measure everything.

    Raises:
        MissingExtraError: torch is not installed.
        BenchError: there is no such device here, or other bytes came back.
    """
    name = prepare(options)
    report.start({"device": options.device, "name": name, "bytes": options.nbytes, "rounds": options.rounds})
    measure(options, report)
    report.close(NOTES)


def prepare(options: CopyOptions) -> str:
    """See that there is such a device; its name. Raises as ``run``."""
    require(["torch"], "pip install torch")
    import torch

    torch.set_num_threads(1)
    if options.device != "cuda":
        return options.device
    if not torch.cuda.is_available():
        raise BenchError("no CUDA device here (torch.cuda is not available); --device cpu runs everywhere")
    return str(torch.cuda.get_device_name())


def measure(options: CopyOptions, report: Report) -> None:
    for fragment in DIRECT:
        _measure(options, f"direct, {size_text(fragment)}", Plane("kv", 1, 1, fragment), False, report)
    for fragment in TRANSPOSED:
        _measure(options, f"transposed, {size_text(fragment)}", Plane("kv", HEADS, TOKENS, fragment), True, report)


def _measure(options: CopyOptions, case: str, plane: Plane, transposed: bool, report: Report) -> None:
    bed = Bed(options.device, plane, transposed, options.nbytes)
    try:
        bed.wait_until_pinned()
        bed.check()
        for store in (True, False):
            name = "store" if store else "load"
            report.progress(f"{name}, {case}")
            speeds, shares = [], []
            for _ in range(options.rounds):
                limit, spent = bed.limit(store), bed.run(store)
                speeds.append(bed.nbytes / spent / 1e9)
                shares.append(limit / spent)
            report.add(Figure(measure=name, case=case, unit="GB/s", values={"tierkv": speeds}))
            report.add(Figure(measure=f"{name}: share", case=case, unit="of plain", values={"tierkv": shares}))
        if options.device == "cpu":
            each = [_describe(bed) for _ in range(options.rounds)]
            report.add(Figure(measure="descriptors", case=case, unit="ns each", values={"tierkv": each}))
    finally:
        bed.close()


def _describe(bed: Bed) -> float:
    """Nanoseconds for each copy that is to be made, planned only."""
    table = as_table(bed.group.pieces)
    runs = sum(piece.runs for piece in bed.group.pieces)
    step = max(1, (1 << 15) // runs)
    out = np.empty((3, step * runs), np.int64)
    blocks, starts = bed.copies.blocks[:step].copy(), bed.copies.slot_offsets[:step].copy()
    begin, count = time.perf_counter(), 0
    for _ in range(20):
        count += offsets.copy_descriptors(blocks, starts, table, bed.region.address, True, out)
    return 1e9 * (time.perf_counter() - begin) / count
