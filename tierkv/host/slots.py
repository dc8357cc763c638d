"""The slots of the host cache: which chunk is where, in which state, how often pinned.

This file moves slots between states; ``cache`` decides which, and policies rank those that are ready. Everything is in
arrays, and what is done for a batch of slots is one kernel.

The region is cut into *slabs* of one size. A slab holds slots of one *size class*, or of none yet; it changes class
when it is empty. So groups whose chunks differ in size share the memory, and a model with one size of chunk has one
class.
Slot ``n`` lies in slab ``n // slots_per_slab``, where ``slots_per_slab`` is how many slots of the smallest class fit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.host.index import NONE, Table, Word, Words, add, delete, fetch, fetch_next, find, make_table
from tierkv.host.jit import Int, inlined, jit
from tierkv.host.lists import NEWEST, Ends, make_ends, push, unlink
from tierkv.host.slabs import SlabPlan
from tierkv.types import Keys, Offsets

#: The states of a slot. A DEAD slot's chunk has left the index, and somebody still holds a pin; an ORPHAN is a dead one
#: whose writer has not reported.
FREE, WRITING, READY, DEAD, ORPHAN = 0, 1, 2, 3, 4
#: Columns of ``State.counts`` beside the states.
EVICTABLE, PINNED = 5, 6
#: Rows of ``State.slabs``: the size class or -1, slots in use, slots in use that are not evictable, whether it is being
#: emptied.
CLASS, USED, BUSY, DRAINING = 0, 1, 2, 3

#: Keys whose place in the table is fetched ahead of their probes.
AHEAD = 64

#: A verdict on a chunk: it does not count as being here as long as it is being written.
NOT_WRITING = -3

#: One slot. key: of its chunk · older, newer: neighbours in the free list or in a policy's list · pins · stamp: when it
#: was last put into a policy's list · owner: which (space, group) · state · place: a policy's own note of the list.
SLOT = np.dtype(
    [
        ("word0", "<u8"),
        ("word1", "<u8"),
        ("older", "<i4"),
        ("newer", "<i4"),
        ("pins", "<i4"),
        ("stamp", "<u4"),
        ("owner", "<u2"),
        ("state", "u1"),
        ("place", "u1"),
    ]
)

Records = npt.NDArray[np.void]
Numbers = npt.NDArray[np.int64]


class State(NamedTuple):
    """All that the kernels work on.

    table: key → slot · records: ``(slots,)`` of ``SLOT`` · free: ``(classes, 2)`` free lists · counts:
    ``(classes, 7)`` int64 · slabs: ``(4, slabs)`` int32 · pool: ``(slabs + 1,)`` int32, slabs of no class: entry 0 says
    how many, and they follow · division: by the slots per slab, see ``make_division`` · fetched: where ``fetch`` leaves
    what it read.
    """

    table: Table
    records: Records
    free: Ends
    counts: Numbers
    slabs: npt.NDArray[np.int32]
    pool: npt.NDArray[np.int32]
    division: Numbers
    fetched: Table


def make_division(divisor: int) -> Numbers:
    """``divisor``, and the factor and the shift that ``slab_of`` divides by it with.

    T. Granlund and P. L. Montgomery, "Division by Invariant Integers using Multiplication", PLDI '94: exact for numbers
    of 31 bits.
    """
    shift = 31 + (divisor - 1).bit_length()
    return np.array([divisor, -(-(1 << shift) // divisor), shift], np.int64)


def make_state(plan: SlabPlan) -> State:
    """The state of a region all of whose slabs are yet to come."""
    return State(
        table=make_table(plan.num_slots),
        records=np.zeros(plan.num_slots, SLOT),
        free=make_ends(len(plan.class_bytes)),
        counts=np.zeros((len(plan.class_bytes), 7), np.int64),
        slabs=np.array([[-1], [0], [0], [0]], np.int32).repeat(plan.num_slabs, axis=1),
        pool=np.zeros(plan.num_slabs + 1, np.int32),
        division=make_division(plan.slots_per_slab),
        fetched=np.zeros(1, np.uint64),
    )


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────


# Arrays and fields of records are bound to names before the loops: to get at them costs more than to use them.


def _slab_of(division: Numbers, slot: Int) -> Int:
    """``slot // slots_per_slab``, for slots below 2**31, in a third of the time."""
    return (slot * division[1]) >> division[2]


