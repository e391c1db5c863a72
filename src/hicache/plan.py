"""Copy plans: the stride arithmetic between two placements of one group, kept factored.

A plan is a template for one page: for each plane a nest of loops around the longest run of bytes that is
contiguous on both sides. It is never expanded over slots; :meth:`CopyPlan.runs` lists one page's runs for
engines that want them, and for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from hicache.errors import InvariantError
from hicache.layout import Placement, PlanePlacement


@dataclass(frozen=True, slots=True)
class Loop:
    """``count`` steps; each moves the source and the target by so many bytes."""

    count: int
    source_stride: int
    target_stride: int


@dataclass(frozen=True, slots=True)
class PlanePlan:
    """One plane of one page: for each (source base, target base) walk ``loops`` (outermost first), copy ``run_nbytes``.

    There is one base pair for all layers when both sides are evenly spaced, else one for each layer.
    """

    bases: tuple[tuple[int, int], ...]
    loops: tuple[Loop, ...]
    run_nbytes: int
    source_slot_stride: int
    target_slot_stride: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How one page of a group travels from one placement to another."""

    planes: tuple[PlanePlan, ...]

    @property
    def run_nbytes(self) -> int:
        """Bytes of the shortest of the planes' longest common runs: what makes an engine fast or slow."""
        return min(plane.run_nbytes for plane in self.planes)

    def runs(self, source_slot: int, target_slot: int) -> Iterator[tuple[int, int, int]]:
        """(source offset, target offset, bytes) of every run of one page."""
        for plane in self.planes:
            source = source_slot * plane.source_slot_stride
            target = target_slot * plane.target_slot_stride
            for steps in product(*(range(loop.count) for loop in plane.loops)):
                a = source + sum(n * loop.source_stride for n, loop in zip(steps, plane.loops, strict=True))
                b = target + sum(n * loop.target_stride for n, loop in zip(steps, plane.loops, strict=True))
                for source_base, target_base in plane.bases:
                    yield source_base + a, target_base + b, plane.run_nbytes


def _plan_plane(source: PlanePlacement, target: PlanePlacement) -> PlanePlan:
    if source.plane != target.plane:
        raise InvariantError(
            "a plan joins two placements of one plane", source=source.plane, target=target.plane
        )
    plane = source.plane
    loops = [
        Loop(plane.tokens, source.token_stride, target.token_stride),
        Loop(plane.heads, source.head_stride, target.head_stride),
    ]
    source_layer, target_layer = source.layer_stride, target.layer_stride
    if source_layer is not None and target_layer is not None:
        bases: tuple[tuple[int, int], ...] = ((source.bases[0], target.bases[0]),)
        loops.append(Loop(plane.layers, source_layer, target_layer))
    else:
        bases = tuple(zip(source.bases, target.bases, strict=True))
    run = plane.item_nbytes
    left = sorted((loop for loop in loops if loop.count > 1), key=lambda loop: loop.source_stride)
    merged = True
    while merged:  # a loop whose step equals the run on both sides makes the run longer
        merged = False
        for loop in left:
            if loop.source_stride == run and loop.target_stride == run:
                run *= loop.count
                left.remove(loop)
                merged = True
                break
    return PlanePlan(bases, tuple(reversed(left)), run, source.slot_stride, target.slot_stride)


@lru_cache(maxsize=1024)
def plan(source: Placement, target: Placement) -> CopyPlan:
    """The plan that copies a page of ``source`` into a page of ``target``; both must place the same planes."""
    pairs = zip(source.planes, target.planes, strict=True)
    return CopyPlan(tuple(_plan_plane(a, b) for a, b in pairs))
