"""What happens in the life of a chunk, as JSON lines for people and tools that want a timeline.

Each line has ``t`` (seconds of ``time.monotonic``), ``event`` and the event's own fields. Without a
``trace_path`` nothing is recorded and ``emit`` costs one comparison.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from typing import IO, Any

logger = logging.getLogger(__name__)


class Trace:
    """An append-only trace, written by the thread ``tierkv-trace-0``.

    Thread safety: ``emit`` may be called by any thread, under any lock; it does no I/O.
    """

    def __init__(self, path: str | None) -> None:
        """Raises OSError if the file cannot be opened."""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if path is not None:
            file = open(path, "a", buffering=1)  # noqa: SIM115 - the thread closes it
            self._thread = threading.Thread(target=self._run, args=(file,), name="tierkv-trace-0", daemon=True)
            self._thread.start()

    def emit(self, event: str, **fields: Any) -> None:
        """Record ``event`` as having happened now."""
        if self._thread is not None:
            self._lines.put(json.dumps({"t": time.monotonic(), "event": event, **fields}))

    def close(self) -> None:
        """Write what was emitted, and stop."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, file: IO[str]) -> None:
        try:
            with file:
                while (line := self._lines.get()) is not None:
                    file.write(line + "\n")
        except OSError as error:
            logger.warning("the trace ends here: %s", error)
            while self._lines.get() is not None:
                pass
