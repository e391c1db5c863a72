"""When a Job runs, what it is answered, and that whatever happens it is answered exactly once."""

from __future__ import annotations

import threading

import pytest
from rig import (
    PATIENCE_S,
    SPEC,
    FakeStore,
    Gate,
    Rig,
    TouchableStore,
    chain,
    down,
    fetch,
    holds,
    load,
    lookup,
    parents_of,
    poisoned,
    put,
    raising,
    record,
    save,
    write,
)

from hicache.data.store.base import WriteOutcome
from hicache.errors import InvariantError
from hicache.keys import RecordKey
from hicache.records import Done, JobKind, Reason, Where


@pytest.fixture(name="rig")
def _rig():
    rig = Rig(store=TouchableStore())
    yield rig
    assert rig.worker.close(PATIENCE_S) == []


def gate_call(rig: Rig, number: int) -> Gate:
    """A gate before one call of the copy engine."""
    gate = Gate()
    rig.engine.before = lambda call: gate.pass_through() if call == number else None
    return gate


def gate_store(rig: Rig, method: str) -> Gate:
    gate = Gate()
    rig.store.before[method] = gate.pass_through
    return gate


def fill_host(rig: Rig, keys, base: int = 0) -> None:
    for i, key in enumerate(keys):
        put(rig.host, base + i, key)


# -- the happy path


def test_a_page_travels_all_the_way_down_and_back(rig):
    keys = chain(3)
    for i, key in enumerate(keys):
        put(rig.rows, 2 * i, key)
    dones = rig.run(
        save(1, keys, (0, 2, 4), (5, 6, 7)),
        down(2, keys, (5, 6, 7), (1, 2, 3), after=(1,)),
        write(3, keys, (1, 2, 3), after=(2,)),
    )
    assert [done.bad for done in dones] == [{}, {}, {}]
    assert holds(rig.device, 6, keys[1])
    assert holds(rig.host, 2, keys[1])
    rig.submit(lookup(4, [*keys, *chain(1, salt=9)]))
    assert rig.next()[4] == Done(4, 0, {}, found=3)
    dones = rig.run(
        fetch(5, keys, (9, 10, 11)),
        load(6, keys, (9, 10, 11), (1, 3, 5), after=(5,)),
    )
    assert [done.bad for done in dones] == [{}, {}]
    assert all(holds(rig.rows, place, key) for place, key in zip((1, 3, 5), keys, strict=True))
    assert rig.worker.idle
    assert rig.worker.counters.pages == {kind: 3 for kind in JobKind if kind is not JobKind.LOOKUP}
    assert rig.worker.counters.nbytes[JobKind.LOAD] == 3 * SPEC.page_nbytes


def test_nothing_runs_before_the_first_job():
    before = set(threading.enumerate())
    rig = Rig()
    assert set(threading.enumerate()) == before
    assert rig.worker.idle
    assert not rig.worker.wait(None)  # nothing in flight: returns at once
    assert rig.worker.close(PATIENCE_S) == []


def test_an_empty_job_is_answered(rig):
    (done,) = rig.run(load(1, (), (), ()))
    assert done == Done(1)


def test_a_job_is_submitted_once(rig):
    gate = gate_call(rig, 0)
    rig.submit(load(1, chain(1), (0,), (0,)))
    with pytest.raises(InvariantError):
        rig.submit(load(1, chain(1), (0,), (0,)))
    gate.open()
    assert not rig.next()[1].bad


# -- (a) after


def test_a_job_waits_for_all_it_follows(rig):
    keys = chain(1)
    put(rig.host, 0, keys[0])
    first, second = gate_store(rig, "read"), gate_call(rig, 0)
    rig.submit(
        fetch(1, chain(1, salt=1), (5,)),
        load(2, keys, (0,), (0,)),
        write(3, keys, (0,), after=(1, 2)),
        write(4, (), ()),
    )
    assert rig.next()[4].bad == {}  # the write lane is free, and has passed over job 3
    first.wait_for_somebody()
    first.open()
    assert rig.next()[1].bad == {chain(1, salt=1)[0]: Reason.MISS}
    rig.run(write(5, (), ()))
    assert rig.store.asked("write") == []
    second.open()
    assert rig.next(2)[3].bad == {}
    assert rig.store.asked("write") == [RecordKey(keys[0], 0, 0), RecordKey(keys[0], 1, 0)]


def test_unknown_and_forgotten_jobs_count_as_ended_and_clean(rig):
    keys = chain(1)
    rig.run(fetch(1, keys, (0,)))  # misses
    rig.submit(applied=(1,))
    put(rig.host, 0, keys[0])
    (done,) = rig.run(load(2, keys, (0,), (0,), after=(1, 777)))
    assert done.bad == {}
    assert holds(rig.rows, 0, keys[0])


