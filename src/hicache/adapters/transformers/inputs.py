"""What callers hand over, as plain ints; ConfigError for what cannot be meant."""

from __future__ import annotations

from operator import index
from typing import Any

from hicache.errors import ConfigError


def _token(value: Any) -> int:
    """A token id: any integer of 0 or more but a bool; TypeError or ValueError for anything else."""
    if isinstance(value, bool):
        raise TypeError(value)
    number = index(value)
    if number < 0:
        raise ValueError(value)
    return number


def prompt_ids(input_ids: Any) -> list[int]:
    """The prompt as a list of ints, from a list, an array or a tensor of one row."""
    try:
        ids = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
        if len(ids) == 1 and isinstance(ids[0], list):
            ids = ids[0]
        tokens = [_token(value) for value in ids]
    except (TypeError, ValueError):
        tokens = []
    if not tokens:
        raise ConfigError("a prompt is one row of at least one token id", given=str(input_ids)[:80])
    return tokens


def end_tokens(eos: Any) -> frozenset[int]:
    """The tokens that end a generation, from None, one of them or several."""
    if eos is None:
        return frozenset()
    plain = eos.tolist() if hasattr(eos, "tolist") else eos
    try:
        return frozenset(
            _token(value)
            for value in (plain if isinstance(plain, list | tuple | set | frozenset) else [plain])
        )
    except (TypeError, ValueError):
        raise ConfigError("eos is a token id or several", given=str(eos)[:80]) from None
