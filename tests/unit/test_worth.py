"""Load or compute: what is learned, what follows from it, and how it is learned anew."""

from __future__ import annotations

import pytest
from driven import SPACE, keys

from hicache.control import ControlConfig, Controller
from hicache.policy.worth import PROBE_S, Line, Speed, Worth
from hicache.records import Done, JobKind, Reason, Where


def line(*seen):
    made = Line()
    for pages, seconds in seen:
        made.see(pages, seconds)
    return made.fit()


def test_a_line_is_found_whatever_the_sizes():
    assert line() is None
    assert line((4, 2.0)) == pytest.approx((0.0, 0.5))
    assert line((4, 2.0), (4, 2.2)) == pytest.approx((0.0, 0.5263), rel=1e-3)
    assert line((1, 0.11), (8, 0.18), (64, 0.74)) == pytest.approx((0.1, 0.01))
    fixed, each = line((1, 1.0), (100, 0.5))
    assert (fixed > 0, each) == (True, 0.0), "more pages never take less time"
    fixed, each = line((10, 1.0), (20, 3.0))
    assert (fixed, each > 0) == (0.0, True), "no call takes less than no time"


def test_a_line_follows_a_store_that_changes():
    made = Line()
    for pages in (4, 16, 64) * 20:
        made.see(pages, 0.001 * pages)
    for pages in (4, 16, 64) * 20:
        made.see(pages, 0.1 + 0.02 * pages)
    assert made.fit() == pytest.approx((0.1, 0.02), rel=0.05)


def test_computing_has_a_speed_for_each_length():
    speed = Speed()
    assert speed.at(10) is None
    speed.see(1, 0.2)
    speed.see(100, 5.0)
    assert speed.at(1) == pytest.approx(0.2)
    assert speed.at(120) == pytest.approx(6.0)
    assert speed.at(1000) == pytest.approx(50.0)
    assert speed.at(3) == pytest.approx(0.6)


def test_what_nobody_knows_is_loaded():
    worth = Worth()
    assert worth.loading(10)
    worth.fetched(10, 100.0, 0.0)
    assert worth.loading(10)
    worth.computed(10, 1.0)
    assert not worth.loading(10)
    assert Worth(compute=worth.compute).loading(10)
    assert worth.loading(1) is False
    worth.computed(0, 1.0)
    worth.computed(1, 0.0)
    assert worth.estimates() == pytest.approx({"fetch": 0.0, "fetch_page": 10.0, "compute_page_of_8": 0.1})


def test_what_nobody_feels_is_no_reason_to_leave_a_hit():
    worth = Worth()
    worth.computed(4, 0.004)
    worth.fetched(4, 0.05, 0.0)
    assert worth.loading(4)
    worth.fetched(4, 0.07, 0.0)
    assert not worth.loading(4)


def test_a_fixed_cost_makes_short_runs_not_worth_it():
    worth = Worth()
    for pages in (1, 8, 64):
        worth.fetched(pages, 0.5 + 0.001 * pages, 0.0)
    for pages in (1, 8, 64):
        worth.computed(pages, 0.05 * pages)
    assert [worth.loading(pages) for pages in (1, 8, 16, 64)] == [False, False, True, True]


class Hand:
    now = 0.0

    def __call__(self):
        return self.now


class Timed:
    """A controller on a store that takes its time."""

    def __init__(self, **config):
        self.clock = Hand()
        self.control = Controller(
            ControlConfig(**{"host_slots": 64, "store": True, "weighs": True, **config}), self.clock
        )
        self.page_s = 0.0
        self.number = 0

    def run(self, found=0):
        jobs = []
        while batch := self.control.take_jobs().jobs:
            jobs += batch
            for job in batch:
                if job.kind is JobKind.FETCH:
                    self.clock.now += self.page_s * job.pages
                self.control.apply([Done(job.id, found=found if job.kind is JobKind.LOOKUP else 0)])
            self.control.check()
        return jobs

    def serve(self, pages=16):
        """One prompt that the store has; what was loaded, and the kinds of Jobs that ran."""
        self.number += 1
        prompt = keys(pages, start=self.number * 1000)
        request = self.control.open(self.number, SPACE, prompt)
        jobs = self.run(pages)
        match = request.match()
        load = request.load(match, range(pages))
        jobs += self.run()
        request.close()
        self.run()
        self.control.evict(Where.HOST, 64)
        return match, load, [job for job in jobs if job.kind is JobKind.FETCH]


@pytest.mark.parametrize("fetch_at", ["load", "lookup"])
def test_a_slow_store_is_left_alone_and_a_fast_one_used(fetch_at):
    one = Timed(fetch_at=fetch_at)
    one.control.computed(16, 0.016)
    one.page_s = 0.1
    _, load, _ = one.serve()
    assert load.pages == 16, "nothing is known yet"
    one.clock.now += 1.0
    match, load, fetches = one.serve()
    assert (match.store, match.pages, match.ends) == (0, 0, Reason.SLOWER)
    assert (load.pages, load.ends, fetches) == (0, Reason.SLOWER, [])
    assert one.control.stats.slower == 16
    one.page_s = 0.0001
    sizes = []
    for _ in range(40):
        one.clock.now += PROBE_S / 2
        _, load, fetches = one.serve()
        if load.pages == 16:
            break
        sizes += [job.pages for job in fetches]
    assert load.pages == 16, "a store that has become fast is used again"
    assert set(sizes) == {1, 8}
    assert len(sizes) < 40 / 2 + 1, "it is tried now and then, not at every request"


def test_a_probe_is_not_waited_for_and_its_pages_serve_the_next_request():
    one = Timed()
    one.control.computed(16, 0.016)
    one.page_s = 1.0
    one.serve()
    one.clock.now += PROBE_S
    request = one.control.open("r", SPACE, keys(16))
    one.run(16)
    load = request.load(request.match(), range(16))
    assert load.pages == 0
    (fetch,) = one.control.take_jobs().jobs
    assert fetch.kind is JobKind.FETCH
    one.control.apply([Done(fetch.id)])
    assert request.match().ready == fetch.pages
    request.close()
    one.control.check()


def test_what_a_deadline_cut_short_counts_as_slow():
    one = Timed(deadlines={JobKind.FETCH: 2.0})
    one.control.computed(16, 0.016)
    request = one.control.open("r", SPACE, keys(16))
    one.run(16)
    request.load(request.match(), range(16))
    fetch, load = one.control.take_jobs().jobs
    one.clock.now += 2.0
    late = dict.fromkeys(keys(16)[4:], Reason.DEADLINE)
    one.control.apply([Done(fetch.id, bad=late, stuck=True)])
    one.control.apply([Done(load.id, bad=dict.fromkeys(late, Reason.UPSTREAM))])
    assert one.control.books.worth.fetch.fit() == pytest.approx((0.0, 0.5))


def test_it_can_be_turned_off():
    one = Timed(weighs=False)
    one.control.computed(16, 1e-9)
    one.page_s = 1.0
    for _ in range(3):
        assert one.serve()[1].pages == 16