def _size_class(s: State, slot: Int) -> Int:
    return s.slabs[CLASS, slab_of(s.division, slot)]


def _assign(s: State, slab: Int, size_class: Int, count: Int) -> None:
    """The first ``count`` slots of ``slab``, which is in no class, are free slots of ``size_class`` from now on."""
    s.slabs[CLASS, slab] = size_class
    first = slab * s.division[0]
    for i in range(count):
        push(s.free, s.records["older"], s.records["newer"], size_class, first + count - 1 - i)
    s.counts[size_class, FREE] += count


def _drain(s: State, slab: Int, count: Int) -> None:
    """The free ones of ``slab``'s ``count`` slots are not given out any more; it joins the pool when it is empty."""
    size_class = s.slabs[CLASS, slab]
    first = slab * s.division[0]
    states = s.records["state"]
    s.slabs[DRAINING, slab] = 1
    for slot in range(first, first + count):
        if states[slot] == FREE:
            unlink(s.free, s.records["older"], s.records["newer"], size_class, slot)
            s.counts[size_class, FREE] -= 1
    pool_if_empty(s, slab)


def _pool_if_empty(s: State, slab: Int) -> None:
    if s.slabs[USED, slab] == 0:
        s.slabs[CLASS, slab] = -1
        s.slabs[DRAINING, slab] = 0
        s.pool[0] += 1
        s.pool[s.pool[0]] = slab


def _become_free(s: State, slot: Int) -> None:
    """``slot``, which is not in the index, in no policy's list, and not counted in a state any more, is free."""
    slab = slab_of(s.division, slot)
    s.records["state"][slot] = FREE
    s.slabs[USED, slab] -= 1
    if s.slabs[DRAINING, slab]:
        pool_if_empty(s, slab)
    else:
        size_class = s.slabs[CLASS, slab]
        push(s.free, s.records["older"], s.records["newer"], size_class, slot)
        s.counts[size_class, FREE] += 1


def _fetch_keys(s: State, keys: Keys, first: Int, last: Int) -> None:
    """Have the processor get what a probe of the keys ``first`` to ``last`` - 1 will look at in the table."""
    fetched = np.uint64(0)
    for i in range(first, last):
        fetched ^= fetch(s.table, keys[i, 0])
    for i in range(first, last):
        fetched ^= fetch_next(s.table, keys[i, 0])
    s.fetched[0] = fetched


def _fetch_slots(s: State, table: Table, words: Words, slots: Offsets, first: Int, last: Int) -> None:
    """As ``fetch_keys``, for ``slots[first:last]``, each by its word of ``words``, in ``table``."""
    fetched = np.uint64(0)
    for i in range(first, last):
        fetched ^= fetch(table, words[slots[i]])
    for i in range(first, last):
        fetched ^= fetch_next(table, words[slots[i]])
    s.fetched[0] = fetched


def _next_slot(previous: Int, slot: Int) -> Int:
    """Where the next chunk of a prompt is if ``slot`` is next to that of the chunk before it; else -1.

    Chunks that were stored together mostly lie side by side, up or down. Where they do, the table is not needed.
    """
    step = slot - previous
    return slot + step if step == 1 or step == -1 else NONE


def _holds(words0: Words, words1: Words, states: npt.NDArray[np.uint8], slot: Int, word0: Word, word1: Word) -> bool:
    """Whether the chunk of a key is in ``slot``, which may be none."""
    if slot < 0 or slot >= words0.shape[0]:
        return False
    is_there: bool = words0[slot] == word0 and words1[slot] == word1
    return is_there and (states[slot] == READY or states[slot] == WRITING)


