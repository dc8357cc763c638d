"""A process that stores chunks below a root, for the tests to kill, to race, and to confine.

    store_in_a_loop.py ROOT SEED N [SLOT_BYTES]

Says ``ready``, waits for a line on its input, stores ``N`` chunks of ``SEED``, one job each, and says after each
job ``<number> <ok> <reason>``, at the end ``end``.
"""

from __future__ import annotations

import sys

from tierkv.testing.driver import TierDriver, some_chunks
from tierkv.tiers.fs import FsTier, FsTierConfig


def main(root: str, seed: int, n: int, slot_bytes: int) -> None:
    config = FsTierConfig(type="fs", root_dir=root, n_read_threads=1, n_write_threads=2)
    with TierDriver(lambda context: FsTier(config, context), n_slots=8, slot_bytes=slot_bytes) as driver:
        print("ready", flush=True)
        sys.stdin.readline()
        chunks = some_chunks(n, seed)
        for i in range(n):
            # The bytes depend on the chunk alone, as in life: whoever computes it, computes the same.
            driver.fill([0], seed=i)
            result = driver.store(chunks.take([i]), [0])
            print(i, bool(result.ok[0]), result.reasons.get(0, "-"), flush=True)
        print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 4096)
