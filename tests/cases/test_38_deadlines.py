"""A slow or dead tier costs at most the deadline, and what had come by then is used."""

from __future__ import annotations

import threading

import pytest

from hicache.data import moves
from hicache.data.store.memory import MemoryStore
from hicache.deadlines import Deadlines
from hicache.errors import ConfigError
from hicache.records import JobKind, Loaded, LookedUp, Reason, Where
from hicache.testing.house import PAGE_TOKENS, PATIENCE_S, SPEC, House

PAGES = 16


class Hand:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self):
        return self.now


class Hanging(MemoryStore):
    """A memory store whose calls of one kind hang from a certain one on, until they are let go."""

    def __init__(self, method=None, after=0):
        super().__init__(1 << 30, SPEC.fingerprint())
        self.method, self.after = method, after
        self.go, self.inside = threading.Event(), threading.Event()

    def _pass(self, method):
        if method == self.method:
            self.after -= 1
            if self.after < 0:
                self.inside.set()
                assert self.go.wait(PATIENCE_S)

    def read(self, namespace, keys, into):
        self._pass("read")
        return super().read(namespace, keys, into)

    def contains(self, namespace, keys):
        self._pass("contains")
        return super().contains(namespace, keys)


class Timed(House):
    """A house with a clock that is moved by hand, driven step by step."""

    def __init__(self, store, **config):
        self.clock = Hand()
        super().__init__(
            store=store,
            host_slots=4 * PAGES,
            deadlines={JobKind.LOOKUP: 1.0, JobKind.FETCH: 2.0},
            **config,
        )

    def step(self):
        self.worker.submit(self.controller.take_jobs())
        self.worker.wait(0.02)
        events = self.controller.apply(self.worker.poll())
        self._hear(events)
        self.controller.check()
        return events

    def until(self, kind, handle=None):
        """Step until an event of this kind comes, for this handle."""
        for _ in range(int(PATIENCE_S / 0.02)):
            for event in self.step():
                if isinstance(event, kind) and handle in (None, event.handle):
                    return event
        raise AssertionError(f"no {kind.__name__}")


def prompt(one, number=0, pages=PAGES):
    return one.keys(range(number << 20, (number << 20) + pages * PAGE_TOKENS))


@pytest.fixture
def warm():
    """A store that hangs when told to, with the pages of a few prompts in it."""
    store = Hanging()
    one = House(store=store, host_slots=4 * PAGES)
    for number in range(3):
        one.serve(("first", number), prompt(one, number))
    one.worker.close(PATIENCE_S)
    yield store
    store.go.set()


@pytest.mark.parametrize("tokens,seconds", [(0, 2.0), (1024, 2.1), (102_400, 12.0), (1_048_576, 30.0)])
def test_a_fetch_has_a_base_more_for_each_token_and_an_end(tokens, seconds):
    assert Deadlines().fetch_limit(tokens) == pytest.approx(seconds)
    scaled = Deadlines(fetch_s=0.1, fetch_1024_s=0.005, fetch_max_s=1.5)
    assert scaled.fetch_limit(tokens) == pytest.approx(seconds / 20)


def test_an_end_below_the_base_is_refused_with_both():
    with pytest.raises(ConfigError, match=r"key=fetch_max_s value=1.0 fetch_s=2.0 nearest=2.0"):
        Deadlines(fetch_max_s=1.0).check()
    assert Deadlines(fetch_s=60.0).fetch_limit(1 << 30) == 60.0


@pytest.mark.parametrize("came", [0, 6, 15])
@pytest.mark.parametrize("fetch_at", ["load", "lookup"])
def test_pages_that_came_before_the_deadline_are_used_and_the_others_are_late(
    warm, monkeypatch, came, fetch_at
):
    monkeypatch.setattr(moves, "FETCH_FIRST", 1)
    monkeypatch.setattr(moves, "PAGES_A_CALL", 1)
    one = Timed(warm, fetch_at=fetch_at)
    warm.method, warm.after = "read", came
    request = one.open("again", prompt(one))
    one.until(LookedUp)
    if fetch_at == "load":
        request.load(request.match(), one.ids(request))
    one.step()
    assert warm.inside.wait(PATIENCE_S)
    one.clock.now = 2.0
    if fetch_at == "lookup":
        one.step()
        assert not request.match().pending
        assert request.match().ready == came
        if came:
            request.load(request.match(), one.ids(request))
    if came or fetch_at == "load":
        loaded = one.until(Loaded)
        assert loaded.good == came
        assert one.right(request, range(came))
    assert one.controller.stats.bad[Reason.DEADLINE] == PAGES - came
    assert one.controller.pools()[Where.HOST]["quarantined"] == PAGES - came
    assert one.controller.stats.stuck_jobs == 1
    # the hung read returns long after: its bytes land in pages still kept for them, and then these are free
    one.clock.now = 12.0
    warm.go.set()
    one.settle()
    pools = one.controller.pools()[Where.HOST]
    assert (pools["quarantined"], pools["free"]) == (0, pools["total"] - came)
    request.close()
    one.settle()
    again = one.serve("then", prompt(one))
    assert again.loaded == PAGES
    one.worker.close(PATIENCE_S)


