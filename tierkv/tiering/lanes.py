"""What the manager keeps for each tier: whether it may be used, and how much of the host it holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tierkv.tiers.base import Tier
from tierkv.tiers.breaker import Breaker
from tierkv.tiers.throttle import Throttle
from tierkv.types import Keys, Offsets, RequestContext


@dataclass(slots=True)
class Lane:
    """One tier. Thread safety: used under the manager's lock only.

    number: its place in the configured order.
    asking, reading, writing: cut it off when its lookups, loads or stores keep failing. A full disk still serves loads;
        and a tier that finds everything may deliver nothing.
    throttle: drops stores when they have become slow; None: never.
    backlog, waiting: chunks that wait to be handed over, in batches of slots and keys, and how many these are.
    held: slots that are pinned for its stores. late: slots that it was to have filled by now, and may still write.
    """

    number: int
    tier: Tier
    throttle: Throttle | None = None
    asking: Breaker = field(default_factory=Breaker)
    reading: Breaker = field(default_factory=Breaker)
    writing: Breaker = field(default_factory=Breaker)
    backlog: deque[tuple[Offsets, Keys]] = field(default_factory=deque)
    waiting: int = 0
    held: int = 0
    late: int = 0

    @property
    def name(self) -> str:
        return self.tier.context.name

    def may_serve(self, request: RequestContext, most_late: float, now: float) -> bool:
        """Whether the tier is asked what it has for ``request``: it is wanted, not at its share, and works.

        Args:
            most_late: the share, in slots, of what may be late.

        The breakers are asked last: they may give leave for one probe.
        """
        wanted = request.load_tiers.allows(self.tier.medium, self.tier.locality)
        return wanted and self.late < most_late and self.reading.allows(now) and self.asking.allows(now)
