"""Defaults suit the platform: what is resolved is what the platform can do, and its slots lie where its kernel reads."""

from __future__ import annotations

import pytest
from resolve_rig import Running, machines, spec_of

from hicache.capability import Direction, Place
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import resolve
from hicache.resolve.request import DEFAULTS, wishes

PLATFORMS = {
    "CUDA": "cuda",
    "CUDA without a staged kernel": "cuda-staged-writeback",
    "ROCm": "rocm",
    "CPU": "cpu",
}
ATTENTIONS = ("mha", "mla")
WRITES = ("write_through", "write_back")

GOLDEN = {
    "CUDA": ("page_first", "kernel", "staged write-back"),
    "CUDA without a staged kernel": ("layer_first", "kernel", "strided gather and scatter"),
    "ROCm": ("page_first", "kernel", "staged write-back"),
    "CPU": ("page_first", "kernel", "gather and scatter on threads"),
}
"""What nothing asked becomes, and the kernel of the write-back."""


def unset(platform, attention, write="write_through"):
    there = machines()[PLATFORMS[platform]]
    return there, resolve(wishes({"hicache_write_policy": write}, spec_of(attention), there), there)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("write", WRITES)
def test_every_resolved_pair_is_in_the_platforms_table_and_slots_lie_where_its_kernel_says(
    platform, attention, write
):
    there, found = unset(platform, attention, write)
    chosen = found.require()
    layout = LAYOUTS[chosen.layout]
    engine = next(e for e in there.engines if e.name == chosen.engine)
    for direction in Direction:
        assert engine.refuses(spec_of(attention), layout, direction, there.platform) is None
    assert chosen.save is engine.kernel(layout, Direction.SAVE)
    if there.platform.platform == "cpu":
        assert chosen.save.target_index is Place.HOST
    elif chosen.save.name == "staged write-back":
        assert (chosen.save.source_index, chosen.save.target_index) == (Place.DEVICE, Place.HOST)
    else:
        assert (chosen.save.source_index, chosen.save.target_index) == (Place.DEVICE, Place.DEVICE)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_golden_table_of_defaults(monkeypatch, platform, attention):
    chosen = unset(platform, attention)[1].require()
    assert (chosen.layout, chosen.io, chosen.save.name) == GOLDEN[platform]
    # another default for all cannot bring a platform to what it lacks
    for layout in LAYOUTS:
        monkeypatch.setitem(DEFAULTS, "layout", layout)
        _, found = unset(platform, attention)
        pair = next(c for c in found.candidates if (c.layout, c.io) == (found.chosen.layout, found.chosen.io))
        assert not pair.refusals


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_a_platform_lacks_is_rejected_with_platform_layout_io_and_the_nearest_pair(attention):
    there = machines()["cuda-staged-writeback"]
    asked = {"layout": "page_first", "io": "kernel", "strict": True}
    with pytest.raises(ConfigError) as error:
        resolve(wishes(asked, spec_of(attention), there), there).require()
    for part in (
        "platform=cuda",
        "layout=page_first",
        "io=kernel",
        "nearest=layer_first+kernel",
        "staged-writeback",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("write", WRITES)
def test_the_resolved_pair_brings_pages_down_and_back_with_equal_bytes(tmp_path, platform, attention, write):
    _, found = unset(platform, attention, write)
    running = Running(found.require(), spec_of(attention), tmp_path)
    running.five_pages()
    running.close()


def test_the_origin_of_each_value_is_reported():
    there = machines()["cuda"]
    found = resolve(wishes({"io": "direct"}, spec_of("mha"), there), there)
    assert found.origin("io") == "user"
    assert found.origin("layout") == "resolved"
    assert found.origin("store") == "default"
