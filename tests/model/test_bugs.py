"""The small worlds find the bugs that caches of this kind have had, and find nothing where there is none."""

from __future__ import annotations

import time

import pytest
from bugs import BUGS
from worlds import WORLDS

from hicache.testing.explore import Limits, explore, replay
from hicache.testing.world import WrongError


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_put_back_is_found_and_its_world_is_clean_without_it(name):
    bug = BUGS[name]
    oracle = frozenset({bug.oracle})
    with pytest.MonkeyPatch.context() as patch:
        bug.patch(patch)
        found = explore(bug.rules, time.monotonic, Limits(states=20_000, seconds=100.0, oracles=oracle))
        assert found.failure is not None, f"{bug.world} does not find it by {bug.oracle}: {found}"
        assert found.failure.oracle == bug.oracle
        steps: list[str] = []
        with pytest.raises(WrongError) as error:
            replay(bug.rules, found.failure.history, steps.append, oracle)
        print(*steps, error.value, sep="\n")
        assert len(steps) <= bug.steps + 4, "still the same bug?"
    clean = explore(bug.rules, time.monotonic, Limits(states=found.states, seconds=100.0))
    assert clean.failure is None, clean.failure


def test_every_oracle_and_every_class_of_world_has_found_something():
    assert {bug.oracle for bug in BUGS.values()} == {"bytes", "check", "liveness", "contract"}
    assert {name[:2] for name in WORLDS} - {bug.world[:2] for bug in BUGS.values()} <= {"w3"}