def test_order_inside_a_batch_does_not_matter(rig):
    keys = chain(1)
    put(rig.rows, 3, keys[0])
    follower = down(2, keys, (4,), (5,), after=(1,))
    rig.run(follower, save(1, keys, (3,), (4,)))
    assert holds(rig.host, 5, keys[0])


# -- (b), (c) failed keys


def test_a_page_that_failed_upstream_is_not_touched(rig):
    keys = chain(3)
    rig.stored(keys[:1])
    fetched, loaded = rig.run(fetch(1, keys, (0, 1, 2)), load(2, keys, (0, 1, 2), (0, 1, 2), after=(1,)))
    assert fetched.bad == {keys[1]: Reason.MISS, keys[2]: Reason.MISS}
    assert loaded.bad == {keys[1]: Reason.UPSTREAM, keys[2]: Reason.UPSTREAM}
    assert holds(rig.rows, 0, keys[0])
    assert poisoned(rig.rows, 1)
    assert poisoned(rig.rows, 2)


def test_a_write_does_not_run_when_its_parent_failed(rig):
    keys = chain(3)
    fill_host(rig, keys)
    rig.run(fetch(1, keys[:1], (9,)))  # misses: the failed key is the parent of the page written
    (done,) = rig.run(write(2, keys[1:], (1, 2), parents=keys[:2], after=(1,)))
    assert done.bad == dict.fromkeys(keys[1:], Reason.UPSTREAM)
    assert rig.store.asked("write") == []


def test_a_write_stops_below_a_parent_that_failed_in_the_same_job(rig):
    keys, other = chain(4), chain(2, salt=5)
    fill_host(rig, keys + other)
    rig.store.after["write"] = lambda answer: [
        WriteOutcome.NO_ROOM if i in (2, 3) else outcome for i, outcome in enumerate(answer)
    ]
    (done,) = rig.run(write(1, keys + other, range(6), parents=parents_of(keys) + parents_of(other)))
    assert done.bad == {keys[1]: Reason.REFUSED, keys[2]: Reason.UPSTREAM, keys[3]: Reason.UPSTREAM}


@pytest.mark.parametrize("when", ["still running", "ended", "polled"])
def test_failures_are_remembered_until_applied(rig, when):
    keys = chain(2)
    gate = gate_store(rig, "read")
    rig.submit(fetch(1, keys, (0, 1)))
    gate.wait_for_somebody()
    follower = load(2, keys, (0, 1), (0, 1), after=(1,))
    if when == "still running":
        rig.submit(follower)
        gate.open()
        done = rig.next(2)[2]
    else:
        gate.open()
        assert rig.worker.wait(PATIENCE_S)
        if when == "polled":
            rig.worker.poll()
            rig.submit(follower)
            done = rig.next()[2]
        else:
            rig.submit(follower)
            done = rig.next(2)[2]
    assert done.bad == dict.fromkeys(keys, Reason.UPSTREAM)


def test_a_job_of_the_batch_that_forgets_still_hears_of_the_failure(rig):
    keys = chain(1)
    rig.run(fetch(1, keys, (0,)))
    rig.submit(load(2, keys, (0,), (0,), after=(1,)), applied=(1,))
    assert rig.next()[2].bad == {keys[0]: Reason.UPSTREAM}


def test_a_waiting_follower_has_heard_before_the_failure_is_forgotten(rig):
    keys = chain(1)
    gate = gate_call(rig, 0)
    rig.submit(save(1, chain(1, salt=3), (5,), (5,)))
    gate.wait_for_somebody()
    rig.submit(fetch(2, keys, (0,)), down(3, keys, (0,), (0,), after=(1, 2)))
    assert rig.next()[2].bad
    rig.submit(applied=(2,))
    gate.open()
    assert rig.next(2)[3].bad == {keys[0]: Reason.UPSTREAM}


# -- lanes


def test_loads_go_before_saves_before_downs_and_priority_before_both(rig):
    gate = gate_call(rig, 0)
    rig.submit(save(1, chain(1), (11,), (11,)))
    gate.wait_for_somebody()
    rig.submit(
        down(2, chain(1, 2), (1,), (1,)),
        save(3, chain(1, 3), (2,), (2,)),
        load(4, chain(1, 4), (3,), (3,)),
        load(5, chain(1, 5), (4,), (4,)),
        down(6, chain(1, 6), (5,), (5,), priority=-1),
    )
    gate.open()
    rig.next(6)
    assert [call[0][0] for call in rig.engine.calls[::2]] == [11, 5, 3, 4, 2, 1]


def test_look_ups_go_before_fetches(rig):
    gate = gate_store(rig, "read")
    rig.submit(fetch(1, chain(1), (0,)))
    gate.wait_for_somebody()
    rig.submit(fetch(2, chain(1, 2), (1,), priority=-5), lookup(3, chain(1, 3)))
    gate.open()
    rig.next(3)
    assert [name for name, _ in rig.store.calls] == ["read", "contains", "read"]


