"""Random copies, for comparing an engine with the reference byte for byte.

A case is drawn from a seed: planes, both sides (a pool in any layout, or arrays with any strides), slots, layers.
``check_random(engine, seed, cases)`` runs them; a failure names the case, which :func:`check_case` runs again.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hicache.data.copy.base import Bytes, CopyEngine, Surface
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.pool import surface_of
from hicache.layout import LAYOUTS, Placement, place, undefined
from hicache.spec import Group, Plane

GUARD = 256
CASE_NBYTES_MAX = 1 << 18
"""Bytes of one side of a case, roughly: ten thousand of them take seconds."""

ITEMS = (
    1,
    2,
    4,
    7,
    15,
    16,
    17,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    80,
    100,
    127,
    128,
    129,
    192,
    256,
    384,
    1000,
    1152,
    4096,
)


def _group(rng: random.Random) -> Group:
    tokens, heads = rng.choice((1, 2, 3, 4, 16)), rng.choice((1, 1, 2, 3, 8))
    planes: list[Plane] = []
    for name in ("k", "v", "scale")[: rng.choice((1, 2, 2, 3))]:
        alike = bool(planes) and rng.random() < 0.5
        item = planes[0].item_nbytes if alike else rng.choice(ITEMS)
        layers = planes[0].layers if alike else rng.choice((1, 2, 3, 5, 30))
        planes.append(Plane(name, layers, tokens, heads if rng.random() < 0.9 else heads + 1, item))
    return Group("main", tuple(planes))


def _memory(rng: random.Random, nbytes: int, *, filled: bool) -> tuple[Bytes, Bytes]:
    """(whole, inner): ``inner`` begins at any address, and everything is random or one value."""
    shift = rng.choice((0, 0, 16, 48, rng.randrange(64)))
    size = nbytes + 2 * GUARD + 64
    seed = rng.getrandbits(32)
    whole = np.full(size, seed & 0xFF, np.uint8)
    if filled:
        whole = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return whole, whole[GUARD + shift : GUARD + shift + nbytes]


def _strides(rng: random.Random, counts: tuple[int, ...]) -> tuple[list[int], int]:
    """Strides of (slot, token, head, byte) with the axes in any order and gaps between them, and the extent."""
    order = [0, 1, 2]
    rng.shuffle(order)
    apart = rng.random() < 0.05
    order.insert(rng.randrange(4) if apart else 3, 3)  # seldom: bytes of an item apart from each other
    strides, extent = [0, 0, 0, 0], 1
    for axis in reversed(order):
        strides[axis] = extent
        extent = extent * counts[axis] + rng.choice((0, 0, 0, 16, 64, rng.randrange(40)))
    return strides, extent


def _strided_plane(
    rng: random.Random, slots: int, plane: Plane, *, filled: bool
) -> tuple[Bytes, list[Bytes]]:
    """(memory, views of the layers): any strides, the same in most layers, at even or uneven distances."""
    counts = (slots, plane.tokens, plane.heads, plane.item_nbytes)
    differ, uneven, backwards = rng.random() < 0.1, rng.random() < 0.5, rng.random() < 0.1
    shared = _strides(rng, counts)
    places: list[tuple[int, list[int]]] = []
    at = 0
    for _ in range(plane.layers):
        strides, extent = _strides(rng, counts) if differ else shared
        places.append((at, strides))
        at += extent + (rng.choice((0, 16, 64, rng.randrange(100))) if uneven else 0)
    whole, inner = _memory(rng, at, filled=filled)
    views = [as_strided(inner[base:], counts, strides) for base, strides in places]
    if uneven and backwards:
        rng.shuffle(views)
    return whole, [view[::-1, ::-1] if backwards else view for view in views]


def _side(rng: random.Random, group: Group, slots: int, *, filled: bool) -> tuple[list[Bytes], Surface]:
    """(all its memory, canaries included; the surface)."""
    fitting = [layout for layout in LAYOUTS.values() if undefined(group, layout) is None]
    if rng.random() < 0.6:
        placement: Placement = place(group, rng.choice(fitting), slots)
        whole, inner = _memory(rng, placement.nbytes, filled=filled)
        return [whole], surface_of(placement, inner)
    pairs = [_strided_plane(rng, slots, plane, filled=filled) for plane in group.planes]
    return [whole for whole, _ in pairs], Surface(tuple(tuple(views) for _, views in pairs))


def _slots(rng: random.Random, source: int, target: int) -> tuple[list[int], list[int]]:
    pages = rng.choice((0, 1, 1, 2, min(source, target), rng.randrange(min(source, target) + 1)))
    pages = min(pages, target, source)
    if rng.random() < 0.3:  # a run on both sides
        a, b = rng.randrange(source - pages + 1), rng.randrange(target - pages + 1)
        return list(range(a, a + pages)), list(range(b, b + pages))
    sources = rng.sample(range(source), pages) if rng.random() < 0.8 else rng.choices(range(source), k=pages)
    return sources, rng.sample(range(target), pages)


def check_case(engine: CopyEngine, seed: int) -> None:
    """Draw the case of ``seed``; AssertionError where the engine and the reference differ in any byte."""
    rng = random.Random(seed)  # noqa: S311  (a case is drawn again from its seed)
    group = _group(rng)
    most = max(1, min(24, CASE_NBYTES_MAX // group.nbytes))
    source_slots, target_slots = rng.randint(1, most), rng.randint(1, most)
    source_memory, source = _side(rng, group, source_slots, filled=True)
    state = rng.getstate()
    target_memory, target = _side(rng, group, target_slots, filled=False)
    rng.setstate(state)
    wanted_memory, wanted = _side(rng, group, target_slots, filled=False)
    sources, targets = _slots(rng, source_slots, target_slots)
    deepest = max(plane.layers for plane in group.planes)
    layers = range(rng.randrange(deepest), deepest, rng.choice((1, 2))) if rng.random() < 0.2 else None
    before = [whole.copy() for whole in source_memory]
    engine.submit(source, sources, target, targets, layers=layers).wait()
    ReferenceEngine().submit(source, sources, wanted, targets, layers=layers)
    told = f"case {seed}: {group} sources={sources} targets={targets} layers={layers}"
    for got, expected in zip(target_memory, wanted_memory, strict=True):
        if not np.array_equal(got, expected):
            raise AssertionError(f"the target differs from the reference's, {told}")
    for got, expected in zip(source_memory, before, strict=True):
        if not np.array_equal(got, expected):
            raise AssertionError(f"the source was changed, {told}")


def check_random(engine: CopyEngine, seed: int, cases: int) -> None:
    """Cases ``seed``, ``seed + 1``, ...; the first that differs raises AssertionError and names itself."""
    for number in range(seed, seed + cases):
        check_case(engine, number)
