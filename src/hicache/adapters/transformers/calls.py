"""A call of ``model.generate`` before it runs: which sequences it will compute, or why it has to run without a cache.

The KV of a token must be a function of the tokens before it. So only what is known to leave it one is taken: every
argument that is not named here, and every option that makes Transformers keep its KV otherwise, is a reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache.adapters.transformers.inputs import padded, placeholder
from hicache.adapters.transformers.probe import takes

PLAIN = frozenset(
    {
        "inputs", "generation_config", "kwargs", "logits_processor", "stopping_criteria", "streamer", "synced_gpus",
        "prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask",
        "use_model_defaults",
    }
)  # fmt: skip
"""Arguments of ``generate`` that choose tokens, watch them or are looked at below, but change no KV."""

BESIDE = frozenset({"tokenizer", "assistant_tokenizer", "trust_remote_code"})
"""Arguments that ``generate`` takes out of its keywords before the model sees them; they change no KV."""

MODES = frozenset({"greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation"})

OTHERWISE = ("is_assistant", "token_healing", "use_mtp", "speculation_type", "assistant_early_exit")
"""Options under which the prompt, the cache or the model is not what it seems."""


@dataclass(frozen=True, slots=True)
class Call:
    """The sequences of a call as the model will compute them.

    prompts: one for each row, without padding; offsets: how much padding stands before each. aligned: what comes
    back is these rows and what was generated behind them. mask: an attention mask to pass, because Transformers
    would make one of its own.
    """

    prompts: list[list[int]]
    offsets: list[int]
    room: int
    aligned: bool
    mask: Any = None


def judge(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | str:
    """The call's sequences, or the name of what stands against serving it."""
    arguments = inspect.signature(type(model).generate).bind(model, *args, **kwargs).arguments
    arguments.pop(next(iter(arguments)))  # the model itself
    for name, value in arguments.items():
        if name not in PLAIN and value is not None:
            return str(name)
    more = {name: value for name, value in arguments.get("kwargs", {}).items() if name not in BESIDE}
    config, rest = model._prepare_generation_config(arguments.get("generation_config"), **more)  # noqa: SLF001
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    wrong = _settings(model, config, str(getattr(mode, "value", mode)))
    if wrong:
        return wrong
    for name, value in rest.items():
        if name not in ("input_ids", "attention_mask") and value is not None and value is not False:
            return str(name)
    ids = rest.get("input_ids") if arguments.get("inputs") is None else arguments["inputs"]
    return _rows(model, ids, rest.get("attention_mask"), config)


def _settings(model: Any, config: Any, mode: str) -> str:
    """The option that stands against it, or nothing."""
    if model.training:
        return "training"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast"
    if mode not in MODES:
        return mode
    if config.use_cache is False:
        return "use_cache"
    if getattr(config, "cache_implementation", None) not in (None, "dynamic"):
        return "cache_implementation"
    return next((name for name in OTHERWISE if getattr(config, name, None)), "")


def _rows(model: Any, ids: Any, mask: Any, config: Any) -> Call | str:
    if model.main_input_name != "input_ids" or not isinstance(ids, torch.Tensor):
        return "inputs"
    if ids.ndim != 2 or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
        return "inputs"
    made = None
    if mask is None:
        mask = made = _mask(ids, config)
    prompts, offsets = padded(ids, mask)
    if not prompts:
        return "attention_mask"
    image = placeholder(model, prompts)
    if image:
        return image
    kind: Any = type(model)
    if any(offsets) and not takes(kind, "position_ids"):
        return "attention_mask"  # where padding counts as positions, it changes what is kept
    several = max(config.num_beams or 1, config.num_return_sequences or 1)
    new = config.max_new_tokens
    return Call(
        prompts=[prompt for prompt in prompts for _ in range(several)],
        offsets=[offset for offset in offsets for _ in range(several)],
        room=new if isinstance(new, int) and new > 0 else 0,
        aligned=(config.num_beams or 1) == 1,
        mask=made if any(offsets) else None,
    )


def _mask(ids: Any, config: Any) -> Any:
    """The mask that Transformers makes where none is given: padding tokens are padding unless they end sequences."""
    pad, eos = config.pad_token_id, config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if pad is None or pad in ends:
        return torch.ones_like(ids)
    return (ids != pad).to(torch.int64)
