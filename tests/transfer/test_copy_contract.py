"""One contract for all copy engines, on memory that the tests fill and read themselves."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import call

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")

from copy_backends import (  # noqa: E402
    NAMES,
    PIECE_BYTES,
    Backend,
    cuda_in_small_pieces,
    open_backend,
    replace_cuda,
)

from tierkv.errors import TransferError, UnsupportedError  # noqa: E402
from tierkv.host.region import Region  # noqa: E402
from tierkv.layout import canonical, offsets  # noqa: E402
from tierkv.layout.packing import GroupPacking  # noqa: E402
from tierkv.layout.spec import GroupSpec, LayerPage  # noqa: E402
from tierkv.transfer.engine import DeviceGroup, TransferResult, make_engine  # noqa: E402
from tierkv.transfer.plan import BlockCopies, Transfer  # noqa: E402

BLOCKS = 12
REGION_BYTES = 1 << 16
#: Per group: blocks a chunk, and of each layer (page bytes, padding between two blocks' pages).
SHAPES = (
    (4, ((48, 0), (16, 16), (100, 28))),
    (2, ((256, 0),)),
    (1, ((24, 8), (24, 0))),
)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return open_backend(request.param, monkeypatch)


@pytest.fixture(params=["as it lies", "staged"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA engine takes both ways, whatever the sizes, and stages a few blocks at a time."""
    from tierkv.transfer import cuda
    from tierkv.transfer import staging as module

    monkeypatch.setattr(module, "DIRECT_BYTES", 0 if request.param == "as it lies" else 1 << 40)
    monkeypatch.setattr(cuda, "STAGED_BYTES", 1000)


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(REGION_BYTES) as made:
        yield made


class Rank:
    """One rank's device memory, filled with bytes of its own, and its engine."""

    def __init__(self, region: Region, backend: Backend, rank: int = 0, ranks: int = 1) -> None:
        self.random = np.random.default_rng(rank)
        self.groups = []
        for index, (blocks_per_chunk, layers) in enumerate(SHAPES):
            pages = tuple(LayerPage.opaque(f"{index}.{i}", size, ranks) for i, (size, _) in enumerate(layers))
            packing = GroupPacking(GroupSpec(index, "full", 16, blocks_per_chunk, 0, pages), rank, ranks)
            planes = [((self._memory(backend.device, size, padding),),) for size, padding in layers]
            self.groups.append(DeviceGroup(packing, planes))
        self.engine = backend.make(self.groups, region)

    def _memory(self, device: str, size: int, padding: int) -> Any:
        filled = self.random.integers(-128, 128, (BLOCKS, size + padding), dtype=np.int8)
        return torch.from_numpy(filled).to(device)[:, :size]

    def page(self, group: int, layer: int, block: int) -> bytes:
        """What lies on the device."""
        return bytes(self.view(group, layer)[block].cpu().numpy().tobytes())

    def view(self, group: int, layer: int) -> Any:
        ((view,),) = self.groups[group].planes[layer]
        return view

    def block(self, group: int, block: int) -> list[bytes]:
        return [self.page(group, layer, block) for layer in range(len(self.groups[group].planes))]

    def wipe(self) -> None:
        for group in range(len(self.groups)):
            for layer in range(len(self.groups[group].planes)):
                self.view(group, layer).zero_()

    def run(self, *transfers: Transfer) -> dict[int, TransferResult]:
        """Submit all, wait for all, and collect the results."""
        for transfer in transfers:
            self.engine.submit(transfer)
        self.engine.wait([transfer.job_id for transfer in transfers])
        results = self.engine.get_finished()
        assert sorted(r.job_id for r in results) == sorted(t.job_id for t in transfers)
        return {result.job_id: result for result in results}


@pytest.fixture
def rank(region: Region, backend: Backend, staging: None) -> Iterator[Rank]:
    made = Rank(region, backend)
    yield made
    made.engine.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("tierkv-copy-", "tierkv-pin-"))]


