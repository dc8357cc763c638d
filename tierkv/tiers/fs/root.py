"""The root directory: where everything lies, and whether it can be used.

::

    root_dir/
      .tmp/<process>/<random>-<bytes>.tmp               what is being written
      .ledger/                                          how much there is: see ``ledger``
      <namespace>/namespace.json                        as ``tierkv.tiers.paths`` says
      <namespace>/<generation>/<2>/<hash>-<group>.tkv
      segments/                                         all records of the layout ``segments``: see ``geometry``

Temporary files have directories of their own: what a crash left there is found without a walk through all records.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import Any

from tierkv.errors import ConfigError
from tierkv.tiers.fs.recordfile import create_temporary, make_directory, write_atomically
from tierkv.tiers.paths import DESCRIPTION, description_text, record_path, space_path
from tierkv.types import ChunkName, Space

logger = logging.getLogger(__name__)

#: A temporary file that was not written to for so long has no writer any more.
STALE_AFTER_S = 3600.0
#: A disk that is full at start is no reason not to serve what is on it.
FULL = (errno.ENOSPC, errno.EDQUOT)


class Root:
    """Paths below one root directory. Thread safety: immutable."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.temporary = os.path.join(self.path, ".tmp")
        self.ledger = os.path.join(self.path, ".ledger")
        self.segments = os.path.join(self.path, "segments")

    def of_namespace(self, namespace: bytes) -> str:
        return f"{self.path}/{namespace.hex()}"

    def of_space(self, space: Space) -> str:
        return f"{self.path}/{space_path(space)}"

    def of_record(self, name: ChunkName) -> str:
        return record_path(self.of_space(name.space), name.group, name.block_hash)

    def prepare(self, namespace: bytes, description: dict[str, Any]) -> None:
        """Make the root, see that it can be written, clean up, and describe the namespace. Idempotent.

        Raises:
            ConfigError: ``root_dir``: it cannot be used.
        """
        try:
            make_directory(self.path)
            make_directory(self.temporary)
            self._remove_stale(self._probe())
            self._describe(namespace, description)
        except (OSError, ValueError) as error:  # ValueError: a path that no system can have
            if isinstance(error, OSError) and error.errno in FULL:
                logger.warning("%s is full; what is stored there is still served", self.path)
                return
            problem = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                "root_dir",
                f"{self.path!r} cannot be written ({problem})",
                "a directory, or one that can be made, that this process can write to",
            ) from error

    def _probe(self) -> float:
        """Write and remove a file; the time of the file system's own clock, in seconds."""
        fd, path = create_temporary(self.temporary)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            os.unlink(path)

    def _remove_stale(self, now: float) -> None:
        """Remove what writers that died have left, and what the ledger has lost sight of. Others may do the same."""
        for directory, _, files in os.walk(self.temporary, topdown=False):
            if os.path.exists(os.path.join(self.ledger, os.path.basename(directory))):
                continue  # of a process that the ledger knows, and cares for
            for path in [os.path.join(directory, name) for name in files]:
                with contextlib.suppress(OSError):
                    if now - os.stat(path, follow_symlinks=False).st_mtime > STALE_AFTER_S:
                        os.unlink(path)
            if directory != self.temporary and now - os.stat(directory).st_mtime > STALE_AFTER_S:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(directory)

    def _describe(self, namespace: bytes, description: dict[str, Any]) -> None:
        path = os.path.join(self.of_namespace(namespace), DESCRIPTION)
        text = description_text(description)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as present:
            if present.read() == text:
                return
        write_atomically(path, text, self.temporary)
