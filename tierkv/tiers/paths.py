"""Where the record of a chunk lies, in a tree of files or of objects with names like theirs.

::

    <namespace>/namespace.json                        the namespace's fields, for people
    <namespace>/<generation>/<2>/<hash>-<group>.tkv   one record

Namespace, generation and block hash are in full, in hex; ``<2>`` is the first byte of the hash, so that no directory
grows large, and a few hundred are made, not one for each record. All tiers that name records do it in this way: a tree
may be copied from one to the other.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tierkv.keys import group_mask
from tierkv.types import KEY_BYTES, ChunkName, Space

#: The name of what describes a namespace.
DESCRIPTION = "namespace.json"

#: Parts of paths: of a namespace or a generation, of a directory of a space, and of a record.
DIGEST = re.compile(r"[0-9a-f]{32}")
FAN = re.compile(r"[0-9a-f]{2}")
RECORD = re.compile(r"((?:[0-9a-f]{2}){16,64})-(\d{1,9})\.tkv")


def space_path(space: Space) -> str:
    """Where the records of one generation of one namespace lie."""
    return f"{space.namespace.hex()}/{space.generation.hex()}"


def record_path(space_path: str, group: int, block_hash: bytes) -> str:
    """Where the record of one chunk lies, given where those of its space do."""
    digits = block_hash.hex()
    return f"{space_path}/{digits[:2]}/{digits}-{group}.tkv"


def description_text(description: dict[str, Any]) -> bytes:
    """What ``namespace.json`` says."""
    return json.dumps(description, indent=2, sort_keys=True).encode() + b"\n"


def name_of(space: Space, file_name: str) -> ChunkName | None:
    """The chunk of ``space`` whose record has this file name; None: it is no record's."""
    match = RECORD.fullmatch(file_name)
    return match and ChunkName(space, int(match[2]), bytes.fromhex(match[1]))


def parse(path: str) -> ChunkName | None:
    """The chunk whose record's path ends like this, from the namespace on; None: it is no record's."""
    parts = path.rsplit("/", 4)[-4:]
    if len(parts) < 4 or not (DIGEST.fullmatch(parts[0]) and DIGEST.fullmatch(parts[1]) and FAN.fullmatch(parts[2])):
        return None
    return name_of(Space(bytes.fromhex(parts[0]), bytes.fromhex(parts[1])), parts[3])


class KeyWords:
    """The first words of the keys of one space's chunks, from the file names of their records."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._masks: dict[str, int] = {}

    def of(self, file_name: str) -> int:
        digits, _, group = file_name[:-4].rpartition("-")
        mask = self._masks.get(group)
        if mask is None:
            mask = self._masks[group] = int(group_mask(self._space, int(group))[0])
        tail = bytes.fromhex(digits[-2 * KEY_BYTES :])
        return int.from_bytes(tail[: KEY_BYTES // 2], "little") ^ mask
