from __future__ import annotations

from typing import Any

import pytest

from tierkv.params import TransferParams, read_params
from tierkv.types import ANY_TIER, TierFilter, TierMatch

#: A tier of each kind, and one that does not say: (medium, locality).
TIERS: list[tuple[Any, Any]] = [
    ("CPU", "LOCAL"),
    ("CPU", "REMOTE"),
    ("STORAGE", "LOCAL"),
    ("STORAGE", "REMOTE"),
    ("STORAGE", None),
    (None, None),
]


def allowed(filter_: TierFilter) -> list[tuple[Any, Any]]:
    return [tier for tier in TIERS if filter_.allows(*tier)]


@pytest.mark.parametrize("raw", [None, {}, {"remote_host": "x"}, {"max_load_tokens": None, "kv_load_tiers": None}])
def test_without_the_fields_there_are_no_bounds(raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    params = read_params(raw)
    assert params == TransferParams(None, None, ANY_TIER)
    assert allowed(params.load_tiers) == TIERS
    assert not caplog.records


@pytest.mark.parametrize("field", ["max_load_tokens", "max_offload_tokens"])
def test_numbers_of_tokens(field: str, caplog: pytest.LogCaptureFixture) -> None:
    for value in (0, 1, 1 << 40):
        assert getattr(read_params({field: value}), field) == value
    assert not caplog.records
    for wrong in (-1, True, 1.0, "1", [1]):
        caplog.clear()
        assert read_params({field: wrong}) == TransferParams()
        assert field in caplog.text and repr(wrong) in caplog.text and "an integer, 0 or above" in caplog.text


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([], []),
        ([{}], TIERS),
        ([{"medium": None, "locality": None}], TIERS),
        ([{"medium": "CPU"}], [*TIERS[:2], TIERS[5]]),
        ([{"medium": "storage", "locality": "Local"}], [TIERS[2], *TIERS[4:]]),
        ([{"locality": "REMOTE"}], [TIERS[1], *TIERS[3:]]),
        ([{"medium": "CPU"}, {"locality": "LOCAL"}], [*TIERS[:3], *TIERS[4:]]),
        ([{"medium": "CPU", "tier": "fast"}], [*TIERS[:2], TIERS[5]]),
    ],
)
def test_tiers_are_chosen(raw: Any, expected: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A tier that does not say what it is may be of any kind."""
    assert allowed(read_params({"kv_load_tiers": raw}).load_tiers) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("raw", "expected", "message"),
    [
        ("CPU", ANY_TIER, "kv_load_tiers is 'CPU'"),
        ({"medium": "CPU"}, ANY_TIER, "a list of objects"),
        (["CPU"], ANY_TIER, r"kv_load_tiers[0] is 'CPU'"),
        (
            [{"medium": "TAPE"}],
            ANY_TIER,
            "kv_load_tiers[0].medium is 'TAPE', which is ignored; accepted: CPU or STORAGE",
        ),
        ([{"locality": ["LOCAL"]}], ANY_TIER, "kv_load_tiers[0].locality is ['LOCAL']"),
        ([{"medium": 1}, {"medium": "CPU"}], TierFilter((TierMatch("CPU"),)), "kv_load_tiers[0].medium is 1"),
    ],
)
def test_a_wrong_entry_is_logged_and_left_out(
    raw: Any, expected: TierFilter, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A list of nothing but mistakes chooses nothing, so all tiers are asked, as vLLM's own offloading does."""
    assert read_params({"kv_load_tiers": raw, "max_load_tokens": 3}) == TransferParams(3, None, expected)
    assert message in caplog.text


def test_what_a_client_sends_is_not_logged_at_length(caplog: pytest.LogCaptureFixture) -> None:
    read_params({"max_load_tokens": "x" * 10_000})
    assert len(caplog.text) < 400
