"""What a model's KV cache looks like: its groups of layers, their pages, and what each token attends to.

Plain values, made once by whoever knows the engine; everything else in tierkv reads sizes and windows from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.errors import UnsupportedError

FULL: Final = "full"
SLIDING_WINDOW: Final = "sliding_window"
CHUNKED_LOCAL: Final = "chunked_local"
MLA: Final = "mla"
STATE: Final = "state"
KINDS: Final = (FULL, SLIDING_WINDOW, CHUNKED_LOCAL, MLA, STATE)


#: The plane of a page that is copied as it is: its "heads" are the ranks. Only engines of one topology share it.
OPAQUE: Final = "opaque"


@dataclass(frozen=True)
class Plane:
    """A part of a page: cells of one size, ``[head][cell]``, spread over the ranks by heads.

    name: what it holds: ``kv``, ``latent``, ``opaque``.
    heads: of all ranks together. Of more ranks than heads, several hold the same one.
    cells: of each head in one block; for attention, one a token.
    cell_bytes: of one cell.
    """

    name: str
    heads: int
    cells: int
    cell_bytes: int

    @property
    def head_bytes(self) -> int:
        return self.cells * self.cell_bytes

    @property
    def nbytes(self) -> int:
        return self.heads * self.head_bytes

    def __str__(self) -> str:
        return f"{self.name}[{self.heads}][{self.cells}][{self.cell_bytes}]"


@dataclass(frozen=True)
class LayerPage:
    """One layer's bytes of one block, on all ranks together: its planes, one after the other."""

    layer: str
    planes: tuple[Plane, ...]

    @classmethod
    def opaque(cls, layer: str, page_bytes: int, ranks: int = 1) -> LayerPage:
        """A page of which nothing is known but its size on each rank."""
        return cls(layer, (Plane(OPAQUE, ranks, 1, page_bytes),))

    @property
    def page_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def __str__(self) -> str:
        return "+".join(map(str, self.planes))


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share a block table.

    group: the engine's group id.
    kind: ``full``, ``sliding_window``, ``chunked_local``, ``mla``, or ``state``: a recurrent state (Mamba, linear
        attention), of which a block holds what it is after the block's last token; such a chunk is one block.
    window: tokens. For ``sliding_window``: a query sees the ``window - 1`` tokens before it and itself; for
        ``chunked_local``: the size of an attention chunk; 0 for the others.
    pages: the layers in canonical order.

    Raises:
        UnsupportedError: ``kind`` is none of the above.
        ValueError: a size that cannot be.
    """

    group: int
    kind: str
    tokens_per_block: int
    blocks_per_chunk: int
    window: int
    pages: tuple[LayerPage, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedError(f"group {self.group}: unknown kind {self.kind!r}; known: {', '.join(KINDS)}")
        if self.tokens_per_block <= 0 or self.blocks_per_chunk <= 0:
            raise ValueError(f"group {self.group}: tokens_per_block and blocks_per_chunk must be positive")
        if (self.window > 0) != (self.kind in (SLIDING_WINDOW, CHUNKED_LOCAL)):
            raise ValueError(f"group {self.group}: a window of {self.window} tokens does not fit kind {self.kind!r}")
        if self.kind == STATE and self.blocks_per_chunk != 1:
            raise ValueError(f"group {self.group}: a chunk of states is one block, not {self.blocks_per_chunk}")
        if not self.pages or any(page.page_bytes <= 0 for page in self.pages):
            raise ValueError(f"group {self.group}: needs at least one page, and each page at least one byte")

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def windowed(self) -> bool:
        """Whether a hit needs the chunks next to its boundary only."""
        return self.kind in (SLIDING_WINDOW, CHUNKED_LOCAL, STATE)

    @property
    def block_bytes(self) -> int:
        """All pages of one block."""
        return sum(page.page_bytes for page in self.pages)

    def first_needed_token(self, boundary: int) -> int:
        """The first token whose KV the token at position ``boundary`` can attend to; of states, the first of the block
        that ends at ``boundary``.

        With ``boundary`` tokens found in the cache, the engine goes on at position ``boundary``: the KV of tokens
        before the result is never read again, by that token or a later one.
        """
        if self.kind == SLIDING_WINDOW:
            return max(0, boundary - self.window + 1)
        if self.kind == CHUNKED_LOCAL:
            return boundary // self.window * self.window
        if self.kind == STATE:
            return max(0, boundary - self.tokens_per_block)
        return 0


@dataclass(frozen=True)
class ModelSpec:
    """A model's groups, and over how many ranks (tensor parallelism) their planes are spread."""

    groups: tuple[GroupSpec, ...]
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks <= 0:
            raise ValueError(f"ranks must be positive, not {self.ranks}")

    def chunk_bytes(self, group_index: int) -> int:
        """Bytes of one chunk of the group at ``group_index`` (an index into ``groups``)."""
        group = self.groups[group_index]
        return group.blocks_per_chunk * group.block_bytes

    @property
    def opaque_layers(self) -> tuple[str, ...]:
        """The layers whose bytes are those of this topology."""
        pages = (page for group in self.groups for page in group.pages)
        return tuple(page.layer for page in pages if any(plane.name == OPAQUE for plane in page.planes))
