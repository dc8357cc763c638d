"""S3-FIFO, a scan-resistant policy of three queues.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO Queues are All You Need for Cache Eviction", Proceedings of
the 29th Symposium on Operating Systems Principles (SOSP '23), 2023. The names S, M and G are the paper's.

What is new enters the small queue S. If it was used again by the time it reaches S's end, it goes on to the main queue
M, else it is evicted, and its ghost stays in G for a while: what comes back while its ghost is there enters M at once.
What reaches M's end is put back to its start as often as it was used, three times at most. So chunks that are used
once, most of all in most traces, leave after a tenth of the cache's size.

Where this differs from the paper, and why:

* Sizes are bytes, since chunks may differ.
* One use while in S is enough to move on to M (the paper asks for two, in a cache of single objects): a prompt that
  comes back uses each of its chunks once, and a conversation's next round is such a prompt.
* Pinned chunks are passed over; when the queue that should give a victim has none, the other one gives it.
* Chunks come in batches, tail first, so that the head is the more recent one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierkv.host.ghosts import Ghosts, add_ghost, find_ghost, make_ghosts, oldest_ghost, remove_ghost
from tierkv.host.jit import Int, inlined, jit
from tierkv.host.lists import OLDEST, Ends, Links, make_ends, push, unlink
from tierkv.host.policies.base import Policy
from tierkv.host.policies.cursors import fetch_ghosts, next_oldest
from tierkv.host.slots import SlotView, State, size_class_of
from tierkv.types import Offsets

Sizes = npt.NDArray[np.int64]

# S and M have a list for each size class: list ``2 * class + S``. G is the one list of ghosts.
S, M = 0, 1
G = 0

#: The share of the bytes that S aims at, as in the paper.
SMALL = 0.1
#: Uses are counted up to this, as in the paper.
MOST_USES = 3
#: Uses that move a chunk from S to M.
USES_FOR_MAIN = 1


class S3FIFOPolicy(Policy):
    """Resists scans: what is used once leaves soon. Thread safety: as ``Policy``."""

    def __init__(self, slots: SlotView) -> None:
        super().__init__(slots)
        self._ends = make_ends(2 * len(slots.class_bytes))
        self._ghosts = make_ghosts(slots.capacity_bytes // int(slots.class_bytes[0]), 1)
        self._nbytes: Sizes = np.zeros(2, np.int64)  # of S and M
        self._now = 0
        self._small = int(SMALL * slots.capacity_bytes)

    def inserted(self, slots: Offsets) -> None:
        self._now += 1
        sizes = self.slots.class_bytes
        fifo_insert(self.slots.state, self._ends, self._ghosts, self._nbytes, sizes, slots, self._now)

    def accessed(self, slots: Offsets) -> None:
        fifo_access(self.slots.state, slots)

    def removed(self, slots: Offsets, evicted: bool) -> None:
        room = self.slots.capacity_bytes - self._small if evicted else 0
        fifo_remove(self.slots.state, self._ends, self._ghosts, self._nbytes, self.slots.class_bytes, slots, room)

    def victims(self, count: int, size_class: int) -> Offsets:
        """As ``Policy.victims``; what was used moves on to M, or back to its start, on the way."""
        self._now += 1
        found = np.empty(count, np.int64)
        state, sizes = self.slots.state, self.slots.class_bytes
        cursors = self._ends[:, OLDEST].copy()
        count = fifo_victims(state, self._ends, cursors, self._nbytes, sizes, self._small, size_class, self._now, found)
        return found[:count]

    @property
    def index_bytes(self) -> Int:
        return sum(array.nbytes for array in self._ghosts)

    def __repr__(self) -> str:
        small, main = self._nbytes.tolist()
        ghosts = int(self._ghosts.nbytes[G])
        return f"<S3FIFOPolicy S {small}, M {main}, G {ghosts} of {self.slots.capacity_bytes} bytes>"


def _fifo_push(s: State, ends: Ends, nbytes: Sizes, sizes: Sizes, which: Int, uses: Int, slot: Int, now: Int) -> None:
    """``slot`` is the newest of S or M, with ``uses`` so far. A place is ``uses * 2 + queue``."""
    size_class = size_class_of(s, slot)
    push(ends, s.records["older"], s.records["newer"], 2 * size_class + which, slot)
    s.records["place"][slot] = uses * 2 + which
    s.records["stamp"][slot] = now & 0xFFFFFFFF
    nbytes[which] += sizes[size_class]


def _fifo_unlink(s: State, ends: Ends, nbytes: Sizes, sizes: Sizes, slot: Int) -> Int:
    """Take ``slot`` out of S or M; says out of which."""
    which = np.int64(s.records["place"][slot]) & 1
    size_class = size_class_of(s, slot)
    unlink(ends, s.records["older"], s.records["newer"], 2 * size_class + which, slot)
    nbytes[which] -= sizes[size_class]
    return which


def _fifo_insert(s: State, ends: Ends, g: Ghosts, nbytes: Sizes, sizes: Sizes, slots: Offsets, now: Int) -> None:
    fetch_ghosts(s, g, slots)
    for back in range(slots.shape[0]):
        slot = slots[slots.shape[0] - 1 - back]
        ghost = find_ghost(g, s.records["word1"][slot])
        which = S
        if ghost >= 0:
            remove_ghost(g, ghost, sizes)
            which = M
        fifo_push(s, ends, nbytes, sizes, which, 0, slot, now)


def _fifo_access(s: State, slots: Offsets) -> None:
    places = s.records["place"]
    for i in range(slots.shape[0]):
        if places[slots[i]] >> 1 < MOST_USES:
            places[slots[i]] += 2


def _fifo_remove(s: State, ends: Ends, g: Ghosts, nbytes: Sizes, sizes: Sizes, slots: Offsets, ghost_room: int) -> None:
    """``ghost_room``: bytes that G may stand for; 0 if no ghosts are to stay."""
    fetch_ghosts(s, g, slots)
    for i in range(slots.shape[0]):
        slot = slots[i]
        which = fifo_unlink(s, ends, nbytes, sizes, slot)
        if which == S and ghost_room > 0:
            while g.nbytes[G] > 0 and g.nbytes[G] + sizes[size_class_of(s, slot)] > ghost_room:
                remove_ghost(g, oldest_ghost(g, G), sizes)
            add_ghost(g, G, s.records["word1"][slot], size_class_of(s, slot), sizes)


def _fifo_victims(
    s: State,
    ends: Ends,
    cursors: Links,
    nbytes: Sizes,
    sizes: Sizes,
    small: int,
    size_class: Int,
    now: Int,
    found: Offsets,
) -> Int:
    """Fill ``found`` with the chunks that reach an end unused; how many there are.

    Chosen ones stay in their queues, behind the cursors, until the cache says that they are gone.
    """
    places = s.records["place"]
    count, small_left = 0, nbytes[S]
    small_ended, main_ended = False, False
    while count < found.shape[0] and not (small_ended and main_ended):
        which = S if (small_left >= small and not small_ended) or main_ended else M
        slot = next_oldest(s.records, cursors, which, 2, size_class, now)
        if slot < 0:
            small_ended, main_ended = small_ended or which == S, main_ended or which == M
            continue
        uses = np.int64(places[slot]) >> 1
        if s.records["pins"][slot] > 0:
            continue
        if which == S and uses >= USES_FOR_MAIN:
            small_left -= sizes[size_class_of(s, slot)]
            fifo_move(s, ends, nbytes, sizes, cursors, 0, slot, now)
            main_ended = False
        elif which == M and uses > 0:
            fifo_move(s, ends, nbytes, sizes, cursors, uses - 1, slot, now)
        else:
            if which == S:
                small_left -= sizes[size_class_of(s, slot)]
            found[count] = slot
            count += 1
    return count


def _fifo_move(
    s: State,
    ends: Ends,
    nbytes: Sizes,
    sizes: Sizes,
    cursors: Links,
    uses: Int,
    slot: Int,
    now: Int,
) -> None:
    """``slot`` is the newest of M now. A walk of M that had come to its end goes on with it."""
    fifo_unlink(s, ends, nbytes, sizes, slot)
    fifo_push(s, ends, nbytes, sizes, M, uses, slot, now)
    queue = 2 * size_class_of(s, slot) + M
    if cursors[queue] < 0:
        cursors[queue] = slot


fifo_push = inlined(_fifo_push)
fifo_unlink = inlined(_fifo_unlink)
fifo_insert = jit(_fifo_insert)
fifo_access = jit(_fifo_access)
fifo_remove = jit(_fifo_remove)
fifo_move = jit(_fifo_move)
fifo_victims = jit(_fifo_victims)
