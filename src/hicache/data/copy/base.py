"""The contract of a copy engine: pages of one group travel between two surfaces.

A :class:`Surface` is a placement over real memory: a tier's pool region or an engine's own tensors. Engines see
placements and slots, never layout names or dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.capability import Capabilities, Direction
from hicache.layout import Layout
from hicache.spec import CacheSpec

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Surface:
    """Pages of one group in CPU memory: ``views[plane][layer]`` is (slots, tokens, heads, item bytes), strided.

    The views alias the memory; nothing is copied when a surface is made. ``slots`` is their first dimension.
    """

    views: tuple[tuple[Bytes, ...], ...]

    @property
    def slots(self) -> int:
        """How many pages the surface has."""
        return int(self.views[0][0].shape[0])


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
