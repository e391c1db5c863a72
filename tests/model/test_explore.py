"""No order of steps of any small world breaks the control plane."""

from __future__ import annotations

import time

import pytest
from worlds import WORLDS

from hicache.testing.explore import Exploration, Limits, explore, replay
from hicache.testing.small import Rules, Small
from hicache.testing.world import WrongError


def told(rules: Rules, result: Exploration) -> str:
    """The shortest history of a failure, one step a line."""
    if result.failure is None:
        return str(result)
    steps = [f"{result}: {result.failure.message}"]
    try:
        replay(rules, result.failure.history, steps.append)
    except WrongError:
        return "\n".join(steps)
    return "\n".join([*steps, "but the history does not fail again"])


@pytest.mark.parametrize("name", WORLDS)
def test_a_small_world_keeps_every_invariant(name):
    world = WORLDS[name]
    limits = Limits(states=world.quick or 300_000, seconds=100.0)
    result = explore(world.rules, time.monotonic, limits)
    print(f"{name}: {result}")
    assert result.failure is None, told(world.rules, result)
    if world.quick:
        assert not result.complete, f"{name} is complete in {result.states} states: say so in its definition"
    else:
        assert result.complete, f"{name}: {result}"
        assert result.states == world.states


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if world.quick])
def test_a_small_world_is_searched_to_its_end(name):
    world = WORLDS[name]
    result = explore(world.rules, time.monotonic, Limits(states=300_000, seconds=300.0))
    print(f"{name}: {result}")
    assert result.failure is None, told(world.rules, result)
    if world.states:
        assert result.complete
        assert result.states == world.states
    else:
        assert result.depth >= world.depth


@pytest.mark.parametrize("name", ["w1_chunks", "w2_prefetch", "w5_store"])
def test_a_history_can_be_run_again_and_leads_to_the_same_state(name):
    rules = WORLDS[name].rules
    first, history = Small(rules), []
    while len(history) < 40 and (steps := list(first.steps())):
        history.append(steps[len(history) * 7 % len(steps)])
        first.perform(history[-1])
    lines: list[str] = []
    again = replay(rules, tuple(history), lines.append)
    assert again.snapshot() == first.snapshot()
    assert len(lines) == len(history)
