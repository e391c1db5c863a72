"""Pools: memory that fits its pages, pages that are views of it, and refusals with numbers."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from hicache.data.platform import cpu
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.platform.memory import MemoryProbe
from hicache.data.pool import Pool, nbytes_for, rows_surface, slots_for, surface_of
from hicache.errors import CapacityError, ConfigError, InvariantError
from hicache.layout import LAYOUTS, place
from hicache.records import Where
from hicache.spec import CacheSpec, Group, Plane

MAIN = Group("main", (Plane("k", 3, 4, 2, 32), Plane("v", 3, 4, 2, 16)))
INDEX = Group("index", (Plane("index", 3, 4, 1, 24),))
SPEC = CacheSpec((MAIN, INDEX), 4)
CPU = CpuPlatform()


def pool_of(layout="page_first", slots=5) -> Pool:
    return Pool(SPEC, LAYOUTS[layout], slots, CPU)


# -- the platform


def test_memory_is_zeroed_aligned_and_exactly_as_long_as_asked():
    for nbytes in (1, 4095, 4097, 3 << 20):
        buffer = CPU.alloc(nbytes, Where.HOST)
        assert buffer.nbytes == buffer.view.size == nbytes
        assert buffer.view.ctypes.data % (2 << 20 if nbytes >= 2 << 20 else mmap.PAGESIZE) == 0
        assert not buffer.view.any()
        buffer.view[:] = 7
        buffer.close()


def test_progress_reaches_the_end(monkeypatch):
    monkeypatch.setattr(cpu, "PREFAULT_CHUNK", 1 << 20)
    seen: list[tuple[int, int]] = []
    nbytes = (2 << 20) + 5
    CPU.alloc(nbytes, Where.DEVICE, progress=lambda *at: seen.append(at)).close()
    assert seen == [(1 << 20, nbytes), (2 << 20, nbytes), (nbytes, nbytes)]


def test_memory_that_cannot_be_had_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(cpu, "memory_available", lambda: 1 << 20)
    with pytest.raises(CapacityError, match="asked_bytes=1048577 available_bytes=1048576"):
        CPU.alloc((1 << 20) + 1, Where.HOST)
    CPU.alloc(1 << 20, Where.HOST).close()
    monkeypatch.setattr(cpu, "memory_available", lambda: None)
    for absurd in (1 << 62, 1 << 80):
        with pytest.raises(CapacityError, match=f"asked_bytes={absurd}"):
            CPU.alloc(absurd, Where.HOST)


def test_available_memory_is_the_least_of_the_machines_and_the_control_groups(monkeypatch):
    monkeypatch.setattr(MemoryProbe, "available", lambda self: 9000)
    monkeypatch.setattr(MemoryProbe, "headroom", lambda self: 3000)
    assert cpu.memory_available() == 3000
    monkeypatch.setattr(MemoryProbe, "headroom", lambda self: None)
    assert cpu.memory_available() == 9000
    monkeypatch.setattr(MemoryProbe, "available", lambda self: None)
    assert cpu.memory_available() is None


def test_a_closed_buffer_has_no_bytes_and_its_views_live_on():
    buffer = CPU.alloc(4096, Where.HOST)
    view = buffer.view
    buffer.close()
    buffer.close()
    view[0] = 1
    with pytest.raises(InvariantError):
        _ = buffer.view


@pytest.mark.parametrize("where", [Where.STORE, Where.ENDPOINT])
def test_only_memory_tiers_have_memory(where):
    with pytest.raises(ConfigError):
        CPU.alloc(4096, where)


def test_what_the_cpu_lacks_it_says_why():
    capabilities = CPU.capabilities()
    assert capabilities.platform == "cpu"
    assert "GPU" in capabilities.lacks("triton")
    assert capabilities.lacks("pinning")


# -- pools


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_is_as_large_as_was_said(layout):
    if layout == "page_head":
        layout = "page_first_direct"
    pool = pool_of(layout)
    assert pool.nbytes <= nbytes_for(SPEC, LAYOUTS[layout], 5) < pool.nbytes + 2 * 4096
    pool.close()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_the_run_of_a_page_is_its_bytes_and_nothing_else(layout):
    pool = pool_of(layout)
    for group, slot in ((0, 0), (0, 4), (1, 2)):
        run = pool.run(group, slot)
        assert (run.format, run.contiguous, run.readonly) == ("B", True, False)
        assert len(run) == pool.placement(group).run_nbytes
        run[:] = bytes([slot + 1]) * len(run)
        for plane in pool.surface(group).views:
            for view in plane:
                assert (view[slot] == slot + 1).all()
                assert (view[slot - 1] != slot + 1).all()
    pool.close()


def test_a_layer_first_page_is_no_run():
    pool = pool_of("layer_first")
    assert pool.run(0, 0) is None
    pool.close()


@pytest.mark.parametrize("slot", [-1, 5])
def test_a_slot_that_is_none(slot):
    pool = pool_of()
    with pytest.raises(InvariantError, match=f"slot={slot}"):
        pool.run(0, slot)
    pool.close()


def test_groups_do_not_share_memory():
    pool = pool_of()
    for plane in pool.surface(0).views:
        for view in plane:
            view[:] = 9
    assert not any(view.any() for plane in pool.surface(1).views for view in plane)
    pool.close()


def test_a_pool_that_does_not_fit_gives_back_what_it_had(monkeypatch):
    closed: list[int] = []
    given: list[int] = []

    class Buffer(cpu.CpuBuffer):
        def close(self) -> None:
            closed.append(self.nbytes)
            super().close()

    class Platform(CpuPlatform):
        def alloc(self, nbytes, where, *, progress=None):
            given.append(nbytes)
            if len(given) == 2:
                raise CapacityError("no")
            return Buffer(nbytes)

    with pytest.raises(CapacityError):
        Pool(SPEC, LAYOUTS["page_first"], 5, Platform())
    assert closed == [place(MAIN, LAYOUTS["page_first"], 5).nbytes]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("slots", [1, 2, 7, 1000])
def test_as_many_slots_as_fit_and_not_one_less(layout, slots):
    wanted = LAYOUTS[layout]
    for spare in (0, 1, 4095, 4096, 5000):
        budget = nbytes_for(SPEC, wanted, slots) + spare
        most = slots_for(SPEC, wanted, budget)
        assert most >= slots
        assert nbytes_for(SPEC, wanted, most) <= budget < nbytes_for(SPEC, wanted, most + 1)


def test_a_budget_below_one_page_is_refused_with_both_numbers():
    need = nbytes_for(SPEC, LAYOUTS["page_first"], 1)
    with pytest.raises(ConfigError, match=f"budget_bytes={need - 1} page_bytes={need}"):
        slots_for(SPEC, LAYOUTS["page_first"], need - 1)


# -- surfaces


def test_a_placement_must_lie_inside_its_memory():
    placement = place(MAIN, LAYOUTS["layer_first"], 3)
    surface_of(placement, np.zeros(placement.nbytes, np.uint8))
    with pytest.raises(ConfigError, match="memory_bytes"):
        surface_of(placement, np.zeros(placement.nbytes - 33, np.uint8))
    for memory in (
        np.zeros(placement.nbytes, np.int8),
        np.zeros((placement.nbytes, 2), np.uint8),
        np.zeros(2 * placement.nbytes, np.uint8)[::2],
    ):
        with pytest.raises(ConfigError):
            surface_of(placement, memory)


def test_rows_are_seen_as_pages_without_a_copy():
    tensor = np.zeros((3, 2, 23, 32), np.uint8)  # layer, head, row, item
    values = np.zeros((23, 3, 2, 16), np.uint8)  # row, layer, head, item
    rows = [[tensor[i].transpose(1, 0, 2) for i in range(3)], [values[:, i] for i in range(3)]]
    surface = rows_surface(MAIN, rows, 5)
    assert surface.slots == 5
    assert [view.shape for view in (surface.views[0][0], surface.views[1][2])] == [
        (5, 4, 2, 32),
        (5, 4, 2, 16),
    ]
    surface.views[0][1][3, 2, 1] = 5
    surface.views[1][2][4, 3, 0] = 6
    assert (tensor[1, 1, 3 * 4 + 2] == 5).all()
    assert (values[4 * 4 + 3, 2, 0] == 6).all()
    assert int((tensor != 0).sum()) + int((values != 0).sum()) == 32 + 16
    assert rows_surface(MAIN, rows, 0).slots == 0


@pytest.mark.parametrize(
    "rows,word",
    [
        ([[np.zeros((20, 2, 32), np.uint8)] * 3], "planes"),
        ([[np.zeros((20, 2, 32), np.uint8)] * 2, [np.zeros((20, 2, 16), np.uint8)] * 3], "layers"),
        ([[np.zeros((19, 2, 32), np.uint8)] * 3, [np.zeros((20, 2, 16), np.uint8)] * 3], "need=20"),
        ([[np.zeros((20, 2, 32), np.int8)] * 3, [np.zeros((20, 2, 16), np.uint8)] * 3], "int8"),
        ([[np.zeros((20, 1, 32), np.uint8)] * 3, [np.zeros((20, 2, 16), np.uint8)] * 3], "wanted"),
        ([[np.zeros((20, 64), np.uint8)] * 3, [np.zeros((20, 2, 16), np.uint8)] * 3], "wanted"),
    ],
)
def test_rows_that_are_not_those_of_the_group(rows, word):
    with pytest.raises(ConfigError, match=word):
        rows_surface(MAIN, rows, 5)