def _take(s: State, keys: Keys, owners: npt.NDArray[np.uint16], size_class: Int, out: Offsets) -> Int:
    """Free slots for ``keys``, all of one class; they are being written from now on, with the writer's pin.

    A key that is there already, twice in the batch included, gets -1, and so do all from where there is no free slot.

    Returns:
        how many keys were looked at before there was none.
    """
    table, slabs, counts, free, division = s.table, s.slabs, s.counts, s.free, s.division
    words0, words1, pins = s.records["word0"], s.records["word1"], s.records["pins"]
    owner, states = s.records["owner"], s.records["state"]
    older, newer = s.records["older"], s.records["newer"]
    out[:] = -1
    done, taken = keys.shape[0], 0
    for i in range(keys.shape[0]):
        if i % AHEAD == 0:
            fetch_keys(s, keys, i, min(i + AHEAD, keys.shape[0]))
        slot = np.int64(free[size_class, NEWEST])
        if slot < 0:
            if find(table, words0, words1, keys[i, 0], keys[i, 1]) >= 0:
                continue
            done = i
            break
        if add(table, words0, words1, keys[i, 0], keys[i, 1], slot) != slot:
            continue
        unlink(free, older, newer, size_class, slot)
        words0[slot] = keys[i, 0]
        words1[slot] = keys[i, 1]
        pins[slot] = 1
        owner[slot] = owners[i]
        states[slot] = WRITING
        slab = slab_of(division, slot)
        slabs[USED, slab] += 1
        slabs[BUSY, slab] += 1
        out[i] = slot
        taken += 1
    counts[size_class, FREE] -= taken
    counts[size_class, WRITING] += taken
    counts[size_class, PINNED] += taken
    return done


def _restore(
    s: State, keys: Keys, owners: npt.NDArray[np.uint16], slots: Offsets, restored: npt.NDArray[np.bool_]
) -> Int:
    """The free ``slots``, all of one class, hold the chunks of ``keys`` already: ready, in no policy's list yet.

    ``restored`` receives which of them are; a key that is there already, twice in the batch included, is passed over.

    Returns:
        how many are.
    """
    table, slabs, counts, free, division = s.table, s.slabs, s.counts, s.free, s.division
    words0, words1, pins = s.records["word0"], s.records["word1"], s.records["pins"]
    owner, states = s.records["owner"], s.records["state"]
    older, newer = s.records["older"], s.records["newer"]
    count = 0
    for i in range(keys.shape[0]):
        if i % AHEAD == 0:
            fetch_keys(s, keys, i, min(i + AHEAD, keys.shape[0]))
        slot = slots[i]
        assert states[slot] == FREE, "only a free slot is restored"
        restored[i] = add(table, words0, words1, keys[i, 0], keys[i, 1], slot) == slot
        if not restored[i]:
            continue
        slab = slab_of(division, slot)
        size_class = slabs[CLASS, slab]
        unlink(free, older, newer, size_class, slot)
        words0[slot] = keys[i, 0]
        words1[slot] = keys[i, 1]
        pins[slot] = 0
        owner[slot] = owners[i]
        states[slot] = READY
        slabs[USED, slab] += 1
        counts[size_class, FREE] -= 1
        counts[size_class, READY] += 1
        counts[size_class, EVICTABLE] += 1
        count += 1
    return count


def _evict(s: State, slots: Offsets, keys: Keys) -> None:
    """``slots``, ready, not pinned, and in no policy's list any more, are free; ``keys`` receives their keys."""
    table, slabs, counts, free, division = s.table, s.slabs, s.counts, s.free, s.division
    words0, words1, pins, states = s.records["word0"], s.records["word1"], s.records["pins"], s.records["state"]
    older, newer = s.records["older"], s.records["newer"]
    for i in range(slots.shape[0]):
        if i % AHEAD == 0:
            fetch_slots(s, table, words0, slots, i, min(i + AHEAD, slots.shape[0]))
        slot = slots[i]
        assert states[slot] == READY and pins[slot] == 0, "a pinned slot is never freed"
        word0 = words0[slot]
        keys[i, 0] = word0
        keys[i, 1] = words1[slot]
        delete(table, word0, slot)
        slab = slab_of(division, slot)
        size_class = slabs[CLASS, slab]
        counts[size_class, READY] -= 1
        counts[size_class, EVICTABLE] -= 1
        states[slot] = FREE
        slabs[USED, slab] -= 1
        if slabs[DRAINING, slab]:
            pool_if_empty(s, slab)
        else:
            push(free, older, newer, size_class, slot)
            counts[size_class, FREE] += 1


