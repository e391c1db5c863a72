"""Working rows: the endpoint of a Transformers model, and the cache object its forward calls read and write.

The KV of the sequences that run together lies in one tensor a plane and layer: ``[batch, rows, heads, dim]``.
Attention gets zero-copy views ``[batch, heads, tokens, dim]`` of them, and HiCache the same bytes as pages: page i
of a sequence is ``page_tokens`` rows from ``offset + i * page_tokens`` on, where ``offset`` rows of padding stand
before its first token. Nothing is copied between the two.

    rows   0 .... offset ........ length ........ capacity
           | padding    | written  | free          |         a load or a forward call moves ``length``

A handle is bound to the memory it was opened on. When a copy of an earlier sequence still runs on it, the next
sequence gets other memory, and the old one lives until that copy has ended. Memory that is full grows: its bytes
move to larger tensors, and copies that run on the old ones end there, on bytes that nobody changes any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import CacheLayerMixin

from hicache.adapters.transformers.probe import Geometry
from hicache.data.copy.base import Bytes, Surface
from hicache.data.pool import rows_surface
from hicache.errors import ConfigError, InvariantError
from hicache.spec import CacheSpec


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
    """The tensors of the sequences that run together, and the same bytes as pages."""

    def __init__(self, geometry: Geometry, spec: CacheSpec, tokens: int, batch: int = 1) -> None:
        self._geometry = geometry
        self._spec = spec
        self.batch = batch
        self.tensors = self._made(tokens)
        self._surfaces: dict[tuple[int, int], Surface] = {}

    @property
    def capacity(self) -> int:
        """Rows of each sequence."""
        return int(self.tensors[0][0].shape[1])

    def _made(self, tokens: int) -> tuple[tuple[Any, ...], ...]:
        rows = -(-tokens // self._spec.page_tokens) * self._spec.page_tokens
        with torch.inference_mode(mode=False):  # else they could never be written to outside of it
            return tuple(
                tuple(
                    torch.zeros((self.batch, rows, side.heads, side.dim), dtype=side.dtype) for side in pair
                )
                for pair in self._geometry.layers
            )

    def grow(self, tokens: int, written: int) -> None:
        """Make room for so many tokens and half as much again as there was; keep the ``written`` first rows."""
        larger = self._made(max(tokens, self.capacity * 3 // 2))
        for old_pair, new_pair in zip(self.tensors, larger, strict=True):
            for old, new in zip(old_pair, new_pair, strict=True):
                new[:, :written].copy_(old[:, :written])
        self.tensors, self._surfaces = larger, {}  # the bytes first: a copy that asks meanwhile finds them

    def surface(self, row: int, offset: int) -> Surface:
        """The pages of one sequence."""
        surfaces, tensors = self._surfaces, self.tensors
        found = surfaces.get((row, offset))
        if found is None:
            planes = [
                [_bytes(tensors[layer][which][row, offset:]) for layer, which in at]
                for at in self._geometry.planes.values()
            ]
            pages = (int(tensors[0][0].shape[1]) - offset) // self._spec.page_tokens
            found = surfaces[row, offset] = rows_surface(self._spec.groups[0], planes, pages)
        return found


def _bytes(tensor: Any) -> Bytes:
    view: Bytes = tensor.view(torch.uint8).numpy()
    assert view.dtype == np.uint8, "a tensor's bytes"
    return view


class Rows:
    """The working rows of what runs. It is the worker's endpoint and makes the model's cache object."""

    def __init__(self, geometry: Geometry, spec: CacheSpec) -> None:
        self._geometry = geometry
        self._spec = spec
        self._memory = Memory(geometry, spec, spec.page_tokens)
        self._bound: dict[int, tuple[Memory, int, int]] = {}

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that fit before its memory grows."""
        return self._memory.capacity

    def reserve(self, tokens: int, batch: int = 1) -> None:
        """Make room for sequences of so many tokens: to be called while no copy runs on the rows."""
        if batch != self._memory.batch or tokens > self.capacity:
            self._memory = Memory(self._geometry, self._spec, tokens, batch)

    def renew(self) -> None:
        """Take other memory, because a copy still runs on this one, or because somebody keeps it."""
        self._memory = Memory(self._geometry, self._spec, self.capacity, self._memory.batch)

    def pad(self, offsets: Sequence[int]) -> None:
        """Zeros in so many first rows of each sequence: attention masks them, but never a NaN of somebody else's."""
        for row, offset in enumerate(offsets):
            for tensor in (side for pair in self._memory.tensors for side in pair if offset):
                tensor[row, :offset].zero_()

    def bind(self, handle: int, row: int = 0, offset: int = 0) -> None:
        """Copies for this handle go to and from this row of the memory as it is now, behind its padding."""
        self._bound[handle] = (self._memory, row, offset)

    def unbind(self, handle: int) -> None:
        """No copy for this handle runs any more."""
        self._bound.pop(handle, None)

    def surface(self, handle: int | None, group: int) -> Surface:
        """The pages of the sequence that ``handle`` belongs to."""
        if handle is None or group or handle not in self._bound:
            raise InvariantError("no rows are bound to this handle", handle=handle, group=group)
        memory, row, offset = self._bound[handle]
        return memory.surface(row, offset)

    def page(self, number: int) -> list[Bytes]:
        """The bytes of one page of the first sequence, plane by plane and layer by layer."""
        surface = self._memory.surface(0, 0)
        return [layer[number] for plane in surface.views for layer in plane]

    def cache(self, length: int) -> Any:
        """A cache object for the model over these rows, of which the first ``length`` are filled."""
        layers = range(len(self._geometry.layers))
        return transformers.Cache(layers=[RowsLayer(self._memory, layer, length) for layer in layers])


