"""Every combination is accepted or refused at construction, never later."""

from __future__ import annotations

import itertools

import pytest
from resolve_rig import Running, machines, spec_of

from hicache.capability import COORDINATES, PIPELINE, Declarations, Shards, StoreDeclaration
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import resolve
from hicache.resolve.request import wishes
from hicache.spec import CacheSpec, Group, Plane, Window

WRITES = ("write_through", "write_through_selective", "write_back")
MATRIX = list(
    itertools.product(LAYOUTS, ("kernel", "direct"), ("cuda", "rocm", "cpu"), ("mha", "mla"), WRITES)
)


def decided(layout, io, platform, attention, write, store="none"):
    """The resolution under strict."""
    there = machines()[platform]
    asked = {"layout": layout, "io": io, "write_policy": write, "store": store, "strict": True}
    return resolve(wishes(asked, spec_of(attention), there), there)


def test_there_are_144_and_each_is_accepted_as_asked_or_refused_with_all_values():
    assert len(MATRIX) == 144
    outcomes = set()
    for layout, io, platform, attention, write in MATRIX:
        for kind, store in itertools.product((attention, "draft"), ("none", "file")):
            found = decided(layout, io, platform, kind, write, store)
            outcomes.add(found.chosen is None)
            if found.chosen is not None:
                assert (found.chosen.layout, found.chosen.io) == (layout, io)
                assert not found.warnings
                continue
            with pytest.raises(ConfigError) as error:
                found.require()
            meant = {"none": "none", "file": "segment"}[store]
            for part in (
                f"platform={platform}",
                f"layout={layout}",
                f"io={io}",
                f"store={meant}",
                "into_host=",
                "spec=",
            ):
                assert part in str(error.value)
    assert outcomes == {True, False}


def accepted():
    rows = {}
    for layout, io, platform, attention, write in MATRIX:
        for kind, store in itertools.product((attention, "draft"), ("none", "file")):
            found = decided(layout, io, platform, kind, write, store)
            if found.chosen is not None:
                rows[(platform, layout, io, kind, store, write)] = found
    return rows


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.timeout(300)
def test_what_is_accepted_backs_up_evicts_and_loads_every_component_with_equal_bytes(tmp_path, write):
    for number, (row, found) in enumerate(accepted().items()):
        if row[-1] != write or (
            row[4] == "file" and number % 3
        ):  # the store's legs are the same for a third of them
            continue
        running = Running(found.chosen, spec_of(row[3]), tmp_path / str(number))
        running.five_pages()
        running.close()


def components(page_tokens):
    full = Group("full", (Plane("k", 2, 32, 1, 32), Plane("v", 2, 32, 1, 32)))
    window = Group("window", (Plane("k", 2, 8, 1, 32), Plane("v", 2, 8, 1, 32)), Window(64))
    return CacheSpec((full, window), page_tokens)


def test_components_whose_pages_divide_the_key_page_are_accepted_and_others_refused_with_the_numbers(
    tmp_path,
):
    there = machines()["cpu"]
    assert resolve(wishes({}, components(32), there), there).chosen is not None
    with pytest.raises(ConfigError) as error:
        components(24)
    for number in ("32", "8", "24"):
        assert number in str(error.value)


def test_a_store_that_does_not_honour_the_pipeline_stage_is_refused_with_two():
    here = machines()["cpu"]
    store = StoreDeclaration("plain", coordinates=COORDINATES - {PIPELINE})
    there = Declarations(here.platform, here.engines, here.layouts, (*here.stores, store))
    for stages in (1, 2):
        shards = Shards(pipeline=stages)
        found = resolve(wishes({"store": "plain"}, spec_of("mha", stages), there, shards=shards), there)
        assert (found.chosen is None) == (stages == 2)
    with pytest.raises(ConfigError, match="plain does not honour the pipeline stage: 2"):
        found.require()
