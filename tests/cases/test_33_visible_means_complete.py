"""A page is visible only when its bytes are complete, and a failure is never completion."""

from __future__ import annotations

import random
import threading

import pytest

from hicache.data.copy.reference import ReferenceEngine
from hicache.data.store.base import Corrupt, Miss
from hicache.data.store.memory import MemoryStore
from hicache.errors import UnavailableError
from hicache.records import Done, JobKind, Loaded, Reason, Where
from hicache.testing.house import PATIENCE_S, SPEC, holds

TOKENS = range(640)  # 10 pages


class Slow(ReferenceEngine):
    """Copies one page and one layer at a time, and lets a watcher look between two of them."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.looked = threading.Semaphore(0)
        self.watched = False

    def submit(self, source, source_slots, target, target_slots, *, layers=None):
        ticket = super().submit(source, [], target, [])
        for a, b in zip(source_slots, target_slots, strict=True):
            for layer in range(len(source.views[0])):
                if self.watched:
                    self.looked.release()
                    assert self.turn.acquire(timeout=PATIENCE_S)
                ticket = super().submit(source, [a], target, [b], layers=range(layer, layer + 1))
        return ticket


def test_pages_reported_complete_are_complete_at_that_moment(house):
    engine = Slow()
    one = house(host_slots=10, engine=engine)
    seed = 33
    print(f"seed {seed}")
    draw = random.Random(seed)
    for round_ in range(200):
        tokens = range(round_ * 1000, round_ * 1000 + 64 * draw.randint(1, 4))
        request = one.open(round_, one.keys(tokens))
        pages = len(request.keys)
        one.compute(request, range(pages))
        request.publish(pages, one.ids(request))
        engine.watched = True
        one.worker.submit(one.controller.take_jobs())
        for _ in range(2 * pages):
            assert engine.looked.acquire(timeout=PATIENCE_S)
            one.controller.apply(one.worker.poll())
            ready = request.match().ready
            at = one.controller.books.tiers.top.at
            for key in request.keys[:ready]:
                assert holds(one.pools[Where.HOST].surface(0), at[one.controller.books.index.find(key)], key)
            engine.turn.release()
        engine.watched = False
        assert one.worker.drain(None)
        one.settle()
        assert request.match().ready == pages
        request.close()
        one.settle()


class Holes(MemoryStore):
    """Answers some pages of a chain in a chosen wrong way."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.wrong: dict[bytes, str] = {}

    def read(self, namespace, keys, into):
        kinds = {self.wrong.get(key.page) for key in keys}
        if "raise" in kinds:
            raise UnavailableError("the store is gone")
        outcomes = super().read(namespace, keys, into)
        for i, key in enumerate(keys):
            if self.wrong.get(key.page) == "miss":
                outcomes[i] = Miss("absent")
            elif self.wrong.get(key.page) == "corrupt":
                outcomes[i] = Corrupt("flipped")
        if "short" in kinds:
            outcomes = outcomes[: next(i for i, key in enumerate(keys) if key.page in self.wrong)]
        return outcomes


@pytest.mark.parametrize("how", ["miss", "corrupt", "short", "raise"])
def test_a_load_with_failed_pages_is_told_as_a_shorter_prefix(house, how):
    store = Holes(64 << 20, SPEC.fingerprint())
    one = house(host_slots=16, store=store, endpoint=128)
    keys = one.keys(TOKENS)
    one.serve("first", keys)
    one.empty()
    store.wrong = {keys[3]: how, keys[7]: how}
    request = one.open("r", keys)
    one.settle()
    assert request.load(request.match(), one.ids(request)).pages == 10
    (loaded,) = [event for event in one.settle() if isinstance(event, Loaded)]
    good = 0 if how == "raise" else 3
    assert (loaded.pages, loaded.good) == (10, good), "3 of 10 is what the request is told"
    assert one.right(request, range(good))
    assert request.match().pages == good
    pool = one.controller.pools()[Where.HOST]
    assert pool["filling"] == pool["doomed"] == 0
    assert pool["free"] + pool["ready"] == pool["total"]
    readable = {
        index for index, key in enumerate(keys) if one.open(index, keys[: index + 1]).match().ready > index
    }
    assert readable == set(range(good))
    store.wrong = {}
    request.close()
    assert one.serve("afterwards", keys).loaded >= good  # asserts every loaded byte


def test_notices_out_of_order_and_twice_count_once(house):
    one = house(device_slots=16, host_slots=16)
    request = one.open("r", one.keys(TOKENS))
    one.compute(request, range(10))
    for upto in (3, 6, 10):
        request.publish(upto, one.ids(request))
    jobs = one.controller.take_jobs().jobs
    saves = [job for job in jobs if job.kind is JobKind.SAVE]
    one.worker.submit(type(one.controller.take_jobs())(jobs))
    assert one.worker.drain(None)
    dones = {done.job: done for done in one.worker.poll()}
    for save, ready in (
        (saves[2], 0),
        (saves[2], 0),
        (saves[0], 3),
        (saves[0], 3),
        (saves[1], 10),
        (saves[1], 10),
    ):
        one.controller.apply([dones[save.id]])
        assert request.match().ready == ready, "progress is the contiguous run of complete pages"
        one.controller.check()
    one.controller.apply([done for done in dones.values() for _ in range(2)])
    request.close()
    one.settle()


@pytest.mark.parametrize("kind, where", [(JobKind.SAVE, Where.DEVICE), (JobKind.DOWN, Where.HOST)])
def test_a_copy_that_fails_after_its_page_was_registered_is_rolled_back(house, kind, where):
    one = house(device_slots=16, host_slots=16)
    request = one.open("r", one.keys(TOKENS))
    one.compute(request, range(10))
    request.publish(10, one.ids(request))
    for job in one.controller.take_jobs().jobs:
        keys = job.spans[0].keys
        bad = dict.fromkeys(keys, Reason.FAILED if job.kind is kind else Reason.UPSTREAM)
        one.controller.apply([Done(job.id, bad=bad if job.kind in (kind, JobKind.DOWN) else {})])
        one.controller.check()
    pool = one.controller.pools()[where]
    assert pool["free"] == pool["total"], "nothing of it is left"
    assert request.match().ready == (0 if kind is JobKind.SAVE else 10)
    request.close()
    one.settle()


def test_outcomes_are_distinct_and_add_up_to_what_was_started(house):
    store = Holes(64 << 20, SPEC.fingerprint())
    one = house(host_slots=16, store=store)
    keys = one.keys(TOKENS)
    one.serve("first", keys)
    one.empty()
    store.wrong = {keys[4]: "corrupt", keys[6]: "miss"}
    before = one.controller.stats
    one.serve("second", keys)
    bad = {
        reason: n - before.bad[reason]
        for reason, n in one.controller.stats.bad.items()
        if n != before.bad[reason]
    }
    assert bad == {Reason.CORRUPT: 1, Reason.MISS: 1, Reason.UPSTREAM: 2}, (
        "each page once a Job, by its own reason"
    )
    assert one.controller.stats.loaded[Where.STORE] == 10
