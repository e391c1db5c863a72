"""The contract of a copy engine: pages of one group travel between two surfaces.

A :class:`Surface` is a placement over real memory: a tier's pool region or an engine's own tensors. Engines see
placements and slots, never layout names or dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.capability import Capabilities, Direction
from hicache.errors import ConfigError
from hicache.layout import Layout
from hicache.spec import CacheSpec

Bytes = npt.NDArray[np.uint8]


Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Addresses:
    """Where the views of a surface lie, as an engine without numpy wants it: a row a view, plane after plane.

    ``bases`` are addresses; ``strides`` are of (slot, token, head, byte); ``shapes`` are (plane, tokens, heads,
    bytes); ``layers`` says which layer of its plane a view is; its bytes lie in ``lowest`` to ``end``.
    """

    bases: Rows
    strides: Rows
    shapes: Rows
    layers: Rows
    lowest: Rows
    end: Rows
    writable: bool


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Pages of one group in CPU memory: ``views[plane][layer]`` is (slots, tokens, heads, item bytes), strided.

    The views alias the memory; nothing is copied when a surface is made. ``slots`` is their first dimension.
    """

    views: tuple[tuple[Bytes, ...], ...]
    _addresses: list[Addresses] = field(default_factory=list, init=False, repr=False)

    @property
    def slots(self) -> int:
        """How many pages the surface has."""
        return int(self.views[0][0].shape[0])

    def addresses(self) -> Addresses:
        """Where the views lie: looked up once, as a copy of thousands of pages crosses few surfaces."""
        if not self._addresses:
            self._addresses.append(_addresses(self.views))
        return self._addresses[0]


def _addresses(views: tuple[tuple[Bytes, ...], ...]) -> Addresses:
    every = [(plane, layer, view) for plane, row in enumerate(views) for layer, view in enumerate(row)]
    bases: list[int] = []
    for plane, layer, view in every:
        if view.dtype != np.uint8 or view.ndim != 4 or len(view) != len(every[0][2]):
            raise ConfigError(
                "a view must be bytes of (slots, tokens, heads, item)",
                plane=plane,
                layer=layer,
                dtype=view.dtype,
                shape=view.shape,
                slots=len(every[0][2]),
            )
        bases.append(view.__array_interface__["data"][0])
    starts = np.array(bases, np.int64)
    strides = np.array([view.strides for _, _, view in every], np.int64)
    extent = (np.array([view.shape for _, _, view in every], np.int64) - 1) * strides
    return Addresses(
        bases=starts,
        strides=strides,
        shapes=np.array([(plane, *view.shape[1:]) for plane, _, view in every], np.int64),
        layers=np.array([layer for _, layer, _ in every], np.int64),
        lowest=starts + np.minimum(extent, 0).sum(axis=1),
        end=starts + np.maximum(extent, 0).sum(axis=1) + 1,
        writable=all(view.flags.writeable for _, _, view in every),
    )


class Ticket(Protocol):
    """A copy under way. The source must not change, nor the target be read, before it is done."""

    def done(self) -> bool:
        """True when every byte is in place."""
        ...

    def wait(self) -> None:
        """Block until every byte is in place; raises what the copy raised."""
        ...


class CopyEngine(Protocol):
    """Copies pages; every engine equals the reference engine byte for byte."""

    name: str

    def refuses(
        self, spec: CacheSpec, layout: Layout, direction: Direction, capabilities: Capabilities
    ) -> str | None:
        """Why this engine cannot serve that layout in that direction on that platform; None when it can."""
        ...

    def submit(
        self,
        source: Surface,
        source_slots: Sequence[int],
        target: Surface,
        target_slots: Sequence[int],
        *,
        layers: range | None = None,
    ) -> Ticket:
        """Copy page ``source_slots[i]`` to ``target_slots[i]`` for each i; ``layers`` limits it to some layers.

        Target slots must not repeat. Slots out of range or planes of different shape are ConfigError, raised
        before any byte moves. No slots: a Ticket that is done.
        """
        ...
