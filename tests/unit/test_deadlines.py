"""Jobs past their deadline, and the end of a worker."""

from __future__ import annotations

import threading

import pytest
from rig import (
    PATIENCE_S,
    FakeStore,
    Gate,
    Rig,
    chain,
    down,
    fetch,
    holds,
    load,
    lookup,
    poisoned,
    put,
    save,
    write,
)

from hicache.data import moves
from hicache.keys import RecordKey
from hicache.records import Done, Reason


@pytest.fixture(name="rig")
def _rig():
    rig = Rig()
    yield rig
    assert rig.worker.close(PATIENCE_S) == []


def hold_store(rig, method) -> Gate:
    gate = Gate()
    rig.store.before[method] = gate.pass_through
    return gate


def late(keys):
    return dict.fromkeys(keys, Reason.DEADLINE)


def hold_engine(rig) -> Gate:
    gate = Gate()
    rig.engine.before = lambda number: gate.pass_through() if number == 0 else None
    return gate


@pytest.mark.parametrize("kind", ["lookup", "fetch", "write", "down"])
def test_a_call_that_hangs_is_given_up_once_and_still_answered(rig, kind):
    keys = chain(2)
    rig.stored(keys)
    gate = {
        "lookup": lambda: hold_store(rig, "contains"),
        "fetch": lambda: hold_store(rig, "read"),
        "write": lambda: hold_store(rig, "write"),
        "down": lambda: hold_engine(rig),
    }[kind]()
    job = {
        "lookup": lambda: lookup(1, keys, deadline=110.0),
        "fetch": lambda: fetch(1, keys, (0, 1), deadline=110.0),
        "write": lambda: write(1, keys, (0, 1), deadline=110.0),
        "down": lambda: down(1, keys, (0, 1), (0, 1), deadline=110.0),
    }[kind]()
    rig.submit(job)
    gate.wait_for_somebody()
    rig.clock.now = 109.9
    assert rig.worker.poll() == []
    rig.clock.now = 110.0
    assert rig.worker.poll() == [Done(1, bad=late(keys), stuck=True)]
    rig.clock.now = 500.0
    assert rig.worker.poll() == []
    assert not rig.worker.idle
    gate.open()
    (done,) = rig.next().values()
    assert done == Done(1, found=2 if kind == "lookup" else 0)
    assert rig.worker.idle
    assert rig.worker.counters.stuck_jobs == 1


@pytest.mark.parametrize("kind", ["load", "save"])
def test_a_leg_of_the_engine_is_never_given_up_nor_cancelled(rig, kind):
    gate = hold_engine(rig)
    make = {"load": load, "save": save}[kind]
    rig.submit(make(1, chain(1), (0,), (0,), deadline=1.0), make(2, chain(1, 2), (1,), (1,), deadline=1.0))
    gate.wait_for_somebody()
    rig.clock.now = 1e9
    assert rig.worker.poll() == []
    gate.open()
    assert [done.bad for done in rig.next(2).values()] == [{}, {}]


def test_followers_of_a_job_given_up_start_and_touch_none_of_its_pages(rig):
    keys, mine = chain(2), chain(1, 7)
    rig.stored(keys)
    put(rig.host, 5, mine[0])
    gate = hold_store(rig, "read")
    rig.submit(
        fetch(1, keys, (0, 1), deadline=110.0),
        load(2, [*keys, *mine], (0, 1, 5), (0, 1, 5), after=(1,)),
    )
    gate.wait_for_somebody()
    rig.clock.now = 111.0
    assert rig.worker.poll()[0] == Done(1, bad=late(keys), stuck=True)
    assert rig.next()[2].bad == dict.fromkeys(keys, Reason.UPSTREAM)
    assert holds(rig.rows, 5, mine[0])
    assert poisoned(rig.rows, 0)
    # one that comes later: before the call returns, and after
    (soon,) = rig.run(load(3, keys, (0, 1), (0, 1), after=(1,)))
    assert soon.bad == dict.fromkeys(keys, Reason.UPSTREAM)
    gate.open()
    assert rig.next()[1] == Done(1)  # the truth: it came after all, into slots that nobody else used
    assert holds(rig.host, 1, keys[1])
    (later,) = rig.run(load(4, keys, (0, 1), (0, 1), after=(1,)))
    assert later.bad == dict.fromkeys(keys, Reason.UPSTREAM)
    rig.submit(applied=(1,))
    (clean,) = rig.run(load(5, keys, (0, 1), (0, 1), after=(1,)))
    assert clean.bad == {}


def test_a_stuck_job_applied_early_leaves_no_memory_behind(rig):
    keys = chain(1)
    gate = hold_store(rig, "read")
    rig.submit(fetch(1, keys, (0,), deadline=110.0))
    gate.wait_for_somebody()
    rig.clock.now = 110.0
    rig.worker.poll()
    rig.submit(applied=(1,))
    (still,) = rig.run(load(2, keys, (0,), (0,), after=(1,)))
    assert still.bad == {keys[0]: Reason.UPSTREAM}
    gate.open()
    rig.next()
    (clean,) = rig.run(load(3, keys, (0,), (0,), after=(1,)))
    assert clean.bad == {}


