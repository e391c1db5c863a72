"""A pool: the memory of one tier, and surfaces over it and over an engine's own rows.

Nothing here knows a layout: a placement says where each plane of each layer lies, and everything else is strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hicache.data.copy.base import Bytes, Surface
from hicache.data.platform.base import Buffer, Platform, Progress
from hicache.errors import ConfigError, InvariantError
from hicache.layout import PAGE_ALIGNMENT, Layout, Placement, place
from hicache.records import Where
from hicache.spec import CacheSpec, Group, Plane, positive


def surface_of(placement: Placement, memory: Bytes) -> Surface:
    """The pages that ``placement`` lays out in ``memory``, one row of contiguous bytes that starts at its base 0."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise ConfigError(
            "a surface needs one contiguous row of bytes", dtype=memory.dtype, shape=memory.shape
        )
    views: list[tuple[Bytes, ...]] = []
    for placed in placement.planes:
        plane = placed.plane
        shape = (placement.slots, plane.tokens, plane.heads, plane.item_nbytes)
        strides = (placed.slot_stride, placed.token_stride, placed.head_stride, 1)
        reach = sum((count - 1) * step for count, step in zip(shape, strides, strict=True)) + 1
        lowest, highest = min(placed.bases), max(placed.bases) + reach
        if min(lowest, *strides) < 0 or highest > memory.size:
            raise ConfigError(
                "a placement reaches out of its memory",
                plane=plane.name,
                first_byte=lowest,
                end_byte=highest,
                memory_bytes=memory.size,
            )
        views.append(tuple(as_strided(memory[base:], shape, strides) for base in placed.bases))
    return Surface(tuple(views))


def rows_surface(group: Group, rows: Sequence[Sequence[Bytes]], pages: int) -> Surface:
    """The first ``pages`` pages of an engine's working rows, as views: nothing is copied.

    ``rows[plane][layer]`` holds the bytes of one plane and layer as (rows, heads, item bytes), with any strides
    under which no two bytes share an address; page i is rows ``i * tokens`` to ``(i + 1) * tokens``.
    """
    positive("pages", pages, minimum=0)
    if len(rows) != len(group.planes):
        raise ConfigError(
            "one entry for each plane", group=group.name, entries=len(rows), planes=len(group.planes)
        )
    views: list[tuple[Bytes, ...]] = []
    places: set[int] = set()
    for plane, layers in zip(group.planes, rows, strict=True):
        if len(layers) != plane.layers:
            raise ConfigError(
                "one array for each layer", plane=plane.name, arrays=len(layers), layers=plane.layers
            )
        for array in layers:
            _check_rows(plane, array, pages * plane.tokens)
            places.add(array.__array_interface__["data"][0])
        shape = (pages, plane.tokens, plane.heads, plane.item_nbytes)
        views.append(
            tuple(
                as_strided(array, shape, (plane.tokens * array.strides[0], *array.strides))
                for array in layers
            )
        )
    if pages and len(places) != sum(plane.layers for plane in group.planes):
        raise ConfigError("two layers of an engine lie at one address", group=group.name)
    return Surface(tuple(views))


def _check_rows(plane: Plane, array: Bytes, need: int) -> None:
    """ConfigError unless ``need`` rows of one plane and layer can be read and written as bytes of their own."""
    if not isinstance(array, np.ndarray):
        raise ConfigError("rows must be numpy arrays", plane=plane.name, given=type(array).__name__)
    about = {"plane": plane.name, "dtype": array.dtype, "shape": array.shape}
    if array.dtype != np.uint8 or array.shape[1:] != (plane.heads, plane.item_nbytes):
        raise ConfigError(
            "rows must be bytes of shape (rows, heads, item)",
            **about,
            wanted=(need, plane.heads, plane.item_nbytes),
        )
    if array.shape[0] < need:
        raise ConfigError(
            "an engine has fewer rows than its pages need", plane=plane.name, rows=array.shape[0], need=need
        )
    if not array.flags.writeable:
        raise ConfigError("an engine's rows must be writable", **about)
    end = 1
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)
    ):
        if size > 1 and stride < end:
            raise ConfigError("rows overlap in memory", **about, strides=array.strides)
        end += stride * (size - 1)


def nbytes_for(spec: CacheSpec, layout: Layout, slots: int) -> int:
    """Bytes of a pool of ``slots`` pages, padding and all."""
    return sum(
        -(-place(group, layout, slots).nbytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT for group in spec.groups
    )


def slots_for(spec: CacheSpec, layout: Layout, budget_bytes: int) -> int:
    """As many pages as fit into ``budget_bytes``; ConfigError when not even one does."""
    one = nbytes_for(spec, layout, 1)
    if budget_bytes < one:
        raise ConfigError(
            "the budget does not hold one page",
            budget_bytes=budget_bytes,
            page_bytes=one,
            layout=layout.name,
            page_tokens=spec.page_tokens,
        )
    low, high = 1, budget_bytes // spec.page_nbytes + 1  # low fits; high does not, even without padding
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes_for(spec, layout, middle) <= budget_bytes else (low, middle)
    return low


class Pool:
    """``slots`` pages of every group of a spec, in one layout, in memory of one tier."""

    def __init__(
        self,
        spec: CacheSpec,
        layout: Layout,
        slots: int,
        platform: Platform,
        where: Where = Where.HOST,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.slots = positive("slots", slots)
        self.where = where
        self._placements = tuple(place(group, layout, slots) for group in spec.groups)
        self._buffers: list[Buffer] = []
        try:
            for placement in self._placements:
                self._buffers.append(platform.alloc(placement.nbytes, where, progress=progress))
        except BaseException:
            self.close()
            raise
        self._surfaces = tuple(
            surface_of(placement, buffer.view)
            for placement, buffer in zip(self._placements, self._buffers, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def placement(self, group: int) -> Placement:
        """Where the planes of a group lie in its region."""
        return self._placements[group]

    def surface(self, group: int) -> Surface:
        """The pages of a group, to copy from and to."""
        return self._surfaces[group]

    def run(self, group: int, slot: int) -> memoryview | None:
        """The bytes of one page of a group where they are one run, without the padding; else None."""
        placement = self._placements[group]
        if not 0 <= slot < self.slots:
            raise InvariantError("no such slot", slot=slot, slots=self.slots, where=self.where.name)
        if placement.run_nbytes is None:
            return None
        start = slot * placement.planes[0].slot_stride
        return self._buffers[group].view[start : start + placement.run_nbytes].data

    def close(self) -> None:
        """Let go of the memory; it returns when the last view of it is gone."""
        self._surfaces = ()
        for buffer in self._buffers:
            buffer.close()