class RowsLayer(CacheLayerMixin):
    """One layer of the working rows, as Transformers wants to see it.

    Whoever mixes sequences (beam search) gets copies, as with Transformers' own layers: the working rows stay as
    they were published.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, memory: Memory, layer: int, length: int) -> None:
        super().__init__()
        self._memory: Memory | None = memory
        self._layer = layer
        self._length = length
        self.held = length
        """How many of the working rows are filled: what is written after a mix lies elsewhere."""
        self.lowest: int | None = None
        """How short it has been made since; what came after that was written anew."""
        k = memory.tensors[layer][0]
        self.dtype, self.device = k.dtype, k.device
        self.is_initialized = True
        self._show()

    def end(self) -> None:
        """The rows are about to be used for something else."""
        self._memory = None

    def _set_length(self, length: int) -> None:
        self._length = length
        if not self.is_mixed:
            self.held = length
        self._show()

    @property
    def is_mixed(self) -> bool:
        """True once a sequence may go on from another's rows."""
        return isinstance(self._memory, Mixed)

    def _shorten(self, length: int) -> None:
        self.lowest = length if self.lowest is None else min(length, self.lowest)
        self._set_length(length)

    def _show(self) -> None:
        assert self._memory is not None, "a layer that mixes sequences shows its own copies"
        self.keys, self.values = (
            rows[:, : self._length].transpose(1, 2) for rows in self._memory.tensors[self._layer]
        )

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the rows are there."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Write the new rows behind the old ones and return views of all."""
        if self._memory is None:
            raise ConfigError("these working rows belong to a sequence that has ended")
        end = self._length + key_states.shape[-2]
        for rows, states in zip(self._memory.tensors[self._layer], (key_states, value_states), strict=True):
            if states.shape[0] != rows.shape[0] or states.shape[1] != rows.shape[2]:
                raise ConfigError(
                    "new rows do not fit behind the old ones",
                    batch=states.shape[0],
                    heads=states.shape[1],
                    rows_batch=rows.shape[0],
                    rows_heads=rows.shape[2],
                )
            if states.dtype != rows.dtype:
                raise ConfigError(
                    "the model computes in another dtype than when it was attached; autocast is not supported",
                    attached=rows.dtype,
                    now=states.dtype,
                )
        if end > self._memory.capacity:
            self._memory.grow(end, min(end, self._memory.capacity))
        for rows, states in zip(self._memory.tensors[self._layer], (key_states, value_states), strict=True):
            rows[:, self._length : end].copy_(states.transpose(1, 2))
        self._set_length(end)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(all tokens with the new ones, 0). Older versions pass the new tokens' positions, not their number."""
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self._length + new, 0

    def get_seq_length(self, *args: Any) -> int:
        """Tokens held."""
        return self._length

    def get_max_length(self) -> int:
        """-1: no maximum; the rows grow."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, as older versions call it."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last rows (a negative number), or all but the first (older versions)."""
        kept = self._length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove
        if tokens_to_remove:
            self._shorten(max(0, min(self._length, kept)))

    def reset(self) -> None:
        """Forget all rows."""
        self._shorten(0)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let the sequences go on from each other, in rows of our own."""
        self._mix(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times, in rows of our own."""
        self._mix(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Any) -> None:
        """Only these sequences, in rows of our own."""
        self._mix(lambda rows: rows[indices])

    def _mix(self, change: Callable[[Any], Any]) -> None:
        if self._memory is None:
            raise ConfigError("these working rows belong to a sequence that has ended")
        pair = self._memory.tensors[self._layer]
        self._memory = Mixed(self._layer, tuple(change(rows[:, : self._length]) for rows in pair))
        self._show()


class Mixed(Memory):
    """Rows of one layer that no page lies in."""

    def __init__(self, layer: int, pair: tuple[Any, ...]) -> None:
        self.batch = int(pair[0].shape[0])
        self.tensors = ((),) * layer + (pair,)
        self._layer = layer

    @property
    def capacity(self) -> int:
        """Rows of each sequence."""
        return int(self.tensors[self._layer][0].shape[1])

    def grow(self, tokens: int, written: int) -> None:
        """Exactly so many: the next step mixes again."""
        pair = tuple(
            torch.cat(
                [rows[:, :written], rows.new_empty((rows.shape[0], tokens - written, *rows.shape[2:]))], 1
            )
            for rows in self.tensors[self._layer]
        )
        self.tensors = ((),) * self._layer + (pair,)
