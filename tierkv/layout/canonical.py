"""The byte format of a chunk, version 1. This text is the specification; the code below follows it.

**Chunk.** A chunk holds ``blocks_per_chunk`` blocks of one group, in token order, one after the other:

    chunk  := block[0] block[1] … block[blocks_per_chunk - 1]
    block  := page of the first layer, …, page of the last layer     (the group's canonical order of layers)

The block is the outermost dimension: ``[block][layer][page]``. Hence a chunk of n blocks MUST equal the concatenation
of n chunks of one block each. There is no header, no alignment and no padding, neither between pages nor between
blocks nor at the end. Headers, names and versions belong to the record that a tier wraps around the chunk.

**Page.** A page is one layer's bytes of one block: its planes, one after the other. For attention with packed keys and
values, which is all that version 1 knows, it is one plane

    plane  := [head][token][K | V]

with the KV heads outermost, in the model's order; then the block's tokens, in order; then the key's ``head_size``
elements followed by the value's. An MLA layer's latent is a plane ``[token][latent]``: the case of one head. Elements
have the KV cache's dtype, in little-endian byte order, and are copied as they are: a writer MUST NOT convert or
normalise them. All tokens' places exist in each page, also where a block is not full.

**Ranks.** Under tensor parallelism with R > 1 ranks, a chunk of version 1 is

    chunk  := [rank][block][layer][page]

where a page holds the KV heads of that rank only. Such bytes depend on the topology, so their namespace MUST name it
(``layout`` = ``topology:…``), and the concatenation rule above holds within a rank's share only. With R = 1 both forms
are the same bytes, and the namespace says ``canonical-1``.

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

from tierkv.layout.spec import ModelSpec

VERSION: Final = 1
#: ``layout`` of a namespace whose chunks any topology can read.
LAYOUT: Final = f"canonical-{VERSION}"


def layout_name(spec: ModelSpec) -> str:
    """The namespace's ``layout``: ``canonical-1``, or ``topology:…`` where the bytes depend on the ranks."""
    return LAYOUT if spec.ranks == 1 else f"topology:v{VERSION}/tp{spec.ranks}"


def checksum(chunk: bytes | bytearray | memoryview | Any) -> int:
    """The checksum of a chunk's bytes (any contiguous buffer): xxh3-64. Releases the GIL for long ones."""
    return xxhash.xxh3_64_intdigest(chunk)


def page_offsets(page_bytes: Sequence[int]) -> list[int]:
    """Where each page of a block starts, from the block's first byte."""
    offsets, at = [], 0
    for size in page_bytes:
        offsets.append(at)
        at += size
    return offsets


def assemble(shares: Sequence[Sequence[Sequence[bytes]]]) -> bytes:
    """A chunk from its pages, ``shares[rank][block][layer]``: slow, obvious, and what tests compare with."""
    return b"".join(page for share in shares for block in share for page in block)
