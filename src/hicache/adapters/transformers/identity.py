"""Identity: the namespace of a Transformers model, from what changes the bytes of its KV and nothing else.

The same weights and settings give the same root in every process and directory; a changed weight, dtype, page
size or field of the list below gives another. Weights changed in place after this was computed are not noticed:
attach again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from hicache.errors import ConfigError
from hicache.keys import FieldValue, Namespace
from hicache.spec import CacheSpec

Progress = Callable[[int, int], None]
"""Called with (bytes hashed, bytes in all)."""

CHUNK_NBYTES = 64 << 20

CONFIG_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "use_qk_norm",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_interleave",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "no_rope_layers",
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "norm_topk_prob",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
    "n_group",
    "topk_group",
)
"""Fields of a model's text configuration that change what a layer computes from the same weights and tokens."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotary embedding whose keys depend on the length of the whole sequence, not on their position alone."""


def weights_digest(model: Any, progress: Progress | None = None) -> bytes:
    """xxh3-128 over all parameters and persistent buffers in name order: name, dtype, shape, bytes."""
    tensors = dict(sorted(model.state_dict().items()))
    total, hashed = 0, 0
    for name, tensor in tensors.items():
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.device.type == "meta"
            or tensor.layout != torch.strided
        ):
            raise ConfigError("these weights cannot be read", name=name, kind=type(tensor).__name__)
        total += tensor.nbytes
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        digest.update(f"{len(head)}:{head}".encode())
        if not tensor.numel():
            continue
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, raw.size, CHUNK_NBYTES):
            part = raw[start : start + CHUNK_NBYTES]
            digest.update(part)
            hashed += part.size
            if progress is not None:
                progress(hashed, total)
    return digest.digest()


def config_text(model: Any) -> str:
    """The named fields of the model's text configuration, canonically: sorted JSON, absent fields left out."""
    config = model.config.get_text_config(decoder=True)
    fields = {name: _plain(getattr(config, name)) for name in CONFIG_FIELDS if hasattr(config, name)}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_plain(inner) for inner in value]
        return sorted(parts) if isinstance(value, set | frozenset) else parts
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError("a configuration field has no canonical text", type=type(value).__name__, value=value)


def refuse_unsteady(model: Any) -> None:
    """ConfigError for a model whose KV is not a function of its weights and the tokens before it."""
    if model.training:
        raise ConfigError(
            "the model is in training mode; call model.eval() first", model=type(model).__name__
        )
    config = model.config.get_text_config(decoder=True)
    found = json.dumps([_plain(getattr(config, name, None)) for name in ("rope_parameters", "rope_scaling")])
    for kind in LENGTH_DEPENDENT_ROPE:
        if f'"{kind}"' in found:
            raise ConfigError("keys of this rotary embedding depend on the sequence's length", rope_type=kind)


def namespace(
    model: Any,
    spec: CacheSpec,
    dtypes: str,
    *,
    adapter: bytes | None = None,
    salt: bytes | None = None,
    progress: Progress | None = None,
) -> Namespace:
    """The namespace of ``model``'s KV in pages of ``spec``.

    ``adapter``: the digest of the files of the adapter (LoRA) in use; needed where one is loaded. ``salt``: the
    tenant's, where tenants must not see each other's pages.
    """
    if adapter is None and (getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")):
        raise ConfigError("an adapter is loaded: pass the digest of its files", model=type(model).__name__)
    fields: dict[str, FieldValue] = {
        "engine": "transformers",
        "weights": weights_digest(model, progress),
        "architecture": type(model).__name__,
        "config": config_text(model),
        "attention": str(getattr(model.config, "_attn_implementation", "")),
        "dtypes": dtypes,
        "planes": spec.describe(),
        "page_tokens": spec.page_tokens,
        "adapter": adapter,
        "salt": salt,
    }
    return Namespace.of(fields)
