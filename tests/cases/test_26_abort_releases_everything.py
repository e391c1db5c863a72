"""A request aborted at any stage leaves nothing behind, and no page is reused before its I/O has ended."""

from __future__ import annotations

import random

import pytest

from hicache.records import Done, JobKind, Where
from hicache.testing.house import POISON

TOKENS = range(256)
PAGES = 4


@pytest.fixture
def one(house, store):
    """An empty cache over a store that has the prompt."""
    made = house(host_slots=256, endpoint=400, store=store)
    made.serve("first", made.keys(TOKENS))
    made.empty()
    return made


def books(one) -> tuple:
    pool = one.controller.pools()[Where.HOST]
    assert pool["filling"] == pool["doomed"] == pool["quarantined"] == 0
    snapshot = one.controller.snapshot()
    return (
        pool["total"] - pool["free"] - pool["ready"],
        sum(one.controller.books.tiers.top.slots.pins),
        snapshot[0][1:3],
    )


def clean(one) -> None:
    """Nothing live, nothing pinned, nobody known; every engine page back."""
    one.settle()
    assert one.controller.idle
    assert books(one) == (0, 0, ((), ()))
    assert len(one.free) == 400


def test_aborted_before_the_look_up_was_taken(one):
    one.open("r", one.keys(TOKENS)).close(abort=True)
    assert one.controller.take_jobs().jobs == (), "the look-up should have been withdrawn"
    clean(one)


def test_aborted_while_the_look_up_runs(one):
    request = one.open("r", one.keys(TOKENS))
    (job,) = one.controller.take_jobs().jobs
    request.close(abort=True)
    one._hear(one.controller.apply([Done(job.id, found=PAGES)]))
    assert request.stored == PAGES, "the late answer was lost"
    clean(one)


def test_aborted_after_a_hit_with_nothing_reserved(one):
    request = one.open("r", one.keys(TOKENS))
    one.settle()
    assert request.match().store == PAGES
    request.close(abort=True)
    clean(one)


@pytest.mark.parametrize("kinds", [{JobKind.FETCH, JobKind.LOAD}, {JobKind.LOAD}])
def test_aborted_with_pages_reserved_or_fetched_but_not_loaded(one, kinds):
    request = one.open("r", one.keys(TOKENS))
    one.settle()
    one.held = kinds
    assert request.load(request.match(), one.ids(request)).pages == PAGES
    one.settle()
    request.close(abort=True)
    one.settle()
    pool = one.controller.pools()[Where.HOST]
    assert pool["free"] <= 256 - PAGES, "memory must not return while its I/O may run"
    one.release()
    clean(one)


def test_aborted_before_anything_was_taken_withdraws_it_all(one):
    request = one.open("r", one.keys(TOKENS))
    one.settle()
    request.load(request.match(), one.ids(request))
    request.close(abort=True)
    assert one.controller.take_jobs().jobs == ()
    clean(one)


def test_aborted_after_the_copies_ended_but_before_that_was_applied(one):
    one.muted = {JobKind.FETCH, JobKind.LOAD}
    request = one.open("r", one.keys(TOKENS))
    one.settle()
    request.load(request.match(), one.ids(request))
    one.settle()
    assert len(one.dones) == 2
    request.close(abort=True)
    one.settle()
    one.release()
    clean(one)


def test_the_engine_pages_of_an_aborted_load_stay_its_own_until_the_copy_ends(one):
    request = one.open("r", one.keys(TOKENS))
    one.settle()
    one.held = {JobKind.LOAD}
    request.load(request.match(), one.ids(request))
    one.settle()
    ids = list(one.ids(request))
    request.close(abort=True)
    one.settle()
    assert not set(ids) & set(one.free)
    one.release()
    assert set(ids) <= set(one.free)
    for slot in ids:
        for plane in one.engine.surface(0).views:
            assert all((view[slot] == POISON).all() for view in plane), "bytes landed after the release"


def test_a_save_that_was_not_taken_is_withdrawn_and_one_that_runs_is_kept(one):
    tokens = range(5000, 5256)
    request = one.open("untaken", one.keys(tokens))
    one.settle()
    one.compute(request, range(PAGES))
    request.publish(PAGES, one.ids(request))
    request.close(abort=True)
    assert one.controller.take_jobs().jobs == ()
    clean(one)
    assert one.controller.pools()[Where.HOST]["ready"] == 0
    one.held = {JobKind.SAVE}
    request = one.open("taken", one.keys(tokens))
    one.settle()
    one.compute(request, range(PAGES))
    request.publish(PAGES, one.ids(request))
    one.settle()
    request.close(abort=True)
    one.release()
    clean(one)
    assert one.controller.pools()[Where.HOST]["ready"] == PAGES


def test_aborting_twice_is_harmless(one):
    request = one.open("r", one.keys(TOKENS))
    request.close(abort=True)
    request.close(abort=True)
    clean(one)


def test_a_request_waiting_for_anothers_fetch_may_abort_alone(one):
    one.held = {JobKind.LOAD}
    first, second = one.open("one", one.keys(TOKENS)), one.open("two", one.keys(TOKENS))
    one.settle()
    assert first.load(first.match(), one.ids(first)).by_tier[Where.STORE] == PAGES
    assert second.load(second.match(), one.ids(second)).by_tier[Where.STORE] == 0, "one fetch serves both"
    first.close(abort=True)
    one.settle()
    one.release()
    assert one.right(second, range(PAGES))
    second.close()
    clean(one)


def test_a_thousand_aborts_at_random_moments_leave_nothing(one):
    seed = 26
    print(f"seed {seed}")
    draw = random.Random(seed)
    prompts = [range(n * 1000, n * 1000 + 64 * (1 + n % 5)) for n in range(6)]
    for tokens in prompts:
        one.serve(tokens.start, one.keys(tokens))
    for number in range(1000):
        one.held = set(draw.sample(list(JobKind), draw.randrange(3)))
        request = one.open(number, one.keys(draw.choice(prompts)))
        stage = draw.randrange(6)
        if stage > 0:
            one.settle()
        if stage > 1:
            request.load(request.match(), one.ids(request))
        if stage > 2:
            one.settle()
        if stage > 3:
            one.compute(request, range(len(request.keys)))
            request.publish(len(request.keys), one.ids(request))
        if stage > 4:
            one.settle()
        request.close(abort=True)
        if draw.random() < 0.3:
            one.controller.evict(Where.HOST, draw.randint(1, 10))
        one.release()
    clean(one)
    long = range(10**6, 10**6 + 200 * 64)
    one.serve("fill", one.keys(long))
    one.empty()
    served = one.serve("two hundred pages", one.keys(long))
    assert served.by_tier[Where.STORE] == served.loaded == 200
    clean(one)
