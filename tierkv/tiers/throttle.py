"""The throttle: cascades to a tier whose stores have become slow are dropped before they hurt.

It is configured by vLLM's ``backpressure``, as it is. vLLM names classes there; those that it brings are
known here by what they do, those of a user are not, because they are written against vLLM's own tiers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tierkv.config import NonNegative, Seconds, decode
from tierkv.errors import ConfigError

_MIB = 1 << 20

#: Above the high watermark, the share that is dropped grows with the latency, up to all at this many high watermarks.
ALL_DROPPED_AT = 3.0
#: What is dropped while a tier recovers.
COOLDOWN_SHARE = 0.5
#: Seconds without news of a tier after which one job is admitted, whatever the latency was.
PROBE_S = 10.0


class BackpressureConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``backpressure``. Latencies are seconds a MiB, from a job's submission to its report.

    backpressure_cls: what is watched: the moving average of a tier's store latency.
    policy_cls: what is done above the high watermark: drop a share of the jobs that grows with the latency,
        or (``DropStorePolicy``) all of them.
    high_water_s, low_water_s: pressure begins above the one and ends below the other.
    alpha: the weight of the latest store in the average.
    warmup_completions: so many stores are only measured; the average starts as theirs.
    decay_half_life_s: under pressure, without a store that ends, the average halves in this time; 0: never.
    cooldown_s: after pressure, half of the jobs are dropped for this time.

    The watermarks here are those for disks of the host's own; see ``watermarks``.
    """

    backpressure_cls: Literal[
        "EMABackpressureDetector", "vllm.v1.kv_offload.tiering.backpressure.EMABackpressureDetector"
    ] = "EMABackpressureDetector"
    policy_cls: Literal[
        "ThrottledDropPolicy",
        "DropStorePolicy",
        "vllm.v1.kv_offload.tiering.backpressure.ThrottledDropPolicy",
        "vllm.v1.kv_offload.tiering.backpressure.DropStorePolicy",
        None,
    ] = "ThrottledDropPolicy"
    high_water_s: Seconds = 0.010
    low_water_s: Seconds = 0.002
    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.15
    warmup_completions: NonNegative = 10
    decay_half_life_s: Annotated[float, Meta(ge=0)] = 2.0
    cooldown_s: Annotated[float, Meta(ge=0)] = 1.0

    @property
    def drops_all(self) -> bool:
        """Whether everything is dropped under pressure, instead of a share."""
        return (self.policy_cls or "").endswith("DropStorePolicy")


def watermarks(tier_type: str, locality: str | None) -> dict[str, float]:
    """The watermarks, in seconds a MiB, of a tier whose configuration gives none: vLLM's, by where its storage is."""
    if tier_type == "obj" or locality == "REMOTE":
        return {"high_water_s": 0.050, "low_water_s": 0.010}
    return {"high_water_s": 0.010, "low_water_s": 0.002}


