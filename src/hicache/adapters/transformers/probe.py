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
    """What the model keeps of a token, from a forward call over two tokens with the cache it makes for itself.

    ConfigError, naming the layer, when the model keeps anything but growing rows of K and V: sliding windows,
    states, indexer keys, layers that share another's cache.
    """
    with torch.inference_mode():
        out = model(input_ids=torch.zeros((1, PROBE_TOKENS), dtype=torch.long), use_cache=True)
    made = getattr(out, "cache", None)
    made = out.past_key_values if made is None else made
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
