"""The decision over all groups against the obvious way: try each boundary from the largest down."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiering_harness import TOKENS, group

from tierkv.layout.spec import GroupSpec
from tierkv.tiering.hits import Range, best_boundary, fitting_limit, needed

groups = st.lists(
    st.tuples(
        st.sampled_from(["full", "sliding_window", "chunked_local", "mla", "state"]),
        st.integers(1, 30),
        st.sampled_from([1, 2, 4]),
    ),
    min_size=1,
    max_size=3,
).map(
    lambda kinds: [
        group(
            i,
            kind,
            window if kind in ("sliding_window", "chunked_local") else 0,
            blocks=1 if kind == "state" else blocks,
        )
        for i, (kind, window, blocks) in enumerate(kinds)
    ]
)


def servable(specs: list[GroupSpec], usable: list[np.ndarray], local: int, boundary: int) -> bool:
    for spec, flags in zip(specs, usable, strict=True):
        if boundary > len(flags) * spec.tokens_per_chunk:
            return False  # beyond what the request has complete chunks of
        for chunk in range(-(-boundary // spec.tokens_per_chunk)):
            last_token = (chunk + 1) * spec.tokens_per_chunk - 1
            wanted = last_token >= max(local, spec.first_needed_token(boundary))
            if wanted and not (chunk < len(flags) and flags[chunk]):
                return False
    return True


@given(st.data())
def test_the_boundary_is_the_largest_that_every_group_can_serve(data: st.DataObject) -> None:
    specs = data.draw(groups)
    tokens = data.draw(st.integers(0, 80))
    usable = [
        np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
        for n in (tokens // s.tokens_per_chunk for s in specs)
    ]
    local = data.draw(st.integers(0, 5)) * TOKENS
    limit = data.draw(st.integers(0, 90))
    complete = min(len(flags) * s.tokens_per_chunk for s, flags in zip(specs, usable, strict=True))
    asked = []

    def gap(n: int, want: Range) -> int | None:
        asked.append((n, want))
        holes = np.flatnonzero(~usable[n][want.first : want.last])
        return want.first + int(holes[-1 if specs[n].windowed else 0]) if len(holes) else None

    found = best_boundary(specs, gap, local, min(limit, complete), TOKENS)
    candidates = [b for b in range(local + TOKENS, limit + 1, TOKENS) if servable(specs, usable, local, b)]
    assert found.tokens == max(candidates, default=local)
    assert found.tokens <= found.whole
    assert all(not usable[n][chunk] for n, chunk in found.gaps)
    whole = [n for n, _ in asked if not specs[n].windowed]
    assert len(whole) == len(set(whole))  # a long prefix is gone through once


@given(st.data())
def test_a_fitting_limit_is_lower_and_wants_no_more_than_fits(data: st.DataObject) -> None:
    spec = group(blocks=data.draw(st.sampled_from([1, 2, 4])))
    count = data.draw(st.integers(1, 12))
    boundary = count * spec.tokens_per_chunk
    wanting = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    room = data.draw(st.integers(0, 12))
    limit = fitting_limit([spec], [np.flatnonzero(wanting)], boundary, TOKENS, lambda ids: len(ids) <= room)
    assert limit < boundary
    if wanting.sum() > room:
        want = needed(spec, 0, limit - limit % TOKENS)
        assert wanting[want.first : want.last].sum() <= room
        assert wanting[: want.last + 1].sum() > room or want.last + 1 > count or limit == boundary - TOKENS


def test_a_window_that_does_not_fit_is_given_up_in_few_steps() -> None:
    spec = group(kind="sliding_window", window=100 * TOKENS)
    boundary, steps = 65_536 * TOKENS, 0
    while boundary > 0:
        missing = [np.arange(boundary // TOKENS)[-100:]]
        boundary = fitting_limit([spec], missing, boundary, TOKENS, lambda ids: False)
        steps += 1
    assert steps < 30
