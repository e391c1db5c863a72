"""No order of steps of any small world breaks the control plane."""

from __future__ import annotations

import time

import pytest
from worlds import SIZES, WORLDS

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


def search(name: str, limits: Limits) -> Exploration:
    result = explore(WORLDS[name], time.monotonic, limits)
    print(f"{name}: {result}")
    assert result.failure is None, told(WORLDS[name], result)
    return result


@pytest.mark.parametrize("name", WORLDS)
def test_a_small_world_keeps_every_invariant(name):
    size = SIZES[name]
    result = search(name, Limits(states=size.quick or 300_000, seconds=100.0))
    if size.quick:
        assert result.states >= size.quick, "complete: say so in its size"
    else:
        assert result.complete
        assert result.states > size.states // 2, "does this world still do what it was made for?"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size.quick])
def test_a_small_world_is_searched_to_its_end(name):
    size = SIZES[name]
    result = search(name, Limits(states=300_000, seconds=300.0))
    if size.states:
        assert result.complete
        assert result.states > size.states // 2, "does this world still do what it was made for?"
    else:
        assert result.complete or result.depth >= size.depth


@pytest.mark.parametrize("name", ["w1_chunks", "w2_prefetch", "w5_store"])
def test_a_history_can_be_run_again_and_leads_to_the_same_state(name):
    rules = WORLDS[name]
    first, history = Small(rules), []
    while len(history) < 40 and (steps := list(first.steps())):
        history.append(steps[len(history) * 7 % len(steps)])
        first.perform(history[-1])
    lines: list[str] = []
    again = replay(rules, tuple(history), lines.append)
    assert again.snapshot() == first.snapshot()
    assert len(lines) == len(history)


FOUND = {
    "an orphan is written behind its stored parent": (
        "w2_store_back",
        """open 0, load 0, publish 0, run 4 0 well, done 4 0, evict 2, publish 0, close 0,
        open 0, load 0, publish 0, close 0,
        open 0, load 0, run 6 0 well, done 6 0, run 12 0 first, done 12 0, publish 0""",
    ),
}
"""Histories that once ended in a failure and lie deeper than the default suite searches."""


@pytest.mark.parametrize("name", FOUND)
def test_a_history_that_failed_once_does_not_fail_again(name):
    world, text = FOUND[name]
    history = [
        tuple(int(word) if word.isdigit() else word for word in step.split()) for step in text.split(",")
    ]
    lines: list[str] = []
    replay(WORLDS[world], tuple(history), lines.append)
    assert len(lines) == len(history)
