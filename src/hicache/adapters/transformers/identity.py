"""Identity: the namespace of a Transformers model, from what changes the bytes of its KV and nothing else.

The same weights and settings give the same root in every process and directory; a changed weight, dtype, page
size or field of the configuration gives another. Weights that are written to or replaced later are noticed before the
next prompt, and hashed again, as far as torch counts writes: not those through ``.data`` or another library's view of
the memory. For these there is :meth:`TransformersCache.invalidate`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
import xxhash

from hicache.adapters.transformers.probe import Geometry, probe
from hicache.errors import ConfigError
from hicache.keys import FieldValue, Namespace
from hicache.spec import CacheSpec

Progress = Callable[[int, int], None]
"""Called with (bytes hashed, bytes in all)."""

CHUNK_NBYTES = 64 << 20

LEFT_OUT = frozenset(
    {
        # what a model is called and where it came from
        "name_or_path", "architectures", "auto_map", "transformers_version", "finetuning_task", "task_specific_params",
        # dtypes stand in the namespace as the tensors really have them
        "dtype", "torch_dtype",
        # what is given back beside the logits
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_return_dict", "use_cache",
        # tokens, which are in the keys
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
        "forced_eos_token_id", "tokenizer_class", "vocab_size",
        # training, and heads that are not a language model's
        "initializer_range", "id2label", "label2id", "num_labels", "problem_type", "summary_type", "summary_use_proj",
        "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "pretraining_tp",
        "gradient_checkpointing",
    }
)  # fmt: skip
"""Fields of a text configuration that change no KV. Every other one counts, known to us or not: a field that is
counted in vain costs a miss, one that is left out wrongly a wrong answer."""

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
    """The model's text configuration without the fields of :data:`LEFT_OUT` and private ones, as sorted JSON."""
    fields = model.config.get_text_config(decoder=True).to_dict()
    kept = {name: _plain(value) for name, value in fields.items() if name[:1] != "_" and name not in LEFT_OUT}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


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


class Marks:
    """What a model's weights look like without reading them: where each tensor lies and how often it was written to.

    Asked before every prompt, so everything here is one pass in C over what the modules hold. Tensors that were
    replaced live on until it is asked again.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._settings = _settings(model)
        modules = list(model.modules())
        self._children = [module._modules for module in modules]  # noqa: SLF001
        self._parameters = [module._parameters for module in modules]  # noqa: SLF001
        self._buffers = [
            (module._buffers, name)  # noqa: SLF001
            for module in modules
            for name in module._buffers  # noqa: SLF001
            if name not in module._non_persistent_buffers_set  # noqa: SLF001
        ]
        self._modules = _all(self._children)
        self._tensors = self._now()
        self._places = [*map(PLACE, _there(self._tensors))]
        self._counting = [one for one in _there(self._tensors) if not one.is_inference()]
        self._counts = [*map(COUNT, self._counting)]

    def _now(self) -> list[Any]:
        return _all(self._parameters) + [buffers.get(name) for buffers, name in self._buffers]

    def are_current(self) -> bool:
        """False when a module, a tensor, a tensor's bytes or the way of computing may be another by now."""
        now = self._now()
        return (
            self._settings == _settings(self._model)
            and _same(self._modules, _all(self._children))
            and _same(self._tensors, now)
            and self._places == [*map(PLACE, _there(now))]
            and self._counts == [*map(COUNT, self._counting)]
        )


PLACE = methodcaller("data_ptr")
COUNT = attrgetter("_version")


def _all(holders: list[dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, holders))]


def _there(tensors: list[Any]) -> list[Any]:
    return [tensor for tensor in tensors if tensor is not None]


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _settings(model: Any) -> tuple[bool, str]:
    return bool(model.training), str(getattr(model.config, "_attn_implementation", ""))


@dataclass(slots=True)
class Identity:
    """The namespace of a model as it is now: hashed when it is first asked for, and again when the model has changed."""

    model: Any
    geometry: Geometry
    spec: CacheSpec
    adapter: bytes | None = None
    salt: bytes | None = None
    progress: Progress | None = None
    _marks: Marks | None = field(default=None, init=False)
    _found: Namespace | ConfigError | None = field(default=None, init=False)

    def forget(self) -> None:
        """Hash again, whatever torch has counted."""
        self._marks = None

    def namespace(self) -> Namespace:
        """ConfigError, each time until it changes again, when the model as it is now cannot be served."""
        if self._marks is None or not self._marks.are_current():
            self._marks = Marks(self.model)
            try:
                self._found = self._read()
            except ConfigError as error:
                self._found = error
        if isinstance(self._found, Namespace):
            return self._found
        assert self._found is not None, "it was asked for just now"
        raise self._found

    def _read(self) -> Namespace:
        refuse_unsteady(self.model)
        if self._found is not None and probe(self.model) != self.geometry:
            raise ConfigError(
                "the model keeps other KV than when it was attached", attached=self.spec.describe()
            )
        return namespace(
            self.model,
            self.spec,
            self.geometry.dtypes,
            adapter=self.adapter,
            salt=self.salt,
            progress=self.progress,
        )
