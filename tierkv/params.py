"""What a request says of its own loads and stores: fields of ``kv_transfer_params``, as vLLM's offloading has them.

They come with each request, from clients: what is wrong is logged and left out of account, and never fails a request.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierkv.types import ANY_TIER, Locality, Medium, TierFilter, TierMatch

logger = logging.getLogger(__name__)

MEDIA: tuple[Medium, ...] = typing.get_args(Medium)
LOCALITIES: tuple[Locality, ...] = typing.get_args(Locality)


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The fields that are understood; whatever else ``kv_transfer_params`` has is for tiers and other connectors.

    max_load_tokens: at most so many tokens are loaded, those on the device not counted. None: no bound.
    max_offload_tokens: nothing beyond the request's first so many tokens is stored. None: no bound.
    load_tiers: the tiers that are asked (``kv_load_tiers``).
    """

    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    load_tiers: TierFilter = ANY_TIER


def read_params(raw: Mapping[str, Any] | None) -> TransferParams:
    """The fields in a request's ``kv_transfer_params``; what is wrong is logged, and the default stands."""
    if not raw:
        return TransferParams()
    return TransferParams(
        _tokens(raw, "max_load_tokens"),
        _tokens(raw, "max_offload_tokens"),
        _filter(raw.get("kv_load_tiers")),
    )


def _tokens(raw: Mapping[str, Any], field: str) -> int | None:
    value = raw.get(field)
    # A bool is an int to isinstance, and no number of tokens.
    if value is None or (type(value) is int and value >= 0):
        return value
    _ignored(field, value, "an integer, 0 or above")
    return None


def _filter(raw: Any) -> TierFilter:
    if raw is None:
        return ANY_TIER
    if not isinstance(raw, list):
        _ignored("kv_load_tiers", raw, "a list of objects with medium and locality")
        return ANY_TIER
    matches = [match for match in map(_match, range(len(raw)), raw) if match is not None]
    if raw and not matches:  # a list of mistakes is not the empty list, which asks for no tier at all
        return ANY_TIER
    return TierFilter(tuple(matches))


def _match(number: int, entry: Any) -> TierMatch | None:
    """One entry of ``kv_load_tiers``; None if it is wrong."""
    path = f"kv_load_tiers[{number}]"
    if not isinstance(entry, Mapping):
        _ignored(path, entry, "an object with medium and locality")
        return None
    words: dict[str, Any] = {}
    for field, known in (("medium", MEDIA), ("locality", LOCALITIES)):
        value = entry.get(field)
        if value is None:
            continue
        word = value.upper() if isinstance(value, str) else value
        if word not in known:
            _ignored(f"{path}.{field}", value, " or ".join(known))
            return None
        words[field] = word
    return TierMatch(**words)


def _ignored(field: str, value: Any, accepted: str) -> None:
    logger.warning("kv_transfer_params: %s is %.80r, which is ignored; accepted: %s", field, value, accepted)
