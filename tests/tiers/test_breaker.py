"""The breaker, also against a model that recomputes everything from the history, in whatever order hypothesis finds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv.tiers.breaker import Breaker, is_failure, verdict
from tierkv.tiers.record import REASONS
from tierkv.types import JobResult


def opened(breaker: Breaker, now: float = 0.0) -> Breaker:
    for _ in range(5):
        breaker.failed(now)
    assert breaker.state == "open"
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(4):
            breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state == "closed" and breaker.allows(0.0) and breaker.retry_at == -math.inf
    opened(breaker, 10.0)
    assert (breaker.retry_at, breaker.opened) == (11.0, 1)
    assert not breaker.allows(10.0) and not breaker.allows(10.9)
    assert repr(breaker) == "Breaker('open', failures=5, pause_s=1, opened=1)"


def test_one_probe_is_allowed_after_the_pause() -> None:
    breaker = opened(Breaker())
    assert breaker.allows(1.0) and breaker.state == "half-open"
    assert [breaker.allows(1.0) for _ in range(3)] == [False] * 3


def test_a_probe_that_succeeds_closes() -> None:
    breaker = opened(Breaker())
    assert breaker.allows(1.0)
    breaker.succeeded()
    assert breaker.state == "closed" and [breaker.allows(1.0) for _ in range(3)] == [True] * 3


def test_probes_that_fail_double_the_pause_up_to_a_minute_and_a_success_resets_it() -> None:
    breaker, now, pauses = opened(Breaker()), 0.0, []
    for _ in range(9):
        pauses.append(breaker.retry_at - now)
        now = breaker.retry_at
        assert breaker.allows(now)
        breaker.failed(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert breaker.opened == 1
    breaker.succeeded()
    assert opened(breaker, now).retry_at == now + 1


def test_a_probe_that_never_reports_is_repeated_after_the_pause() -> None:
    breaker = opened(Breaker(first_pause_s=2.0))
    assert breaker.allows(5.0)
    assert not breaker.allows(6.9)
    assert breaker.allows(7.0) and breaker.state == "half-open"
    assert not breaker.allows(8.9)


def test_late_news_while_open() -> None:
    breaker = opened(Breaker())
    for _ in range(10):
        breaker.failed(0.5)
    assert breaker.retry_at == 1.0, "failures of uses from before do not prolong the pause"
    breaker.succeeded()
    assert breaker.state == "closed", "a tier that delivers is back"


@pytest.mark.parametrize("arguments", [(0, 1.0, 60.0), (1, 0.0, 60.0), (1, 2.0, 1.0)])
def test_what_cannot_be(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(AssertionError):
        Breaker(*arguments)


@pytest.mark.parametrize("reason", ["eio", "enospc", "erofs", "error", "unknown", "refused", "late", *REASONS])
def test_reasons_that_speak_against_the_tier(reason: str) -> None:
    assert is_failure(reason)


@pytest.mark.parametrize("reason", ["absent", "capacity", "closed"])
def test_reasons_that_do_not(reason: str) -> None:
    assert not is_failure(reason)


@pytest.mark.parametrize(
    ("ok", "reasons", "says"),
    [
        ([True, True], {}, True),
        ([True, False], {1: "eio"}, True),
        ([False, False], {0: "absent", 1: "absent"}, True),
        ([True, False], {1: "checksum"}, True),
        ([False, False], {0: "absent", 1: "checksum"}, False),
        ([False, False], {0: "closed", 1: "absent"}, True),
        ([False, False], {0: "absent", 1: "eio"}, False),
        ([False, False], {0: "closed", 1: "eio"}, False),
        ([False], {}, False),
        ([False, False], {0: "closed", 1: "closed"}, None),
        ([], {}, None),
    ],
)
def test_what_a_report_says_of_its_tier(ok: Sequence[bool], reasons: Mapping[int, str], says: bool | None) -> None:
    assert verdict(JobResult(1, np.array(ok, np.bool_), None, reasons)) is says


class Model:
    """A breaker as what has happened since its last success: ``("failed", now)`` or ``("probe", now)`` each."""

    def __init__(self, failures: int, first: float, most: float) -> None:
        self.failures, self.first, self.most = failures, first, most
        self.history: list[tuple[str, float]] = []

    def numbers(self, what: str) -> list[int]:
        return [number for number, (happened, _) in enumerate(self.history) if happened == what]

    def cuts(self) -> list[float]:
        """When it was cut off: by the last of the first failures, then by the first failure after each probe."""
        fails, probes = self.numbers("failed"), self.numbers("probe")
        if len(fails) < self.failures:
            return []
        cuts = [fails[self.failures - 1]]
        for number in fails[self.failures :]:
            if any(cuts[-1] < probe < number for probe in probes):
                cuts.append(number)
        return [self.history[number][1] for number in cuts]

    def pause(self) -> float:
        return float(min(self.first * 2 ** (len(self.cuts()) - 1), self.most))

    def probed_at(self) -> float | None:
        """When the last probe was allowed that no failure has answered yet."""
        fails, probes = self.numbers("failed"), self.numbers("probe")
        return self.history[probes[-1]][1] if probes and probes[-1] > fails[-1] else None

    def state(self) -> str:
        if not self.cuts():
            return "closed"
        return "open" if self.probed_at() is None else "half-open"

    def retry_at(self) -> float:
        if not self.cuts():
            return -math.inf
        probed = self.probed_at()
        return (self.cuts()[-1] if probed is None else probed) + self.pause()

    def allows(self, now: float) -> bool:
        if not self.cuts():
            return True
        if now < self.retry_at():
            return False
        self.history.append(("probe", now))
        return True


class BreakerMachine(RuleBasedStateMachine):
    @initialize(failures=st.integers(1, 4), first=st.sampled_from([0.5, 1.0]), most=st.sampled_from([1.0, 8.0]))
    def start(self, failures: int, first: float, most: float) -> None:
        self.breaker = Breaker(failures, first, most)
        self.model = Model(failures, first, most)
        self.now = 0.0

    @rule(quarters=st.integers(1, 12))
    def wait(self, quarters: int) -> None:
        self.now += quarters / 4

    @rule()
    def wait_for_the_retry(self) -> None:
        self.now = max(self.now, self.breaker.retry_at)

    @rule()
    def use(self) -> None:
        assert self.breaker.allows(self.now) == self.model.allows(self.now)

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()
        self.model.history.clear()

    @rule()
    def fail(self) -> None:
        self.breaker.failed(self.now)
        self.model.history.append(("failed", self.now))

    @invariant()
    def agree(self) -> None:
        assert self.breaker.state == self.model.state()
        assert self.breaker.retry_at == self.model.retry_at()


BreakerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAgainstItsHistory = BreakerMachine.TestCase
