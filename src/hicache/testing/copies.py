"""The contract suite of copy engines: inherit :class:`CopyEngineContract` and give it an ``engine`` fixture.

Sources hold random bytes, targets a pattern; both lie between canaries. After each copy the whole target, padding
and canaries included, must equal what a loop over single items makes of it, and the source must be unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from hicache.capability import Capabilities, Direction
from hicache.data.copy.base import Bytes, CopyEngine, Surface
from hicache.data.pool import rows_surface, surface_of
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS, Placement, place, undefined
from hicache.spec import CacheSpec, Group, Plane, State

GUARD = 4096
UNTOUCHED = 0xA5
SLOTS = 7

PLANE_SETS: dict[str, Group] = {
    "equal": Group("main", (Plane("k", 3, 4, 2, 32), Plane("v", 3, 4, 2, 32))),
    "k128_v64": Group("main", (Plane("k", 3, 4, 2, 256), Plane("v", 3, 4, 2, 128))),
    "mla_512_64": Group("main", (Plane("latent", 3, 4, 1, 1024), Plane("rope", 3, 4, 1, 128))),
    "scaled": Group("main", (Plane("k", 3, 4, 2, 33), Plane("v", 3, 4, 2, 32), Plane("scale", 2, 4, 1, 4))),
    "one_layer": Group("main", (Plane("k", 1, 2, 3, 48), Plane("v", 1, 2, 3, 16))),
    "state": Group("state", (Plane("conv", 3, 1, 1, 96), Plane("ssm", 3, 1, 4, 64)), State()),
    "opaque": Group("blob", (Plane("block", 1, 1, 1, 5000),)),
}
"""Groups of every kind that is known: what differs between them is what has broken engines."""

SLOT_SETS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "empty": ((), ()),
    "one": ((3,), (5,)),
    "scattered": ((6, 0, 3, 2), (1, 5, 2, 0)),
    "run": ((1, 2, 3, 4), (3, 4, 5, 6)),
    "falling": ((4, 3, 2), (0, 1, 2)),
    "repeated_source": ((2, 2, 4), (0, 6, 3)),
    "like_a_run": ((1, 3, 2, 4), (2, 4, 3, 5)),
    "all": (tuple(range(SLOTS)), tuple(range(SLOTS))),
    "all_shuffled": ((3, 1, 6, 0, 2, 5, 4), (0, 4, 1, 6, 5, 3, 2)),
}

PAIRS: list[tuple[str, str, str]] = [
    (name, source, target)
    for name, group in PLANE_SETS.items()
    for source in LAYOUTS
    for target in LAYOUTS
    if undefined(group, LAYOUTS[source]) is None and undefined(group, LAYOUTS[target]) is None
]
"""(plane set, layout, layout) of every pair that can exist."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """Memory between canaries, and a surface over it."""

    whole: Bytes
    surface: Surface

    def untouched_since(self, before: Bytes) -> bool:
        """True when not one byte differs, canaries included."""
        return bool(np.array_equal(self.whole, before))


def guarded(nbytes: int, seed: int | None) -> tuple[Bytes, Bytes]:
    """(whole, inner): random bytes (a pattern without a seed) between two canaries."""
    whole = np.full(nbytes + 2 * GUARD, UNTOUCHED, np.uint8)
    inner = whole[GUARD : GUARD + nbytes]
    if seed is not None:
        inner[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return whole, inner


def pool_side(group: Group, layout: str, seed: int | None) -> Guarded:
    """A pool region of :data:`SLOTS` pages in a layout."""
    placement: Placement = place(group, LAYOUTS[layout], SLOTS)
    whole, inner = guarded(placement.nbytes, seed)
    return Guarded(whole, surface_of(placement, inner))


def token_rows(group: Group, seed: int | None) -> Guarded:
    """An engine with one tensor: for each token all layers and planes side by side, with gaps, items padded."""
    width = sum(p.layers * p.heads * (p.item_nbytes + 16) for p in group.planes) + 48
    rows = SLOTS * max(p.tokens for p in group.planes) + 3
    whole, inner = guarded(width * rows, seed)
    table, at = inner.reshape(rows, width), 0
    planes: list[list[Bytes]] = []
    for plane in group.planes:
        layers: list[Bytes] = []
        for _ in range(plane.layers):
            span = plane.heads * (plane.item_nbytes + 16)
            items = table[:, at : at + span].reshape(rows, plane.heads, plane.item_nbytes + 16)
            assert np.shares_memory(items, table), "splitting the last axis never copies"
            layers.append(items[..., : plane.item_nbytes])
            at += span
        planes.append(layers)
    return Guarded(whole, rows_surface(group, planes, SLOTS))


def head_rows(group: Group, seed: int | None) -> Guarded:
    """An engine with a (heads, rows, item) tensor a plane and layer, at uneven distances: seen as (rows, heads, item)."""
    rows = SLOTS * max(p.tokens for p in group.planes) + 1
    nbytes = sum(p.layers * (rows * p.heads * p.item_nbytes + 64 * p.layers) for p in group.planes)
    whole, inner = guarded(nbytes, seed)
    planes: list[list[Bytes]] = []
    at = 0
    for plane in group.planes:
        layers: list[Bytes] = []
        for layer in range(plane.layers):
            at += 64 * (layer % 2)
            span = plane.heads * rows * plane.item_nbytes
            tensor = inner[at : at + span].reshape(plane.heads, rows, plane.item_nbytes)
            layers.append(tensor.transpose(1, 0, 2))
            at += span
        planes.append(layers)
    return Guarded(whole, rows_surface(group, planes, SLOTS))


ENGINE_ROWS: dict[str, Callable[[Group, int | None], Guarded]] = {
    "token_rows": token_rows,
    "head_rows": head_rows,
}


def copy_by_items(
    source: Surface,
    source_slots: Sequence[int],
    target: Surface,
    target_slots: Sequence[int],
    layers: range | None = None,
) -> None:
    """The copy as one would say it aloud: item by item."""
    for ours, theirs in zip(source.views, target.views, strict=True):
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if layers is not None and layer not in layers:
                continue
            for s, t in zip(source_slots, target_slots, strict=True):
                for token in range(a.shape[1]):
                    for head in range(a.shape[2]):
                        b[t, token, head] = a[s, token, head]


Sides = Callable[[int | None], Guarded]


class CopyEngineContract:
    """What every copy engine must do. Subclasses give the fixture ``engine``."""

    @pytest.fixture
    def engine(self) -> CopyEngine:
        """The engine under test."""
        raise NotImplementedError

    def copies(
        self,
        engine: CopyEngine,
        source_side: Sides,
        target_side: Sides,
        slots: str,
        layers: range | None = None,
    ) -> None:
        """Copy once with the engine and once by items, and compare every byte there is."""
        sources, targets = SLOT_SETS[slots]
        source, target, wanted = source_side(11), target_side(None), target_side(None)
        source_before = source.whole.copy()
        ticket = engine.submit(source.surface, sources, target.surface, targets, layers=layers)
        ticket.wait()
        assert ticket.done()
        copy_by_items(source.surface, sources, wanted.surface, targets, layers)
        assert np.array_equal(target.whole, wanted.whole)
        assert source.untouched_since(source_before)

    def refuses_before_any_byte(
        self,
        engine: CopyEngine,
        source: Guarded,
        sources: Sequence[int],
        target: Guarded,
        targets: Sequence[int],
        layers: range | None = None,
    ) -> None:
        """The copy is refused, and both sides are as they were."""
        source_before, target_before = source.whole.copy(), target.whole.copy()
        with pytest.raises(ConfigError):
            engine.submit(source.surface, sources, target.surface, targets, layers=layers)
        assert source.untouched_since(source_before)
        assert target.untouched_since(target_before)

    def test_declares_what_it_takes(self, engine: CopyEngine) -> None:
        """A name, and no refusal of a layout that the group itself refuses or not at all by accident."""
        assert engine.name
        spec = CacheSpec((PLANE_SETS["scaled"],), page_tokens=4)
        assert engine.refuses(spec, LAYOUTS["page_head"], Direction.SAVE, Capabilities("cpu"))

    @pytest.mark.parametrize("slots", SLOT_SETS)
    @pytest.mark.parametrize("planes,source,target", PAIRS)
    def test_all_layout_pairs(
        self, engine: CopyEngine, planes: str, source: str, target: str, slots: str
    ) -> None:
        """Pool to pool, every pair of layouts, every plane set, every slot set."""
        group = PLANE_SETS[planes]
        self.copies(
            engine,
            lambda seed: pool_side(group, source, seed),
            lambda seed: pool_side(group, target, seed),
            slots,
        )

    @pytest.mark.parametrize("slots", SLOT_SETS)
    @pytest.mark.parametrize("rows", ENGINE_ROWS)
    @pytest.mark.parametrize("planes,layout", sorted({(p, a) for p, a, _ in PAIRS}))
    def test_engine_rows(self, engine: CopyEngine, planes: str, layout: str, rows: str, slots: str) -> None:
        """Both ways between a pool and an engine's strided rows."""
        group = PLANE_SETS[planes]

        def pool(seed: int | None) -> Guarded:
            return pool_side(group, layout, seed)

        def engine_side(seed: int | None) -> Guarded:
            return ENGINE_ROWS[rows](group, seed)

        self.copies(engine, pool, engine_side, slots)
        self.copies(engine, engine_side, pool, slots)

    @pytest.mark.parametrize("layers", [range(0), range(1), range(1, 3), range(2, 3), range(0, 3, 2)])
    @pytest.mark.parametrize("planes", ["equal", "scaled", "state"])
    def test_some_layers(self, engine: CopyEngine, planes: str, layers: range) -> None:
        """Only the layers asked for; a plane with fewer layers takes part with those it has."""
        group = PLANE_SETS[planes]
        self.copies(
            engine,
            lambda seed: token_rows(group, seed),
            lambda seed: pool_side(group, "page_first", seed),
            "scattered",
            layers,
        )

    @pytest.mark.parametrize(
        "sources,targets",
        [
            ((0,), (SLOTS,)),
            ((SLOTS,), (0,)),
            ((-1,), (0,)),
            ((0,), (-1,)),
            ((0, 1), (2, 2)),
            ((0, 1), (2,)),
            ((0,), ()),
            ((1 << 40,), (0,)),
        ],
        ids=str,
    )
    def test_wrong_slots(
        self, engine: CopyEngine, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> None:
        """Out of range on either side, repeated targets, unequal rows."""
        group = PLANE_SETS["equal"]
        source, target = pool_side(group, "layer_first", 1), pool_side(group, "page_first", None)
        self.refuses_before_any_byte(engine, source, sources, target, targets)

    @pytest.mark.parametrize("layers", [range(4), range(3, 4), range(-1, 1)])
    def test_wrong_layers(self, engine: CopyEngine, layers: range) -> None:
        """Layers that no plane has."""
        group = PLANE_SETS["equal"]
        source, target = pool_side(group, "layer_first", 1), pool_side(group, "page_first", None)
        self.refuses_before_any_byte(engine, source, (0,), target, (1,), layers)

    def test_other_planes(self, engine: CopyEngine) -> None:
        """Surfaces of different groups: item size, heads, number of planes."""
        source = pool_side(PLANE_SETS["equal"], "page_first", 1)
        for other in ("k128_v64", "scaled", "opaque", "one_layer"):
            target = pool_side(PLANE_SETS[other], "page_first", None)
            self.refuses_before_any_byte(engine, source, (0,), target, (1,))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_page_onto_itself(self, engine: CopyEngine, layout: str) -> None:
        """Within one pool: refused where a page is source and target, done where they are apart."""
        side = pool_side(PLANE_SETS["equal"], layout, 5)
        self.refuses_before_any_byte(engine, side, (0, 1), side, (1, 2))
        wanted = side.whole.copy()
        placement = place(PLANE_SETS["equal"], LAYOUTS[layout], SLOTS)
        copy_by_items(
            side.surface,
            (0, 1),
            surface_of(placement, wanted[GUARD : GUARD + placement.nbytes]),
            (4, 2),
        )
        engine.submit(side.surface, (0, 1), side.surface, (4, 2)).wait()
        assert np.array_equal(side.whole, wanted)

    def test_overlapping_memory(self, engine: CopyEngine) -> None:
        """Two surfaces that share bytes but not places."""
        group = PLANE_SETS["equal"]
        placement = place(group, LAYOUTS["page_first"], SLOTS)
        whole, inner = guarded(placement.nbytes + 64, 3)
        source = Guarded(whole, surface_of(placement, inner[: placement.nbytes]))
        target = Guarded(whole, surface_of(placement, inner[64:]))
        self.refuses_before_any_byte(engine, source, (0,), target, (0,))

    def test_read_only_target(self, engine: CopyEngine) -> None:
        """Memory that must not be written is refused, not written."""
        group = PLANE_SETS["equal"]
        source = pool_side(group, "page_first", 1)
        whole, inner = guarded(place(group, LAYOUTS["page_first"], SLOTS).nbytes, None)
        inner.flags.writeable = False
        target = Guarded(whole, surface_of(place(group, LAYOUTS["page_first"], SLOTS), inner))
        self.refuses_before_any_byte(engine, source, (0,), target, (1,))