@pytest.mark.parametrize("kind", ["lookup", "fetch", "write"])
def test_a_job_given_up_starts_no_further_call(rig, monkeypatch, kind):
    monkeypatch.setattr(moves, "PAGES_A_CALL", 1)
    monkeypatch.setattr(moves, "WRITES_A_CALL", 1)
    monkeypatch.setattr(moves, "LOOKUP_FIRST", 1)
    monkeypatch.setattr("hicache.data.scratch.SCRATCH_PAGES_MAX", 1)
    rig = Rig()
    keys = chain(3)
    rig.stored(keys)
    method = {"lookup": "contains", "fetch": "read", "write": "write"}[kind]
    calls = len(rig.store.calls)
    gate = hold_store(rig, method)
    rig.submit(
        {
            "lookup": lambda: lookup(1, keys, deadline=110.0),
            "fetch": lambda: fetch(1, keys, (0, 1, 2), deadline=110.0),
            "write": lambda: write(1, keys, (0, 1, 2), deadline=110.0),
        }[kind]()
    )
    gate.wait_for_somebody()
    rig.clock.now = 110.0
    assert rig.worker.poll() == [Done(1, bad=late(keys), stuck=True)]
    gate.open()
    (done,) = rig.next().values()
    assert len(rig.store.calls) == calls + 1
    if kind == "lookup":
        assert done == Done(1, found=1)
    else:
        assert done.bad == late(keys[1:])
    assert rig.worker.close(PATIENCE_S) == []


def test_a_job_past_its_deadline_does_not_start_though_nobody_polled(rig):
    behind, last = chain(1), chain(1, 9)
    gate = hold_store(rig, "read")
    rig.submit(fetch(1, chain(1, 8), (9,)), fetch(2, behind, (0,), deadline=110.0), fetch(3, last, (1,)))
    gate.wait_for_somebody()
    second = hold_store(rig, "read")
    rig.clock.now = 111.0
    gate.open()
    second.wait_for_somebody()
    assert rig.store.asked("read")[-2:] == [RecordKey(last[0], 0), RecordKey(last[0], 1)]
    second.open()
    dones = rig.next(3)
    assert dones[2].bad == late(behind)
    assert len(rig.store.asked("read")) == 4


@pytest.mark.parametrize("why", ["queued", "waiting"])
def test_a_job_that_has_not_started_is_cancelled_for_good(rig, why):
    keys = chain(2)
    rig.stored(keys)
    gate = hold_store(rig, "read")
    rig.submit(fetch(1, chain(1, 8), (9,)))
    gate.wait_for_somebody()
    after = (1,) if why == "waiting" else ()
    rig.submit(
        fetch(2, keys, (0, 1), deadline=110.0, after=after),
        lookup(3, keys, deadline=110.0),
        load(4, keys, (0, 1), (0, 1), after=(2,)),
    )
    rig.clock.now = 110.0
    dones = {done.job: done for done in rig.worker.poll()}
    if 4 not in dones:
        dones |= rig.next()
    assert dones[2] == Done(2, bad=late(keys))
    assert dones[3] == Done(3, bad=late(keys))
    assert dones[4].bad == dict.fromkeys(keys, Reason.UPSTREAM)
    gate.open()
    assert set(rig.next()) == {1}
    rig.run(lookup(5, ()))
    assert len(rig.store.asked("read")) == 2  # job 1 alone
    assert all(poisoned(rig.host, slot) for slot in (0, 1))
    assert rig.worker.counters.cancelled_jobs == 2


def test_waiting_wakes_for_a_deadline(rig):
    gate = hold_store(rig, "read")
    rig.submit(fetch(1, chain(1), (0,), deadline=100.05))
    gate.wait_for_somebody()
    rig.clock.step = 0.02  # the deadline passes while somebody waits
    assert rig.worker.wait(PATIENCE_S)
    assert rig.worker.poll() == [Done(1, bad=late(chain(1)), stuck=True)]
    gate.open()
    rig.next()


def test_wait_and_drain_give_up_when_time_is_up(rig):
    gate = hold_store(rig, "read")
    rig.submit(fetch(1, chain(1), (0,)))
    gate.wait_for_somebody()
    assert not rig.worker.wait(0.0)
    assert not rig.worker.drain(rig.clock.now)
    gate.open()
    assert rig.worker.drain(None)
    assert not rig.worker.idle  # its Done was not fetched
    assert [done.job for done in rig.worker.poll()] == [1]
    assert rig.worker.idle


def test_closing_names_the_lane_that_hangs_and_answers_everything_else():
    rig = Rig()
    gate = hold_store(rig, "read")
    keys = chain(1)
    rig.submit(fetch(1, keys, (0,)), load(2, keys, (0,), (0,), after=(1,)), write(3, keys, (1,), after=(1,)))
    gate.wait_for_somebody()
    assert rig.worker.close(0.01) == ["read"]
    assert {done.job: done.bad for done in rig.worker.poll()} == {
        2: {keys[0]: Reason.CANCELLED},
        3: {keys[0]: Reason.CANCELLED},
    }
    rig.submit(load(4, keys, (0,), (0,)))
    assert rig.worker.poll() == [Done(4, bad={keys[0]: Reason.CANCELLED})]
    gate.open()
    assert rig.worker.close(PATIENCE_S) == []
    assert [done.job for done in rig.worker.poll()] == [1]
    assert rig.worker.idle


def test_twenty_workers_leave_no_thread_behind():
    before = set(threading.enumerate())
    for _ in range(20):
        rig = Rig(store=FakeStore())
        keys = chain(2)
        rig.submit(
            lookup(1, keys), fetch(2, keys, (0, 1)), load(3, keys, (0, 1), (0, 1)), write(4, keys, (0, 1))
        )
        assert rig.worker.close(PATIENCE_S) == []
        assert {done.job for done in rig.worker.poll()} == {1, 2, 3, 4}
        assert set(threading.enumerate()) == before