def all_groups(job_id: int, store: bool) -> Transfer:
    """A whole chunk of the first group, one and a half of the second, two of the third, in slots of their own."""
    return Transfer(
        job_id,
        store,
        (
            BlockCopies.of(0, [7, 2, 3, 11], [1024] * 4, [0, 1, 2, 3]),
            BlockCopies.of(1, [0, 1, 5], [4096 - 64, 4096 - 64, 8192], [0, 1, 1]),
            BlockCopies.of(2, [9, 4], [512, 640], [0, 0]),
        ),
    )


def test_a_store_writes_canonical_bytes_and_nothing_else(rank: Rank, region: Region) -> None:
    result = rank.run(all_groups(1, store=True))[1]
    expected = bytearray(REGION_BYTES)

    def put(offset: int, blocks: list[list[bytes]]) -> int:
        chunk = canonical.assemble([[[page] for page in block] for block in blocks])
        expected[offset : offset + len(chunk)] = chunk
        return len(chunk)

    nbytes = put(1024, [rank.block(0, b) for b in (7, 2, 3, 11)])
    nbytes += put(4096 - 64, [rank.block(1, b) for b in (0, 1)])
    nbytes += put(8192 + 256, [rank.block(1, 5)])
    nbytes += put(512, [rank.block(2, 9)]) + put(640, [rank.block(2, 4)])
    assert bytes(region.view) == bytes(expected)
    assert result == TransferResult(1, True, True, nbytes, result.seconds)
    assert result.seconds >= 0


def test_a_load_brings_back_what_was_stored_and_touches_no_other_block(rank: Rank) -> None:
    stored = all_groups(1, store=True)
    before = {(c.group, b): rank.block(c.group, b) for c in stored.copies for b in c.blocks.tolist()}
    assert rank.run(stored)[1].ok
    rank.wipe()
    assert rank.run(all_groups(2, store=False))[2].ok
    for group in range(len(SHAPES)):
        for block in range(BLOCKS):
            empty = [bytes(len(page)) for page in rank.block(group, block)]
            assert rank.block(group, block) == before.get((group, block), empty)


def test_a_part_of_a_chunk_can_be_loaded_into_other_blocks(rank: Rank) -> None:
    rank.run(Transfer(1, True, (BlockCopies.of(0, [0, 1, 2, 3], [2048] * 4, [0, 1, 2, 3]),)))
    expected = [rank.block(0, block) for block in (3, 1)]
    rank.wipe()
    rank.run(Transfer(2, False, (BlockCopies.of(0, [8, 9], [2048] * 2, [3, 1]),)))
    assert [rank.block(0, block) for block in (8, 9)] == expected
    assert not any(any(page) for page in rank.block(0, 1))


def test_padding_between_blocks_stays_as_it_is(rank: Rank) -> None:
    view = rank.view(0, 1)
    whole = view.as_strided((BLOCKS, view.stride(0)), (view.stride(0), 1))
    rank.run(all_groups(1, store=True))
    rank.wipe()
    padding = whole[:, view.shape[1] :].clone()
    rank.run(all_groups(2, store=False))
    assert torch.equal(whole[:, view.shape[1] :], padding)


def test_two_ranks_share_a_slot(region: Region, backend: Backend) -> None:
    ranks = [Rank(region, backend, number, 2) for number in range(2)]
    transfer = Transfer(1, True, (BlockCopies.of(1, [6, 0], [4096, 4096], [0, 1]),))
    for rank in ranks:
        rank.engine.submit(pickle.loads(pickle.dumps(transfer)))
    for rank in ranks:
        rank.engine.wait([1])
        assert [result.ok for result in rank.engine.get_finished()] == [True]
    chunk = canonical.assemble([[[rank.page(1, 0, block) for rank in ranks]] for block in (6, 0)])
    assert bytes(region.view[4096 : 4096 + len(chunk)]) == chunk
    for rank in ranks:
        rank.engine.close()


CHUNK_0 = 4 * (48 + 16 + 100)


