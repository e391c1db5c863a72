"""All components of a page, or a shorter prefix: what is promised, loaded and usable is the same number."""

from __future__ import annotations

import pytest

from hicache.data.store.base import Corrupt
from hicache.data.store.memory import MemoryStore
from hicache.keys import RecordKey
from hicache.records import Where
from hicache.spec import CacheSpec, Group, Plane, State, Window, usable
from hicache.testing.house import NAMESPACE, PAGE_TOKENS, House, holds, put

PAGES = 10
MAIN, INDEX = (
    Group("main", (Plane("k", 2, PAGE_TOKENS, 1, 16),)),
    Group("index", (Plane("i", 1, PAGE_TOKENS, 1, 8),)),
)
DRAFT = Group("draft", (Plane("d", 1, PAGE_TOKENS, 1, 16),))
WINDOW = Group("window", (Plane("w", 1, PAGE_TOKENS, 1, 16),), Window(4 * PAGE_TOKENS))
STATE = Group("state", (Plane("s", 1, 1, 1, 64),), State())


def row(pages):
    return [page in set(pages) for page in range(PAGES)]


@pytest.mark.parametrize(
    "groups,present,right",
    [
        ((MAIN, INDEX), (range(10), range(7)), 7),
        ((MAIN, WINDOW), (range(10), (6, 7, 8)), 0),
        ((MAIN, WINDOW), (range(10), range(3, 9)), 9),
        ((MAIN, STATE), (range(10), (3, 7)), 8),
        ((MAIN, INDEX, STATE), (range(10), range(7), (3, 7)), 4),
        ((MAIN, DRAFT), (range(10), range(6)), 6),
    ],
)
def test_which_prefix_a_set_of_components_makes(groups, present, right):
    assert usable(CacheSpec(groups, PAGE_TOKENS), [row(pages) for pages in present]) == right


class Whole(House):
    """A house whose engine has a page of every group; a group's bytes follow from the key and the group."""

    def compute(self, request, pages):
        for group, surface in enumerate(self._surfaces()):
            for page in pages:
                put(surface, self.ids(request)[page], self._name(request.keys[page], group))

    def right(self, request, pages):
        ids = self.ids(request)
        return all(
            holds(surface, ids[page], self._name(request.keys[page], group))
            for group, surface in enumerate(self._surfaces())
            for page in pages
        )

    def _surfaces(self):
        return [self.engine.surface(group) for group in range(len(self.engine.spec.groups))]

    @staticmethod
    def _name(key, group):
        return bytes([group]) + key


class Half(MemoryStore):
    """A store whose records of one group are there when asked, and cannot be read from a certain page on."""

    group, upto, pages = 1, 7, ()

    def read(self, namespace, keys, into):
        found = super().read(namespace, keys, into)
        bad = set(self.pages[self.upto :])
        return [
            Corrupt("payload") if key.page in bad and key.group == self.group else one
            for key, one in zip(keys, found, strict=True)
        ]


@pytest.fixture(params=["page_first", "layer_first"])
def warm(request):
    """A house with an empty memory and a store that has all components of ten pages; and their keys."""
    spec = CacheSpec((MAIN, INDEX, DRAFT), PAGE_TOKENS)
    store = Half(64 << 20, spec.fingerprint())
    one = Whole(store=store, spec=spec, layout=request.param)
    keys = one.keys(range(PAGES * PAGE_TOKENS))
    one.serve("first", keys)
    one.empty()
    yield one, keys
    one.close()


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("lost", [[7, 8, 9], [9], [0], [4]])
def test_a_component_lost_before_the_look_up_shortens_what_is_promised_and_loaded(warm, group, lost):
    one, keys = warm
    one.store.delete([RecordKey(keys[page], group) for page in reversed(lost)])
    request = one.open("again", keys)
    one.settle()
    assert request.match().pages == lost[0]
    request.close(abort=True)
    one.settle()
    again = one.serve("then", keys)
    assert (again.loaded, again.computed) == (lost[0], PAGES - lost[0])
    one.empty()
    assert one.serve("mended", keys).by_tier[Where.STORE] == PAGES, "what was computed has filled the hole"


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_component_that_cannot_be_read_shortens_the_prefix_and_nothing_of_the_rest_is_kept(warm, group):
    one, keys = warm
    one.store.group, one.store.pages = group, keys
    request = one.open("again", keys)
    one.settle()
    assert request.match().pages == PAGES, "it is there when asked"
    load = request.load(request.match(), one.ids(request))
    (loaded,) = (event for event in one.settle() if type(event).__name__ == "Loaded")
    assert (load.pages, loaded.good) == (PAGES, 7)
    assert one.right(request, range(7))
    assert request.match().pages == 7, "what could not be read is not promised again"
    pools = one.controller.pools()[Where.HOST]
    assert (pools["ready"], pools["free"]) == (7, pools["total"] - 7), "nothing of the unusable part is kept"
    request.close()
    one.settle()


def test_a_store_that_never_had_a_component_gives_nothing(warm):
    one, keys = warm
    one.store.delete([RecordKey(key, 1) for key in reversed(keys)])
    request = one.open("again", keys)
    one.settle()
    assert request.match().pages == 0
    request.close()
    one.settle()


def test_records_of_another_set_of_components_are_never_a_hit():
    less = CacheSpec((MAIN,), PAGE_TOKENS)
    more = CacheSpec((MAIN, INDEX), PAGE_TOKENS)
    store = MemoryStore(64 << 20, less.fingerprint())
    one = Whole(store=store, spec=less)
    keys = one.keys(range(PAGES * PAGE_TOKENS))
    one.serve("first", keys)
    one.close()
    assert all(store.contains(NAMESPACE, [RecordKey(key, 0) for key in keys]))
    other = Whole(store=store, spec=more)
    assert other.serve("again", keys).loaded == 0
    other.close()
