"""The pure part of transfers, and what of the CUDA engine can be tested without a GPU."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.transfer.pin import cut
from tierkv.transfer.plan import BlockCopies, Run, Transfer, runs


def test_a_transfer_travels_by_pickle() -> None:
    transfer = Transfer(7, True, (BlockCopies.of(1, [3, 4], [0, 4096], [0, 1]),))
    copy = pickle.loads(pickle.dumps(transfer))
    assert (copy.job_id, copy.store, copy.num_blocks) == (7, True, 2)
    assert copy.copies[0].group == 1
    for name in ("blocks", "slot_offsets", "positions"):
        assert np.array_equal(getattr(copy.copies[0], name), getattr(transfer.copies[0], name))


def test_plans_do_not_need_torch() -> None:
    code = (
        "import sys, tierkv.transfer.plan, tierkv.transfer.pin, tierkv.transfer.engine\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12),
    page_bytes=st.integers(1, 2),
    touching=st.booleans(),
)
def test_runs_cover_each_page_in_order_and_are_as_long_as_can_be(
    steps: list[tuple[int, int]], page_bytes: int, touching: bool
) -> None:
    blocks, host = [b for b, _ in steps], [h for _, h in steps]
    found = runs(np.array(blocks, np.int64), np.array(host, np.int64), page_bytes, touching)
    single = [(r.first + i, r.host_offset + i * page_bytes) for r in found for i in range(r.blocks)]
    assert single == steps
    for one, two in itertools.pairwise(found):
        joins = two.first == one.first + one.blocks and two.host_offset == one.host_offset + one.blocks * page_bytes
        assert not (touching and joins)
    assert touching or all(run.blocks == 1 for run in found)


@given(start=st.integers(0, 40), size=st.integers(1, 60), piece=st.integers(1, 20))
def test_a_cut_copy_is_whole_and_no_part_crosses_pieces(start: int, size: int, piece: int) -> None:
    bounds = cut(start, start + size, piece)
    assert bounds[0] == start and bounds[-1] == start + size
    for first, end in itertools.pairwise(bounds):
        assert first < end and first // piece == (end - 1) // piece
    assert all(bound % piece == 0 for bound in bounds[1:-1])  # no more parts than must be


class Copies:
    """Records every copy between tensors: which bytes of ``host`` it reads or writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
        self.spans: list[tuple[int, int]] = []
        copy = type(host).copy_

        def record(target: Any, source: Any, **options: Any) -> Any:
            for tensor in (target, source):
                start = tensor.data_ptr() - host.data_ptr()
                if 0 <= start < host.numel():
                    self.spans.append((start, start + tensor.numel()))
            return copy(target, source, **options)

        monkeypatch.setattr(type(host), "copy_", record)


@pytest.mark.parametrize("piece_bytes", [1000, 24, 16, 7])
@pytest.mark.parametrize("stride", [16, 24])
def test_copy_runs_of_the_cuda_engine_moves_the_right_bytes(
    stride: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="the copy engines work on torch tensors; torch is not installed")
    from tierkv.transfer.cuda import copy_runs

    with torch.inference_mode():  # as an engine allocates its KV cache
        page = torch.arange(8 * stride, dtype=torch.int16).to(torch.int8).view(8, stride)[:, :16]
    host = torch.zeros(400, dtype=torch.int8)
    blocks, offsets = np.array([2, 3, 4, 0]), np.array([0, 16, 32, 100])
    plan = runs(blocks, offsets, 16, stride == 16)
    assert plan == (
        [Run(2, 3, 0), Run(0, 1, 100)] if stride == 16 else [Run(2, 1, 0), Run(3, 1, 16), Run(4, 1, 32), Run(0, 1, 100)]
    )
    before = page.clone()
    copies = Copies(monkeypatch, host)
    with torch.inference_mode():
        assert copy_runs(page, host, plan, piece_bytes, to_host=True) == 64
        for block, at in zip(blocks, offsets, strict=True):
            assert torch.equal(host[at : at + 16], before[block])
        page.zero_()
        assert copy_runs(page, host, plan, piece_bytes, to_host=False) == 64
    assert sum(end - start for start, end in copies.spans) == 2 * 64
    assert all(start // piece_bytes == (end - 1) // piece_bytes for start, end in copies.spans)
    if piece_bytes == 1000:
        assert len(copies.spans) == 2 * len(plan)  # what fits a piece is one copy
    assert torch.equal(page[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    assert not page[[1, 5, 6, 7]].any()
