"""The byte format of a chunk, version 1. This text is the specification; the code below follows it.

**Chunk.** A chunk holds ``blocks_per_chunk`` blocks of one group, in token order, one after the other:

    chunk  := block[0] block[1] … block[blocks_per_chunk - 1]
    block  := page of the first layer, …, page of the last layer     (the group's canonical order of layers)

The block is the outermost dimension: ``[block][layer][page]``. Hence a chunk of n blocks MUST equal the concatenation
of n chunks of one block each. There is no header, no alignment and no padding, neither between pages nor between
blocks nor at the end. Headers, names and versions belong to the record that a tier wraps around the chunk.

**Page.** A page is one layer's bytes of one block: its planes, one after the other, in the layer's order.

    page   := plane …
    plane  := [head][cell]

The heads are those of **all** ranks, in the model's order. A cell is a whole number of bytes; all cells of a plane have
the same size, and each head has as many. For attention with packed keys and values the page is one plane, ``kv``: a
cell is one token's key followed by its value, ``head_size`` elements and then ``head_size_v``, and the cells are the
block's tokens, in order. An MLA layer's latent is the plane ``latent``: one head, one cell a token. Elements have the
KV cache's dtype, in little-endian byte order, and are copied as they are: a writer MUST NOT convert or normalise them.
All tokens' places exist in each page, also where a block is not full. A backend may keep the tokens of a head in an
order of its own. Such a plane is named for it, ``kv:NAME`` or ``latent:NAME``, and has one cell a head: all its
tokens, as they are.

**Ranks.** With R ranks that share H heads, rank r holds the heads from r·H/R on, H/R of them, where R divides H. Where
H divides R, each head is on R/H ranks that follow each other: rank r holds head r·H/R (rounded down), and a writer MAY
take it from any of them. Nothing else of the ranks, and nothing of the order in which a device keeps these dimensions,
is in the bytes.

**Opaque pages.** What a page looks like inside may not be known. It is then one plane, ``opaque``, whose heads are the
ranks, each with a single cell: that rank's page as it is. Such bytes depend on the topology, so their namespace MUST
name it (``layout`` = ``topology:…``). A namespace without opaque pages says ``canonical-1``.

**Checksum.** xxh3-64 (seed 0) of the chunk's bytes, all of them, all ranks. A record that carries it stores it as an
unsigned little-endian integer of 8 bytes.

**Order of layers.** The order of ``GroupSpec.pages``, which every rank and every deployment of the namespace MUST
share; the namespace lists the layers in this order.

A reader MUST reject a chunk whose length is not ``ModelSpec.chunk_bytes``, and SHOULD compare the checksum before it
uses a byte. A change of any of these rules is a new version, with a new ``layout`` in the namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import xxhash

VERSION: Final = 1
#: ``layout`` of a namespace whose chunks any topology can read.
LAYOUT: Final = f"canonical-{VERSION}"


def checksum(chunk: bytes | bytearray | memoryview | Any) -> int:
    """The checksum of a chunk's bytes (any contiguous buffer): xxh3-64. Releases the GIL for long ones."""
    return xxhash.xxh3_64_intdigest(chunk)


#: ``checksum`` of a chunk that comes in pieces.
Checksum = xxhash.xxh3_64


def assemble(blocks: Sequence[Sequence[Sequence[bytes]]]) -> bytes:
    """A chunk from its planes, ``blocks[block][layer][plane]``: slow, obvious, and what tests compare with."""
    return b"".join(plane for block in blocks for page in block for plane in page)