@pytest.mark.parametrize(
    ("group", "block", "slot_offset", "position", "message"),
    [
        (0, BLOCKS, 0, 0, "device block 12"),
        (0, -1, 0, 0, "device block -1"),
        (0, 1 << 62, 0, 0, "device block"),
        (0, 0, 0, 4, "position within the chunk 4"),
        (0, 0, 0, -1, "position within the chunk -1"),
        (0, 0, -8, 0, "slot offset -8"),
        (0, 0, REGION_BYTES - CHUNK_0 + 1, 0, "slot offset"),
        (0, 0, 1 << 62, 0, "slot offset"),
        (len(SHAPES), 0, 0, 0, "group index 3"),
        (-1, 0, 0, 0, "group index -1"),
    ],
)
@pytest.mark.parametrize("store", [True, False])
def test_what_lies_outside_is_reported_and_moves_no_byte(
    rank: Rank, region: Region, store: bool, group: int, block: int, slot_offset: int, position: int, message: str
) -> None:
    region.view[:] = b"\x11" * REGION_BYTES
    before = [rank.block(0, b) for b in range(BLOCKS)]
    good = BlockCopies.of(0, [1], [0], [0])
    bad = BlockCopies.of(group, [0, block], [0, slot_offset], [0, position])
    result = rank.run(Transfer(5, store, (good, bad)))[5]
    assert not result.ok and result.nbytes == 0 and result.store is store
    assert message in result.error
    assert bytes(region.view) == b"\x11" * REGION_BYTES
    assert [rank.block(0, b) for b in range(BLOCKS)] == before
    assert rank.run(all_groups(6, store=True))[6].ok  # and the engine goes on


def test_the_last_slot_of_the_region_can_be_used(rank: Rank, region: Region) -> None:
    at = REGION_BYTES - CHUNK_0
    assert rank.run(Transfer(1, True, (BlockCopies.of(0, [5], [at], [3]),)))[1].ok
    assert bytes(region.view[-164:]) == b"".join(rank.block(0, 5))


def test_arrays_of_the_wrong_kind_are_reported(rank: Rank) -> None:
    one = np.array([0], np.int64)
    for number, wrong in enumerate([np.array([0.5]), np.array([0, 1], np.int64), [0], np.array([0], np.int32)]):
        assert not rank.run(Transfer(number, True, (BlockCopies(0, one, one, wrong),)))[number].ok  # type: ignore[arg-type]


def test_an_empty_transfer_is_reported_too(rank: Rank) -> None:
    results = rank.run(Transfer(1, True, ()), Transfer(2, False, (BlockCopies.of(0, [], [], []),)))
    assert all(result.ok and result.nbytes == 0 for result in results.values())


def test_each_transfer_is_reported_exactly_once(rank: Rank) -> None:
    seen: list[int] = []
    for number in range(200):
        rank.engine.submit(all_groups(number, store=number % 3 != 0))
        seen += [result.job_id for result in rank.engine.get_finished()]
    deadline = time.monotonic() + 60
    while len(seen) < 200 and time.monotonic() < deadline:
        seen += [result.job_id for result in rank.engine.get_finished()]
    assert sorted(seen) == list(range(200))
    assert rank.engine.get_finished() == []


def test_stores_are_in_order_and_so_are_loads(rank: Rank) -> None:
    for number in range(40):
        rank.engine.submit(all_groups(number, store=number % 2 == 0))
    rank.engine.wait(range(40))
    results = rank.engine.get_finished()
    for store in (True, False):
        order = [result.job_id for result in results if result.store is store]
        assert order == sorted(order) and len(order) == 20


def test_wait_leaves_the_result_to_get_finished(rank: Rank, region: Region) -> None:
    rank.engine.submit(all_groups(1, store=True))
    rank.engine.wait([1])
    assert bytes(region.view[512:560]) == b"".join(rank.block(2, 9))
    rank.engine.wait([1, 77])  # ended, and never heard of
    assert [result.job_id for result in rank.engine.get_finished()] == [1]
    rank.engine.wait([1])


