"""What happens in the life of a chunk, as JSON lines for people and tools that want a timeline.

Each line has ``t`` (seconds of ``time.monotonic``), ``event`` and the event's own fields. Without a
``trace_path`` nothing is recorded and ``emit`` costs one comparison.
"""

from __future__ import annotations

import json
import threading
import time
from typing import IO, Any


class Trace:
    """An append-only trace. Thread safety: ``emit`` may be called by any thread."""

    def __init__(self, path: str | None) -> None:
        self._lock = threading.Lock()
        self._file: IO[str] | None = open(path, "a", buffering=1) if path else None  # noqa: SIM115 - lives as long as the object

    @property
    def enabled(self) -> bool:
        return self._file is not None

    def emit(self, event: str, **fields: Any) -> None:
        """Record ``event`` as having happened now."""
        if self._file is None:
            return
        line = json.dumps({"t": time.monotonic(), "event": event, **fields})
        with self._lock:
            if self._file is not None:
                self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
