"""What a model keeps of a token, read from real tensors; and one forward call, in every spelling there is."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from hicache.errors import ConfigError
from hicache.spec import CacheSpec, Group, Plane

PROBE_TOKENS = 2

POSITIONS = "_prepare_position_ids_for_generation"
"""How a model says that a token's position is not its place in the sequence."""


@dataclass(frozen=True, slots=True)
class Side:
    """K or V of one layer as the model really makes it: plane name, heads, dim, dtype."""

    plane: str
    heads: int
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Geometry:
    """What every layer keeps, read from real tensors. ``layers[i]`` is (K, V) of layer i."""

    layers: tuple[tuple[Side, Side], ...]

    @property
    def planes(self) -> dict[str, list[tuple[int, int]]]:
        """For each plane the (layer, 0 for K or 1 for V) it holds, in layer order."""
        table: dict[str, list[tuple[int, int]]] = {}
        for layer, sides in enumerate(self.layers):
            for which, side in enumerate(sides):
                table.setdefault(side.plane, []).append((layer, which))
        return table

    def side(self, at: tuple[int, int]) -> Side:
        """K or V of one layer."""
        return self.layers[at[0]][at[1]]

    @property
    def dtypes(self) -> str:
        """The exact dtypes, plane by plane: fp8_e4m3fn is not fp8_e4m3fnuz."""
        names = {plane: str(self.side(at[0]).dtype) for plane, at in self.planes.items()}
        return ",".join(f"{plane}:{dtype}" for plane, dtype in sorted(names.items()))

    def spec(self, page_tokens: int) -> CacheSpec:
        """The plane table: one group, whose every page is needed."""
        planes = []
        for name, at in self.planes.items():
            side = self.side(at[0])
            planes.append(Plane(name, len(at), page_tokens, side.heads, side.dim * side.dtype.itemsize))
        return CacheSpec((Group("kv", tuple(planes)),), page_tokens)


@cache
def cache_argument(kind: Any) -> str:
    """What this version of Transformers calls the cache in a forward call of this class of model."""
    for name in ("cache", "past_key_values"):
        if takes(kind, name):
            return name
    raise ConfigError("the model's forward takes no cache", model=kind.__name__)


@cache
def takes(kind: Any, argument: str) -> bool:
    """True when the forward call of this class of model has an argument of that name."""
    return argument in inspect.signature(kind.forward).parameters


def forward(model: Any, ids: Sequence[int], cache: Any) -> int:
    """One forward call over ``ids`` behind what ``cache`` holds; returns the likeliest next token."""
    kind: Any = type(model)
    more = {cache_argument(kind): cache}
    if takes(kind, "logits_to_keep"):
        more["logits_to_keep"] = 1
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(ids)]), use_cache=True, **more)
        return int(out.logits[0, -1].argmax())


def probe(model: Any) -> Geometry:
    """What the model keeps of a token, from forward calls over a few tokens with the cache it makes for itself.

    ConfigError, naming the layer, when the model keeps anything but growing rows of K and V (sliding windows,
    states, indexer keys, layers that share another's cache), when it has an encoder or does not run at all, or when
    the rows of a token depend on the tokens behind it.
    """
    refuse_by_configuration(model)
    made = _made(model, PROBE_TOKENS)
    geometry = _geometry(made)
    longer = _made(model, 2 * PROBE_TOKENS)
    for number, layer in enumerate(geometry.layers):
        for which, side in zip(("keys", "values"), layer, strict=True):
            short = getattr(made.layers[number], which).float()
            same = getattr(longer.layers[number], which)[..., :PROBE_TOKENS, :].float()
            allowed = (1e-3 if side.dtype.itemsize >= 4 else 0.1) * max(1.0, float(short.abs().max()))
            if not float((short - same).abs().max()) <= allowed:  # NaN is refused too
                raise ConfigError(
                    "what this model keeps of a token depends on the tokens behind it, or is no number",
                    layer=number,
                    side=which,
                    model=type(model).__name__,
                )
    return geometry


def refuse_by_configuration(model: Any) -> None:
    """ConfigError for what is no language model of Transformers, has an encoder before it, or makes its own positions."""
    config = getattr(model, "config", None)
    callables = [getattr(model, name, None) for name in ("forward", "modules")]
    if not all(map(callable, callables)) or not hasattr(config, "get_text_config"):
        raise ConfigError("this is no model of Transformers", type=type(model).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            "models with an encoder are not supported: their KV depends on what the encoder read",
            model=type(model).__name__,
        )
    positions = getattr(type(model), POSITIONS, None)
    own = positions is not None and positions is not getattr(
        transformers.GenerationMixin, POSITIONS, positions
    )
    if own or any(hasattr(module, "rope_deltas") for module in model.modules()):
        raise ConfigError(
            "this model makes positions of its own, which images before the text move",
            model=type(model).__name__,
        )


def _made(model: Any, tokens: int) -> Any:
    """The cache that the model makes for itself over so many tokens."""
    ids = torch.arange(1, tokens + 1).unsqueeze(0)
    try:
        with torch.inference_mode():
            out = model(input_ids=ids, use_cache=True)
    except Exception as error:
        raise ConfigError(
            "the model does not run over a few plain tokens",
            model=type(model).__name__,
            error=type(error).__name__,
            says=str(error)[:120],
        ) from error
    made = getattr(out, "cache", None)
    return getattr(out, "past_key_values", None) if made is None else made


def _geometry(made: Any) -> Geometry:
    layers = getattr(made, "layers", None)
    if type(made) is not transformers.DynamicCache or not layers:
        raise ConfigError("the model keeps its own kind of cache", cache=type(made).__name__)
    names: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    sides: list[tuple[Side, Side]] = []
    for number, layer in enumerate(layers):
        if type(layer) is not DynamicLayer or not getattr(layer, "is_croppable", True) or layer.keys is None:
            raise ConfigError(
                "this kind of layer cannot be cached by pages yet",
                layer=number,
                kind=type(layer).__name__,
                supported=DynamicLayer.__name__,
            )
        sides.append((_side(number, 0, layer.keys, names), _side(number, 1, layer.values, names)))
    return Geometry(tuple(sides))


def _side(layer: int, which: int, states: Any, names: dict[tuple[int, torch.Size, torch.dtype], str]) -> Side:
    if states.dim() != 4 or states.shape[0] != 1 or states.shape[2] != PROBE_TOKENS:
        raise ConfigError(
            "a layer does not keep one row a token",
            layer=layer,
            shape=tuple(states.shape),
            tokens=PROBE_TOKENS,
        )
    if states.device.type != "cpu":
        raise ConfigError("this version works with models on the CPU", layer=layer, device=states.device)
    shape = (which, states.shape[1::2], states.dtype)  # layers of unequal shape are planes of their own
    same = sum(known[0] == which for known in names)
    name = names.setdefault(shape, "kv"[which] + (str(same) if same else ""))
    return Side(name, int(states.shape[1]), int(states.shape[3]), states.dtype)