def test_close_finishes_what_was_submitted(rank: Rank) -> None:
    for number in range(20):
        rank.engine.submit(all_groups(number, store=True))
    rank.engine.close()
    rank.engine.close()
    results = rank.engine.get_finished()
    assert [result.job_id for result in results] == list(range(20)) and all(result.ok for result in results)
    rank.engine.submit(all_groups(99, store=True))
    rank.engine.wait([99])
    (late,) = rank.engine.get_finished()
    assert late.job_id == 99 and not late.ok and "closed" in late.error


def test_the_region_can_be_closed_after_the_engine(region: Region, backend: Backend) -> None:
    rank = Rank(region, backend)
    rank.run(all_groups(1, store=True))
    rank.engine.close()
    region.close()


def test_a_store_comes_after_the_work_that_was_submitted_before(rank: Rank, region: Region) -> None:
    view = rank.view(1, 0)
    for number in range(1, 20):
        for _ in range(50):  # on a device, enough work that it is still running at submit
            view.fill_(0)
        view.fill_(number)
        rank.run(Transfer(number, True, (BlockCopies.of(1, [3], [4096], [0]),)))
        assert bytes(region.view[4096 : 4096 + 256]) == bytes([number]) * 256


def test_a_load_comes_after_the_work_that_was_submitted_before(rank: Rank, region: Region) -> None:
    view = rank.view(1, 0)
    region.view[4096 : 4096 + 256] = b"\x55" * 256
    for number in range(20):
        for _ in range(50):
            view.fill_(1)
        rank.run(Transfer(number, False, (BlockCopies.of(1, [3], [4096], [0]),)))
        assert rank.page(1, 0, 3) == b"\x55" * 256


def test_device_memory_of_another_shape_is_refused(backend: Backend) -> None:
    device = backend.device
    packing = GroupPacking(GroupSpec(0, "full", 16, 1, 0, (LayerPage.opaque("a", 8), LayerPage.opaque("b", 8))), 0, 1)
    good = torch.zeros((4, 8), dtype=torch.int8, device=device)
    wrong = [
        torch.zeros((4, 9), dtype=torch.int8, device=device),
        torch.zeros((5, 8), dtype=torch.int8, device=device),
        torch.zeros((4, 8), dtype=torch.float32, device=device),
        torch.zeros((8, 4), dtype=torch.int8, device=device).T,
        torch.zeros(64, dtype=torch.int8, device=device).as_strided((4, 8), (4, 1)),
        torch.zeros(32, dtype=torch.int8, device=device),
    ]
    DeviceGroup(packing, (((good,),), ((good,),)))
    for view in wrong:
        with pytest.raises(TransferError):
            DeviceGroup(packing, (((good,),), ((view,),)))
    with pytest.raises(TransferError, match="1 layers for 2 layers"):
        DeviceGroup(packing, (((good,),),))


