"""Scratch pages: where a record lies while it is not in its pool's layout. One set a lane, never shared."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hicache.data.copy.base import Bytes, Surface
from hicache.data.pool import surface_of
from hicache.layout import LAYOUTS, Placement, place, undefined
from hicache.spec import CacheSpec, Group

SCRATCH_NBYTES = 16 << 20
SCRATCH_PAGES_MAX = 32


def record_placements(group: Group) -> Mapping[str, Placement]:
    """One page of ``group`` in each layout a record may have: the page-major ones that can hold it."""
    return {
        layout.name: place(group, layout, 1)
        for layout in LAYOUTS.values()
        if layout.page_major and undefined(group, layout) is None
    }


class Scratch:
    """``pages`` scratch pages of each group, long enough for any layout; memory is taken on first use."""

    def __init__(self, spec: CacheSpec) -> None:
        self._records = tuple(record_placements(group) for group in spec.groups)
        self._strides = tuple(
            max(placement.nbytes for placement in placements.values()) for placements in self._records
        )
        self.pages = max(1, min(SCRATCH_PAGES_MAX, SCRATCH_NBYTES // sum(self._strides)))
        self._memory: dict[int, Bytes] = {}
        self._surfaces: dict[tuple[int, str], Surface] = {}

    def memory(self, group: int) -> Bytes:
        """All scratch pages of a group: page-aligned bytes."""
        if group not in self._memory:
            nbytes = self.pages * self._strides[group]
            self._memory[group] = np.frombuffer(
                mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8
            )
        return self._memory[group]

    def page(self, group: int, number: int) -> Bytes:
        """One scratch page of a group."""
        stride = self._strides[group]
        return self.memory(group)[number * stride : (number + 1) * stride]

    def surface(self, group: int, layout: str) -> Surface:
        """All scratch pages of a group, as records of one layout: many pages are converted in one call."""
        if (group, layout) not in self._surfaces:
            record, stride = self._records[group][layout], self._strides[group]
            planes = tuple(replace(plane, slot_stride=stride) for plane in record.planes)
            placement = Placement(planes, self.pages, self.pages * stride)
            self._surfaces[group, layout] = surface_of(placement, self.memory(group))
        return self._surfaces[group, layout]
