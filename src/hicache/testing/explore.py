"""Exhaustive search: every order of every step of a small world, breadth first, on the real Controller.

States are told apart by the controller's snapshot together with the world's; each is kept as a pickle and brought
back for each of its steps. A failure comes with the shortest history that leads to it, which :func:`replay` runs
again.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.control import ControlConfig
from hicache.errors import InvariantError
from hicache.keys import Namespace
from hicache.records import Job, JobKind, Reason, Span, Stats, Where
from hicache.testing.letters import name_of
from hicache.testing.small import ORACLES, Rules, Small, Step
from hicache.testing.world import WrongError


@dataclass(frozen=True, slots=True)
class Failure:
    """What an oracle found, and the shortest way there."""

    oracle: str
    message: str
    history: tuple[Step, ...]


@dataclass(slots=True)
class Exploration:
    """What a search has seen. ``depth``: all histories of that many steps; all there are when ``complete``."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False
    drained: int = 0
    failure: Failure | None = None

    def __str__(self) -> str:
        end = "complete" if self.complete else "failed" if self.failure else "cut"
        return (
            f"{self.states} states, depth {self.depth}, {self.transitions} steps, {self.drained} drained, "
            f"{self.seconds:.1f} s, {end}"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """When a search stops."""

    states: int = 300_000
    seconds: float = 300.0
    oracles: frozenset[str] = ORACLES


_kept: list[object] = []
_numbers: dict[int, int] = {}


def _again(number: int) -> object:
    return _kept[number]


def _keep(thing: object) -> tuple[Callable[[int], object], tuple[int]]:
    """Immutable things are not copied: a pickle names them by number."""
    number = _numbers.get(id(thing))
    if number is None:
        number = _numbers[id(thing)] = len(_kept)
        _kept.append(thing)
    return _again, (number,)


def _array(row: array[int]) -> tuple[object, ...]:
    return array, (row.typecode, row.tobytes())


def _objects(row: npt.NDArray[np.object_]) -> tuple[object, ...]:
    return np.array, (row.tolist(), object)


_SHARED = (Job, Span, JobKind, Reason, Where, ControlConfig, Rules, Namespace, Stats)
"""Statistics change, but nothing depends on them."""

_REDUCE: Any = {
    **copyreg.dispatch_table,
    **dict.fromkeys(_SHARED, _keep),
    array: _array,
    np.ndarray: _objects,
}


def _freeze(small: Small) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCE
    pickler.dump(small)
    return buffer.getvalue()


def _thaw(blob: bytes) -> Small:
    small = pickle.loads(blob)  # noqa: S301  (our own)
    assert isinstance(small, Small)
    return small


def explore(rules: Rules, clock: Callable[[], float], limits: Limits = Limits()) -> Exploration:
    """Search breadth first until everything was seen, an oracle speaks, or a limit is reached."""
    start, result = clock(), Exploration(states=1)
    small = Small(rules)
    seen = {hash(small.snapshot())}
    blobs: list[bytes] = [_freeze(small)]
    origin: list[tuple[int, Step]] = [(-1, ())]
    level = [0]
    try:
        while level:
            after: list[int] = []
            for state in level:
                if result.states >= limits.states or (state % 64 == 0 and clock() - start > limits.seconds):
                    return result
                blob, blobs[state] = blobs[state], b""
                for step in list(_thaw(blob).steps()):
                    result.transitions += 1
                    try:
                        small = _thaw(blob)
                        small.perform(step, limits.oracles)
                        mark = hash(small.snapshot())
                        if mark in seen:
                            continue
                        frozen = _freeze(small)
                        if small.over and "liveness" in limits.oracles:
                            result.drained += 1
                            _drain(frozen)
                    except WrongError as error:
                        if error.oracle not in limits.oracles:
                            continue
                        history = (*_history(origin, state), step)
                        result.failure = Failure(error.oracle, str(error), history)
                        result.depth = len(history)
                        return result
                    seen.add(mark)
                    blobs.append(frozen)
                    origin.append((state, step))
                    after.append(result.states)
                    result.states += 1
            level = after
            result.depth += bool(level)
        result.complete = True
        return result
    finally:
        result.seconds = clock() - start
        _kept.clear()
        _numbers.clear()


def _drain(blob: bytes) -> None:
    for mode in ("well", "all"):
        try:
            _thaw(blob).world.drain(mode)
        except InvariantError as error:
            raise WrongError("check", str(error)[:400]) from error


def _history(origin: list[tuple[int, Step]], state: int) -> tuple[Step, ...]:
    steps = []
    while state > 0:
        state, step = origin[state]
        steps.append(step)
    return tuple(reversed(steps))


def replay(
    rules: Rules, history: tuple[Step, ...], tell: Callable[[str], object], oracles: frozenset[str] = ORACLES
) -> Small:
    """Run a history again, telling each step; raises where it went wrong."""
    small = Small(rules)
    for number, step in enumerate(history, 1):
        tell(f"{number:3}  {_words(small, step)}")
        small.perform(step, oracles)
    return small


def _words(small: Small, step: Step) -> str:
    verb = step[0]
    if verb in ("run", "done", "stuck"):
        job = small.world.tasks[int(step[1])].job
        spans = "; ".join(
            f"{' '.join(map(name_of, span.keys))} {span.source.name}{list(span.sources)} -> "
            f"{span.target.name}{list(span.targets)}"
            for span in job.spans
        )
        how = "" if verb == "done" else f", pages arriving: {step[3]}"
        after = f" after {list(job.after)}" if job.after else ""
        return f"{verb} {job.kind.value} {job.id} of handle {job.handle} on shard {step[2]}{how}{after} ({spans})"
    if verb == "evict":
        return f"evict one page from {Where(int(step[1])).name}"
    if verb == "lose":
        return f"the store loses {name_of(sorted(small.world.store[0])[int(step[1])])}"
    if len(step) == 1:
        return str(verb)
    return f"{verb} by actor {step[1]} ({small.rules.actors[int(step[1])].prompts})"