def test_no_kernel_is_compiled_by_a_transfer(region: Region) -> None:
    rank = Rank(region, Backend("cpu", make_engine))
    kernels = [k for k in (offsets.copy_many, offsets.copy_descriptors) if hasattr(k, "signatures")]
    before = [list(kernel.signatures) for kernel in kernels]
    read_only = BlockCopies.of(0, [1, 0, 2, 0], [0] * 4, [0, 0, 1, 0])
    read_only.blocks.flags.writeable = False
    strided = BlockCopies(0, *(array[::2] for array in (read_only.blocks, read_only.slot_offsets, read_only.positions)))
    assert all(r.ok for r in rank.run(Transfer(1, True, (read_only, strided)), all_groups(2, store=False)).values())
    assert [list(kernel.signatures) for kernel in kernels] == before
    rank.engine.close()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_the_cuda_engine_registers_the_region_in_pieces(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = replace_cuda(monkeypatch)
    rank = Rank(region, Backend("cpu", cuda_in_small_pieces))
    engine: Any = rank.engine
    assert eventually(lambda: engine.registered_bytes == REGION_BYTES)
    starts = range(region.address, region.address + REGION_BYTES, PIECE_BYTES)
    assert runtime.cudaHostRegister.call_args_list == [call(start, PIECE_BYTES, 0) for start in starts]
    assert rank.run(all_groups(1, store=True))[1].ok
    runtime.cudaHostUnregister.assert_not_called()
    engine.close()
    engine.close()
    assert runtime.cudaHostUnregister.call_args_list == [call(start) for start in starts]
    assert engine.registered_bytes == 0


def test_a_region_of_one_piece_is_registered_at_once(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierkv.transfer.cuda import CudaCopyEngine

    runtime = replace_cuda(monkeypatch)
    engine: Any = Rank(region, Backend("cpu", CudaCopyEngine)).engine
    assert eventually(lambda: engine.registered_bytes == REGION_BYTES)
    runtime.cudaHostRegister.assert_called_once_with(region.address, region.size, 0)
    engine.close()


def test_the_cuda_engine_copies_before_anything_is_registered(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ``close`` waits for the call that is running, and undoes that one and no other."""
    go_on = threading.Event()

    def register(address: int, nbytes: int, flags: int) -> int:
        assert go_on.wait(60)
        return 0

    runtime = replace_cuda(monkeypatch, register)
    rank = Rank(region, Backend("cpu", cuda_in_small_pieces))
    engine: Any = rank.engine
    assert rank.run(all_groups(1, store=True))[1].ok and engine.registered_bytes == 0
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert eventually(lambda: engine._pinner._stop.is_set())
    runtime.cudaHostUnregister.assert_not_called()
    go_on.set()
    closing.join(60)
    assert runtime.cudaHostRegister.call_args_list == [call(region.address, PIECE_BYTES, 0)]
    assert runtime.cudaHostUnregister.call_args_list == [call(region.address)]


@pytest.mark.parametrize(("code", "registered", "warned"), [(712, REGION_BYTES - PIECE_BYTES, False), (2, 8192, True)])
def test_the_cuda_engine_goes_on_without_what_cannot_be_registered(
    region: Region,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    registered: int,
    warned: bool,
) -> None:
    third = region.address + 2 * PIECE_BYTES
    runtime = replace_cuda(monkeypatch, lambda address, nbytes, flags: code if address == third else 0)
    rank = Rank(region, Backend("cpu", cuda_in_small_pieces))
    engine: Any = rank.engine
    assert eventually(lambda: engine.registered_bytes == registered)
    assert eventually(lambda: ("8192 are page-locked" in caplog.text and f"CUDA error {code}" in caplog.text) is warned)
    assert len(caplog.records) == warned
    assert rank.run(all_groups(1, store=True))[1].ok
    engine.close()
    undone = [args.args[0] - region.address for args in runtime.cudaHostUnregister.call_args_list]
    assert undone == ([0, 4096] if warned else [start for start in range(0, REGION_BYTES, 4096) if start != 8192])


def test_what_cannot_be_unregistered_is_logged(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = replace_cuda(monkeypatch)
    runtime.cudaHostUnregister.side_effect = lambda address: 1 if address == region.address else 0
    engine: Any = Rank(region, Backend("cpu", cuda_in_small_pieces)).engine
    assert eventually(lambda: engine.registered_bytes == REGION_BYTES)
    engine.close()
    assert engine.registered_bytes == PIECE_BYTES
    assert f"{PIECE_BYTES} bytes of the host region stay page-locked: cudaHostUnregister: CUDA error 1" in caplog.text


def test_a_device_without_an_engine_is_named(region: Region) -> None:
    packing = GroupPacking(GroupSpec(0, "full", 16, 1, 0, (LayerPage.opaque("a", 8),)), 0, 1)
    group = DeviceGroup(packing, (((torch.zeros((4, 8), dtype=torch.int8, device="meta"),),),))
    with pytest.raises(UnsupportedError, match=r"'meta'.*cpu, cuda"):
        make_engine([group], region)
    with pytest.raises(UnsupportedError, match="one device"):
        make_engine([], region)
