"""Prefetch capacity is never silently zero, and a fetch that finds no room now is made later."""

from __future__ import annotations

import pytest
from resolve_rig import machines, spec_of

from hicache.errors import ConfigError
from hicache.records import JobKind, Where
from hicache.resolve import resolve
from hicache.resolve.request import wishes
from hicache.testing.house import PAGE_TOKENS

LIMIT_TOKENS = 18_227
REQUESTS, FETCHABLE = 24, 60


def prompts(one):
    return [one.keys(range(n << 20, (n << 20) + FETCHABLE * PAGE_TOKENS)) for n in range(REQUESTS)]


def stored(house, store, chains):
    """Fill the store through a cache that ends."""
    first = house(store=store, host_slots=REQUESTS * FETCHABLE, endpoint=64)
    for number, keys in enumerate(chains(first)):
        first.serve(("first", number), keys)
    assert store.usage()["records"]


def test_with_a_host_tier_as_large_as_the_device_a_stored_prompt_is_fetched(house, store):
    stored(house, store, lambda one: [one.keys(range(64 * PAGE_TOKENS))])
    one = house(store=store, device_slots=64, host_slots=64)
    served = one.serve("again", one.keys(range(64 * PAGE_TOKENS)))
    assert served.by_tier[Where.STORE] == served.loaded == 64


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_the_size_of_the_host_tier_beside_the_device_forbids_nothing(ratio):
    there = machines()["cuda"]
    request = wishes({"hicache_ratio": ratio, "store": "file"}, spec_of("mha"), there, device_nbytes=1 << 20)
    assert resolve(request, there).require().size.asked == int(ratio * (1 << 20))


def test_a_host_tier_that_holds_no_page_is_refused_with_both_sizes():
    there = machines()["cuda"]
    request = wishes({"hicache_ratio": 0.001, "store": "file"}, spec_of("mha"), there, device_nbytes=1 << 20)
    with pytest.raises(ConfigError, match=r"1048 bytes .* one page of 4096"):
        resolve(request, there).require()


class Hand:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def crowd(house, store):
    """24 requests of 60 stored pages each, all submitted at once to a fresh cache, and its clock."""
    stored(house, store, prompts)
    one = house(
        store=store,
        host_slots=REQUESTS * FETCHABLE,
        endpoint=REQUESTS * FETCHABLE,
        fetch_at="lookup",
        fetch_pages_max=LIMIT_TOKENS // PAGE_TOKENS,
        fetch_wait_s=10.0,
    )
    clock = one.controller.books.clock = Hand()
    one.held = {JobKind.FETCH}
    requests = [one.open(number, keys) for number, keys in enumerate(prompts(one))]
    one.settle()
    return one, requests, clock


def test_24_requests_that_do_not_fit_at_once_are_all_fetched_within_the_limit(crowd):
    one, waiting, _ = crowd
    order, waves = [], 0
    while waiting:
        waves += 1
        in_flight = [job for job in one.waiting if job.kind is JobKind.FETCH]
        assert 1 <= len(in_flight) <= 4
        assert sum(job.pages for job in in_flight) * PAGE_TOKENS <= LIMIT_TOKENS
        assert sum(request.match().pending for request in waiting) == len(waiting), (
            "those that wait are told to"
        )
        one.release(still={JobKind.FETCH})
        ready = [request for request in waiting if not request.match().pending]
        for request in ready:
            assert request.match().ready == FETCHABLE
            assert request.load(request.match(), one.ids(request)).by_tier[Where.HOST] == FETCHABLE
            one.settle()
            assert one.right(request, range(FETCHABLE))
            order.append(request.id)
            request.close()
            one.settle()
        waiting = [request for request in waiting if request not in ready]
    stats = one.controller.stats
    assert order == list(range(REQUESTS)), "first come, first served"
    assert waves >= 6
    assert stats.deferred >= 20
    assert stats.expired == 0
    assert sum(stats.bad.values()) == 0
    assert one.store.usage()["records"] * PAGE_TOKENS == REQUESTS * 3840 == 92_160


def test_a_request_whose_time_is_over_while_it_waits_goes_on_without(crowd):
    one, requests, clock = crowd
    clock.now = 10.0
    one.settle()
    stats = one.controller.stats
    assert stats.expired == stats.deferred == 20
    late = requests[10]
    assert not late.match().pending
    assert late.match().ready == 0
    assert late.load(late.match(), one.ids(late), arriving=False).pages == 0
    one.release()
    assert [request.match().ready for request in requests[:4]] == [FETCHABLE] * 4
    for request in requests:
        request.close()
    one.settle()


def test_a_waiting_request_that_is_closed_gives_its_turn_away(crowd):
    one, requests, _ = crowd
    for request in requests[4:]:
        request.close(abort=True)
    one.release()
    assert one.controller.idle
    assert sum(request.match().ready for request in requests[:4]) == 4 * FETCHABLE
    for request in requests[:4]:
        request.close()
    one.settle()


def test_a_prefetch_below_the_minimum_is_left_to_the_load(house, store):
    stored(house, store, lambda one: [one.keys(range(8 * PAGE_TOKENS))])
    one = house(store=store, fetch_at="lookup", fetch_pages_min=9)
    request = one.open("r", one.keys(range(8 * PAGE_TOKENS)))
    one.settle()
    assert (request.match().ready, request.match().store) == (0, 8)
    assert request.load(request.match(), one.ids(request)).by_tier[Where.STORE] == 8
    one.settle()
    request.close()
    one.settle()


@pytest.mark.parametrize("device_slots", [0, 64])
@pytest.mark.parametrize("fetch_at", ["load", "lookup"])
def test_a_chain_longer_than_the_host_tier_passes_through_it(house, store, device_slots, fetch_at):
    stored(house, store, lambda one: [one.keys(range(64 * PAGE_TOKENS))])
    one = house(store=store, device_slots=device_slots, host_slots=8, fetch_at=fetch_at)
    request = one.open("again", one.keys(range(64 * PAGE_TOKENS)))
    one.settle()
    got, loads = 0, 0
    while got < 64:
        load = request.load(request.match(got), one.ids(request)[got:])
        assert load.pages, f"lost behind page {got}: {load.ends}"
        one.settle()
        got, loads = got + load.pages, loads + 1
    assert one.right(request, range(64))
    assert loads == 8
    request.publish(64, one.ids(request))
    one.settle()
    assert request.match().ready == (64 if device_slots else request.match().memory)
    request.close()
    one.settle()
    one.empty()
    assert all(pool["free"] == pool["total"] for pool in one.controller.pools().values())
