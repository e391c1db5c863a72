"""The reference copy engine: strided assignments in numpy. Every other engine equals it byte for byte."""

from __future__ import annotations

import numpy as np

from hicache.capability import EngineDeclaration, Kernel, Place
from hicache.data.copy.checked import CheckedEngine, Side, Slots, pairs

_ASSIGNMENT = Kernel("strided assignment", Place.HOST, Place.HOST)

DECLARATION = EngineDeclaration(
    name="reference",
    io="kernel",
    platforms=frozenset({"cpu"}),
    factory="hicache.data.copy.reference:ReferenceEngine",
    load=_ASSIGNMENT,
    save=_ASSIGNMENT,
)
"""Declared for completeness: ``kernel`` on a CPU is the host engine, which ranks higher."""


def _index(slots: Slots) -> slice | Slots:
    """A slice where the slots are one ascending run: the only speed-up the oracle allows itself."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return slots


class ReferenceEngine(CheckedEngine):
    """Copies with one numpy assignment for each plane and layer, before it returns."""

    name = "reference"

    def _move(self, source: Side, target: Side, layers: range) -> None:
        a, b = _index(source[1]), _index(target[1])
        for _, layer, ours, theirs in pairs(source[0], target[0]):
            if layer in layers:
                theirs[b] = ours[a]