class Throttle:
    """Which jobs of a tier are dropped, by how long its last stores took.

    It knows no clock: ``now`` is in seconds, from any clock that does not go back.

    Thread safety: none; to be used under its owner's lock.
    """

    def __init__(self, config: BackpressureConfig) -> None:
        self._config = config
        self._warm_up: list[float] = []
        self._latency = 0.0
        self._pressed = False
        #: Until when half is dropped, when the average was last brought up to date, and when there was last
        #: reason to expect news.
        self._cool_at = -math.inf
        self._latency_at = -math.inf
        self._news_at = -math.inf
        #: Chunks that would have to be dropped by now to have dropped the share exactly.
        self._owed = 0.0
        #: What was dropped until now.
        self.jobs_dropped = 0
        self.chunks_dropped = 0

    @property
    def latency(self) -> float:
        """The average store latency, in seconds a MiB; 0 until there is one."""
        return self._latency

    @property
    def under_pressure(self) -> bool:
        return self._pressed

    def admits(self, count: int, now: float) -> bool:
        """Whether a job of ``count`` chunks may be given to the tier; if not, it is counted as dropped.

        Of many jobs, the share that is to be dropped is dropped exactly, in chunks, and evenly.
        """
        self._forget(now)
        share = self._share(now)
        self._owed = self._owed + share * count if share else 0.0
        if share and self._owed >= count:
            self._owed -= count
            if now - self._news_at < PROBE_S:
                self.jobs_dropped += 1
                self.chunks_dropped += count
                return False
        self._news_at = now
        return True

    def finished(self, seconds: float, num_bytes: int, now: float) -> None:
        """A store of ``num_bytes`` has ended, ``seconds`` after it was submitted. Without bytes it says nothing."""
        if num_bytes <= 0:
            return
        config, sample = self._config, seconds * _MIB / num_bytes
        self._latency_at = self._news_at = now
        warm_up = max(1, config.warmup_completions)
        if len(self._warm_up) < warm_up:
            self._warm_up.append(sample)
            if len(self._warm_up) < warm_up:
                return
            self._latency = sum(self._warm_up) / warm_up
        else:
            self._latency += config.alpha * (sample - self._latency)
        if self._latency > config.high_water_s:
            self._pressed = True
        else:
            self._relax(now)

    def __repr__(self) -> str:
        dropped = f"jobs_dropped={self.jobs_dropped}, chunks_dropped={self.chunks_dropped}"
        return f"Throttle(latency={self._latency:.3g}, under_pressure={self._pressed}, {dropped})"

    def _forget(self, now: float) -> None:
        """Let the average decay: of a tier that gets nothing there is no news, and it may be fast again."""
        half_life = self._config.decay_half_life_s
        if self._pressed and half_life:
            self._latency *= 0.5 ** ((now - self._latency_at) / half_life)
            self._latency_at = now
            self._relax(now)

    def _relax(self, now: float) -> None:
        """End the pressure if the average is low enough."""
        if self._pressed and self._latency < self._config.low_water_s:
            self._pressed = False
            self._cool_at = now + self._config.cooldown_s

    def _share(self, now: float) -> float:
        """The share of chunks to drop now, from 0 to 1."""
        if not self._pressed:
            return COOLDOWN_SHARE if now < self._cool_at else 0.0
        if self._config.drops_all:
            return 1.0
        excess = self._latency / self._config.high_water_s - 1.0
        return min(max(excess / (ALL_DROPPED_AT - 1.0), 0.0), 1.0)


def build_throttle(
    top: Mapping[str, Any] | None,
    own: Mapping[str, Any] | None,
    *,
    tier_type: str,
    locality: str | None,
    path: str,
) -> Throttle | None:
    """The throttle of one tier; None where neither configuration asks for one.

    What is set for the tier comes before what is set for all, field by field, and that before ``watermarks``.

    Args:
        top, own: ``backpressure`` of the whole configuration and of the tier. An empty one asks for the defaults.
        tier_type, locality: the tier's ``type``, and whether it is ``LOCAL`` or ``REMOTE`` (None: not known).
        path: where the tier's configuration stands, for errors, such as ``secondary_tiers[0]``.

    Raises:
        ConfigError: a field is unknown or cannot be used, or the low watermark is above the high one.
    """
    if top is None and own is None:
        return None
    places = {"backpressure": top, f"{path}.backpressure": own}
    merged: dict[str, Any] = dict(watermarks(tier_type, locality))
    blamed = "backpressure"
    for place, raw in places.items():
        if raw is not None:
            decode(raw, BackpressureConfig, place)
            merged.update(raw)
            if "high_water_s" in raw or "low_water_s" in raw:
                blamed = place
    config = decode(merged, BackpressureConfig, blamed)
    if config.low_water_s > config.high_water_s:
        problem = f"{config.low_water_s:g} is above high_water_s, which is {config.high_water_s:g}"
        raise ConfigError(f"{blamed}.low_water_s", problem, "at most high_water_s")
    return Throttle(config)
