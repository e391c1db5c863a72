"""One controller, several shards: a page counts on all of them or on none, whatever their answers and their order."""

from __future__ import annotations

import pytest
from driven import SPACE, controller, keys
from driver import Driver, Habits

from hicache.control import ControlConfig
from hicache.records import Done, JobKind, Loaded, Reason, Where

RANKS = pytest.mark.parametrize("shards", [2, 4])


def answer(control, jobs, bad=None, found=None, order=None):
    """Every shard's Done of these Jobs; ``bad``: (kind, shard) -> keys. Applied in ``order`` of the shards."""
    events = []
    for job in jobs:
        for shard in order or range(control.books.config.shards):
            wrong = dict.fromkeys((bad or {}).get((job.kind, shard), ()), Reason.FAILED)
            control_found = (found or {}).get(shard, 0) if job.kind is JobKind.LOOKUP else 0
            events += control.apply([Done(job.id, shard, wrong, control_found)])
            control.check()
    return events


def settled(control, **how):
    events = []
    while jobs := control.take_jobs().jobs:
        events += answer(control, jobs, **how)
    return events


@RANKS
@pytest.mark.parametrize("backwards", [False, True])
def test_the_least_of_what_the_ranks_have_is_used_by_all(shards, backwards):
    """1 and 2: rank 0 has two leading pages, rank 1 one; or 1,092 and 708."""
    for counts, right in (((2, 1), 1), ((1092, 708), 708), ((5, 0), 0)):
        control = controller(store=True, shards=shards, host_slots=2048)
        request = control.open("r", SPACE, keys(max(counts)))
        order = list(range(shards))[:: -1 if backwards else 1]
        settled(control, found={n: counts[n % 2] for n in range(shards)}, order=order)
        assert request.match().pages == right
        load = request.load(request.match(), range(max(counts)))
        assert load.pages == right
        jobs = control.take_jobs().jobs
        assert all(job.pages == right for job in jobs), "no rank is asked for another number of pages"


@RANKS
@pytest.mark.parametrize("bad_shard", [0, 1])
def test_a_copy_that_fails_on_one_rank_is_kept_by_nobody(shards, bad_shard):
    control = controller(shards=shards)
    request = control.open("r", SPACE, keys(4))
    request.publish(4, range(4))
    settled(control, bad={(JobKind.SAVE, bad_shard): keys(4)[2:]})
    assert request.match().ready == 2
    pools = control.pools()[Where.HOST]
    assert (pools["ready"], pools["free"]) == (2, pools["total"] - 2)


@RANKS
def test_a_file_that_one_rank_has_lost_shortens_the_prefix_on_all(shards):
    control = controller(store=True, shards=shards)
    request = control.open("r", SPACE, keys(6))
    settled(control, found=dict.fromkeys(range(shards), 6))
    request.load(request.match(), range(6))
    fetch, load = control.take_jobs().jobs
    answer(control, [fetch], bad={(JobKind.FETCH, 1): keys(6)[3:4]})
    events = answer(control, [load], bad={(JobKind.LOAD, 1): keys(6)[3:4]})
    (loaded,) = (event for event in events if isinstance(event, Loaded))
    assert loaded.good == 3
    assert request.match().memory == 3, "pages behind the hole are there, and of no use"
    assert request.match().ready == 3


@RANKS
def test_nothing_counts_before_the_last_rank_has_answered(shards):
    control = controller(shards=shards)
    request = control.open("r", SPACE, keys(4))
    request.publish(4, range(4))
    (save,) = control.take_jobs().jobs
    for shard in range(shards - 1):
        control.apply([Done(save.id, shard)])
        assert request.match().ready == 0
    control.apply([Done(save.id, 0), Done(save.id, 0)])
    assert request.match().ready == 0, "an answer that comes twice is no other rank's"
    control.apply([Done(save.id, shards - 1)])
    assert request.match().ready == 4


@RANKS
def test_random_delays_and_failures_on_any_rank_leave_the_ranks_alike(shards):
    """10,000 ticks; each shard moves its own bytes, so a page that only some of them have would show."""
    seed = 35
    print(f"seed {seed}")
    config = ControlConfig(device_slots=12, host_slots=16, store=True, shards=shards)
    habits = Habits(steps=10_000, live=6, blocks=60, failing_store=0.1, failing_copy=0.05, sticking=0.01)
    counts = Driver(config, seed, habits).run()
    print(dict(sorted(counts.items())))
    assert counts["pages hit"] > 100
    assert min(counts[what] for what in ("finished", "aborted", "loads", "stuck")) > 10
