"""Working rows: the endpoint of a Transformers model, and the cache object its forward calls read and write.

The KV of the one sequence that runs lies in one tensor a plane and layer, token-major: ``[rows, heads, dim]``.
Attention gets zero-copy views ``[1, heads, tokens, dim]`` of them, and HiCache the same bytes as pages: page i is
rows ``i * page_tokens`` to ``(i + 1) * page_tokens``. Nothing is copied between the two.

    rows   0 ........ length ........ capacity
           | written  | free          |            a load or a forward call moves ``length``

A handle is bound to the tensors it was opened on. When a copy of an earlier sequence still runs on them, the next
sequence gets new ones, and the old ones live until that copy has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hicache.data.copy.base import Bytes, Surface
from hicache.data.pool import rows_surface
from hicache.errors import ConfigError, InvariantError
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


def kept_rows(cache: Any, start: int, end: int) -> list[tuple[Any, Any]]:
    """Rows ``start`` to ``end`` of every layer of any Transformers cache: what cropping leaves of it."""
    return [(layer.keys[..., start:end, :], layer.values[..., start:end, :]) for layer in cache.layers]


def joined_cache(model: Any, pieces: Sequence[list[tuple[Any, Any]]]) -> Any:
    """Transformers' own ``DynamicCache`` for ``model``, holding these pieces one behind the other."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        for number, layer in enumerate(
            zip(*pieces, strict=True)
        ):  # one update a layer: each copies what is there
            cache.update(torch.cat([k for k, _ in layer], -2), torch.cat([v for _, v in layer], -2), number)
    return cache


class Memory:
    """The tensors of one sequence, and the same bytes as pages."""

    def __init__(self, geometry: Geometry, spec: CacheSpec, pages: int) -> None:
        rows = pages * spec.page_tokens
        self.tensors: tuple[tuple[Any, ...], ...] = tuple(
            tuple(torch.zeros((rows, side.heads, side.dim), dtype=side.dtype) for side in pair)
            for pair in geometry.layers
        )
        self.pages = pages
        planes = [
            [_bytes(self.tensors[layer][which]) for layer, which in at] for at in geometry.planes.values()
        ]
        self.surface = rows_surface(spec.groups[0], planes, pages)


def _bytes(tensor: Any) -> Bytes:
    view: Bytes = tensor.view(torch.uint8).numpy()
    assert view.dtype == np.uint8, "a tensor's bytes"
    return view


class Rows:
    """The working rows of the sequence that runs. It is the worker's endpoint and makes the model's cache object."""

    def __init__(self, geometry: Geometry, spec: CacheSpec) -> None:
        self._geometry = geometry
        self._spec = spec
        self._memory = Memory(geometry, spec, 1)
        self._bound: dict[int, Memory] = {}

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self._memory.pages * self._spec.page_tokens

    def reserve(self, tokens: int) -> None:
        """Make room for a sequence of so many tokens: to be called while no copy runs on the rows."""
        if tokens > self.capacity:
            pages = -(-tokens // self._spec.page_tokens)
            self._memory = Memory(self._geometry, self._spec, max(pages, 2 * self._memory.pages))

    def renew(self) -> None:
        """Take new tensors, because a copy still runs on the old ones."""
        self._memory = Memory(self._geometry, self._spec, self._memory.pages)

    def bind(self, handle: int) -> None:
        """Copies for this handle go to and from the rows as they are now."""
        self._bound[handle] = self._memory

    def unbind(self, handle: int) -> None:
        """No copy for this handle runs any more."""
        self._bound.pop(handle, None)

    def surface(self, handle: int | None, group: int) -> Surface:
        """The pages of the sequence that ``handle`` belongs to."""
        if handle is None or group or handle not in self._bound:
            raise InvariantError("no rows are bound to this handle", handle=handle, group=group)
        return self._bound[handle].surface

    def page(self, number: int) -> list[Bytes]:
        """The bytes of one page, plane by plane and layer by layer."""
        surface = self._memory.surface
        return [layer[number] for plane in surface.views for layer in plane]

    def cache(self, length: int) -> Any:
        """A cache object for the model over these rows, of which the first ``length`` are filled."""
        return transformers.Cache(layers=[RowsLayer(k, v, length) for k, v in self._memory.tensors])


class RowsLayer(CacheLayerMixin):
    """One layer of the working rows, as Transformers wants to see it."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, k: Any, v: Any, length: int) -> None:
        super().__init__()
        self._rows = (k, v)
        self._length = length
        self.dtype, self.device = k.dtype, k.device
        self.is_initialized = True
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (rows[: self._length].transpose(0, 1).unsqueeze(0) for rows in self._rows)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the rows are there."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Write the new rows behind the old ones and return views of all."""
        end = self._length + key_states.shape[-2]
        for rows, states in zip(self._rows, (key_states, value_states), strict=True):
            if states.shape[0] != 1 or end > rows.shape[0]:
                raise InvariantError(
                    "new rows do not fit",
                    batch=states.shape[0],
                    rows=rows.shape[0],
                    start=self._length,
                    end=end,
                )
            if states.dtype != rows.dtype:
                raise ConfigError(
                    "the model computes in another dtype than when it was attached; autocast is not supported",
                    attached=rows.dtype,
                    now=states.dtype,
                )
            rows[self._length : end].copy_(states[0].transpose(0, 1))
        self._length = end
        self._show()
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(all tokens with the new ones, 0). Older versions pass the new tokens' positions, not their number."""
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self._length + new, 0

    def get_seq_length(self, *args: Any) -> int:
        """Tokens held."""
        return self._length

    def get_max_length(self) -> int:
        """-1: no maximum that the model need know of; the adapter reserves rows before it starts."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, as older versions call it."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last rows (a negative number), or all but the first (older versions)."""
        kept = self._length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove
        if tokens_to_remove:
            self._length = max(0, min(self._length, kept))
            self._show()

    def reset(self) -> None:
        """Forget all rows."""
        self._length = 0
        self._show()
