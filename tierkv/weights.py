"""The identity of a model's weights: what tells two models of one architecture apart.

For each weight file below a directory: its relative name, its size, and xxh3-128 over the safetensors
header and 64 evenly spaced pages of 4 KiB, or over everything. Never times, inodes or absolute
paths: a copy of the same files on another host has the same identity.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import xxhash

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PAGE = 4096
_PAGES = 64
_HEADER_LIMIT = 100 << 20


def weights_identity(directory: Path, check: Literal["samples", "full"] = "samples") -> str:
    """The identity of the weight files in ``directory``, 32 hexadecimal digits.

    Samples can miss an edit of a few bytes between the pages that are read; ``full`` cannot.

    Raises:
        FileNotFoundError: there is no weight file.
    """
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise FileNotFoundError(f"no weight files ({', '.join(WEIGHT_SUFFIXES)}) in {directory}")
    entries = [[p.relative_to(directory).as_posix(), p.stat().st_size, _file_digest(p, check)] for p in files]
    encoded = json.dumps([check, entries]).encode()
    return hashlib.blake2b(encoded, digest_size=16, person=b"tierkv-weights").hexdigest()


def _file_digest(path: Path, check: str) -> str:
    hasher = xxhash.xxh3_128()
    size = path.stat().st_size
    with path.open("rb") as file:
        if check == "full":
            while block := file.read(1 << 22):
                hasher.update(block)
            return hasher.hexdigest()
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            hasher.update(file.read(min(length, _HEADER_LIMIT)))
        last = max(0, size - _PAGE)
        for i in range(_PAGES):
            file.seek(last * i // (_PAGES - 1))
            hasher.update(file.read(_PAGE))
    return hasher.hexdigest()