def _unpin_once(
    s: State,
    pins: npt.NDArray[np.int32],
    states: npt.NDArray[np.uint8],
    slabs: npt.NDArray[np.int32],
    counts: Numbers,
    division: Numbers,
    slot: Int,
) -> None:
    """One pin of ``slot`` goes; with the last one, a dead slot is free. The arrays are those of ``s``."""
    left = pins[slot] - 1
    state = states[slot]
    assert left >= (1 if state in (WRITING, ORPHAN) else 0), "a slot was unpinned more often than pinned"
    pins[slot] = left
    if left == 0:
        slab = slab_of(division, slot)
        size_class = slabs[CLASS, slab]
        counts[size_class, PINNED] -= 1
        slabs[BUSY, slab] -= 1
        if state == READY:
            counts[size_class, EVICTABLE] += 1
        else:
            counts[size_class, state] -= 1
            become_free(s, slot)


def _pin_once(
    pins: npt.NDArray[np.int32],
    states: npt.NDArray[np.uint8],
    slabs: npt.NDArray[np.int32],
    counts: Numbers,
    division: Numbers,
    slot: Int,
) -> None:
    assert states[slot] != FREE, "only slots in use are pinned"
    pins[slot] += 1
    if pins[slot] == 1:  # not pinned before, so it was ready
        slab = slab_of(division, slot)
        size_class = slabs[CLASS, slab]
        counts[size_class, PINNED] += 1
        counts[size_class, EVICTABLE] -= 1
        slabs[BUSY, slab] += 1


def _pin(s: State, slots: Offsets) -> None:
    """One more pin for each entry of ``slots``, none of which is free."""
    pins, states, slabs, counts, division = s.records["pins"], s.records["state"], s.slabs, s.counts, s.division
    for i in range(slots.shape[0]):
        pin_once(pins, states, slabs, counts, division, slots[i])


def _unpin(s: State, slots: Offsets) -> None:
    """One pin less for each entry of ``slots``."""
    pins, states, slabs, counts, division = s.records["pins"], s.records["state"], s.slabs, s.counts, s.division
    for i in range(slots.shape[0]):
        unpin_once(s, pins, states, slabs, counts, division, slots[i])


def _end_writing(s: State, slots: Offsets, written: bool, alive: npt.NDArray[np.bool_]) -> None:
    """The writers of ``slots`` have reported: those not forgotten are ready if ``written``, and gone if not.

    ``alive`` receives which are ready now.
    """
    table, slabs, counts, division = s.table, s.slabs, s.counts, s.division
    words0, pins, states = s.records["word0"], s.records["pins"], s.records["state"]
    for i in range(slots.shape[0]):
        slot = slots[i]
        before = states[slot]
        assert before in (WRITING, ORPHAN), "only slots that are being written are committed or aborted"
        size_class = slabs[CLASS, slab_of(division, slot)]
        alive[i] = written and before == WRITING
        after = READY if alive[i] else DEAD
        if before == WRITING and not written:
            delete(table, words0[slot], slot)
        states[slot] = after
        counts[size_class, before] -= 1
        counts[size_class, after] += 1
        unpin_once(s, pins, states, slabs, counts, division, slot)


