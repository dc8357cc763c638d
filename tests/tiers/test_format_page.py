"""The example of docs/FORMAT.md is what the code writes."""

from __future__ import annotations

import re
from pathlib import Path

from tierkv.tiers import record
from tierkv.types import ChunkName, Space

PAGE = Path(__file__).parents[2] / "docs" / "FORMAT.md"


def block(kind: str) -> bytes:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return bytes.fromhex(found)


def test_the_example_is_what_the_code_writes() -> None:
    chunk = bytes(
        0x10 * head + token + 0x80 * value + 2 * element
        for head in range(2)
        for token in range(2)
        for value in range(2)
        for element in range(2)
    )
    assert block("chunk") == chunk
    name = ChunkName(Space(bytes(range(16)), bytes(16)), 1, bytes(range(0xA0, 0xC0)))
    header = record.encode_header(name, len(chunk), record.payload_checksum(chunk))
    assert block("header") == header[:136] + header[504:]
    assert header[136:504] == bytes(368)
