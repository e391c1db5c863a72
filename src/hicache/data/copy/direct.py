"""``direct``: one copy for each contiguous run. On a CPU a memcpy; on CUDA and ROCm the runtime's copy engine.

The runtime's engine is declared here and not written yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from hicache.capability import STREAMS, Capabilities, Direction, EngineDeclaration, Kernel, Place
from hicache.data.copy.base import Bytes, Surface
from hicache.data.copy.checked import CheckedEngine, Side
from hicache.layout import LAYOUTS, Layout, place
from hicache.plan import plan
from hicache.spec import CacheSpec


def _limit(spec: CacheSpec, layout: Layout) -> str | None:
    """A call a run pays only where the rows of a page and layer are one run, as they are in an engine's tensor."""
    for group in spec.groups:
        engine, pool = place(group, LAYOUTS["layer_first"], 2), place(group, layout, 2)
        for plane, planned in zip(group.planes, plan(engine, pool).planes, strict=True):
            whole = plane.tokens * plane.heads * plane.item_nbytes
            if planned.run_nbytes < whole:
                return (
                    f"direct copies run by run, and {layout.name} cuts the {whole} bytes of a page and layer of "
                    f"plane {plane.name!r} into runs of {planned.run_nbytes}"
                )
    return None


_MEMCPY = Kernel("memcpy a run", Place.HOST, Place.HOST)
_RUNTIME = Kernel("runtime copy a run", Place.HOST, Place.HOST, (STREAMS,))

DECLARATION = EngineDeclaration(
    name="memcpy",
    io="direct",
    platforms=frozenset({"cpu"}),
    factory="hicache.data.copy.direct:DirectEngine",
    load=_MEMCPY,
    save=_MEMCPY,
)

RUNTIME_DECLARATION = EngineDeclaration(
    name="runtime",
    io="direct",
    platforms=frozenset({"cuda", "rocm"}),
    factory="hicache.data.copy.direct:RuntimeEngine",
    load=_RUNTIME,
    save=_RUNTIME,
    limit=_limit,
    imports=("torch",),
)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of one page that lie in one piece on both sides: their addresses in slot 0, and how slots follow."""

    source: int
    target: int
    nbytes: int
    source_stride: int
    target_stride: int

    def then(self, other: Run) -> Run | None:
        """This run made longer by one that goes on where it ends, on both sides and in every slot."""
        joined = (
            self.source + self.nbytes == other.source
            and self.target + self.nbytes == other.target
            and (self.source_stride, self.target_stride) == (other.source_stride, other.target_stride)
        )
        if not joined:
            return None
        return Run(
            self.source, self.target, self.nbytes + other.nbytes, self.source_stride, self.target_stride
        )


def _runs_of_view(ours: Bytes, theirs: Bytes) -> Iterator[Run]:
    """The runs of one plane and layer; steps that continue the run on both sides are folded into it."""
    steps = [
        (count, a, b)
        for count, a, b in zip(ours.shape[1:], ours.strides[1:], theirs.strides[1:], strict=True)
        if count > 1
    ]
    nbytes = 1
    while folded := next((step for step in steps if step[1:] == (nbytes, nbytes)), None):
        nbytes *= folded[0]
        steps.remove(folded)
    for at in product(*(range(count) for count, _, _ in steps)):
        yield Run(
            ours.ctypes.data + sum(n * step[1] for n, step in zip(at, steps, strict=True)),
            theirs.ctypes.data + sum(n * step[2] for n, step in zip(at, steps, strict=True)),
            nbytes,
            ours.strides[0],
            theirs.strides[0],
        )


def runs_of(source: Surface, target: Surface, layers: range) -> list[Run]:
    """The runs of one page over all planes and these layers, in the order of the source, as long as they can be."""
    found = sorted(
        (
            run
            for ours, theirs in zip(source.views, target.views, strict=True)
            for layer, (a, b) in enumerate(zip(ours, theirs, strict=True))
            if layer in layers
            for run in _runs_of_view(a, b)
        ),
        key=lambda run: run.source,
    )
    runs: list[Run] = []
    for run in found:
        longer = runs[-1].then(run) if runs else None
        if longer is None:
            runs.append(run)
        else:
            runs[-1] = longer
    return runs


class DirectEngine(CheckedEngine):
    """Copies with one memcpy for each run of each page, before it returns."""

    name = "memcpy"

    def refuses(
        self, spec: CacheSpec, layout: Layout, direction: Direction, capabilities: Capabilities
    ) -> str | None:
        """Why this engine cannot serve that layout in that direction on that platform; None when it can."""
        return DECLARATION.refuses(spec, layout, direction, capabilities)

    def _move(self, source: Side, target: Side, layers: range) -> None:
        slots = list(zip(source[1].tolist(), target[1].tolist(), strict=True))
        for run in runs_of(source[0], target[0], layers):
            for ours, theirs in slots:
                ctypes.memmove(
                    run.target + theirs * run.target_stride,
                    run.source + ours * run.source_stride,
                    run.nbytes,
                )
