"""Layouts: in which order the axes of a page lie in memory, and the strides that follow.

A layout is one line in :data:`LAYOUTS`. :func:`place` turns it into the :class:`Placement` of one group in a
pool of ``slots`` pages; two placements are equal when their bases and strides are, whatever they are called.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hicache.errors import ConfigError
from hicache.spec import Group, Plane, positive

PAGE_ALIGNMENT = 4096
"""Bytes: the stride of a page in a page-major layout is a multiple of it, so that direct I/O can use it."""

PLANE_ALIGNMENT = 16
"""Bytes: where a plane starts (and a head, in ``page_head``), so that 16-byte accesses stay aligned."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A named order of the axes, outermost first; ``item`` (the bytes of one head of one row) is always last.

    ``code`` is the number a stored record carries; it never changes its meaning.
    """

    name: str
    code: int
    axes: tuple[str, ...]

    @property
    def page_major(self) -> bool:
        """True when a page of a group is one contiguous run."""
        return self.axes[0] == "page"


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("layer_first", 0, ("plane", "layer", "page", "token", "head")),
        Layout("page_first", 1, ("page", "plane", "token", "layer", "head")),
        Layout("page_first_direct", 2, ("page", "plane", "layer", "token", "head")),
        Layout("page_head", 3, ("page", "head", "plane", "token", "layer")),
    )
}


def layout(name: str) -> Layout:
    """The layout called ``name``; ConfigError lists the known ones."""
    if name not in LAYOUTS:
        raise ConfigError("unknown layout", layout=name, known=",".join(LAYOUTS))
    return LAYOUTS[name]


@dataclass(frozen=True, slots=True)
class PlanePlacement:
    """Where one plane lies: ``bases[layer]`` plus slot, token and head strides, all in bytes.

    The token (head) stride of a plane with one row (head) is 0: that step is never taken, and placements of the
    same bytes are to be equal.
    """

    plane: Plane
    bases: tuple[int, ...]
    slot_stride: int
    token_stride: int
    head_stride: int

    @property
    def layer_stride(self) -> int | None:
        """Bytes from one layer to the next, or None when the bases are not evenly spaced (engine tensors)."""
        if len(self.bases) == 1:
            return 0
        step = self.bases[1] - self.bases[0]
        even = all(b - a == step for a, b in zip(self.bases, self.bases[1:], strict=False))
        return step if even else None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the planes of one group lie in a region of ``nbytes`` bytes that holds ``slots`` pages.

    ``run_nbytes`` is the length of a page when it is one contiguous run starting at ``slot * slot_stride``
    (page-major layouts), without the padding at its end; None otherwise.
    """

    planes: tuple[PlanePlacement, ...]
    slots: int
    nbytes: int
    run_nbytes: int | None = None


def undefined(group: Group, wanted: Layout) -> str | None:
    """Why ``wanted`` cannot hold ``group``, or None when it can."""
    head, plane = wanted.axes.index("head"), wanted.axes.index("plane")
    if head > plane:
        return None
    heads = {p.name: p.heads for p in group.planes}
    if len(set(heads.values())) > 1:
        return f"{wanted.name} needs the same number of heads in every plane of a group, got {heads}"
    thin = {p.name: p.item_nbytes for p in group.planes if p.item_nbytes < PLANE_ALIGNMENT}
    if thin:
        return f"{wanted.name} needs items of at least {PLANE_ALIGNMENT} bytes, got {thin}"
    return None


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


@lru_cache(maxsize=256)
def place(group: Group, wanted: Layout, slots: int) -> Placement:
    """Lay ``slots`` pages of ``group`` out in ``wanted``; ConfigError when the layout cannot hold the group.

    Walks the axes from the innermost outward. Inside ``plane`` each plane has its own extent; at ``plane`` the
    extents are put one behind the other; outside it one stride serves all planes.
    """
    positive("slots", slots)
    reason = undefined(group, wanted)
    if reason:
        raise ConfigError(reason, group=group.name)
    planes = group.planes
    extents = [p.item_nbytes for p in planes]
    bases = [0] * len(planes)
    strides: list[dict[str, int]] = [{} for _ in planes]
    run = None
    for axis in reversed(wanted.axes):
        if axis == "plane":
            total = 0
            for i, extent in enumerate(extents):
                bases[i] = total
                total = _up(total + extent, PLANE_ALIGNMENT)
            if wanted.axes[0] == "page" and wanted.axes[1] == "plane":
                total = bases[-1] + extents[-1]
            extents = [total] * len(planes)
            continue
        if axis == "page" and wanted.page_major:
            run = extents[0]
            extents = [_up(run, PAGE_ALIGNMENT)] * len(planes)
        for i, plane in enumerate(planes):
            count = {"page": slots, "token": plane.tokens, "layer": plane.layers, "head": plane.heads}[axis]
            strides[i][axis] = extents[i]
            extents[i] *= count
    placed = tuple(
        PlanePlacement(
            plane=p,
            bases=tuple(bases[i] + layer * s["layer"] for layer in range(p.layers)),
            slot_stride=s["page"],
            token_stride=s["token"] if p.tokens > 1 else 0,
            head_stride=s["head"] if p.heads > 1 else 0,
        )
        for i, (p, s) in enumerate(zip(planes, strides, strict=True))
    )
    return Placement(placed, slots, max(extents), run)
