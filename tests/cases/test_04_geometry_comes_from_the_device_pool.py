"""Host geometry follows the real device pool: shapes, strides and dtypes of arrays, never a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from hicache.data.copy.reference import ReferenceEngine
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool, rows_surface
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS, undefined
from hicache.spec import CacheSpec, Group, Plane, Window

PAGE = 64
PAGES = 3


@dataclass
class DevicePool:
    """An engine's tensor of one plane and layer: (rows, heads, width) of a dtype, rows perhaps further apart."""

    name: str
    heads: int
    width: int
    dtype: type
    gap: int = 0

    def __post_init__(self):
        whole = np.random.default_rng(len(self.name) + self.width).integers(
            0,
            256,
            (PAGES * PAGE, self.heads, (self.width + self.gap) * np.dtype(self.dtype).itemsize),
            np.uint8,
        )
        self.rows = whole[..., : self.width * np.dtype(self.dtype).itemsize]

    @property
    def plane(self):
        _, heads, item = self.rows.shape
        return Plane(self.name, 1, PAGE, heads, item)


def spec_of(*groups):
    made = [Group(name, tuple(pool.plane for pool in pools), rule) for name, pools, rule in groups]
    return CacheSpec(tuple(made), PAGE)


FULL = Group.__dataclass_fields__["rule"].default_factory()
BF16 = np.uint16
POOLS = {
    "mla 576": [("kv", [DevicePool("latent", 1, 576, BF16)], FULL)],
    "fp8 sparse mla 656 bytes": [("kv", [DevicePool("latent", 1, 656, np.uint8, gap=48)], FULL)],
    "k 128, v 64": [("kv", [DevicePool("k", 1, 128, BF16), DevicePool("v", 1, 64, BF16)], FULL)],
    "full and window": [
        ("full", [DevicePool("k", 4, 128, BF16), DevicePool("v", 4, 128, BF16)], FULL),
        ("window", [DevicePool("k", 2, 64, BF16), DevicePool("v", 2, 64, BF16)], Window(128)),
    ],
}
BYTES = {
    "mla 576": [73_728],
    "fp8 sparse mla 656 bytes": [41_984],
    "k 128, v 64": [24_576],
    "full and window": [2 * 64 * 4 * 128 * 2, 2 * 64 * 2 * 64 * 2],
}


@pytest.mark.parametrize("name", POOLS)
def test_bytes_a_page_follow_from_the_device_pool(name):
    assert [group.nbytes for group in spec_of(*POOLS[name]).groups] == BYTES[name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POOLS)
def test_three_pages_go_down_and_come_back_with_equal_bytes(name, layout):
    spec, engine = spec_of(*POOLS[name]), ReferenceEngine()
    assert not any(undefined(group, LAYOUTS[layout]) for group in spec.groups)
    host = Pool(spec, LAYOUTS[layout], PAGES, CpuPlatform())
    for number, (_, pools, _) in enumerate(POOLS[name]):
        device = rows_surface(spec.groups[number], [[pool.rows] for pool in pools], PAGES)
        before = [pool.rows.copy() for pool in pools]
        engine.submit(device, range(PAGES), host.surface(number), (2, 0, 1)).wait()
        for pool in pools:
            pool.rows[:] = 0
        engine.submit(host.surface(number), (2, 0, 1), device, range(PAGES)).wait()
        for pool, wanted in zip(pools, before, strict=True):
            assert np.array_equal(pool.rows, wanted)
    host.close()


@pytest.mark.parametrize("size", [0, -1, -656, 1.5, "656"])
@pytest.mark.parametrize("field", ["layers", "tokens", "heads", "item_nbytes"])
def test_a_size_that_is_none_is_refused_with_the_number(field, size):
    sizes = {"layers": 1, "tokens": PAGE, "heads": 1, "item_nbytes": 128, field: size}
    with pytest.raises(ConfigError, match=f"{field}.*{size}"):
        Plane("v", **sizes)


def test_a_v_head_of_no_width_is_refused():
    with pytest.raises(ConfigError, match="item_nbytes=0"):
        spec_of(("kv", [DevicePool("k", 1, 128, BF16), DevicePool("v", 1, 0, BF16)], FULL))


def latent(rows):
    """One plane of two layers, two heads and 32 bytes; ``rows`` for each layer, and all of it asked for."""
    group = Group("kv", (Plane("latent", 2, PAGE, 2, 32),))
    return rows_surface(group, [rows], PAGES)


def whole(*shape):
    return np.zeros(shape, np.uint8)


ROWS = PAGES * PAGE


def test_rows_may_have_any_strides_that_keep_their_bytes_apart():
    wide = whole(ROWS, 2, 2, 64)
    latent([wide[:, 0, :, ::2], wide[:, 1, :, ::2]])
    latent([whole(ROWS, 2, 32)[::-1], whole(2, ROWS, 32).transpose(1, 0, 2)])


@pytest.mark.parametrize(
    "rows, said",
    [
        (lambda: [np.broadcast_to(whole(1, 2, 32), (ROWS, 2, 32))] * 2, "writable"),
        (
            lambda: [np.lib.stride_tricks.as_strided(whole(99_999), (ROWS, 2, 32), (48, 32, 1))] * 2,
            "overlap.*48, 32, 1",
        ),
        (lambda: [np.lib.stride_tricks.as_strided(whole(99_999), (ROWS, 2, 32), (32, 0, 1))] * 2, "overlap"),
        (lambda: [whole(ROWS, 2, 32)] * 2, "one address"),
        (lambda: [whole(ROWS, 2, 32), None], "NoneType"),
        (lambda: [whole(ROWS, 2, 32), np.zeros((ROWS, 2, 8), np.float32)], "float32"),
    ],
)
def test_rows_that_a_load_would_write_over_each_other_are_refused(rows, said):
    with pytest.raises(ConfigError, match=said):
        latent(rows())


@pytest.mark.parametrize("name", ["", "k:1x1x1x1,v", "k]", 3, None, "\ud800"])
def test_a_name_that_could_pose_as_another_geometry_is_refused(name):
    with pytest.raises(ConfigError, match="name of a plane"):
        Plane(name, 1, PAGE, 1, 2)
    with pytest.raises(ConfigError, match="name of a group"):
        Group(name, (Plane("k", 1, PAGE, 1, 2),))


def test_what_is_not_a_group_or_a_rule_is_refused():
    plane = Plane("k", 1, PAGE, 1, 2)
    group = Group("kv", (plane,))
    for make in (
        lambda: Group("kv", [plane]),
        lambda: Group("kv", ("k",)),
        lambda: Group("kv", (plane,), "full"),
        lambda: CacheSpec([group], PAGE),
        lambda: CacheSpec((group, group), PAGE),
    ):
        with pytest.raises(ConfigError):
            make()
