"""Where bytes lie: strides, alignment, padding, and the layouts that cannot be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hicache.data.pool import surface_of
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS, PAGE_ALIGNMENT, PLANE_ALIGNMENT, layout, place, undefined
from hicache.spec import Group, Plane
from hicache.testing.copies import PLANE_SETS

LLAMA = Group("main", (Plane("k", 32, 16, 8, 256), Plane("v", 32, 16, 8, 256)))
K128_V64 = Group("main", (Plane("k", 32, 16, 8, 256), Plane("v", 32, 16, 8, 128)))
SMOL = Group("main", (Plane("k", 30, 16, 3, 128), Plane("v", 30, 16, 3, 128)))
MLA = Group("main", (Plane("latent", 61, 16, 1, 1024), Plane("rope", 61, 16, 1, 128)))

ALL = [
    (name, wanted)
    for name, group in PLANE_SETS.items()
    for wanted in LAYOUTS
    if undefined(group, LAYOUTS[wanted]) is None
]


def test_codes_and_names_never_change():
    assert {name: entry.code for name, entry in LAYOUTS.items()} == {
        "layer_first": 0,
        "page_first": 1,
        "page_first_direct": 2,
        "page_head": 3,
    }
    assert [name for name, entry in LAYOUTS.items() if entry.page_major] == [
        "page_first",
        "page_first_direct",
        "page_head",
    ]
    with pytest.raises(ConfigError, match="page_first_direct"):
        layout("page_major")


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name,wanted", ALL)
def test_every_byte_has_one_place_and_lies_inside(name, wanted, slots):
    group = PLANE_SETS[name]
    placement = place(group, LAYOUTS[wanted], slots)
    memory = np.zeros(placement.nbytes, np.uint8)
    for plane in surface_of(placement, memory).views:
        for view in plane:
            np.add(view, 1, out=view)  # no two views share a byte
    assert int(memory.max()) == 1
    assert int(memory.sum()) == slots * group.nbytes


@pytest.mark.parametrize("name,wanted", ALL)
def test_alignment(name, wanted):
    placement = place(PLANE_SETS[name], LAYOUTS[wanted], 3)
    for placed in placement.planes:
        assert placed.bases[0] % PLANE_ALIGNMENT == 0
        if wanted == "page_head":
            assert placed.head_stride % PLANE_ALIGNMENT == 0
        if LAYOUTS[wanted].page_major:
            assert placed.slot_stride % PAGE_ALIGNMENT == 0


@pytest.mark.parametrize("name,wanted", [case for case in ALL if case[1] != "layer_first"])
def test_a_page_is_one_run(name, wanted):
    group = PLANE_SETS[name]
    placement = place(group, LAYOUTS[wanted], 4)
    memory = np.zeros(placement.nbytes, np.uint8)
    for plane in surface_of(placement, memory).views:
        for view in plane:
            view[2] = 1
    stride = placement.planes[0].slot_stride
    run = memory[2 * stride : 2 * stride + placement.run_nbytes]
    assert int(run.sum()) == group.nbytes == int(memory.sum())
    assert run[0] == 1
    assert placement.run_nbytes <= stride < placement.run_nbytes + PAGE_ALIGNMENT
    if wanted != "page_head":
        assert run[-1] == 1  # no padding at the end is part of the run


def test_layer_first_has_no_run():
    assert place(LLAMA, LAYOUTS["layer_first"], 4).run_nbytes is None


def test_order_of_the_axes():
    steps = {
        name: (p.slot_stride, p.layer_stride, p.token_stride, p.head_stride)
        for name in LAYOUTS
        for p in [place(LLAMA, LAYOUTS[name], 4).planes[1]]
    }
    page = 2 * 32 * 16 * 8 * 256
    assert steps == {
        "layer_first": (16 * 2048, 4 * 16 * 2048, 2048, 256),
        "page_first": (page, 2048, 32 * 2048, 256),
        "page_first_direct": (page, 16 * 2048, 2048, 256),
        "page_head": (page, 256, 32 * 256, 2 * 16 * 32 * 256),
    }


@pytest.mark.parametrize("wanted", ["page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize(
    "group,run,padded",
    [
        (SMOL, SMOL.nbytes, SMOL.nbytes),
        (LLAMA, LLAMA.nbytes, LLAMA.nbytes),
        (MLA, 1_124_352, 1_126_400),
        (Group("g", (Plane("block", 1, 1, 1, 8400),)), 8400, 12288),
        (Group("g", (Plane("block", 1, 1, 1, 256),)), 256, 4096),
    ],
    ids=["smol", "llama", "mla", "8400", "256"],
)
def test_what_padding_costs(group, run, padded, wanted):
    placement = place(group, LAYOUTS[wanted], 1)
    assert placement.run_nbytes == run
    assert placement.nbytes == padded
    assert place(group, LAYOUTS[wanted], 5).nbytes == 5 * padded


def test_planes_after_an_odd_one_are_aligned():
    group = Group("g", (Plane("k", 1, 1, 1, 33), Plane("scale", 1, 1, 1, 4)))
    placement = place(group, LAYOUTS["page_first"], 2)
    assert [placed.bases[0] for placed in placement.planes] == [0, 48]
    assert placement.run_nbytes == 52


def test_page_head_is_refused_where_it_cannot_be():
    unequal = Group("g", (Plane("k", 2, 4, 8, 32), Plane("k_scale", 2, 4, 1, 32)))
    thin = Group("g", (Plane("k", 2, 4, 2, 32), Plane("scale", 2, 4, 2, 4)))
    for group, word in ((unequal, "heads"), (thin, "at least 16 bytes")):
        assert word in undefined(group, LAYOUTS["page_head"])
        with pytest.raises(ConfigError, match=word):
            place(group, LAYOUTS["page_head"], 1)
        for wanted in ("layer_first", "page_first", "page_first_direct"):
            assert undefined(group, LAYOUTS[wanted]) is None


def test_placements_are_equal_when_their_bytes_are():
    assert place(MLA, LAYOUTS["page_head"], 4) == place(MLA, LAYOUTS["page_first"], 4)
    state = Group("state", (Plane("a", 3, 1, 1, 96), Plane("b", 2, 1, 1, 64)))
    for a, b in itertools.combinations(("page_first", "page_first_direct", "page_head"), 2):
        assert place(state, LAYOUTS[a], 4) == place(state, LAYOUTS[b], 4)
        assert place(LLAMA, LAYOUTS[a], 4) != place(LLAMA, LAYOUTS[b], 4)


@pytest.mark.parametrize("slots", [0, -1, 1.5])
def test_slots_are_a_positive_integer(slots):
    with pytest.raises(ConfigError):
        place(LLAMA, LAYOUTS["page_first"], slots)
