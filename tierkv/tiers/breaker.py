"""The breaker: a tier that keeps failing is cut off, and probed until it is back."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from tierkv.tiers.io import ABSENT, CLOSED
from tierkv.types import JobResult

State = Literal["closed", "open", "half-open"]

#: Consecutive failures after which a tier is cut off.
FAILURES = 5
#: Seconds until the first probe, and at most between two.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

#: Reasons that say something of one chunk, and that the tier is there to say it.
_OF_ONE_CHUNK = frozenset({ABSENT, "capacity"})


def is_failure(reason: str) -> bool:
    """Whether ``reason``, why a chunk of a job is not ok, speaks against the tier itself.

    Words that nobody knows do, as do those of the operating system: ``eio``, ``enospc``, ``refused``, ``late``; and
    damaged records: a tier that delivers nothing else is of no use, and costs each request the wait for it.
    """
    return reason not in _OF_ONE_CHUNK and reason != CLOSED


def verdict(result: JobResult) -> bool | None:
    """What the report of a job says of its tier: True: it works, False: it fails, None: nothing.

    A tier that got through with one chunk works, whatever became of the others. A job that ended because the
    tier was closed, or that has no chunks, says nothing.
    """
    if np.asarray(result.ok).any():
        return True
    reasons = [result.reasons.get(index, "unknown") for index in range(len(result.ok))]
    if any(is_failure(reason) for reason in reasons):
        return False
    return True if any(reason != CLOSED for reason in reasons) else None


class Breaker:
    """Whether a tier may be used, by what became of its last uses.

    *closed*: it may. After ``failures`` failures without a success in between, *open*: it may not, for a pause.
    When that is over, *half-open*: one use is allowed, the probe. Its success closes the breaker; its failure
    opens it again, for twice the pause, up to ``max_pause_s``. A probe that does not report is repeated after
    the pause that it was waiting for. Any success closes, and the next first pause is ``first_pause_s`` again.

    It knows no clock: ``now`` is in seconds, from any clock that does not go back.

    Thread safety: none; to be used under its owner's lock.
    """

    __slots__ = ("_failures", "_first_pause_s", "_limit", "_max_pause_s", "_pause_s", "_retry_at", "_state", "opened")

    def __init__(
        self, failures: int = FAILURES, first_pause_s: float = FIRST_PAUSE_S, max_pause_s: float = MAX_PAUSE_S
    ) -> None:
        """
        Args:
            failures: how many in a row open it, 1 or more.
            first_pause_s, max_pause_s: seconds, above 0 and in this order.
        """
        assert failures >= 1 and 0 < first_pause_s <= max_pause_s
        self._limit = failures
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._state: State = "closed"
        self._failures = 0
        self._pause_s = first_pause_s
        self._retry_at = -math.inf
        #: How often it has opened, failed probes not counted.
        self.opened = 0

    @property
    def state(self) -> State:
        return self._state

    @property
    def retry_at(self) -> float:
        """When the next probe is allowed; -inf while closed."""
        return self._retry_at

    def allows(self, now: float) -> bool:
        """Whether to use the tier now. True while it is not closed is leave for one probe: use it, or lose a turn."""
        if self._state == "closed":
            return True
        if now < self._retry_at:
            return False
        self._state = "half-open"
        self._retry_at = now + self._pause_s
        return True

    def succeeded(self) -> None:
        """The tier did what it was asked for, whenever that was: it is back."""
        self._state = "closed"
        self._failures = 0
        self._pause_s = self._first_pause_s
        self._retry_at = -math.inf

    def failed(self, now: float) -> None:
        """The tier did not do what it was asked for. While open, this is old news and changes nothing."""
        if self._state == "open":
            return
        if self._state == "closed":
            self._failures += 1
            if self._failures < self._limit:
                return
            self.opened += 1
        else:
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
        self._state = "open"
        self._retry_at = now + self._pause_s

    def judge(self, works: bool | None, now: float) -> None:
        """``succeeded`` or ``failed``, as a ``verdict`` says; None says nothing."""
        if works:
            self.succeeded()
        elif works is False:
            self.failed(now)

    def __repr__(self) -> str:
        counts = f"failures={self._failures}, pause_s={self._pause_s:g}, opened={self.opened}"
        return f"Breaker({self._state!r}, {counts})"
