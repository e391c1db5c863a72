"""The small worlds: as little as each class of fault needs, with everything that may happen there."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.control import ControlConfig
from hicache.policy import WritePolicy
from hicache.records import JobKind, Where
from hicache.testing.small import Actor, Rules

D, H = Where.DEVICE, Where.HOST
COPIES_DOWN = frozenset({JobKind.LOOKUP, JobKind.FETCH, JobKind.DOWN, JobKind.WRITE})


@dataclass(frozen=True)
class Size:
    """How much of a world's space is searched.

    states: all there are, when last counted (0: more than a complete run has seen). quick: in the default run (0: all of them).
    depth: what a complete run that is cut reaches at least.
    """

    states: int = 0
    quick: int = 1000
    depth: int = 0


def memory(**settings) -> ControlConfig:
    return ControlConfig(device_slots=2, host_slots=1, ghosts=8, **settings)


def host(slots: int = 1, **settings) -> ControlConfig:
    return ControlConfig(host_slots=slots, store=True, ghosts=8, **settings)


PAIR = (Actor(("AB",), abort=True), Actor(("A",), abort=True))
ANSWERS = frozenset(JobKind) - {JobKind.LOOKUP}  # a look-up that fails is one that finds less

WORLDS: dict[str, Rules] = {
    # W1: two memory tiers, no store. A chain of two, another page, and the chain again.
    "w1_through": Rules(memory(), (Actor(("AB", "C")),), evictors=(D,)),
    "w1_back": Rules(memory(into_host=WritePolicy.BACK), (Actor(("AB", "C")),), evictors=(D,)),
    "w1_chunks": Rules(
        memory(into_host=WritePolicy.BACK), (Actor(("AB", "C", "AB"), chunk=1),), evictors=(D, H)
    ),
    "w1_chunks_through": Rules(memory(), (Actor(("AB", "C", "AB"), chunk=1),), evictors=(D, H)),
    # W2: one host slot, two requests that may be aborted at every stage; Jobs taken and events heard late.
    "w2_no_store": Rules(
        ControlConfig(host_slots=1), (Actor(("A",), abort=True), Actor(("C",), abort=True)), eager=False
    ),
    "w2_shared": Rules(
        ControlConfig(host_slots=1), (Actor(("A",), abort=True), Actor(("A",), abort=True)), eager=False
    ),
    "w2_writes": Rules(host(2), (Actor(("AB",), chunk=1),), evictors=(H,)),
    "w2": Rules(host(), PAIR, stored=("AB",), store_slots=2, fails=ANSWERS),
    "w2_late": Rules(
        host(), (Actor(("AB",), abort=True, chunk=1),), stored=("A",), store_slots=2, eager=False
    ),
    "w2_selective": Rules(
        host(into_store=WritePolicy.SELECTIVE, into_host=WritePolicy.SELECTIVE),
        (Actor(("A", "C", "A"), abort=True), Actor(("C", "A"))),
        stored=("C",),
        fails=COPIES_DOWN,
    ),
    "w2_store_back": Rules(
        host(2, into_store=WritePolicy.BACK),
        (Actor(("AB", "C", "AB"), chunk=1),),
        evictors=(H,),
        store_slots=3,
    ),
    "w2_prefetch": Rules(
        host(fetch_at="lookup"),
        (Actor(("AB", "C", "AB"), abort=True, preempt=True),),
        stored=("AB", "C"),
        evictors=(H,),
    ),
    "w2_best_effort": Rules(
        host(2, fetch_at="lookup", best_effort=True),
        (Actor(("AB", "AB"), abort=True),),
        stored=("AB",),
        evictors=(H,),
    ),
    "w2_prefetch_two": Rules(host(2, fetch_at="lookup"), PAIR, stored=("AB",), fails=ANSWERS),
    "w2_preempt": Rules(
        ControlConfig(host_slots=1),
        (Actor(("A", "A"), abort=True, preempt=True), Actor(("A",), abort=True)),
        eager=False,
    ),
    "w2_sync": Rules(
        memory(store=True),
        (Actor(("AB",), arriving=False), Actor(("AB",), arriving=False)),
        stored=("AB",),
    ),
    # Pages that the engine has itself come before those it loads: the only reservation that may orphan.
    "w2_computed": Rules(
        host(2),
        (Actor(("AB", "AB"), computed=1), Actor(("A",))),
        stored=("AB",),
        evictors=(H,),
        fails=ANSWERS,
    ),
    # The store loses records and one Job gets stuck, with a late real answer.
    "w2_stuck": Rules(
        host(2, deadlines={JobKind.FETCH: 1.0}),
        (Actor(("A", "A"), abort=True),),
        stored=("A",),
        stuck=COPIES_DOWN,
        stuck_jobs=1,
        loses=True,
    ),
    # W3: two requests on different chains.
    "w3": Rules(memory(), (Actor(("AB",), chunk=1), Actor(("C",), abort=True)), evictors=(D,)),
    # W4: one slot a tier, one stuck Job.
    "w4": Rules(
        ControlConfig(device_slots=1, host_slots=1, store=True, ghosts=8),
        (Actor(("AB",), chunk=1),),
        evictors=(D, H),
        stuck=COPIES_DOWN,
        stuck_jobs=1,
    ),
    "w4_fetch": Rules(
        host(),
        (Actor(("A", "C"), abort=True),),
        stored=("A",),
        fails=frozenset(),
        stuck=frozenset({JobKind.FETCH}),
        stuck_jobs=1,
    ),
    "w4_part": Rules(
        host(2),
        (Actor(("AB", "AB"), abort=True),),
        stored=("AB",),
        evictors=(H,),
        fails=frozenset(),
        stuck=frozenset({JobKind.FETCH}),
        stuck_jobs=1,
    ),
    "w4_back": Rules(
        memory(into_host=WritePolicy.BACK),
        (Actor(("AB", "C"), chunk=1, abort=True),),
        evictors=(D, H),
        stuck=COPIES_DOWN,
        stuck_jobs=1,
    ),
    # W5: two shards, of which one may fail or be late.
    "w5": Rules(
        ControlConfig(device_slots=1, host_slots=1, shards=2, ghosts=8),
        (Actor(("A", "A")),),
        evictors=(D,),
    ),
    "w5_twice": Rules(ControlConfig(host_slots=1, shards=2), (Actor(("A",)),), repeats=True),
    "w5_store": Rules(host(shards=2), (Actor(("A", "A")),), stored=("A",), evictors=(H,)),
    "w5_stuck": Rules(
        host(2, shards=2),
        (Actor(("AB",), abort=True),),
        stored=("AB",),
        fails=frozenset(),
        stuck=frozenset({JobKind.FETCH}),
        stuck_jobs=2,
    ),
}


SIZES: dict[str, Size] = {
    "w1_through": Size(850, quick=0),
    "w1_back": Size(481, quick=0),
    "w1_chunks": Size(16_240),
    "w1_chunks_through": Size(depth=25),
    "w2_no_store": Size(1_276, quick=0),
    "w2_shared": Size(1_673, quick=0),
    "w2_writes": Size(3_095),
    "w2": Size(depth=11),
    "w2_late": Size(736, quick=0),
    "w2_selective": Size(depth=10),
    "w2_store_back": Size(depth=16),
    "w2_prefetch": Size(depth=11),
    "w2_best_effort": Size(depth=16),
    "w2_prefetch_two": Size(depth=8),
    "w2_preempt": Size(depth=11),
    "w2_sync": Size(depth=10),
    "w2_computed": Size(depth=9),
    "w2_stuck": Size(depth=13),
    "w3": Size(depth=16),
    "w4": Size(7_031, quick=800),
    "w4_fetch": Size(1_900, quick=0),
    "w4_part": Size(7_938),
    "w4_back": Size(5_372),
    "w5": Size(8_492, quick=800),
    "w5_twice": Size(49, quick=0),
    "w5_store": Size(depth=11),
    "w5_stuck": Size(5_398),
}
