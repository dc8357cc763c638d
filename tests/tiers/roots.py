"""What lies below the root of an fs tier, seen without the tier, also while processes write there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tierkv.errors import RecordError
from tierkv.tiers import record
from tierkv.types import ChunkName, Space


def everything(root: Path) -> list[Path]:
    """``root`` and all below it. (``Path.rglob`` fails if a directory goes away meanwhile.)"""
    return [Path(directory, name) for directory, _, files in os.walk(root) for name in (".", *files)]


def disk_bytes(root: Path) -> int:
    """What ``du`` says: blocks of everything, directories included."""
    total = 0
    for path in everything(root):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def verified(root: Path) -> int:
    """Verify each record that is visible below ``root``, by the format alone; how many there are.

    One that is evicted meanwhile, so that its file becomes another's, is none any more.
    """
    paths = [path for path in everything(root) if path.suffix == ".tkv"]
    for path in paths:
        namespace, generation, _, file = path.relative_to(root).parts
        digits, group = file.removesuffix(".tkv").split("-")
        name = ChunkName(Space(bytes.fromhex(namespace), bytes.fromhex(generation)), int(group), bytes.fromhex(digits))
        with suppress(FileNotFoundError), path.open("rb") as opened:
            raw = opened.read()
            try:
                record.verify(raw, name, len(raw) - record.HEADER_BYTES)
            except RecordError:
                assert not os.path.samestat(os.fstat(opened.fileno()), path.stat())
    return len(paths)
