"""The CUDA engine's operations under every order in which a device may get on with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tierkv.transfer import order
from tierkv.transfer.order import (
    BEGUN,
    Direct,
    Fill,
    Gather,
    Join,
    Moving,
    Operation,
    Part,
    Record,
    Scatter,
    Unload,
    Wait,
)

PARTS = [Part(3, 0), Part(0, 2), Part(5, 2)]


def test_the_operations_of_a_store_and_of_a_load() -> None:
    begin, end = (Wait("begun"), Record("start")), (Record("end"), Join("end"))
    stages = [(0, 2), (2, 4), (4, 5)]
    store = [op for a, b in stages for op in (Gather(2, a, b), Unload(2, a, b))]
    load = [op for a, b in stages for op in (Fill(2, a, b), Scatter(2, a, b))]
    assert order.operations(True, PARTS) == (*begin, Direct(0, 0, 3), *store, *end)
    assert order.operations(False, PARTS) == (*begin, Direct(0, 0, 3), *load, *end)
    assert order.operations(True, []) == (*begin, *end)


@dataclass
class Device:
    """Streams that get on one operation at a time, in any order among each other; and the threads that feed them.

    A thread enqueues without waiting, but for ``Join``. As on CUDA, whoever waits for an event that nobody has recorded
    yet does not wait. The caller computes, submits both transfers (each marked on its
    stream), and computes on. ``log``: what has happened, in order.
    """

    transfers: dict[str, tuple[Operation, ...]]
    streams: dict[str, tuple[tuple[str, Operation | str], ...]] = field(default_factory=dict)
    thread_at: dict[str, int] = field(default_factory=dict)
    happened: frozenset[tuple[str, str]] = frozenset()
    log: tuple[tuple[str, object], ...] = ()

    @classmethod
    def with_(cls, transfers: dict[str, tuple[Operation, ...]]) -> Device:
        caller = (("caller", "compute"), *((name, Record(BEGUN)) for name in transfers), ("caller", "compute on"))
        return cls(transfers, {"caller": caller, **{name: () for name in transfers}}, dict.fromkeys(transfers, 0))

    def choices(self) -> Iterator[Device]:
        for name, operations in self.transfers.items():
            at = self.thread_at[name]
            if at > len(operations):
                continue
            if at == len(operations):
                yield self._after(threads={name: at + 1}, log=(name, "reported"))
                continue
            operation = operations[at]
            idle = isinstance(operation, Wait | Join) and not self._recorded(name, operation.event)
            if idle or (isinstance(operation, Join) and (name, operation.event) in self.happened):
                yield self._after(threads={name: at + 1})
            elif not isinstance(operation, Join):
                yield self._after(threads={name: at + 1}, streams={name: (*self.streams[name], (name, operation))})
        for stream, queue in self.streams.items():
            if not queue:
                continue
            (name, first), rest = queue[0], queue[1:]
            if isinstance(first, Wait) and (name, first.event) not in self.happened:
                continue
            event = {(name, first.event)} if isinstance(first, Record) else set()
            yield self._after(streams={stream: rest}, event=event, log=(name, first))

    def _recorded(self, name: str, event: str) -> bool:
        queued = any((name, Record(event)) in queue for queue in self.streams.values())
        return queued or (name, event) in self.happened

    def _after(
        self,
        threads: dict[str, int] | None = None,
        streams: dict[str, tuple[tuple[str, Operation | str], ...]] | None = None,
        event: set[tuple[str, str]] | None = None,
        log: tuple[str, object] | None = None,
    ) -> Device:
        return Device(
            self.transfers,
            {**self.streams, **(streams or {})},
            {**self.thread_at, **(threads or {})},
            self.happened | (event or set()),
            (*self.log, log) if log else self.log,
        )

    @property
    def state(self) -> tuple[object, ...]:
        """Equal if all that can still happen is, and all that was checked about what has."""
        queues = tuple(sorted(self.streams.items()))
        return queues, tuple(sorted(self.thread_at.items())), self.happened, frozenset(self.log)


def wrongs(device: Device) -> list[str]:
    """What the last thing that happened should have come after."""
    if not device.log:
        return []
    (name, what), before = device.log[-1], set(device.log[:-1])
    found = []
    if isinstance(what, Moving) and ("caller", "compute") not in before:
        found.append(f"{name}: {what} before the computation that it was submitted after")
    if what == "reported":
        moves = {(name, op) for op in device.transfers[name] if isinstance(op, Moving)}
        found += [f"{name}: reported before {op}" for _, op in moves - before]
    if isinstance(what, Gather | Fill):
        # There is one buffer for the planes of a transfer, and it must be free.
        after = {Gather: Unload, Fill: Scatter}[type(what)]
        staged = {op for n, op in before if n == name and isinstance(op, type(what)) and op.planes == what.planes}
        found += [
            f"{name}: {what} while {op} is staged"
            for op in staged
            if (name, after(op.planes, op.first, op.last)) not in before
        ]
    for kind, needed in ((Unload, Gather), (Scatter, Fill)):
        if isinstance(what, kind) and (name, needed(what.planes, what.first, what.last)) not in before:
            found.append(f"{name}: {what} before it is staged")
    return found


def explore(transfers: dict[str, tuple[Operation, ...]]) -> tuple[set[str], int]:
    """All that goes wrong in any order, and how many transfers are reported at every end."""
    todo, seen, found, reported = [Device.with_(transfers)], set(), set(), len(transfers)
    while todo:
        device = todo.pop()
        if device.state in seen:
            continue
        seen.add(device.state)
        found.update(wrongs(device))
        following = list(device.choices())
        if not following:
            reported = min(reported, sum(what == "reported" for _, what in device.log))
        todo += following
    return found, reported


PAIR = {"store": order.operations(True, [Part(1, 0), Part(2, 1)]), "load": order.operations(False, [Part(2, 1)])}


def test_no_order_of_completion_goes_wrong() -> None:
    assert explore(PAIR) == (set(), 2)


@pytest.mark.parametrize("dropped", [Wait, Join])
def test_without_what_orders_them_it_goes_wrong(dropped: type) -> None:
    """So the exploration would have noticed."""
    for name in PAIR:
        changed = {**PAIR, name: tuple(op for op in PAIR[name] if not isinstance(op, dropped))}
        assert explore(changed)[0]


def test_an_end_that_is_recorded_too_early_goes_wrong() -> None:
    store = PAIR["store"]
    early = (*store[:2], store[-2], *store[2:-2], store[-1])
    assert any("reported before" in wrong for wrong in explore({"store": early})[0])


def test_a_wait_for_what_nobody_records_goes_wrong() -> None:
    assert explore({"store": (Wait("another"), *PAIR["store"][1:])})[0]
    assert explore({"store": (*PAIR["store"][:-1], Join("another"))})[0]


@pytest.mark.parametrize("store", [True, False])
def test_a_buffer_that_is_staged_into_twice_goes_wrong(store: bool) -> None:
    begin, (first, second, third, fourth), end = (Wait(BEGUN), Record("start")), _stages(store), order.ending()
    assert explore({"it": (*begin, first, second, third, fourth, *end)}) == (set(), 1)
    assert any("is staged" in wrong for wrong in explore({"it": (*begin, first, third, second, fourth, *end)})[0])


def _stages(store: bool) -> tuple[Operation, ...]:
    return order.operations(store, [Part(2, 1)])[2:-2]


def test_two_transfers_of_one_direction() -> None:
    """They have events of their own, and the thread goes on to the second when it has reported the first."""
    both = {"one": order.operations(True, [Part(2, 1)]), "two": order.operations(True, [Part(1, 0)])}
    assert explore(both) == (set(), 2)
