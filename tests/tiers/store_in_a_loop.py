"""A process that stores chunks below a root, for the tests to kill, to race, and to confine.

    store_in_a_loop.py ROOT SEED N [SLOT_BYTES [STOP_AT [CAPACITY]]]

Says ``ready``, waits for a line on its input, stores ``N`` chunks of ``SEED``, one job each, and says after each
job ``<number> <ok> <reason>``, at the end ``end``. With ``STOP_AT`` it says ``half`` when it has written half of
the payload of that chunk, and then nothing any more. With ``CAPACITY`` eight chunks are stored, and some loaded, in
one job each, of which nothing is said, and ``N`` is for how many jobs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial

from tierkv.testing.driver import TierDriver, some_chunks
from tierkv.tiers.fs import FsTier, FsTierConfig


def half_a_write(writev: Callable[[int, list[memoryview]], int], fd: int, parts: list[memoryview]) -> int:
    header, payload = parts
    writev(fd, [header, payload[: len(payload) // 2]])
    print("half", flush=True)
    threading.Event().wait()
    raise AssertionError("nobody sets this event")


def main(
    root: str,
    seed: int,
    n: int,
    slot_bytes: int = 4096,
    stop_at: int = -1,
    capacity: int | None = None,
) -> None:
    config = FsTierConfig(type="fs", root_dir=root, n_read_threads=1, n_write_threads=2, capacity_bytes=capacity)
    with TierDriver(lambda context: FsTier(config, context), n_slots=8, slot_bytes=slot_bytes) as driver:
        print("ready", flush=True)
        sys.stdin.readline()
        if capacity is not None:
            store_and_load(driver, seed, n)
            n = 0
        chunks = some_chunks(n, seed)
        for i in range(n):
            if i == stop_at:
                os.writev = partial(half_a_write, os.writev)
            # The bytes depend on the chunk alone, as in life: whoever computes it, computes the same.
            driver.fill([0], seed=i)
            result = driver.store(chunks.take([i]), [0])
            print(i, bool(result.ok[0]), result.reasons.get(0, "-"), flush=True)
        print("end", flush=True)


def store_and_load(driver: TierDriver, seed: int, n: int) -> None:
    """Chunks of two sizes, and never other bytes than were stored."""
    sizes = [driver.slot_bytes if slot % 4 else driver.slot_bytes // 2 for slot in range(8)]
    for i in range(n):
        chunks = some_chunks(8, 1000 * seed + i)
        payloads = driver.fill(range(8), sizes, seed=1000 * seed + i)
        stored = driver.store(chunks, range(8), sizes)
        assert set(stored.reasons.values()) <= {"capacity"}, stored.reasons
        loaded = driver.load(chunks, range(8), sizes)
        assert set(loaded.reasons.values()) <= {"absent"}, loaded.reasons
        assert all(driver.payload(slot, sizes[slot]) == payloads[slot] for slot in range(8) if loaded.ok[slot])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
