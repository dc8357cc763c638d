"""What the CUDA engine enqueues for a transfer, and in which order: values, made by a pure function.

The engine has one stream a direction, and one thread that works through a transfer's operations one after the other.
``Wait`` and ``Record`` and all that moves bytes only enqueue, and return at once; the device does them later, in the
order of the stream. ``Join`` alone stops the thread. That order is all that keeps a store from reading a block before
the computation has written it, a load from writing one that is still read, and a report from coming before the last
byte; ``tests/transfer/test_order.py`` goes through every order in which a device may get on with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Events of a transfer. ``BEGUN``: all that the caller had enqueued when it submitted. ``START``, ``END``: around the
#: copies.
BEGUN, START, END = "begun", "start", "end"


@dataclass(frozen=True)
class Wait:
    """The stream goes on when the event has happened."""

    event: str


@dataclass(frozen=True)
class Record:
    """The event happens when the stream has come here."""

    event: str


@dataclass(frozen=True)
class Join:
    """The thread goes on when the event has happened."""

    event: str


@dataclass(frozen=True)
class Moving:
    """Blocks ``first`` to ``last`` - 1 of the planes number ``planes``."""

    planes: int
    first: int
    last: int


class Direct(Moving):
    """Device ⇄ host, as they lie."""


class Gather(Moving):
    """Device → a new staging buffer."""


class Unload(Moving):
    """Staging buffer → host, after which the buffer is free."""


class Fill(Moving):
    """Host → a new staging buffer."""


class Scatter(Moving):
    """Staging buffer → device, after which the buffer is free."""


Operation = Wait | Record | Join | Moving


@dataclass(frozen=True)
class Part:
    """What of a transfer is planes of one kind: how many blocks, and how many of them are staged at a time.

    at_a_time: 0: none; they are copied as they lie.
    """

    blocks: int
    at_a_time: int


def operations(store: bool, parts: Sequence[Part]) -> tuple[Operation, ...]:
    """All of a transfer, from what it comes after to the moment when it can be reported."""
    return (
        Wait(BEGUN),
        Record(START),
        *(op for number, part in enumerate(parts) for op in _moves(store, number, part)),
        *ending(),
    )


def ending() -> tuple[Operation, ...]:
    """What comes last, also after an error: what was enqueued before it must not move bytes after the report."""
    return Record(END), Join(END)


def _moves(store: bool, number: int, part: Part) -> Iterator[Moving]:
    if not part.blocks:
        return
    if not part.at_a_time:
        yield Direct(number, 0, part.blocks)
        return
    for first in range(0, part.blocks, part.at_a_time):
        last = min(first + part.at_a_time, part.blocks)
        yield (Gather if store else Fill)(number, first, last)
        yield (Unload if store else Scatter)(number, first, last)
