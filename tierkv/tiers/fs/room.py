"""Room for new records: what a root may take, and what goes when that is too little.

The least recently used records go first; before them, those of generations that were left behind. Which these are, a
walk through the root finds, on a thread of its own and for many evictions at once; whether such a record was used
since, the file system says before it is evicted. So processes that share a root need not tell each other what they
use.

The file of a record that is evicted for one of the same size becomes that one's: it is moved to where temporary files
are, and written over. To remove a file and to make another takes ext4 ten times as long for 16 KiB, and four times for
1 MiB: it looks for an inode that was not freed lately, and for blocks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from tierkv.errors import RecordError
from tierkv.keys import FIRST_GENERATION
from tierkv.tiers.fs.ledger import Ledger
from tierkv.tiers.fs.root import Root
from tierkv.tiers.fs.survey import Survey, Victim, Victims, names, survey
from tierkv.types import Space

logger = logging.getLogger(__name__)

#: Which share of the capacity one walk looks for, and the least.
_VICTIM_SHARE = 10
_LEAST_VICTIM_BYTES = 1 << 30
#: How long a store waits for a walk.
PATIENCE_S = 10.0
#: After a walk that found nothing there is no other for this long, or for as long as it took.
PAUSE_S = 0.05


class Room:
    """One process's room below a root.

    Thread safety: any method may be called by any thread. ``_evicting`` is held by who removes records; ``_changed``
    guards what the walking thread and the others tell each other.
    """

    def __init__(
        self,
        root: Root,
        ledger: Ledger,
        namespace: bytes,
        *,
        capacity_bytes: int | None,
        bounded: bool,
        generation_ttl_s: float,
        tier: str,
        on_walk: Callable[[Survey | None], None],
        on_removed: Callable[[str], None],
    ) -> None:
        """
        Args:
            capacity_bytes: of all records. None: no such bound.
            bounded: whether there is any bound. Without one, nothing is evicted, and one walk looks at names alone.
            tier: its name, for the thread's.
            on_walk: told when a walk begins (None), and what it has found.
            on_removed: told of each record that was evicted, by its path.
        """
        self._root = root
        self._ledger = ledger
        self._namespace = namespace
        share = (capacity_bytes or 0) // _VICTIM_SHARE
        self._victim_bytes = max(share, min(_LEAST_VICTIM_BYTES, capacity_bytes or _LEAST_VICTIM_BYTES))
        self._bounded = bounded
        self._ttl_s = generation_ttl_s
        self._on_walk = on_walk
        self._on_removed = on_removed
        self._left: dict[Space, int] = {}
        self._evicting = threading.Lock()
        self._changed = threading.Condition()
        self._victims = Victims()
        self._enough = 0
        self._wanted = True
        self._walks = 0
        self._barren_until = 0.0
        #: Whether the root was full lately: then others' records are not asked about, but evicted.
        self._full = False
        self._closed = False
        self.evicted = 0
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{tier}-walk-0", daemon=True)
        self._thread.start()

    def take(self, nbytes: int, temporary: str | None) -> bool:
        """Use ``nbytes`` for a file that is about to be made; evicts as needed.

        Args:
            temporary: where to move the file of an evicted record to; None: to nowhere.

        Returns:
            whether the file of an evicted record, which takes as many bytes, lies at ``temporary`` now.

        Raises:
            RecordError: ``capacity``: there is no room, and none can be made.
        """
        while not self._ledger.take(nbytes, ask=not self._full):
            with self._evicting:
                victim = self._next_victim()
                self._full = victim is not None
                if victim is None:
                    if self._ledger.take(nbytes):
                        return False
                    raise RecordError("capacity", f"no room for {nbytes} bytes")
                fits = temporary is not None and victim.nbytes == nbytes and not self._ledger.over
                if not self._evict(victim, temporary if fits else None):
                    continue
                if fits:
                    self._ledger.reuse(nbytes)
                    return True
                self._ledger.give_back(victim.nbytes, removed=True)
        return False

    def leave(self, space: Space) -> None:
        """This process does not use ``space`` any more; nobody else can, unless its generation has a name."""
        if space.generation != FIRST_GENERATION:
            self._left[space] = time.time_ns()

    def enter(self, space: Space) -> None:
        """This process uses ``space`` from now on."""
        self._left.pop(space, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __repr__(self) -> str:
        return f"Room(victims={len(self._victims)}, evicted={self.evicted}, walks={self._walks})"

    # ── evicting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _next_victim(self) -> Victim | None:
        """What goes next. Waits for a walk if none is known; None: there is nothing that may go."""
        with self._changed:
            if len(self._victims) <= self._enough:
                self._want_walk()
            until = time.monotonic() + PATIENCE_S
            while not len(self._victims) and self._wanted and not self._closed:
                if not self._changed.wait(until - time.monotonic()):
                    break
            return self._victims.take()

    def _want_walk(self) -> None:
        if time.monotonic() >= self._barren_until:
            self._wanted = True
            self._changed.notify_all()

    def _evict(self, victim: Victim, moved_to: str | None) -> bool:
        """Remove a record, or move its file, unless it was used since the walk; whether that was done."""
        try:
            if os.stat(victim.path, follow_symlinks=False).st_atime_ns != victim.used_ns:
                return False
            if moved_to is None:
                os.unlink(victim.path)
            else:
                os.rename(victim.path, moved_to)
        except FileNotFoundError:  # another process has removed it
            return False
        except OSError as error:
            logger.warning("%s cannot be evicted: %s", victim.path, error)
            return False
        self.evicted += 1
        self._on_removed(victim.path)
        return True

    # ── walking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            begin = time.monotonic()
            found = Victims()
            try:
                found = self._walk()
            except Exception as error:  # of the file system, most likely; there may be another walk
                logger.warning("a walk through %s failed: %s", self._root.path, error)
            with self._changed:
                self._victims = found
                self._enough = len(found) // 2
                self._wanted = False
                self._walks += 1
                self._full = False
                now = time.monotonic()
                self._barren_until = 0.0 if len(found) else now + max(PAUSE_S, now - begin)
                self._changed.notify_all()
            self._shrink()

    def _shrink(self) -> None:
        """Evict what is above the capacity, which was larger before, or was not minded by others."""
        while self._ledger.over and not self._closed:
            with self._evicting:
                with self._changed:
                    victim = self._victims.take()
                if victim is None:
                    return
                if self._evict(victim, None):
                    self._ledger.give_back(victim.nbytes, removed=True)

    def _walk(self) -> Victims:
        self._on_walk(None)
        if not self._bounded:
            self._on_walk(names(self._root, self._namespace, lambda: self._closed))
            return Victims()
        self._ledger.open()
        count = self._ledger.begin_count()
        found = survey(
            self._root,
            self._namespace,
            self._ledger.size_of,
            victim_bytes=self._victim_bytes,
            left=dict(self._left),
            unused_since_ns=time.time_ns() - int(self._ttl_s * 1e9),
            stop=lambda: self._closed,
        )
        if not self._closed:
            self._ledger.end_count(count, found.nbytes)
            self._on_walk(found)
        return found.victims
