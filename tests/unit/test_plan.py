"""Copy plans: the longest common run, and every byte exactly once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hicache.errors import InvariantError
from hicache.layout import LAYOUTS, place, undefined
from hicache.plan import plan
from hicache.spec import Group, Plane
from hicache.testing.copies import PAIRS, PLANE_SETS

K128_V64 = Group("main", (Plane("k", 32, 16, 8, 256), Plane("v", 32, 16, 8, 128)))


def of(group, source, target, slots=3):
    return plan(place(group, LAYOUTS[source], slots), place(group, LAYOUTS[target], slots))


@pytest.mark.parametrize(
    "source,target,runs",
    [
        ("layer_first", "page_first_direct", (32768, 16384)),
        ("layer_first", "page_first", (2048, 1024)),
        ("layer_first", "page_head", (256, 128)),
        ("page_first", "page_head", (256, 128)),
        ("page_first_direct", "page_head", (256, 128)),
        ("page_first", "page_first", (32 * 32768, 32 * 16384)),
        ("layer_first", "layer_first", (32768, 16384)),
    ],
)
def test_the_longest_common_run(source, target, runs):
    for a, b in ((source, target), (target, source)):
        made = of(K128_V64, a, b)
        assert tuple(plane.run_nbytes for plane in made.planes) == runs
        assert made.run_nbytes == min(runs)


@pytest.mark.parametrize("planes,source,target", PAIRS)
def test_runs_cover_a_page_once_on_both_sides(planes, source, target):
    group = PLANE_SETS[planes]
    runs = list(of(group, source, target).runs(2, 1))
    for side in (0, 1):
        taken = sorted((run[side], run[side] + run[2]) for run in runs)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
        assert sum(end - start for start, end in taken) == group.nbytes


@pytest.mark.parametrize("planes,source,target", PAIRS)
def test_no_two_runs_could_be_one(planes, source, target):
    made = of(PLANE_SETS[planes], source, target)
    for plane in made.planes:
        assert all(
            (loop.source_stride, loop.target_stride) != (plane.run_nbytes, plane.run_nbytes)
            for loop in plane.loops
        )
        assert all(loop.count > 1 for loop in plane.loops)


def test_layers_at_uneven_distances_have_a_base_each():
    placement = place(PLANE_SETS["equal"], LAYOUTS["page_first"], 2)
    first = placement.planes[0]
    uneven = replace(
        placement,
        planes=(replace(first, bases=(0, 4096, 4096 * 5)), replace(first, bases=(8192, 40960, 81920))),
    )
    assert [p.layer_stride for p in uneven.planes] == [None, None]
    target = replace(placement, planes=tuple(replace(p, plane=first.plane) for p in placement.planes))
    made = plan(uneven, target)
    assert [len(plane.bases) for plane in made.planes] == [3, 3]
    starts = {run[0] for run in made.runs(0, 0)}
    assert {0, 4096, 4096 * 5, 8192, 40960, 81920} <= starts
    assert sum(run[2] for run in made.runs(0, 0)) == 2 * first.plane.nbytes


def test_a_plan_joins_equal_planes_only():
    group = PLANE_SETS["equal"]
    other = Group("g", (replace(group.planes[0], item_nbytes=16), group.planes[1]))
    with pytest.raises(InvariantError):
        plan(place(group, LAYOUTS["page_first"], 1), place(other, LAYOUTS["page_first"], 1))


def test_a_plan_is_made_once():
    assert of(K128_V64, "layer_first", "page_head") is of(K128_V64, "layer_first", "page_head")
    assert all(undefined(K128_V64, wanted) is None for wanted in LAYOUTS.values())