def test_a_hanging_write_does_not_hold_up_a_load_or_a_fetch(rig):
    keys = chain(1)
    rig.stored(keys)
    gate = gate_store(rig, "write")
    rig.submit(write(1, chain(1, 2), (3,)))
    gate.wait_for_somebody()
    fetched, loaded = rig.run(fetch(2, keys, (0,)), load(3, keys, (0,), (0,), after=(2,)))
    assert (fetched.bad, loaded.bad) == ({}, {})
    gate.open()
    rig.next()


def test_a_full_write_lane_refuses_the_newest_at_once():
    rig = Rig(writes_max=2)
    gate = gate_store(rig, "write")
    rig.submit(write(1, chain(1), (0,)))
    gate.wait_for_somebody()
    keys = chain(1, 4)
    rig.submit(write(2, chain(1, 2), (1,)), write(3, chain(1, 3), (2,)), write(4, keys, (3,)))
    assert rig.next()[4].bad == {keys[0]: Reason.REFUSED}
    children = [*keys, *chain(2, 4)[1:]]
    rig.store.before.clear()
    gate.open()
    rig.next(3)
    (done,) = rig.run(write(5, children[1:], (4,), parents=keys, after=(4,)))
    assert done.bad == {children[1]: Reason.UPSTREAM}
    assert rig.worker.counters.refused_jobs == 1
    assert not rig.worker.close(PATIENCE_S)


# -- (j) touches


def test_touched_pages_reach_the_store_with_all_their_groups(rig):
    gate = gate_store(rig, "touch")
    keys = chain(2)
    rig.submit(touched=tuple(keys))
    gate.wait_for_somebody()
    assert rig.store.asked("touch") == [RecordKey(key, group, 0) for key in keys for group in (0, 1)]
    rig.store.before["touch"] = raising(OSError())
    rig.submit(touched=(keys[0],))
    gate.open()
    rig.run(write(1, (), ()))  # behind it on the lane
    assert rig.worker.counters.exceptions == {"touch: OSError": 1}
    assert rig.worker.counters.touched == 2


def test_touches_are_bounded(rig):
    gate = gate_store(rig, "write")
    rig.submit(write(1, chain(1), (0,)))
    gate.wait_for_somebody()
    rig.submit(touched=tuple(n.to_bytes(32, "big") for n in range(5000)))
    assert rig.worker.counters.touches_dropped == 5000 - 4096
    gate.open()
    rig.next()


def test_a_store_without_recency_is_not_touched():
    rig = Rig(store=FakeStore())
    rig.submit(write(1, (), ()), touched=tuple(chain(1)))
    assert rig.next()[1] == Done(1)
    assert not rig.worker.close(PATIENCE_S)


# -- (k) counters


def test_counters_count_what_arrived(rig):
    keys = chain(3)
    rig.stored(keys[:2])

    def tick() -> None:
        rig.clock.now += 2.5

    rig.store.before["read"] = tick
    rig.run(fetch(1, keys, (0, 1, 2)), load(2, keys, (0, 1, 2), (0, 1, 2), after=(1,)))
    counters = rig.worker.counters
    assert counters.pages == {JobKind.WRITE: 2, JobKind.FETCH: 2, JobKind.LOAD: 2}
    assert counters.nbytes[JobKind.FETCH] == 2 * SPEC.page_nbytes
    assert counters.seconds[JobKind.FETCH] == pytest.approx(2.5)
    assert counters.bad == {Reason.MISS: 1, Reason.UPSTREAM: 1}
    assert counters.jobs == {JobKind.WRITE: 1, JobKind.FETCH: 1, JobKind.LOAD: 1}


def test_the_shard_is_in_keys_and_answers():
    rig = Rig(shard=3)
    keys = chain(2)
    rig.stored(keys)
    (done,) = rig.run(lookup(1, keys))
    assert done == Done(1, 3, {}, found=2)
    assert set(rig.store.records) == {record(key, group, 3) for key in keys for group in (0, 1)}
    (done,) = rig.run(fetch(2, keys, (5, 6)))
    assert done == Done(2, 3)
    assert holds(rig.host, 6, keys[1])
    assert not rig.worker.close(PATIENCE_S)


def test_sources_may_be_in_two_tiers_of_one_load(rig):
    keys = chain(2)
    put(rig.host, 4, keys[0])
    put(rig.device, 7, keys[1])
    job = load(1, keys[:1], (4,), (0,))
    more = load(1, keys[1:], (7,), (1,), where=Where.DEVICE)
    (done,) = rig.run(type(job)(1, JobKind.LOAD, 1, job.spans + more.spans))
    assert done.bad == {}
    assert holds(rig.rows, 0, keys[0])
    assert holds(rig.rows, 1, keys[1])
