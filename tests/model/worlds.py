"""The small worlds: as little as each class of fault needs, with everything that may happen there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hicache.control import ControlConfig
from hicache.policy import WritePolicy
from hicache.records import JobKind, Where
from hicache.testing.small import Actor, Rules

D, H = Where.DEVICE, Where.HOST
COPIES_DOWN = frozenset({JobKind.LOOKUP, JobKind.FETCH, JobKind.DOWN, JobKind.WRITE})


@dataclass(frozen=True)
class SmallWorld:
    """Rules, and how much of them a default run and a complete run see.

    states: the size of the whole space (0: unknown). quick: the states of the default run (0: all). depth: what a
    run that is cut must reach.
    """

    rules: Rules
    states: int = 0
    quick: int = 0
    depth: int = 0


def memory(**settings) -> ControlConfig:
    return ControlConfig(device_slots=2, host_slots=1, ghosts=8, **settings)


def host(slots: int = 1, **settings) -> ControlConfig:
    return ControlConfig(host_slots=slots, store=True, ghosts=8, **settings)


PAIR = (Actor(("AB",), abort=True), Actor(("AB",), abort=True))

WORLDS: dict[str, SmallWorld] = {
    # W1: two memory tiers, no store. A chain of two, another page, and the chain again.
    "w1_through": SmallWorld(Rules(memory(), (Actor(("AB", "C")),), evictors=(D,))),
    "w1_back": SmallWorld(Rules(memory(into_host=WritePolicy.BACK), (Actor(("AB", "C")),), evictors=(D,))),
    "w1_chunks": SmallWorld(
        Rules(memory(into_host=WritePolicy.BACK), (Actor(("AB", "C", "AB"), chunk=1),), evictors=(D, H))
    ),
    "w1_chunks_through": SmallWorld(Rules(memory(), (Actor(("AB", "C", "AB"), chunk=1),), evictors=(D, H))),
    # W2: one host slot, two requests that may be aborted at every stage; Jobs taken and events heard late.
    "w2_no_store": SmallWorld(
        Rules(
            ControlConfig(host_slots=1), (Actor(("A",), abort=True), Actor(("C",), abort=True)), eager=False
        )
    ),
    "w2_shared": SmallWorld(
        Rules(ControlConfig(host_slots=1), (Actor(("A",), abort=True), Actor(("A",), abort=True)), eager=False)
    ),
    "w2_writes": SmallWorld(Rules(host(2), (Actor(("AB",), chunk=1),), evictors=(H,))),
    "w2": SmallWorld(Rules(host(), PAIR, stored=("AB",), store_slots=2)),
    "w2_late": SmallWorld(
        Rules(host(), (Actor(("AB",), abort=True, chunk=1),), stored=("A",), store_slots=2, eager=False)
    ),
    "w2_selective": SmallWorld(
        Rules(
            host(into_store=WritePolicy.SELECTIVE, into_host=WritePolicy.SELECTIVE),
            (Actor(("A", "C", "A"), abort=True), Actor(("C", "A"))),
            stored=("C",),
            fails=COPIES_DOWN,
        )
    ),
    "w2_store_back": SmallWorld(
        Rules(
            host(2, into_store=WritePolicy.BACK),
            (Actor(("AB", "C", "AB"), chunk=1),),
            evictors=(H,),
            store_slots=3,
        )
    ),
    "w2_prefetch": SmallWorld(
        Rules(
            host(fetch_at="lookup"),
            (Actor(("AB", "C", "AB"), abort=True, preempt=True),),
            stored=("AB", "C"),
            evictors=(H,),
        )
    ),
    "w2_prefetch_two": SmallWorld(Rules(host(2, fetch_at="lookup"), PAIR, stored=("AB",))),
    "w2_preempt": SmallWorld(
        Rules(
            ControlConfig(host_slots=1),
            (Actor(("A", "A"), abort=True, preempt=True), Actor(("A",), abort=True)),
            eager=False,
        )
    ),
    "w2_sync": SmallWorld(
        Rules(
            memory(store=True),
            (Actor(("AB",), arriving=False), Actor(("AB",), arriving=False)),
            stored=("AB",),
        )
    ),
    # Pages that the engine has itself come before those it loads: the only reservation that may orphan.
    "w2_computed": SmallWorld(
        Rules(host(2), (Actor(("ABC", "AB"), computed=1), Actor(("A",))), stored=("ABC",), evictors=(H,))
    ),
    # The store loses records and one Job gets stuck, with a late real answer.
    "w2_stuck": SmallWorld(
        Rules(
            host(2, deadlines={JobKind.FETCH: 1.0}),
            (Actor(("A", "A"), abort=True),),
            stored=("A",),
            stuck=COPIES_DOWN,
            stuck_jobs=1,
            loses=True,
        )
    ),
    # W3: two requests on different chains.
    "w3": SmallWorld(
        Rules(memory(store=True), (Actor(("AB",), chunk=1), Actor(("C",), abort=True)), evictors=(D,))
    ),
    # W4: one slot a tier, one stuck Job.
    "w4": SmallWorld(
        Rules(
            ControlConfig(device_slots=1, host_slots=1, store=True, ghosts=8),
            (Actor(("AB",), chunk=1),),
            evictors=(D, H),
            stuck=COPIES_DOWN,
            stuck_jobs=1,
        )
    ),
    "w4_fetch": SmallWorld(
        Rules(
            host(),
            (Actor(("A", "C"), abort=True),),
            stored=("A",),
            fails=frozenset(),
            stuck=frozenset({JobKind.FETCH}),
            stuck_jobs=1,
        )
    ),
    "w4_back": SmallWorld(
        Rules(
            memory(into_host=WritePolicy.BACK),
            (Actor(("AB", "C"), chunk=1, abort=True),),
            evictors=(D, H),
            stuck=COPIES_DOWN,
            stuck_jobs=1,
        )
    ),
    # W5: two shards, of which one may fail or be late.
    "w5": SmallWorld(
        Rules(
            ControlConfig(device_slots=1, host_slots=1, shards=2, ghosts=8),
            (Actor(("A", "A")),),
            evictors=(D,),
        )
    ),
    "w5_twice": SmallWorld(
        Rules(ControlConfig(host_slots=1, shards=2), (Actor(("A",)),), repeats=True)
    ),
    "w5_store": SmallWorld(Rules(host(shards=2), (Actor(("A", "A")),), stored=("A",), evictors=(H,))),
}


def only(name: str, **changes) -> Rules:
    """A world with other rules."""
    return replace(WORLDS[name].rules, **changes)
