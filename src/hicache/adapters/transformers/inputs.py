"""What callers hand over, as plain ints; ConfigError for what cannot be meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from hicache.errors import ConfigError

PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*_token_(id|index)")


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


def placeholder(model: Any, prompts: Sequence[Sequence[int]]) -> str:
    """The configuration's name for a token that stands for part of an image, a video or a sound; else nothing.

    What is computed for such a token depends on the image, which the token does not say.
    """
    names = [str(name) for name in sorted(vars(model.config)) if PLACEHOLDER.fullmatch(name)]
    for name in names:
        if any(getattr(model.config, name) in prompt for prompt in prompts):
            return name
    return ""


def refuse_placeholders(model: Any, prompts: Sequence[Sequence[int]]) -> None:
    """ConfigError for a prompt with a place for an image, a video or a sound in it."""
    name = placeholder(model, prompts)
    if name:
        raise ConfigError("only text can be cached; this prompt has a place for something else", token=name)


def prompt_rows(input_ids: Any, mask: Any) -> tuple[list[list[int]], list[int]]:
    """Prompts and how much padding stands before each, from one row of tokens or a left-padded tensor of several."""
    if getattr(input_ids, "ndim", 1) < 2 or (mask is None and len(input_ids) == 1):
        return [prompt_ids(input_ids)], [0]
    prompts, offsets = padded(input_ids, torch.ones_like(input_ids) if mask is None else mask)
    if not prompts:
        raise ConfigError(
            "several prompts are a tensor of rows and a mask that says how each is padded, on the left",
            shape=tuple(input_ids.shape),
            mask=None if mask is None else tuple(getattr(mask, "shape", ())),
        )
    return prompts, offsets


def padded(ids: Any, mask: Any) -> tuple[list[list[int]], list[int]]:
    """Rows without their padding and how much of it stands before each; nothing for any other kind of mask."""
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or not ids.numel():
        return [], []
    real = (mask != 0).long()
    counts = real.sum(1)
    offsets = ids.shape[1] - counts
    places = torch.arange(ids.shape[1], device=ids.device)
    left = bool((real == (places >= offsets[:, None])).all())
    if not left or not bool(counts.all()) or not bool((mask == real.to(mask.dtype)).all()):
        return [], []
    starts = offsets.tolist()
    return [row[start:] for row, start in zip(ids.tolist(), starts, strict=True)], starts


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