def _drop(s: State, slots: Offsets) -> None:
    """``slots``, none of them free, leave the index, and are free where nobody holds them.

    Those that are ready are in no policy's list any more. One that is dead already, twice given included, stays so.
    """
    table, slabs, counts, division = s.table, s.slabs, s.counts, s.division
    words0, pins, states = s.records["word0"], s.records["pins"], s.records["state"]
    for i in range(slots.shape[0]):
        slot = slots[i]
        before = states[slot]
        if before != WRITING and before != READY:
            continue
        size_class = slabs[CLASS, slab_of(division, slot)]
        delete(table, words0[slot], slot)
        counts[size_class, before] -= 1
        if pins[slot] == 0:
            counts[size_class, EVICTABLE] -= 1
            become_free(s, slot)
        else:
            after = ORPHAN if before == WRITING else DEAD
            states[slot] = after
            counts[size_class, after] += 1


def _locate(s: State, keys: Keys, slots: Offsets, states: npt.NDArray[np.uint8]) -> None:
    """For each key, its slot, or -1, and its state, FREE where it is not there."""
    table, words0, words1, state_of = s.table, s.records["word0"], s.records["word1"], s.records["state"]
    for i in range(keys.shape[0]):
        if i % AHEAD == 0:
            fetch_keys(s, keys, i, min(i + AHEAD, keys.shape[0]))
        slot = find(table, words0, words1, keys[i, 0], keys[i, 1])
        slots[i] = slot
        states[i] = FREE if slot < 0 else state_of[slot]


def _leading(s: State, keys: Keys, out: Offsets) -> None:
    """``out`` receives how many leading keys are ready, and how many are ready or being written."""
    table, words0, words1, states = s.table, s.records["word0"], s.records["word1"], s.records["state"]
    ready, present = -1, keys.shape[0]
    for i in range(keys.shape[0]):
        slot = find(table, words0, words1, keys[i, 0], keys[i, 1])
        if ready < 0 and (slot < 0 or states[slot] != READY):
            ready = i
        if slot < 0:
            present = i
            break
    out[0] = present if ready < 0 else ready
    out[1] = present


def _gap(
    s: State,
    keys: Keys,
    held: Offsets,
    verdicts: npt.NDArray[np.int16],
    first: Int,
    last: Int,
    backward: bool,
    out: Offsets,
) -> None:
    """The first chunk of ``first`` to ``last`` - 1 that cannot be counted on, ``last`` if all can; those before: held.

    With ``backward`` the last such chunk, ``first`` - 1 if there is none. A chunk can be counted on if its verdict says
    that a tier has it, or it is here: ready, or being written and no verdict against that. ``held`` as in ``_hold``;
    ``out`` receives the chunk, how many pins more are held now, and how many chunks that were passed are not ready.
    """
    table, slabs, counts, division = s.table, s.slabs, s.counts, s.division
    words0, words1 = s.records["word0"], s.records["word1"]
    pins, states = s.records["pins"], s.records["state"]
    out[0] = first - 1 if backward else last
    out[1] = out[2] = 0
    fetched, likely, previous = 0, NONE, NONE
    for step in range(last - first):
        i = last - 1 - step if backward else first + step
        if verdicts[i] >= 0:
            out[2] += 1
            continue
        slot = held[i]
        if slot >= 0 and states[slot] != READY and states[slot] != WRITING:  # dead meanwhile, and perhaps here anew
            unpin_once(s, pins, states, slabs, counts, division, slot)
            out[1] -= 1
            held[i] = slot = NONE
        if slot < 0:
            if holds(words0, words1, states, likely, keys[i, 0], keys[i, 1]):
                slot = likely
            else:
                if step >= fetched:
                    fetched = min(step + AHEAD, last - first)
                    if backward:
                        fetch_keys(s, keys, last - fetched, last - step)
                    else:
                        fetch_keys(s, keys, first + step, first + fetched)
                slot = find(table, words0, words1, keys[i, 0], keys[i, 1])
            if slot < 0 or (states[slot] == WRITING and verdicts[i] == NOT_WRITING):
                out[0] = i
                break
            pin_once(pins, states, slabs, counts, division, slot)
            out[1] += 1
            held[i] = slot
        elif states[slot] == WRITING and verdicts[i] == NOT_WRITING:
            out[0] = i
            break
        out[2] += states[slot] == WRITING
        likely = next_slot(previous, slot)
        previous = slot


