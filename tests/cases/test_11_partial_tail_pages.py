"""Partial pages are neither stored nor loaded, and pages that the engine holds are never written over."""

from __future__ import annotations

import pytest

from hicache.adapters.transformers.engine import attach
from hicache.adapters.transformers.runs import loadable_pages
from hicache.records import JobKind
from hicache.settings import load
from hicache.spec import CacheSpec, Group, Plane
from hicache.testing.house import PAGE_TOKENS, fill
from hicache.testing.model import tiny_model

PROMPT = list(range(1000))


def test_a_tail_that_fills_no_page_is_not_stored(house, store):
    one = house(host_slots=64, store=store)
    first = one.serve("first", one.keys(PROMPT))
    assert (first.loaded, first.computed) == (0, 15), "15 pages are 960 tokens; 40 tokens have no key"
    assert store.usage()["records"] == 15
    second = one.serve("second", one.keys(PROMPT + list(range(5000, 5100))))
    assert (second.loaded, second.computed) == (15, 2), "960 tokens hit, 140 computed"
    assert store.usage()["records"] == 17


def test_pages_the_engine_already_holds_keep_their_bytes(house):
    """The engine has tokens 0..288 of 512, the cache both pages of 256: page 1 is partly the engine's, so it is not loaded."""
    page = 256
    spec = CacheSpec((Group("kv", (Plane("k", 2, page, 1, 16), Plane("v", 2, page, 1, 16))),), page)
    one = house(host_slots=4, spec=spec, endpoint=8)
    keys = one.keys(range(2 * PAGE_TOKENS))  # two pages of whatever size
    one.serve("stored", keys)
    request = one.open("r", keys)
    engine = one.engine.surface(0)
    for slot in one.ids(request):
        fill(engine, slot, 0x5C)
    held_tokens = 288
    for computed, promised in ((-(-held_tokens // page), 0), (1, 1), (0, 2)):
        match = request.match(computed)
        assert (match.start, match.pages) == (computed, promised), "whole pages behind what the engine has"
    assert request.load(request.match(2), []).pages == 0
    one.settle()
    for slot in one.ids(request):
        assert all((view[slot] == 0x5C).all() for plane in engine.views for view in plane)
    loaded = request.load(request.match(1), one.ids(request)[1:])
    one.settle()
    assert loaded.pages == 1
    assert one.right(request, range(1, 2))
    assert all((view[one.ids(request)[0]] == 0x5C).all() for plane in engine.views for view in plane)


def test_a_load_never_names_a_page_before_its_start(house):
    one = house(host_slots=16)
    keys = one.keys(PROMPT)
    one.serve("stored", keys)
    request = one.open("r", keys)
    request.load(request.match(5), one.ids(request)[5:])
    (job,) = [job for job in one.controller.take_jobs().jobs if job.kind is JobKind.LOAD]
    assert job.spans[0].keys == tuple(keys[5:])
    assert set(job.spans[0].targets) == set(one.ids(request)[5:])
    one.worker.submit(type(one.controller.take_jobs())((job,)))
    assert one.worker.drain(None)
    one.settle()


@pytest.mark.parametrize("tokens, pages", [(1, 0), (64, 0), (65, 1), (1023, 15), (1024, 15), (1025, 16)])
def test_at_least_one_token_is_left_to_compute(tokens, pages):
    assert loadable_pages(tokens, 64) == pages


def test_a_prompt_of_whole_pages_is_hit_up_to_its_last_page():
    settings = load(page_tokens=64, host={"bytes": "16MiB"}, store="off")
    with attach(tiny_model(seed=11), settings) as cached:
        prompt = [token % 97 for token in range(1024)]
        assert cached.generate(prompt, 1).sources["computed"] == 1024
        again = cached.generate(prompt, 1)
        assert again.sources == {"device": 0, "host": 960, "store": 0, "computed": 64}
        longer = cached.generate([*prompt, 5], 1)
        assert longer.sources["host"] == 1024


def test_the_answer_is_the_same_each_time():
    settings = load(page_tokens=64, host={"bytes": "16MiB"}, store="off")
    with attach(tiny_model(seed=11), settings) as cached:
        prompt = [token % 97 for token in PROMPT]
        assert len({tuple(cached.generate(prompt, 4).tokens) for _ in range(4)}) == 1
        assert cached.generate(prompt, 1).sources["host"] == 960
