"""A whole cache on a store that lies, fails and dies: no wrong byte, nothing lost in the books, and little time."""

from __future__ import annotations

import random

import pytest

from hicache.data.store.guard import CLOSED, OPEN, Guard, Limits
from hicache.data.store.memory import MemoryStore
from hicache.records import Where
from hicache.testing.faulty_store import FaultyStore
from hicache.testing.house import PAGE_TOKENS, SPEC, House

TOXICS = ("short", "torn", "flipped", "swapped", "full", "raising")
MIXED = dict.fromkeys(TOXICS, 0.03)
SEED = 65


class Hand:
    now = 0.0

    def __call__(self):
        return self.now


def cache_on(plan, seed, clock):
    store = MemoryStore(8 << 20, SPEC.fingerprint())
    faulty = FaultyStore(store, plan, seed)
    guard = Guard(faulty, SPEC.fingerprint(), clock, Limits(pause_s=1.0, negative_s=2.0))
    return House(store=guard, device_slots=24, host_slots=40), faulty


def drive(plan, seed, requests):
    """Serve random requests that share beginnings; each is looked at byte by byte."""
    print(f"seed {seed} {plan}")
    draw, clock = random.Random(seed), Hand()
    one, faulty = cache_on(plan, seed, clock)
    from_store = pages = 0
    for number in range(requests):
        clock.now += 0.1
        document, length = draw.randrange(12), draw.randint(1, 10)
        keys = one.keys(range(document << 20, (document << 20) + length * PAGE_TOKENS))
        served = one.serve(number, keys)
        assert served.loaded + served.computed == length
        assert sum(served.by_tier.values()) >= served.loaded
        pages += length
        from_store += served.by_tier[Where.STORE]
        for pool in one.controller.pools().values():
            assert pool["free"] + pool["ready"] == pool["total"], "at rest nothing is on its way"
    one.empty()
    assert all(pool["free"] == pool["total"] for pool in one.controller.pools().values())
    counters = one.worker.counters
    assert sum(counters.jobs.values()) > requests
    one.close()
    return faulty, from_store, pages


@pytest.mark.parametrize("toxic", [*TOXICS, "mixed"])
def test_a_store_that_lies_or_fails_never_gives_a_wrong_byte(toxic):
    plan = MIXED if toxic == "mixed" else {toxic: 0.1}
    faulty, from_store, pages = drive(plan, SEED, 400)
    assert set(faulty.seen) == set(plan), "each fault has come about"
    assert from_store > pages // 20, "and the store was of use all the same"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_lies_and_fails_for_long(seed):
    faulty, _, pages = drive(MIXED, 1000 + seed, 10_000)
    assert sum(faulty.seen.values()) > pages // 100


def test_a_dead_store_costs_no_more_than_its_breakers_budget():
    clock = Hand()
    one, faulty = cache_on({"dead": 1.0}, SEED, clock)
    calls = []
    before = faulty._before
    faulty._before = lambda: calls.append(clock.now) or before()
    limits = one.store.limits
    for number in range(50):
        keys = one.keys(range(number << 20, (number << 20) + 4 * PAGE_TOKENS))
        assert one.serve(number, keys).loaded == 0
    budget = 2 * limits.failures * (1 + limits.retries)  # of reads and of writes
    assert len(calls) <= budget
    assert (one.store.reads.state, one.store.writes.state) == (OPEN, OPEN)
    clock.now += limits.pause_s
    for number in range(50, 100):
        keys = one.keys(range(number << 20, (number << 20) + 4 * PAGE_TOKENS))
        assert one.serve(number, keys).loaded == 0
    assert len(calls) <= budget + 2 * (1 + limits.retries), "one trial a pause"
    assert one.serve("memory", keys).by_tier[Where.DEVICE] == 4, "memory goes on"
    one.close()


def test_a_store_that_recovers_is_used_again():
    clock = Hand()
    one, faulty = cache_on({"raising": 1.0}, SEED, clock)
    keys = one.keys(range(4 * PAGE_TOKENS))
    one.serve("a", keys)
    one.serve("b", one.keys(range(1 << 20, (1 << 20) + 4 * PAGE_TOKENS)))
    one.serve("c", one.keys(range(2 << 20, (2 << 20) + 4 * PAGE_TOKENS)))
    assert (one.store.reads.state, one.store.writes.state) == (OPEN, OPEN)
    faulty._plan = {}
    clock.now += 1.0
    one.empty()
    one.serve("d", keys)  # the trials: a look-up, a write
    assert (one.store.reads.state, one.store.writes.state) == (CLOSED, CLOSED)
    one.empty()
    one.serve("e", keys)
    one.empty()
    assert one.serve("f", keys).by_tier[Where.STORE] == 4
    one.close()
