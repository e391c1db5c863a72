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
    assert store.usage()["records"] >= FETCHABLE


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


def test_24_requests_that_do_not_fit_at_once_are_all_fetched_within_the_limit(house, store):
    """Those that find no room are asked again when there is some; none is skipped for good, first come first served."""
    stored(house, store, prompts)
    slots = LIMIT_TOKENS // PAGE_TOKENS
    one = house(store=store, host_slots=slots, endpoint=REQUESTS * FETCHABLE)
    waiting = [one.open(number, keys) for number, keys in enumerate(prompts(one))]
    one.settle()
    done = dict.fromkeys(range(REQUESTS), 0)
    order, waves, deferred = [], 0, 0
    while waiting:
        waves += 1
        one.held = {JobKind.FETCH}  # all that are asked now are in flight together
        asked = []
        for number, request in enumerate(waiting):
            start = done[request.id]
            load = request.load(request.match(start), one.ids(request)[start:])
            if not load.pages:
                deferred += len(waiting) - number
                break
            asked.append((request, load.pages))
            one.settle()
        counts = one.controller.pools()[Where.HOST]
        assert counts["filling"] * PAGE_TOKENS <= LIMIT_TOKENS
        one.release()
        assert asked, "nothing moves"
        for request, pages in asked:
            start = done[request.id]
            assert one.right(request, range(start, start + pages))
            done[request.id] += pages
            if done[request.id] == FETCHABLE:
                order.append(request.id)
                request.close()
        waiting = [request for request in waiting if done[request.id] < FETCHABLE]
        one.settle()
    assert set(done.values()) == {FETCHABLE}
    assert one.controller.stats.loaded[Where.STORE] * PAGE_TOKENS == REQUESTS * 3840 == 92_160
    assert order == sorted(order)
    assert waves >= 6
    assert deferred >= 20
