"""Room for new records: what a root may take, and what goes when that is too little.

The least recently used records go first; before them, those of generations that were left behind. Which these are, a
walk through the root finds, on a thread of its own and for many evictions at once; whether such a record was used
since, the file system says before it is evicted. So processes that share a root need not tell each other what they
use.

The file of a record that is evicted for one of the same size becomes that one's: it is moved to where temporary files
are, and written over. To remove a file and to make another takes ext4 (without a journal) ten times as long for 16 KiB,
and four times for 1 MiB: it looks for blocks, and for an inode that was not freed lately.
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
from tierkv.tiers.fs.recordfile import make_directory
from tierkv.tiers.fs.root import Root
from tierkv.tiers.fs.survey import Survey, Victim, Victims, names, remove_empty, survey
from tierkv.types import Space

logger = logging.getLogger(__name__)

#: Which share of the capacity one walk looks for, and the least; and of that, what is left when the next one begins.
#: So a walk looks at five records for each one that is evicted.
_VICTIM_SHARE = 4
_ENOUGH_SHARE = 8
_LEAST_VICTIM_BYTES = 1 << 30
#: How long a store tries to get room, waiting for a walk included.
PATIENCE_S = 10.0
#: After a walk that was of no use there is no other for this long, or for as long as it took.
PAUSE_S = 0.05
_MOST_PAUSE_S = 5.0
#: After a walk that failed there is another by itself.
_RETRY_S = 1.0
#: While the root is full, so many stores evict before one asks whether it still is.
_ASK_EVERY = 64


class Room:
    """One process's room below a root.

    Thread safety: any method may be called by any thread. ``_changed`` guards what the walking thread and the others
    tell each other; nobody holds it while files are looked at.
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
        self._space: Space | None = None
        self._left: dict[Space, int] = {}
        self._changed = threading.Condition()
        self._victims = Victims()
        self._enough = 0
        self._wanted = True
        self._walks = 0
        #: The walk for which a store has waited in vain: nobody else waits for that one.
        self._too_long = -1
        self._useless = 0
        self._barren_until = 0.0
        self._evicted_before = 0
        #: How many stores have evicted since the root was found to be full; 0: it was not, lately.
        self._full = 0
        self._failures = 0
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
            RecordError: ``capacity``: there is no room, and none can be made in time.
        """
        until = time.monotonic() + PATIENCE_S
        while True:
            walks = self._walks
            if self._ledger.take(nbytes, ask=self._full % _ASK_EVERY == 0):
                return False
            if not self._have_victims(until):
                self._full = 0
                if self._ledger.take(nbytes):
                    return False
                raise RecordError("capacity", f"no room for {nbytes} bytes")
            victim = self._next_victim(walks)
            if victim is None:
                continue
            fits = temporary is not None and victim.nbytes == nbytes and not self._ledger.over
            if not self._evict(victim, temporary if fits else None):
                continue
            if fits:
                self._ledger.reuse(nbytes)
                return True
            self._ledger.removed(victim.nbytes)

    def use(self, space: Space) -> None:
        """This process uses ``space`` from now on, and not any more what it used before.

        Nobody else can be using that, unless its generation has a name: then it has been used since.
        """
        if space == self._space:
            return
        if self._space is not None and self._space.generation != FIRST_GENERATION:
            self._left[self._space] = time.time_ns()
        self._left.pop(space, None)
        self._space = space

    def stop(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        self._thread.join()

    def __repr__(self) -> str:
        return f"Room(victims={len(self._victims)}, evicted={self.evicted}, walks={self._walks})"

    # ── evicting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _have_victims(self, until: float) -> bool:
        """Whether there is anything that may go. Waits for a walk if none is known; False also if not in time."""
        with self._changed:
            if len(self._victims) <= self._enough:
                self._want_walk()
            while not len(self._victims) and self._wanted and self._too_long != self._walks and not self._closed:
                left = until - time.monotonic()
                if left <= 0:
                    self._too_long = self._walks
                else:
                    self._changed.wait(left)
            return len(self._victims) > 0 and not self._closed and time.monotonic() < until

    def _next_victim(self, walks: int) -> Victim | None:
        """What goes next, for a store that saw so many ``walks`` and was then told that the root is full.

        None: that is to be asked again. A walk has ended meanwhile, and with it a count, which may have found room: the
        first one above all, before which nothing is promised. Or others have taken the last victim.
        """
        with self._changed:
            victim = self._victims.take() if self._walks == walks else None
            if victim is not None:
                self._full += 1
            return victim

    def _want_walk(self) -> None:
        if time.monotonic() >= self._barren_until:
            self._wanted = True
            self._changed.notify_all()

    def _evict(self, victim: Victim, moved_to: str | None) -> bool:
        """Remove a record, or move its file, unless it was used since the walk; whether that was done."""
        try:
            status = os.stat(victim.path, follow_symlinks=False)
            if status.st_atime_ns != victim.used_ns:
                return False
            if moved_to is None:
                os.unlink(victim.path)
            elif status.st_nlink > 1:  # a copy of somebody's, which must not be written over
                return False
            else:
                _move(victim.path, moved_to)
        except FileNotFoundError:  # another process has removed it
            return False
        except OSError as error:
            self._complain("%s cannot be evicted", victim.path, error)
            return False
        self.evicted += 1
        self._on_removed(victim.path)
        return True

    # ── walking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        retry_s: float | None = None
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    if not self._changed.wait(retry_s):
                        break
                if self._closed:
                    return
            retry_s = None if self._walk_once() else _RETRY_S

    def _walk_once(self) -> bool:
        """Walk, and tell what was found; whether that could be done."""
        begin = time.monotonic()
        found, again, done = Victims(), False, True
        try:
            found, again = self._walk()
            again |= self._shrink(found)
        except Exception as error:  # of the file system, most likely; there will be another walk
            done = False
            self._complain("a walk through %s failed", self._root.path, error)
        with self._changed:
            self._victims = found
            self._enough = len(found) // _ENOUGH_SHARE
            self._wanted = again and not self._closed
            self._walks += 1
            self._full = 0
            # Walk after walk without any eviction: what they find cannot be evicted, or they find nothing.
            useful = bool(len(found)) and self.evicted > self._evicted_before
            self._useless = 0 if useful else self._useless + 1
            now = time.monotonic()
            pause = max(PAUSE_S, now - begin) * (1 << min(self._useless, 8)) if self._useless > 1 else 0.0
            self._barren_until = now + min(max(pause, 0.0 if len(found) else PAUSE_S), _MOST_PAUSE_S)
            self._evicted_before = self.evicted
            self._changed.notify_all()
        return done

    def _complain(self, what: str, path: str, error: Exception) -> None:
        """Log the first, second, fourth, eighth … failure: on a disk that is read-only, each one fails."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            logger.warning(f"{what} (%d failures so far): %s", path, self._failures, error)

    def _walk(self) -> tuple[Victims, bool]:
        """What may go, and whether another walk is wanted at once."""
        self._on_walk(None)
        if not self._bounded:
            self._on_walk(names(self._root, self._namespace, lambda: self._closed))
            return Victims(), False
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
        if self._closed:
            return Victims(), False
        again = not self._ledger.end_count(count, found.nbytes)
        self._on_walk(found)
        for space, directory in found.empty:
            if space != self._space:
                self._ledger.removed(remove_empty(directory) * self._ledger.directory_bytes)
        return found.victims, again

    def _shrink(self, victims: Victims) -> bool:
        """Evict what is above the bounds: they were others before, or somebody does not mind them.

        Returns:
            whether there is more to evict than ``victims``.
        """
        before = self.evicted
        while self._ledger.over and not self._closed and (victim := victims.take()):
            if self._evict(victim, None):
                self._ledger.removed(victim.nbytes)
        return self._ledger.over and self.evicted > before


def _move(path: str, moved_to: str) -> None:
    """Move a file to where temporary files are.

    Raises:
        FileNotFoundError: it is not there.
    """
    try:
        os.rename(path, moved_to)
    except FileNotFoundError:
        make_directory(os.path.dirname(moved_to))  # somebody has tidied up
        os.rename(path, moved_to)
