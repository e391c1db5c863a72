"""What the cases share: stores to run on, and houses that are closed at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.data.store.memory import MemoryStore
from hicache.data.store.segment import SegmentStore
from hicache.testing.house import SPEC, House

CAP = 64 << 20

for other in ("unit", "model", "adapters"):  # the cases share their rigs and models
    sys.path.insert(0, str(Path(__file__).parents[1] / other))


@pytest.fixture(params=["memory", "segment"])
def store(request, tmp_path) -> Iterator[object]:
    """A store of each kind."""
    made = (
        MemoryStore(CAP, SPEC.fingerprint())
        if request.param == "memory"
        else SegmentStore(tmp_path / "store", CAP, SPEC.fingerprint())
    )
    yield made
    made.close()


@pytest.fixture
def house() -> Iterator[Callable[..., House]]:
    """Makes houses; each is closed, and its books checked, when the test ends."""
    made: list[House] = []

    def make(**settings) -> House:
        made.append(House(**settings))
        return made[-1]

    yield make
    for one in made:
        one.controller.check()
        one.close()