def _hold(s: State, keys: Keys, held: Offsets, first: Int, last: Int, missing: Offsets, out: Offsets) -> None:
    """Pin those of the chunks ``first`` to ``last`` - 1 that are here, once each; give up all other pins of ``held``.

    ``held[i]`` is the slot of chunk i that is pinned for this holder, or -1. ``missing`` receives the numbers of the
    chunks that are not here, ``out`` how many these are, and how many of the held ones are being written.
    """
    table, slabs, counts, division = s.table, s.slabs, s.counts, s.division
    words0, words1 = s.records["word0"], s.records["word1"]
    pins, states = s.records["pins"], s.records["state"]
    absent, writing = 0, 0
    for i in range(held.shape[0]):
        slot = held[i]
        inside = first <= i < last
        if slot >= 0 and (not inside or (states[slot] != READY and states[slot] != WRITING)):
            unpin_once(s, pins, states, slabs, counts, division, slot)
            slot = NONE
        if inside and slot < 0:
            slot = find(table, words0, words1, keys[i, 0], keys[i, 1])
            if slot >= 0:
                pin_once(pins, states, slabs, counts, division, slot)
            else:
                missing[absent] = i
                absent += 1
        if slot >= 0 and states[slot] == WRITING:
            writing += 1
        held[i] = slot
    out[0] = absent
    out[1] = writing


def _let_go(s: State, held: Offsets) -> Int:
    """Give up all pins of ``held``; returns how many these were."""
    pins, states, slabs, counts, division = s.records["pins"], s.records["state"], s.slabs, s.counts, s.division
    count = 0
    for i in range(held.shape[0]):
        if held[i] >= 0:
            unpin_once(s, pins, states, slabs, counts, division, held[i])
            held[i] = -1
            count += 1
    return count


slab_of = inlined(_slab_of)
size_class_of = inlined(_size_class)
pool_if_empty = jit(_pool_if_empty)
become_free = jit(_become_free)
unpin_once = inlined(_unpin_once)
pin_once = inlined(_pin_once)
assign = jit(_assign)
drain = jit(_drain)
fetch_keys = inlined(_fetch_keys)
fetch_slots = inlined(_fetch_slots)
next_slot = inlined(_next_slot)
holds = inlined(_holds)
take = jit(_take)
restore = jit(_restore)
evict = jit(_evict)
pin = jit(_pin)
unpin = jit(_unpin)
end_writing = jit(_end_writing)
drop = jit(_drop)
locate = jit(_locate)
leading = jit(_leading)
gap = jit(_gap)
hold = jit(_hold)
let_go = jit(_let_go)


class SlotView:
    """What a policy may read of the slots; ``state`` is for the built-in ones.

    capacity_bytes: of all slots together. class_bytes: ``(classes,)`` int64, of a slot of each size class.

    Thread safety: as the host cache.
    """

    def __init__(self, state: State, plan: SlabPlan) -> None:
        self.state = state
        self.num_slots = plan.num_slots
        self.capacity_bytes = plan.region_bytes
        self.class_bytes: Offsets = np.array(plan.class_bytes, np.int64)

    def keys(self, slots: Offsets) -> Keys:
        """``(n, 2)`` uint64: the keys of the chunks in ``slots``."""
        records = self.state.records[slots]
        return np.stack([records["word0"], records["word1"]], axis=1)

    def size_classes(self, slots: Offsets) -> Offsets:
        """``(n,)`` int64: indices into ``class_bytes``."""
        classes: Offsets = self.state.slabs[CLASS, slots // self.state.division[0]].astype(np.int64)
        return classes

    def evictable(self, slots: Offsets) -> npt.NDArray[np.bool_]:
        """Which of ``slots`` are ready and not pinned."""
        records = self.state.records[slots]
        flags: npt.NDArray[np.bool_] = (records["state"] == READY) & (records["pins"] == 0)
        return flags
