"""After a restart: read the tables of headers slab by slab, and put what is of this namespace into the index.

The thread holds the GIL for a fraction of a millisecond at a time and then sleeps, which is how others get it: one that
only waits for the GIL is given it after five milliseconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.errors import RecordError
from tierkv.host.cache import HostCache
from tierkv.keys import make_keys
from tierkv.tiers import record
from tierkv.tiers.base import TierContext
from tierkv.tiers.fs.geometry import PAGE, Geometry, SlabHeader
from tierkv.tiers.fs.segmentfile import SegmentFiles
from tierkv.tiers.headers import HEADER, Headers, intact, raw_bytes
from tierkv.types import KEY_BYTES, Chunks, Hashes, Offsets, Space

logger = logging.getLogger(__name__)

#: Headers of records, and of slabs, that are looked at in one go.
_AT_ONCE = 256
_SLABS_AT_ONCE = 16
#: Chunks that are put into the index in one go, which holds the GIL.
_RESTORED_AT_ONCE = 2048
#: How long to sleep after that.
_PAUSE_S = 100e-6


class Found(NamedTuple):
    """Records in a slab, ascending: number of the slot, generation, group, and the last bytes of the block hash."""

    numbers: Offsets
    generations: npt.NDArray[np.uint64]
    groups: npt.NDArray[np.int32]
    tails: Hashes

    def take(self, which: Offsets) -> Found:
        return Found(self.numbers[which], self.generations[which], self.groups[which], self.tails[which])


class Restore:
    """The thread ``tierkv-<tier>-restore-0``, which makes slabs usable: empty ones first, then the oldest ones.

    Records of other namespaces and what is damaged are not erased: their slots are free. Slabs without a record of this
    namespace are used last.

    Thread safety: any method may be called by any thread.
    """

    def __init__(
        self,
        context: TierContext,
        geometry: Geometry,
        files: SegmentFiles,
        lock: threading.Lock,
        cache: HostCache,
        formatted: Offsets,
    ) -> None:
        """
        Args:
            lock: to be held around calls of ``cache``.
            formatted: receives the size class that each slab is cut up for.
        """
        self._namespace = context.namespace
        self._name = context.name
        self._geometry = geometry
        self._files = files
        self._lock = lock
        self._cache = cache
        self._formatted = formatted
        self._closing = False
        #: Slots that were written since the start.
        self._stored: list[Offsets] = []
        #: Set when the first slab can be used, or none ever will be; and when this is done.
        self.begun, self.ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{context.name}-restore-0", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let nobody wait for the first slab any longer."""
        self._closing = True
        self.begun.set()

    def close(self) -> None:
        """Stop and wait for the thread, which has been started."""
        self.stop()
        self._thread.join()

    def note_stored(self, slots: Offsets) -> None:
        """``slots`` were written just now, which is later than all that is restored. Under the lock of the cache."""
        if not self.ended.is_set():
            self._stored.append(slots)

    def _run(self) -> None:
        began, count = time.monotonic(), 0
        try:
            for slab, size_class in self._survey():
                if self._closing:
                    return
                count += self._restore(slab, size_class)
            if count:
                logger.info("tier %s: %d chunks restored in %.1f s", self._name, count, time.monotonic() - began)
        except Exception:
            logger.exception("tier %s: restoring ended early; the slabs that are left are not used", self._name)
        finally:
            self.begun.set()
            with self._lock:
                self.ended.set()
                for slots in self._stored:
                    self._cache.touch(slots)
                self._stored.clear()

    def _survey(self) -> list[tuple[int, int]]:
        """Make slabs usable in which nothing can be of ours, those of another model last.

        Returns:
            the other slabs and their size class, the oldest first.
        """
        self._cache.populate()
        written = self._files.maybe_written()
        self._add(np.flatnonzero(~written))
        ours, theirs, empty = [], [], []
        for slab in np.flatnonzero(written).tolist():
            if self._closing:
                break
            try:
                header = self._slab_header(slab)
            except (OSError, RecordError) as error:
                self._give_up(slab, error)
                continue
            size_class = -1 if header is None else self._geometry.size_class(header)
            if header is None:
                empty.append(slab)
            elif size_class < 0:
                theirs.append(slab)
            else:
                ours.append((header.written_at, slab, size_class))
        self._add(np.array(empty + theirs, np.int64))
        return [(slab, size_class) for _, slab, size_class in sorted(ours)]

    def _slab_header(self, slab: int) -> SlabHeader | None:
        if slab % _SLABS_AT_ONCE == 0:
            time.sleep(_PAUSE_S)
        raw = bytearray(PAGE)
        self._files.read(slab, 0, memoryview(raw))
        return self._geometry.decode_slab_header(slab, bytes(raw))

    def _give_up(self, slab: int, error: Exception) -> None:
        logger.warning("tier %s: slab %d cannot be read, and is not used: %s", self._name, slab, error)

    def _add(self, slabs: Offsets) -> None:
        if len(slabs):
            with self._lock:
                self._cache.add_slabs(slabs)
            self.begun.set()

    def _restore(self, slab: int, size_class: int) -> int:
        """Make ``slab`` usable; how many chunks were found in it."""
        try:
            found = self._read(slab, size_class)
        except (OSError, RecordError) as error:
            self._give_up(slab, error)
            return 0
        self._formatted[slab] = size_class
        if not len(found.numbers):
            self._add(np.array([slab], np.int64))
            return 0
        slots, count = found.numbers + slab * self._geometry.plan.slots_per_slab, 0
        with self._lock:
            self._cache.add_slabs(np.array([slab], np.int64), size_class)
            for which, space in _spaces(found, self._namespace):
                for first in range(0, len(which), _RESTORED_AT_ONCE):
                    some = which[first : first + _RESTORED_AT_ONCE]
                    restored = self._cache.restore(_chunks(found.take(some), space), slots[some])
                    count += int(np.count_nonzero(restored))
        self.begun.set()
        time.sleep(_PAUSE_S)
        return count

    def _read(self, slab: int, size_class: int) -> Found:
        """The records of this namespace in ``slab``."""
        slots, parts = self._geometry.slots_in(size_class), []
        headers = np.zeros(_AT_ONCE, HEADER)
        for first in range(0, slots, _AT_ONCE):
            part = headers[: min(_AT_ONCE, slots - first)]
            self._files.read(slab, PAGE + first * record.HEADER_BYTES, raw_bytes(part))
            parts.append(self._ours(part, size_class, first))
            time.sleep(_PAUSE_S)
        return Found(*map(np.concatenate, zip(*parts, strict=True)))

    def _ours(self, headers: Headers, size_class: int, first: int) -> Found:
        """The records of this namespace that ``headers``, from slot ``first`` of a slab on, say are there."""
        classes = np.array([*self._geometry.class_of_group, -1])
        groups, hash_bytes = headers["group"], headers["hash_bytes"]
        good = intact(headers, self._namespace) & (hash_bytes >= KEY_BYTES)
        good &= headers["length"] <= self._geometry.place_bytes[size_class]
        good &= classes[np.minimum(groups, len(classes) - 1)] == size_class
        where = np.flatnonzero(good)
        tails = np.zeros((len(where), KEY_BYTES), np.uint8)
        for size in set(hash_bytes[where].tolist()):
            of_size = hash_bytes[where] == size
            tails[of_size] = headers["hash"][:, size - KEY_BYTES : size][where[of_size]]
        return Found(where + first, headers["generation"][where], groups[where].astype(np.int32), tails)


def _spaces(found: Found, namespace: bytes) -> Iterator[tuple[Offsets, Space]]:
    """The numbers of the records of each space and group, ascending, and the space."""
    left: Offsets = np.arange(len(found.numbers))
    while len(left):
        same = (found.generations[left] == found.generations[left[0]]).all(axis=1)
        same &= found.groups[left] == found.groups[left[0]]
        yield left[same], Space(namespace, found.generations[left[0]].astype("<u8").tobytes())
        left = left[~same]


def _chunks(found: Found, space: Space) -> Chunks:
    """The chunks of one space and group; of their hashes, only what the index needs."""
    group = int(found.groups[0])
    return Chunks(space, make_keys(space, group, found.tails), found.groups, found.tails)
