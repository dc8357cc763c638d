"""A process that stores chunks of two sizes in segments without end, for a test to kill.

    churn_segments.py ROOT CAPACITY SEED

Says ``ready`` after the first job. Everything is evicted again and again, and slabs move between the sizes.
"""

from __future__ import annotations

import itertools
import sys

from tierkv.testing.driver import TierDriver, some_chunks
from tierkv.tiers.fs import FsTier, FsTierConfig


def main(root: str, capacity: int, seed: int) -> None:
    config = FsTierConfig(type="fs", root_dir=root, layout="segments", capacity_bytes=capacity, n_write_threads=3)
    sizes = (4096, 16384)
    with TierDriver(lambda context: FsTier(config, context), n_slots=40, slot_bytes=16384, chunk_bytes=sizes) as driver:
        for number in itertools.count(1000 * seed):
            driver.fill(range(40), seed=number)
            group = number // 3 % 2
            job = driver.store_job(some_chunks(40, number, group=group), range(40), [sizes[group]] * 40)
            assert driver.wait([driver.submit(job)])[0].ok.any()
            if number == 1000 * seed:
                print("ready", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