def test_a_store_that_hangs_in_the_look_up_gives_nothing_at_its_deadline(warm):
    one = Timed(warm)
    warm.method = "contains"
    request = one.open("again", prompt(one))
    one.step()
    assert warm.inside.wait(PATIENCE_S)
    assert request.match().pending
    one.clock.now = 1.0
    assert one.until(LookedUp).found == 0
    assert (request.match().pending, request.match().pages) == (False, 0)
    warm.go.set()
    one.settle()
    one.worker.close(PATIENCE_S)


def test_a_fetch_that_is_done_is_heard_of_whatever_hangs_beside_it(warm):
    one = Timed(warm, fetch_at="load", endpoint=4 * PAGES)
    first = one.open("first", prompt(one, 0))
    one.until(LookedUp, first.handle)
    last = one.open("last", prompt(one, 1))
    one.until(LookedUp, last.handle)
    last.load(last.match(), one.ids(last))
    assert one.until(Loaded, last.handle).good == PAGES
    warm.method = "read"
    first.load(first.match(), one.ids(first))
    one.step()
    assert warm.inside.wait(PATIENCE_S)
    memory = one.open("memory", prompt(one, 1))  # the healthy tier is served while the reader hangs
    memory.load(memory.match(), one.ids(memory))
    assert one.until(Loaded, memory.handle).good == PAGES
    assert one.right(memory, range(PAGES))
    one.clock.now = 2.0
    assert one.until(Loaded, first.handle).good == 0
    warm.go.set()
    one.settle()
    one.worker.close(PATIENCE_S)


def test_threads_stay_few_and_a_hung_call_is_counted(warm):
    before = threading.active_count()
    one = Timed(warm, endpoint=4 * PAGES)
    warm.method = "read"
    for number in range(3):
        request = one.open(number, prompt(one, number))
        one.until(LookedUp, request.handle)
        request.load(request.match(), one.ids(request))
    one.step()
    assert warm.inside.wait(PATIENCE_S)
    assert threading.active_count() - before <= 3
    one.clock.now = 2.0
    while len(ends := [event for event in one.log if isinstance(event, Loaded)]) < 3:
        one.step()
    assert [event.good for event in ends] == [0, 0, 0]
    assert one.worker.counters.stuck_jobs == 1
    assert one.controller.stats.stuck_jobs == 1
    warm.go.set()
    one.settle()
    one.worker.close(PATIENCE_S)


@pytest.mark.parametrize("let", ["late", "early"])
def test_best_effort_takes_what_has_come_and_waits_for_nothing(warm, let):
    one = Timed(warm, fetch_at="lookup", best_effort=True)
    if let == "late":
        warm.method = "read"
    request = one.open("again", prompt(one))
    one.until(LookedUp)
    one.step()
    if let == "late":
        assert warm.inside.wait(PATIENCE_S)
    else:
        one.settle()
    match = request.match()
    assert (match.pending, match.ready) == (False, PAGES if let == "early" else 0)
    load = request.load(match, one.ids(request))
    assert load.pages == (PAGES if let == "early" else 0)
    warm.go.set()
    one.settle()
    request.close()
    one.settle()
    assert one.serve("then", prompt(one)).by_tier[Where.HOST] == PAGES, "what came late serves the next one"
    one.worker.close(PATIENCE_S)


def test_with_best_effort_fetches_start_when_the_look_up_answers():
    with pytest.raises(ConfigError, match="nothing ever would be"):
        House(store=MemoryStore(1 << 20, SPEC.fingerprint()), best_effort=True)
