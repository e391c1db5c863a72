"""Pages in a copy that has not ended are neither evicted nor reused, on either end."""

from __future__ import annotations

import random

import pytest

from hicache.policy import WritePolicy
from hicache.records import Done, JobKind, Reason, Where

A, B = range(256), range(1000, 1256)  # prompts of 4 pages


@pytest.fixture
def two(house):
    """A host pool of 8 pages that holds A and B, both unpinned."""
    one = house(host_slots=8)
    one.serve("a", one.keys(A))
    one.serve("b", one.keys(B))
    return one


def start_load(one, tokens, name="loader"):
    request = one.open(name, one.keys(tokens))
    load = request.load(request.match(), one.ids(request))
    assert load.pages == len(request.keys)
    return request


def test_sources_of_a_load_are_never_victims(two):
    two.held = {JobKind.LOAD}
    request = start_load(two, A)
    two.settle()
    assert two.controller.evict(Where.HOST, 6) == 4, "only B's four pages can go"
    assert request.match().ready == 4
    two.release()
    assert two.right(request, range(4)), "A did not arrive intact"
    request.close()
    two.settle()
    assert two.controller.evict(Where.HOST, 8) == 4, "A can go once its load has ended"


def test_targets_of_a_save_are_never_victims(house):
    one = house(host_slots=8)
    one.serve("b", one.keys(B))
    one.held = {JobKind.SAVE}
    request = one.open("a", one.keys(A))
    one.compute(request, range(4))
    assert request.publish(4, one.ids(request)) == 4
    one.settle()
    assert one.controller.evict(Where.HOST, 8) == 4, "only B's pages can go while A's are being filled"
    assert request.match().ready == 0, "a page that is being filled is not ready"
    one.release()
    assert request.match().ready == 4
    request.close()


def test_a_sweep_under_write_back_keeps_what_is_on_its_way(house):
    one = house(device_slots=12, host_slots=4, into_host=WritePolicy.BACK)
    prompts = {"c": range(256), "d": range(1000, 1256), "e": range(2000, 2256)}
    for name, tokens in prompts.items():
        one.serve(name, one.keys(tokens))
    one.held = {JobKind.DOWN}
    assert one.controller.evict(Where.DEVICE, 4) == 0
    one.settle()
    assert [(job.kind, job.pages) for job in one.waiting] == [(JobKind.DOWN, 4)], "C is on its way down"
    assert one.controller.evict(Where.DEVICE, 8) == 0, "D and E wait for the room that C's copy is taking"
    one.release()
    assert one.controller.evict(Where.DEVICE, 4) == 4
    for name, tokens in prompts.items():
        assert one.serve(name + " again", one.keys(tokens)).loaded == 4


@pytest.mark.parametrize("reason", [Reason.FAILED, Reason.CANCELLED, Reason.UPSTREAM])
def test_a_failed_load_gives_its_pins_back(two, reason):
    request = start_load(two, A)
    (job,) = two.controller.take_jobs().jobs
    two.controller.apply([Done(job.id, bad=dict.fromkeys(job.spans[0].keys, reason))])
    two.controller.check()
    request.close()
    two.settle()
    assert two.controller.evict(Where.HOST, 8) == two.controller.pools()[Where.HOST]["total"] - (
        4 if reason is Reason.FAILED else 0  # a page that cannot be read was dropped already
    )


def test_ten_thousand_random_steps_mix_up_no_page(house):
    seed = 27
    print(f"seed {seed}")
    draw = random.Random(seed)
    one = house(device_slots=6, host_slots=8)
    prompts = [range(n * 1000, n * 1000 + 64 * pages) for n, pages in enumerate((1, 2, 3, 4, 4, 3, 2, 1))]
    live, steps = [], 0
    while steps < 10_000:
        steps += 1
        move = draw.randrange(7)
        if move == 0 and len(one.free) > 8 and len(live) < 8:
            live.append(one.open(steps, one.keys(draw.choice(prompts))))
        elif move == 1 and live:
            request = draw.choice(live)
            load = request.load(request.match(), one.ids(request))
            if load.pages:
                events = one.settle()
                good = next(e.good for e in events if getattr(e, "pages", None) == load.pages)
                assert one.right(request, range(good))
        elif move == 2 and live:
            request = draw.choice(live)
            one.compute(request, range(len(request.keys)))
            request.publish(draw.randint(1, len(request.keys)), one.ids(request))
        elif move == 3 and live:
            live.pop(draw.randrange(len(live))).close(abort=draw.random() < 0.5)
        elif move == 4:
            one.controller.evict(draw.choice([Where.DEVICE, Where.HOST]), draw.randint(1, 4))
        else:
            one.settle()
    for request in live:
        request.close()
    one.settle()
    for where, pool in one.controller.pools().items():
        assert pool["free"] + pool["ready"] == pool["total"], where
    one.empty()
    assert all(pool["free"] == pool["total"] for pool in one.controller.pools().values())
