"""Random engines on real controllers: nothing wrong is ever read, and nothing is left behind."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from driver import Driver, Habits

from hicache.control import ControlConfig
from hicache.policy import WritePolicy as Policy
from hicache.records import JobKind

TIERS = {
    "device": ((1, 0), (Policy.THROUGH,)),
    "host": ((0, 1), (Policy.THROUGH, Policy.SELECTIVE)),
    "both": ((1, 1), (Policy.THROUGH, Policy.SELECTIVE, Policy.BACK)),
}
LEGS = [(tiers, into_host) for tiers, (_, policies) in TIERS.items() for into_host in policies]
STORES = [None, *itertools.product(Policy, ("load", "lookup"))]
DEADLINES = dict.fromkeys((JobKind.LOOKUP, JobKind.FETCH, JobKind.WRITE, JobKind.DOWN), 1.0)


def drive(tiers: str, into_host: Policy, *, large: bool, steps: int, rounds: int) -> Counter[str]:
    """One run for each kind of store."""
    total: Counter[str] = Counter()
    (device, host), _ = TIERS[tiers]
    for round_, (number, store) in itertools.product(range(rounds), enumerate(STORES)):
        into_store, fetch_at = store or (Policy.THROUGH, "load")
        seed = 1_000_000 * round_ + 10_000 * LEGS.index((tiers, into_host)) + 100 * number + large
        size = 24 + 20 * (number % 3) if large else 1 + number % 3
        config = ControlConfig(
            device_slots=device * size,
            host_slots=host * (size + number % 2),
            store=store is not None,
            shards=1 + (number == 3),
            into_host=into_host,
            into_store=into_store,
            fetch_at=fetch_at,
            deadlines=DEADLINES if number % 2 else {},
            ghosts=None if number % 2 else 8,
            kv_events=number % 3 == 0,
        )
        habits = Habits(
            steps=steps,
            live=8 if large else 3,
            blocks=120 if large else 40,
            prompt=12 if large else 4,
            sticking=0.02 if number % 2 else 0.0,
            own_prefix=0.2 if number in (2, 5) else 0.0,
            losing=number in (1, 4),
            detaching=number in (3, 6),
            arriving=number not in (0, 4),
        )
        total += Driver(config, seed, habits).run()
    return total


@pytest.mark.parametrize("large", [False, True], ids=["tiny pools", "pools"])
@pytest.mark.parametrize("tiers,into_host", LEGS, ids=[f"{tiers}-{policy.value}" for tiers, policy in LEGS])
def test_a_random_engine_never_reads_wrong_bytes_and_leaves_nothing_behind(tiers, into_host, large):
    total = drive(tiers, into_host, large=large, steps=1500, rounds=1)
    print(dict(sorted(total.items())))
    assert total["pages hit"] > (200 if large else 20)
    assert min(total[what] for what in ("finished", "aborted", "preempted", "loads", "save")) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("large", [False, True], ids=["tiny pools", "pools"])
@pytest.mark.parametrize("tiers,into_host", LEGS, ids=[f"{tiers}-{policy.value}" for tiers, policy in LEGS])
def test_random_engines_for_long(tiers, into_host, large):
    total = drive(tiers, into_host, large=large, steps=4000, rounds=3)
    print(dict(sorted(total.items())))
