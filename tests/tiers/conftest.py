from __future__ import annotations

import pytest

from tierkv.testing.leaks import no_leaked_fds, no_leaked_shm, no_leaked_threads  # noqa: F401


@pytest.fixture(autouse=True)
def no_leaks(no_leaked_fds: None, no_leaked_shm: None, no_leaked_threads: None) -> None:  # noqa: F811
    """Every test of a tier leaves nothing behind."""
