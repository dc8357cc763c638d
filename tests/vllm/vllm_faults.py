"""Faults that tests plant in a running engine's process; called by ``Engine("call", function=…, arguments=…)``."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tierkv.transfer.cpu import CpuCopyEngine


def _before_copies(store: bool, act: Any) -> None:
    """Call ``act`` on the copying thread before each copy of that direction."""
    copy = CpuCopyEngine._copy

    def wrapped(self: CpuCopyEngine, transfer: Any, begun: Any) -> tuple[int, float]:
        if transfer.store == store:
            act()
        return copy(self, transfer, begun)

    CpuCopyEngine._copy = wrapped  # type: ignore[method-assign]


def slow_copies(process: Any, store: bool, seconds: float) -> None:
    """Each copy starts late: whoever does not wait for it changes its source or uses its target too early."""
    _before_copies(store, lambda: time.sleep(seconds))


def fail_copies(process: Any, store: bool, which: list[int]) -> None:
    """The copies of these numbers, counted from now on, fail."""
    numbers = itertools.count()

    def fail() -> None:
        if next(numbers) in which:
            raise OSError("this copy was made to fail")

    _before_copies(store, fail)
