"""A load fails in the middle while others share its prefix: all get what came, and nobody's memory is freed twice."""

from __future__ import annotations

import pytest

from hicache.data.store.base import Miss
from hicache.data.store.memory import MemoryStore
from hicache.records import JobKind, Loaded, Where
from hicache.testing.house import PAGE_TOKENS, SPEC, House

PAGES = 160


class Partial(MemoryStore):
    """A store that has lost everything from a certain page on, though it still says otherwise."""

    lost: frozenset[bytes] = frozenset()

    def read(self, namespace, keys, into):
        found = super().read(namespace, keys, into)
        return [Miss() if key.page in self.lost else one for key, one in zip(keys, found, strict=True)]


@pytest.fixture
def store():
    store = Partial(64 << 20, SPEC.fingerprint())
    first = House(store=store, host_slots=PAGES, endpoint=PAGES)
    first.serve("first", first.keys(range(PAGES * PAGE_TOKENS)))
    first.close()
    return store


@pytest.fixture
def one(house, store):
    return house(store=store, host_slots=2 * PAGES, endpoint=4 * PAGES)


def adds_up(one):
    """Every page is in one place, and every place has one owner; the books' own audit says the rest."""
    one.controller.check()
    for pool in one.controller.pools().values():
        total = pool.pop("total")
        assert sum(pool.values()) == total, pool


def start(one, name, keys):
    request = one.open(name, keys)
    one.settle()
    return request, request.load(request.match(), one.ids(request))


@pytest.mark.parametrize("good", [87, 0, 1, 159])
@pytest.mark.parametrize("release_first", [0, 1, 2])
def test_all_who_share_a_load_get_what_came_of_it(one, store, good, release_first):
    keys = one.keys(range(PAGES * PAGE_TOKENS))
    store.lost = frozenset(keys[good:])
    one.held = {JobKind.FETCH}
    crowd = [start(one, "R1", keys)[0]]
    assert crowd[0].match().ready == 0, "what has not come is not there"
    crowd += [start(one, name, keys)[0] for name in ("R2", "R3")]
    adds_up(one)
    assert store.usage()["records"] == PAGES
    loads = [event for event in one.release() if isinstance(event, Loaded)]
    assert sorted(event.handle for event in loads) == sorted(request.handle for request in crowd)
    assert [event.good for event in loads] == [good] * 3
    adds_up(one)
    for request in crowd:
        assert one.right(request, range(good))
        one.compute(request, range(good, PAGES))
        request.publish(PAGES, one.ids(request))
        one.settle()
        adds_up(one)
    for number in range(3):
        crowd[(release_first + number) % 3].close()
        one.settle()
        adds_up(one)
    store.lost = frozenset()
    assert one.serve("then", keys).loaded == PAGES
    one.empty()
    pools = one.controller.pools()[Where.HOST]
    assert pools["free"] == pools["total"]


@pytest.mark.parametrize("good", [87, 0])
def test_loads_of_overlapping_ranges(one, store, good):
    keys = one.keys(range(PAGES * PAGE_TOKENS))
    store.lost = frozenset(keys[good:])
    one.held = {JobKind.FETCH}
    short, _ = start(one, "short", keys[:100])
    long, load = start(one, "long", keys)
    assert load.pages == PAGES
    adds_up(one)
    events = one.release()
    assert {e.handle: e.good for e in events if isinstance(e, Loaded)} == {
        short.handle: good,
        long.handle: good,
    }
    for request in (short, long):
        assert one.right(request, range(good))
        request.close()
        one.settle()
        adds_up(one)
    assert one.controller.pools()[Where.HOST]["ready"] == good, "the failed tail is given back, once"


def test_many_requests_that_share_a_prefix_read_the_store_once(house, store):
    one = house(store=store, host_slots=PAGES, endpoint=64 * 20)
    keys = one.keys(range(20 * PAGE_TOKENS))
    asked = []
    read = store.read
    store.read = lambda namespace, keys, into: asked.extend(keys) or read(namespace, keys, into)
    one.held = {JobKind.FETCH}
    crowd = [start(one, number, keys)[0] for number in range(64)]
    loads = [event for event in one.release() if isinstance(event, Loaded)]
    assert [event.good for event in loads] == [20] * 64
    assert all(one.right(request, range(20)) for request in crowd)
    assert len(asked) == len(set(asked)) == 20
    for request in crowd:
        request.close()
    one.settle()
    adds_up(one)
