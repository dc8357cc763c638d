"""The trace: complete, in order, and never in the way."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from tierkv.events import Trace


def test_lines_of_all_threads_are_written_by_close(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace"))
    threads = [
        threading.Thread(target=lambda n=n: [trace.emit("e", thread=n, i=i) for i in range(50)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    for n in range(4):
        assert [line["i"] for line in lines if line["thread"] == n] == list(range(50))


def test_a_full_disk_ends_the_trace_and_nothing_else() -> None:
    trace = Trace("/dev/full")
    for _ in range(3):
        trace.emit("e")
    trace.close()


def test_without_a_path_nothing_is_started() -> None:
    before = threading.active_count()
    trace = Trace(None)
    trace.emit("e")
    assert threading.active_count() == before
    trace.close()
