"""The copy engine for machines without a compiler: as fast as numpy gets, with no more than strides and slices.

numpy loses time on three things, and each is avoided where it can be: calls (evenly spaced layers of a plane are
one array, and pages that follow each other on both sides one slice), temporaries (a slice is copied straight from
view to view), and indexing with arrays (used only for pages so small that a call costs more, and then in pieces
whose temporary stays in the cache).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hicache.data.copy.base import Bytes, Surface
from hicache.data.copy.checked import CheckedEngine, Side, Slots

TINY_NBYTES = 2048
"""Bytes of a page of one array below which one more numpy call costs more than a temporary."""

PIECE_NBYTES = 512 << 10
"""Bytes of a temporary: half of a small second-level cache."""


def _joined(views: Sequence[Bytes]) -> Bytes | None:
    """The views as one array (slots, layers, tokens, heads, item) where they lie evenly, else None."""
    first = views[0]
    at = [view.__array_interface__["data"][0] for view in views]
    step = at[1] - at[0] if len(at) > 1 else 0
    if any(view.strides != first.strides or view.shape != first.shape for view in views):
        return None
    if any(b - a != step for a, b in pairwise(at)):
        return None
    shape = (first.shape[0], len(views), *first.shape[1:])
    return as_strided(first, shape, (first.strides[0], step, *first.strides[1:]))


def _arrays(source: Surface, target: Surface, layers: range) -> Iterator[tuple[Bytes, Bytes]]:
    """Pairs of arrays whose first axis is slots and that hold all of the layers asked for."""
    for ours, theirs in zip(source.views, target.views, strict=True):
        picked = [layer for layer in layers if layer < len(ours)]
        if not picked:
            continue
        a, b = [ours[layer] for layer in picked], [theirs[layer] for layer in picked]
        one, other = _joined(a), _joined(b)
        if one is not None and other is not None:
            yield one, other
        else:
            yield from zip(a, b, strict=True)


def _stretches(sources: Slots, targets: Slots) -> list[tuple[int, int, int]]:
    """(first source, first target, pages) of every stretch of pages that follow each other on both sides."""
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(sources)]
    return [(int(sources[i]), int(targets[i]), j - i) for i, j in zip(starts, ends, strict=True)]


class NumpyEngine(CheckedEngine):
    """Copies with numpy, before it returns."""

    name = "numpy"

    def _move(self, source: Side, target: Side, layers: range) -> None:
        (ours, sources), (theirs, targets) = source, target
        stretches = _stretches(sources, targets)
        for a, b in _arrays(ours, theirs, layers):
            page = a[0].size
            if page * len(sources) < TINY_NBYTES * len(stretches):
                for i in range(0, len(sources), max(1, PIECE_NBYTES // page)):
                    piece = slice(i, i + max(1, PIECE_NBYTES // page))
                    b[targets[piece]] = a[sources[piece]]
            else:
                for s, t, pages in stretches:
                    b[t : t + pages] = a[s : s + pages]
