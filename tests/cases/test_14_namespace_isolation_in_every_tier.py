"""Adapter, salt and tenant separate pages in the device tier, the host tier and the store alike."""

from __future__ import annotations

import pytest

from hicache.keys import Namespace
from hicache.records import Where

BASE = Namespace.of({"weights": "w"})
SPACES = {
    "none": BASE,
    "adapter X": BASE.derive(adapter="X"),
    "salt X": BASE.derive(salt="X"),
    "adapter X, salt X": BASE.derive(adapter="X", salt="X"),
    "adapter ab, salt c": BASE.derive(adapter="ab", salt="c"),
    "adapter a, salt bc": BASE.derive(adapter="a", salt="bc"),
    "text that looks like an adapter": BASE.derive(salt="adapter=X"),
    "number 1": BASE.derive(salt=1),
    "text 1": BASE.derive(salt="1"),
}
TOKENS = range(1024)
PAGES = 16


@pytest.fixture
def filled(house, store):
    """A cache that has served the prompt under every namespace, with room for all of them in each tier."""
    one = house(device_slots=PAGES * len(SPACES), host_slots=PAGES * len(SPACES), store=store)
    for name, space in SPACES.items():
        assert one.serve(name, one.keys(TOKENS, space), space).loaded == 0, f"{name} saw another's pages"
    return one


def hits(one, space) -> dict[Where, int]:
    """What a look at each tier finds for the prompt under ``space``, without filling anything."""
    request = one.open(object(), one.keys(TOKENS, space), space)
    one.settle()
    match = request.match()
    load = request.load(match, one.ids(request))
    one.settle()
    assert one.right(request, range(load.pages))
    request.close(abort=True)
    one.settle()
    return {where: pages for where, pages in load.by_tier.items() if pages}


@pytest.mark.parametrize(
    "dropped, source",
    [((), Where.DEVICE), ((Where.DEVICE,), Where.HOST), ((Where.DEVICE, Where.HOST), Where.STORE)],
)
def test_each_namespace_hits_its_own_pages_and_no_other(filled, dropped, source):
    for name, space in SPACES.items():
        for where in dropped:
            filled.empty(where)
        assert hits(filled, space) == {source: PAGES}, name


def test_a_namespace_that_stored_nothing_hits_nothing_in_any_tier(filled):
    stranger = BASE.derive(salt="nobody")
    assert hits(filled, stranger) == {}
    filled.empty(Where.DEVICE)
    assert hits(filled, stranger) == {}
    filled.empty()
    assert hits(filled, stranger) == {}


def test_an_empty_salt_is_no_salt_everywhere(filled):
    for space in (BASE.derive(salt=""), BASE.derive(salt=None), Namespace.of({"weights": "w", "salt": b""})):
        assert space.root == BASE.root
        assert hits(filled, space) == {Where.DEVICE: PAGES}


def test_keys_of_all_namespaces_differ_from_the_first_page_on(filled):
    keys = [filled.keys(TOKENS, space) for space in SPACES.values()]
    for page in range(PAGES):
        assert len({chain[page] for chain in keys}) == len(SPACES)


def test_the_order_in_which_fields_are_named_does_not_matter():
    assert BASE.derive(adapter="X", salt="Y").root == BASE.derive(salt="Y", adapter="X").root
    assert BASE.derive(adapter="X").derive(salt="Y").root == BASE.derive(salt="Y", adapter="X").root
