"""Writing back into a host tier that is full of pinned pages: pages are dropped or kept, never lost track of."""

from __future__ import annotations

import pytest

from hicache.policy import WritePolicy
from hicache.records import JobKind, Where
from hicache.spec import CacheSpec, Group, Plane, State
from hicache.testing.house import PAGE_TOKENS

SPECS = {
    "MHA": CacheSpec((Group("kv", (Plane("k", 2, 64, 2, 32), Plane("v", 2, 64, 2, 32))),), PAGE_TOKENS),
    "MLA": CacheSpec(
        (Group("kv", (Plane("latent", 2, 64, 1, 64), Plane("rope", 2, 64, 1, 16))),), PAGE_TOKENS
    ),
    "state": CacheSpec((Group("state", (Plane("conv", 2, 1, 1, 48),), State()),), PAGE_TOKENS),
}
PINNED = range(9000, 9000 + 8 * 64)


def prompt(number: int) -> range:
    return range(number * 1000, number * 1000 + 256)  # 4 pages


@pytest.fixture(params=list(SPECS))
def full(house, request):
    """Device: 16 dirty, unpinned pages in four prompts. Host: 8 pages, pinned by a load in flight."""
    one = house(
        device_slots=16, host_slots=8, into_host=WritePolicy.BACK, spec=SPECS[request.param], endpoint=64
    )
    one.serve("pinned", one.keys(PINNED))
    one.empty(Where.DEVICE)
    one.held = {JobKind.LOAD}
    one.loading = one.open("loading", one.keys(PINNED))
    assert one.loading.load(one.loading.match(), one.ids(one.loading)).by_tier[Where.HOST] == 8
    one.settle()
    for number in range(4):
        one.serve(number, one.keys(prompt(number)))
    pools = one.controller.pools()
    assert (pools[Where.DEVICE]["ready"], pools[Where.HOST]["ready"]) == (16, 8)
    return one


def test_four_pages_are_freed_and_no_page_is_host_only_without_a_host_slot(full):
    assert full.controller.evict(Where.DEVICE, 4) == 4
    full.settle()
    pools = full.controller.pools()
    assert pools[Where.DEVICE]["free"] == 4
    assert pools[Where.HOST]["ready"] == 8


def test_the_evicted_prompt_is_a_clean_miss(full):
    full.controller.evict(Where.DEVICE, 4)
    found = [full.open(("ask", n), full.keys(prompt(n))).match().pages for n in range(4)]
    assert sum(found) == 12, "four pages went, none of them from the middle of a prompt"
    for number, pages in enumerate(found):
        served = full.open(("ask", number), full.keys(prompt(number)))
        assert served.match().ready == pages


def test_once_the_pins_are_gone_pages_are_written_before_their_slots_are_reused(full):
    full.release()
    full.loading.close()
    full.settle()
    full.held = {JobKind.DOWN}
    assert full.controller.evict(Where.DEVICE, 4) == 0, "a dirty page's slot must wait for its copy"
    full.settle()
    assert full.controller.pools()[Where.DEVICE]["free"] == 0
    full.release()
    assert full.controller.evict(Where.DEVICE, 4) == 4
    assert full.controller.stats.evicted[Where.HOST] == 4, "the pinned prompt made room in the host tier"
    gone = [n for n in range(4) if full.open(("ask", n), full.keys(prompt(n))).match().ready == 4]
    assert gone == list(range(4)), "all four prompts are still whole, one of them in the host tier"
    for number in range(4):
        full.serve(("again", number), full.keys(prompt(number)))  # asserts the bytes


def test_with_every_device_page_pinned_the_answer_is_cannot_at_once(full):
    for number in range(4):
        request = full.open(("pin", number), full.keys(prompt(number)))
        request.load(request.match(), full.ids(request))
    full.settle()
    for _ in range(3):
        assert full.controller.evict(Where.DEVICE, 4) == 0


def test_publishing_without_room_is_skipped_and_counted_and_the_request_goes_on(full):
    for number in range(4):
        request = full.open(("pin", number), full.keys(prompt(number)))
        request.load(request.match(), full.ids(request))
    full.settle()
    before = full.controller.stats.not_saved
    request = full.open("new", full.keys(prompt(7)))
    full.compute(request, range(4))
    assert request.publish(4, full.ids(request)) == 0
    assert full.controller.stats.not_saved == before + 1
    full.release()
    assert request.publish(4, full.ids(request)) == 4, (
        "the cursor stayed and the next call went on from there"
    )
    request.close()
    full.settle()
