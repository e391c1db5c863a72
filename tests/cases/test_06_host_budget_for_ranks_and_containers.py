"""The host budget of ranks that share a machine, and in containers: one agreed view, all or nobody, never clamped."""

from __future__ import annotations

from itertools import permutations

import pytest
from resolve_rig import spec_of
from test_sizing import machine, together

from hicache.build import Surroundings, build
from hicache.data import pool as pool_module
from hicache.data.platform.cpu import CpuPlatform
from hicache.errors import CapacityError, ConfigError
from hicache.keys import Namespace
from hicache.resolve.choose import choose
from hicache.resolve.sizing import GIB, Budget, Snapshot
from hicache.settings import load

SPEC = spec_of("mha")


def one(tmp_path, available, host=None, **groups):
    around = Surroundings(probe=machine(tmp_path, available, **groups), reserve=10 * GIB)
    return choose(load(environ={}, page_tokens=SPEC.page_tokens, host=host or {}), SPEC, around)


def test_the_budget_is_divided_once():
    assert Budget(Snapshot(500 * GIB), 4, 10 * GIB).nbytes == 122.5 * GIB


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
def test_four_ranks_of_110_fit_into_500_in_every_order(tmp_path, order):
    found = together(tmp_path, [110] * 4, order, [500 * GIB] * 4)
    assert len({rank.require().size.slots for rank in found}) == 1
    assert found[0].chosen.size.asked == 110 * GIB


def test_ranks_that_look_later_see_less_and_still_agree(tmp_path):
    """Peers that have pinned theirs already do not make the third one refuse what fits: all go by one view."""
    found = together(tmp_path, [60] * 4, (0, 1, 2, 3), [500 * GIB, 390 * GIB, 280 * GIB, 280 * GIB])
    assert len({rank.require().size.slots for rank in found}) == 1


def test_four_ranks_of_150_all_refuse_before_any_memory_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(CpuPlatform, "alloc", lambda *_a, **_k: pytest.fail("memory was taken"))
    for rank in together(tmp_path, [150] * 4, (0, 1, 2, 3), [500 * GIB] * 4):
        with pytest.raises(ConfigError, match=str(150 * GIB)):
            rank.require()


@pytest.mark.parametrize("version", ["v2", "v1"])
def test_a_container_of_90_on_a_machine_of_1007_has_a_budget_of_80(tmp_path, version):
    found = one(tmp_path, 1007 * GIB, {"bytes": 200 * GIB}, **{version: 90 * GIB})
    with pytest.raises(ConfigError) as error:
        found.require()
    assert str(200 * GIB) in str(error.value)
    assert str(80 * GIB) in str(error.value)
    (tmp_path / "b").mkdir()
    assert one(tmp_path / "b", 1007 * GIB, {"bytes": 80 * GIB}, **{version: 90 * GIB}).require()


@pytest.mark.parametrize("groups", [{"v2": "max"}, {"v1": 1 << 63}, {}])
def test_without_a_limit_the_machine_counts(tmp_path, groups):
    assert one(tmp_path, 500 * GIB, {"bytes": 490 * GIB}, **groups).require()
    with pytest.raises(ConfigError, match=f"{490 * GIB} are there"):
        one(tmp_path / "x", 500 * GIB, {"bytes": 490 * GIB + 1}, **groups).require()


def test_nothing_configured_is_chosen_to_fit_and_a_fraction_is_one(tmp_path):
    chosen = one(tmp_path / "a", 11 * GIB).require()
    assert chosen.size.nbytes <= GIB
    assert "nothing was asked" in chosen.size.how
    tight = one(tmp_path / "b", 10 * GIB + (100 << 20)).require()
    assert tight.size.nbytes <= 100 << 20
    for fraction in (0.0, -0.1, 1.5):
        with pytest.raises(ConfigError, match="not a fraction"):
            load(environ={}, host={"fraction": fraction})
    assert one(tmp_path / "c", 20 * GIB, {"fraction": 1.0}).require().size.asked == 10 * GIB


def test_an_explicit_size_is_guarded_too_and_not_adjusted(tmp_path):
    assert one(tmp_path / "a", 20 * GIB, {"bytes": 3 * GIB}).require().size.asked == 3 * GIB
    with pytest.raises(ConfigError, match="to have"):
        one(tmp_path / "b", 20 * GIB, {"bytes": 11 * GIB}).require()


def test_a_construction_that_fails_leaves_no_memory_behind(monkeypatch):
    buffers = []
    alloc = CpuPlatform.alloc

    def counted(self, nbytes, where, *, progress=None):
        if len(buffers) == 1:
            raise CapacityError("not enough memory")
        buffers.append(alloc(self, nbytes, where, progress=progress))
        return buffers[-1]

    monkeypatch.setattr(CpuPlatform, "alloc", counted)
    settings = load(
        environ={}, page_tokens=SPEC.page_tokens, host={"bytes": "1MiB"}, device={"bytes": "1MiB"}
    )
    with pytest.raises(CapacityError):
        build(settings, SPEC, Namespace.of({"weights": "w"}), None)
    with pytest.raises(Exception, match="closed buffer"):
        _ = buffers[0].view
    assert pool_module


def test_all_ranks_end_with_the_same_number_of_pages(tmp_path):
    found = together(tmp_path, [110, 90, 110, 110], (3, 1, 0, 2), [500 * GIB] * 4)
    assert {rank.require().size.slots for rank in found} == {found[1].chosen.size.slots}
