"""Whatever a store or an engine does, a Job is answered once, its lane lives on and the cause is known."""

from __future__ import annotations

import random
import threading

import pytest
from rig import (
    NAMESPACE,
    PATIENCE_S,
    SPEC,
    Rig,
    chain,
    down,
    fetch,
    holds,
    load,
    lookup,
    put,
    raising,
    save,
    write,
)

from hicache.records import Batch, Reason


@pytest.fixture(name="rig")
def _rig():
    rig = Rig()
    yield rig
    assert rig.worker.close(PATIENCE_S) == []


BROKEN = {
    "OSError": ("before", raising(OSError(5, "input/output error"))),
    "TimeoutError": ("before", raising(TimeoutError())),
    "ValueError": ("before", raising(ValueError("no"))),
    "SystemExit": ("before", raising(SystemExit(1))),
    "False": ("after", lambda answer: False),
    "None": ("after", lambda answer: None),
    "short": ("after", lambda answer: answer[:2]),
    "Nones": ("after", lambda answer: [*answer[:2], *(None for _ in answer[2:])]),
    "None between": ("after", lambda answer: [*answer[:2], None, *answer[3:]]),
    "long": ("after", lambda answer: [*answer, answer[0]]),
    "other type": ("after", lambda answer: [*answer[:2], *("stored" for _ in answer[2:])]),
}
KNOWN_GOOD = {"short": 1, "None between": 1, "Nones": 1, "other type": 1}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("method", ["read", "write", "contains"])
def test_lanes_survive_a_broken_store(rig, how, method):
    keys = chain(3)
    rig.stored(keys)
    if method == "write":
        rig.store.records.clear()
    make = {
        "read": lambda n: fetch(n, keys, (0, 1, 2)),
        "write": lambda n: write(n, keys, (0, 1, 2)),
        "contains": lambda n: lookup(n, keys),
    }[method]
    for slot, key in enumerate(keys):
        put(rig.host, slot, key)
    when, hook = BROKEN[how]
    getattr(rig.store, when)[method] = hook
    threads = {thread.name for thread in threading.enumerate()}
    (done,) = rig.run(make(1))
    good = KNOWN_GOOD.get(how, 0)
    if method == "contains":
        assert done.found == 0  # a page is there when the records of all its groups are
        assert done.bad == dict.fromkeys(keys, Reason.FAILED)
    else:
        assert done.bad == dict.fromkeys(keys[good:], Reason.FAILED)
    (again,) = rig.run(make(2))
    assert again.bad
    getattr(rig.store, when).clear()
    (well,) = rig.run(make(3))
    assert well.bad == {}
    assert sum(rig.worker.counters.exceptions.values()) == 2
    assert threads - {thread.name for thread in threading.enumerate()} == set()


def test_the_cause_is_logged_once_a_kind(rig, caplog):
    for number in range(6):
        rig.store.before["read"] = raising(OSError() if number % 2 else ValueError())
        rig.run(fetch(number, chain(1), (0,)))
    assert len(caplog.records) == 2
    assert rig.worker.counters.exceptions == {"fetch: OSError": 3, "fetch: ValueError": 3}


def test_nine_of_ten_writes_reach_a_store_that_fails_once(rig):
    calls = iter(range(100))

    def third() -> None:
        if next(calls) == 2:
            raise OSError

    rig.store.before["write"] = third
    chains = [chain(1, salt) for salt in range(10)]
    dones = rig.run(*(write(n, keys, (n,)) for n, keys in enumerate(chains)))
    assert [bool(done.bad) for done in dones] == [n == 2 for n in range(10)]
    assert len(rig.store.records) == 18


@pytest.mark.parametrize("call", [0, 1])
def test_a_raising_engine_fails_its_span_and_no_other(rig, call):
    keys = chain(2)
    rig.engine.before = lambda number: raising(RuntimeError("copy"))() if number == call else None
    job = load(1, keys[:1], (0,), (0,))
    other = load(2, keys[1:], (1,), (1,))
    put(rig.host, 1, keys[1])
    both = type(job)(**{f: getattr(job, f) for f in job.__slots__} | {"spans": job.spans + other.spans})
    (done,) = rig.run(both)
    assert done.bad == {keys[0]: Reason.FAILED}
    assert holds(rig.rows, 1, keys[1])


def test_an_endpoint_that_is_gone_fails_the_job_only(rig):
    keys = chain(1)
    gone, there = rig.run(load(1, keys, (0,), (0,), handle=404), load(2, keys, (0,), (0,)))
    assert gone.bad == {keys[0]: Reason.FAILED}
    assert there.bad == {}


def test_without_a_store_its_jobs_fail(rig):
    plain = Rig()
    data = type(plain.data)(SPEC, plain.data.pools, plain.data.endpoint, plain.engine)
    worker = type(plain.worker)(data, plain.clock)
    worker.submit(Batch((lookup(1, chain(2)), fetch(2, chain(1), (0,)), write(3, chain(1), (0,)))))
    assert worker.drain(plain.clock.now + PATIENCE_S)
    assert all(set(done.bad.values()) == {Reason.FAILED} for done in worker.poll())
    assert worker.close(PATIENCE_S) == []


@pytest.mark.parametrize("seed", range(5))
def test_upstream_is_answered_exactly_where_a_followed_job_failed_the_page(rig, seed):
    """Random Jobs over few keys, errors everywhere, batches and polls in any order; the closure of `after` holds."""
    rng, errors, keys = random.Random(seed), random.Random(seed + 100), chain(6)
    rig.stored(keys[:4])

    def maybe(*_) -> None:
        if errors.random() < 0.2:
            raise OSError

    rig.store.before = {"read": maybe, "write": maybe}
    rig.engine.before = maybe
    jobs, dones = {}, {}
    for number in range(200):
        mine = rng.sample(keys, rng.randint(1, 3))
        places = rng.sample(range(12), len(mine))
        after = tuple(rng.sample(range(max(0, number - 8), number), min(number, rng.randint(0, 3))))
        kind = rng.choice((fetch, write, load, save, down))
        more = {"parents": [NAMESPACE.root] * len(mine)} if kind is write else {}
        both = (places,) if kind in (fetch, write) else (places, rng.sample(range(12), len(mine)))
        jobs[number] = kind(number, mine, *both, after=after, **more)
    waiting = list(jobs.values())
    while waiting:
        size = rng.randint(1, 12)
        batch, waiting = waiting[:size], waiting[size:]
        oldest = batch[0].id - 8
        rig.submit(*batch, applied=tuple(n for n in dones if n < oldest))
        if rng.random() < 0.3:
            rig.worker.drain(None)  # so that some follow a Job that has ended
        for done in rig.worker.poll():
            assert done.job not in dones
            dones[done.job] = done.bad
    assert rig.worker.drain(None)
    dones |= {done.job: done.bad for done in rig.worker.poll()}
    assert dones.keys() == jobs.keys()
    for number, job in jobs.items():
        for key in job.spans[0].keys:
            failed = any(key in dones[before] for before in job.after)
            assert (dones[number].get(key) is Reason.UPSTREAM) == failed
    assert {reason for bad in dones.values() for reason in bad.values()} >= {Reason.UPSTREAM, Reason.FAILED}
