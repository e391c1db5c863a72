"""However many pages a store holds, its directory stays small and a look-up costs the same."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from segments import NAMESPACE, cap_of, house_on, house_store

from hicache.data.store.base import Record, WriteOutcome
from hicache.data.store.segment import Files, SegmentStore
from hicache.keys import RecordKey
from hicache.testing.house import PAGE_TOKENS

PAGE_BYTES = 256
SPARE = 200
PROMPT_PAGES = 128
SMALL, LARGE = 1_000, 200_000
ROOT = Path(__file__).parents[2]

_listed: list[str] | None = None


def _watch(event: str, arguments: tuple) -> None:
    if _listed is not None and event in ("os.listdir", "os.scandir"):
        _listed.append(str(arguments[0]))


sys.addaudithook(_watch)


@contextmanager
def listings() -> Iterator[list[str]]:
    """Every directory that is listed in the block."""
    global _listed  # noqa: PLW0603  (a hook of the interpreter can be added, but never removed)
    _listed = seen = []
    try:
        yield seen
    finally:
        _listed = None


def prompt(number: int, pages: int = PROMPT_PAGES) -> list[Record]:
    """One chain of tiny pages."""
    keys = [RecordKey(hashlib.sha256(b"%d/%d" % (number, page)).digest()) for page in range(pages)]
    payload = [memoryview(bytes(PAGE_BYTES))]
    return [Record(key, keys[i - 1] if i else None, "page_first", payload) for i, key in enumerate(keys)]


class Hasty(Files):
    """Does not wait for the disk: for filling."""

    def sync(self, fd):
        """Later, by the system."""


def fill(path: Path, population: int) -> int:
    """Store so many pages in prompts of 128; returns the cap, under which SPARE more fit."""
    cap = cap_of(population + SPARE, PAGE_BYTES)
    store = SegmentStore(path, cap, files=Hasty())
    for first in range(0, population // PROMPT_PAGES, 8):
        batch = [r for n in range(first, first + 8) for r in prompt(n)]
        outcomes = store.write(NAMESPACE, batch[: population - first * PROMPT_PAGES])
        assert set(outcomes) == {WriteOutcome.STORED}
    store.close()
    return cap


@pytest.fixture(
    params=[SMALL, 5_000, pytest.param(LARGE, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    scope="module",
)
def filled(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "store"
    return path, fill(path, request.param)


def test_no_directory_holds_many_entries(filled):
    path, _ = filled
    for folder, below, files in os.walk(path):
        assert len(below) + len(files) <= 100, folder
        assert not below, "no directories that could pile up"


def test_looking_up_storing_and_evicting_list_no_directory(filled):
    path, cap = filled
    store = SegmentStore(path, cap)
    room = SegmentStore.capacity(cap, PAGE_BYTES) - store.usage()["records"]
    with listings() as listed:
        assert store.contains(NAMESPACE, [r.key for r in prompt(3)]) == [True] * PROMPT_PAGES
        missing = [*prompt(4)[:3], *prompt(-1)]
        assert store.contains(NAMESPACE, [r.key for r in missing])[:4] == [True] * 3 + [False]
        for start in range(0, room + 100, 100):
            assert store.write(NAMESPACE, prompt(-2 - start, 100)) == [WriteOutcome.STORED] * 100
        assert store.usage()["evicted"] >= 100
    assert listed == []
    store.close()
    with listings() as listed:
        SegmentStore(path, cap).close()
    assert listed, "the watcher sees what an open does"


def test_a_miss_at_page_3_stops_the_look_up_early(tmp_path):
    store = house_store(tmp_path / "store", 256)
    with house_on(store) as one:
        one.serve("first pages", one.keys(range(3 * PAGE_TOKENS)))
    asked = []
    contains = store.contains
    store.contains = lambda namespace, keys: asked.append(len(keys)) or contains(namespace, keys)
    with house_on(store, endpoint=PROMPT_PAGES, host_slots=PROMPT_PAGES) as one:
        assert one.serve("long", one.keys(range(PROMPT_PAGES * PAGE_TOKENS))).loaded == 3
    assert sum(asked) <= 4 + 16
    store.close()


def test_the_index_of_many_pages_is_as_shallow_as_that_of_few(filled):
    path, cap = filled
    store = SegmentStore(path, cap)
    with store.directory.env.begin() as txn:
        assert txn.stat(store.directory.tables.rec)["depth"] <= 4, "pages that one look-up touches"
    store.close()


def test_a_restart_serves_look_ups_at_once(filled):
    path, cap = filled
    start = time.perf_counter()
    store = SegmentStore(path, cap)
    assert store.contains(NAMESPACE, [prompt(2)[0].key]) == [True]
    assert time.perf_counter() - start <= 5.0
    store.check()
    store.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_look_up_takes_at_most_twice_the_time_among_200_times_as_many_pages(tmp_path):
    keys = [r.key for r in prompt(1)]
    stores = {
        population: SegmentStore(path, fill(path, population))
        for population in (SMALL, LARGE)
        for path in [tmp_path / str(population)]
    }
    best = dict.fromkeys(stores, float("inf"))
    for _ in range(500):
        for population, store in stores.items():  # in turn, so that a busy machine is as busy for both
            start = time.perf_counter()
            assert all(store.contains(NAMESPACE, keys))
            best[population] = min(best[population], time.perf_counter() - start)
    print("seconds of a look-up of 128 pages, at best:", best)
    assert best[LARGE] <= 2 * best[SMALL]
    for store in stores.values():
        store.close()


def test_what_a_page_costs_in_files_is_documented():
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "format.md").read_text(encoding="utf-8"))
    assert "A page takes no file of its own" in text
