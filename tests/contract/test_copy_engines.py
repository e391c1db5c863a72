"""Every copy engine passes one suite, and a copy plan's runs make the same bytes as the reference engine."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.data.copy import host
from hicache.data.copy.base import CopyEngine
from hicache.data.copy.direct import DirectEngine, runs_of
from hicache.data.copy.host import HostEngine
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.copy.strided import NumpyEngine
from hicache.data.pool import surface_of
from hicache.layout import LAYOUTS, place
from hicache.plan import plan
from hicache.testing.copies import PAIRS, PLANE_SETS, SLOTS, CopyEngineContract, guarded, pool_side


class TestDirectEngine(CopyEngineContract):
    @pytest.fixture
    def engine(self) -> CopyEngine:
        return DirectEngine()


class TestReferenceEngine(CopyEngineContract):
    @pytest.fixture
    def engine(self) -> CopyEngine:
        return ReferenceEngine()


class TestNumpyEngine(CopyEngineContract):
    @pytest.fixture
    def engine(self) -> CopyEngine:
        return NumpyEngine()


native = pytest.mark.skipif(HostEngine.available() is not None, reason=str(HostEngine.available()))


@native
class TestHostEngine(CopyEngineContract):
    @pytest.fixture
    def engine(self) -> CopyEngine:
        return HostEngine()


@native
class TestHostEngineWithHelpers(CopyEngineContract):
    """Every call is taken for a large one: stores around the cache, and threads."""

    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> CopyEngine:
        monkeypatch.setattr(host, "SMALL_NBYTES", 0)
        return HostEngine()


@pytest.mark.parametrize("planes,source,target", PAIRS)
def test_runs_of_a_plan_equal_the_reference(planes, source, target):
    group = PLANE_SETS[planes]
    a, b = place(group, LAYOUTS[source], SLOTS), place(group, LAYOUTS[target], SLOTS)
    _, ours = guarded(a.nbytes, 7)
    whole, theirs = guarded(b.nbytes, None)
    expected_whole, expected = guarded(b.nbytes, None)
    sources, targets = (6, 0, 3), (1, 6, 2)
    ReferenceEngine().submit(surface_of(a, ours), sources, surface_of(b, expected), targets)
    moved = 0
    for s, t in zip(sources, targets, strict=True):
        for start, end, nbytes in plan(a, b).runs(s, t):
            assert 0 <= start <= a.nbytes - nbytes
            assert 0 <= end <= b.nbytes - nbytes
            theirs[end : end + nbytes] = ours[start : start + nbytes]
            moved += nbytes
    assert moved == len(sources) * group.nbytes
    assert np.array_equal(whole, expected_whole)


def test_direct_copies_as_few_runs_as_there_are():
    group = PLANE_SETS["equal"]
    sides = {name: pool_side(group, name, 1).surface for name in LAYOUTS}
    layers = range(group.planes[0].layers)

    def runs(source, target):
        return len(runs_of(sides[source], sides[target], layers))

    assert runs("page_first", "page_first") == runs("page_head", "page_head") == 1
    assert runs("layer_first", "page_first_direct") == 2 * 3  # one a plane and layer
    assert runs("layer_first", "page_first") == 2 * 3 * 4  # one a plane, layer and token
