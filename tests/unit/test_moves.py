"""What look-ups, fetches and writes do with a store's records."""

from __future__ import annotations

import itertools

import pytest
from rig import (
    MAIN,
    NAMESPACE,
    PATIENCE_S,
    SLOTS,
    SPEC,
    FakeStore,
    Rig,
    chain,
    fetch,
    holds,
    lookup,
    parents_of,
    poison,
    poisoned,
    put,
    record,
    write,
)

from hicache.data import moves
from hicache.data.scratch import Scratch
from hicache.data.store.base import Hit, Miss, WriteOutcome
from hicache.keys import RecordKey
from hicache.layout import LAYOUTS, place, undefined
from hicache.records import Done, Reason
from hicache.spec import CacheSpec, Full, Group, Plane, State, Window

EVEN = CacheSpec((Group("main", (Plane("k", 2, 4, 2, 32), Plane("v", 2, 4, 2, 32))),), 4)
UNEVEN = CacheSpec((Group("main", (Plane("k", 2, 4, 2, 40), Plane("v", 3, 4, 2, 24))),), 4)
MLA = CacheSpec((Group("main", (Plane("latent", 2, 4, 1, 64), Plane("rope", 2, 4, 1, 16))),), 4)
SCALED = CacheSpec((Group("main", (Plane("k", 2, 4, 2, 33), Plane("scale", 2, 4, 1, 4))),), 4)
STATES = CacheSpec((MAIN, Group("state", (Plane("ssm", 2, 1, 3, 20),), State())), 4)
SPECS = {"two groups": SPEC, "even": EVEN, "uneven": UNEVEN, "mla": MLA, "scaled": SCALED, "states": STATES}

CASES = [
    (name, writer, reader)
    for name, spec in SPECS.items()
    for writer, reader in itertools.product(LAYOUTS, LAYOUTS)
    if all(undefined(group, LAYOUTS[layout]) is None for group in spec.groups for layout in (writer, reader))
]


@pytest.fixture(name="rig")
def _rig():
    rig = Rig()
    yield rig
    assert rig.worker.close(PATIENCE_S) == []


# -- records between layouts


@pytest.mark.parametrize("name,writer,reader", CASES)
def test_every_writer_serves_every_reader(name, writer, reader):
    spec, keys, store = SPECS[name], chain(5), FakeStore()
    first = Rig(spec=spec, layout=writer, store=store)
    first.stored(keys)
    written = "page_first" if writer == "layer_first" else writer
    assert {layout for _, layout, _ in store.records.values()} == {written}
    for group, number in itertools.product(range(len(spec.groups)), range(5)):
        length = place(spec.groups[group], LAYOUTS[written], 1).run_nbytes
        assert len(store.records[record(keys[number], group)][2]) == length
    second = Rig(spec=spec, layout=reader, store=store)
    slots = (7, 0, 3, 11, 4)
    (done,) = second.run(fetch(1, keys, slots))
    assert done == Done(1)
    assert all(holds(second.host, s, k, second.groups) for s, k in zip(slots, keys, strict=True))
    assert all(poisoned(second.host, s, second.groups) for s in set(range(SLOTS)) - set(slots))
    assert first.worker.close(PATIENCE_S) == second.worker.close(PATIENCE_S) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_pages_than_fit_in_one_call(monkeypatch, layout):
    monkeypatch.setattr(moves, "PAGES_A_CALL", 2)
    monkeypatch.setattr(moves, "WRITES_A_CALL", 2)
    monkeypatch.setattr("hicache.data.scratch.SCRATCH_PAGES_MAX", 3)
    rig = Rig(spec=EVEN, layout=layout)
    keys = chain(11)
    rig.stored(keys)
    (done,) = rig.run(fetch(1, keys, range(11)))
    assert done == Done(1)
    assert all(holds(rig.host, i, key, 1) for i, key in enumerate(keys))
    assert max(len(what) for name, what in rig.store.calls if name in ("read", "write")) <= 3
    assert rig.worker.close(PATIENCE_S) == []


def test_a_record_is_read_in_place_where_it_fits():
    spec = EVEN
    rig = Rig(spec=spec)
    keys = chain(2)
    rig.stored(keys)
    calls = len(rig.engine.calls)
    rig.run(fetch(1, keys, (4, 5)))
    assert len(rig.engine.calls) == calls  # not one copy
    assert holds(rig.host, 5, keys[1], 1)
    assert rig.worker.close(PATIENCE_S) == []


def test_scratch_is_bounded_and_page_aligned():
    scratch = Scratch(SPEC)
    assert scratch.pages == 32
    assert scratch.memory(0).ctypes.data % 4096 == 0
    big = CacheSpec((Group("main", (Plane("k", 64, 1, 1, 1 << 20),)),), 4)
    assert Scratch(big).pages == 1


# -- what a read says


@pytest.mark.parametrize("group", [0, 1])
def test_a_page_is_good_only_when_all_its_groups_are(rig, group):
    keys = chain(4)
    rig.stored(keys)
    del rig.store.records[record(keys[1], group)]
    parent, layout, payload = rig.store.records[record(keys[2], group)]
    rig.store.records[record(keys[2], group)] = (parent, layout, b"rotten" + payload[6:])
    (done,) = rig.run(fetch(1, keys, (0, 1, 2, 3)))
    assert done.bad == {keys[1]: Reason.MISS, keys[2]: Reason.CORRUPT}
    assert holds(rig.host, 0, keys[0])
    assert holds(rig.host, 3, keys[3])


@pytest.mark.parametrize(
    "hit,reason",
    [
        (lambda hit: Hit("layer_first", hit.nbytes), Reason.MISS),
        (lambda hit: Hit("of_a_later_version", hit.nbytes), Reason.MISS),
        (lambda hit: Hit(hit.layout, hit.nbytes - 1), Reason.CORRUPT),
        (lambda hit: Hit(hit.layout, 0), Reason.CORRUPT),
        (lambda hit: Miss("version"), Reason.MISS),
    ],
)
def test_a_record_that_is_not_usable_here(rig, hit, reason):
    keys = chain(2)
    rig.stored(keys)
    rig.store.after["read"] = lambda answer: [hit(outcome) for outcome in answer]
    (done,) = rig.run(fetch(1, keys, (0, 1)))
    assert done.bad == dict.fromkeys(keys, reason)


def test_what_was_read_before_a_call_raised_is_kept(rig, monkeypatch):
    monkeypatch.setattr(moves, "PAGES_A_CALL", 2)
    monkeypatch.setattr("hicache.data.scratch.SCRATCH_PAGES_MAX", 2)
    rig = Rig(spec=EVEN)
    keys = chain(6)
    rig.stored(keys)
    calls = itertools.count()

    def second() -> None:
        if next(calls) == 1:
            raise OSError

    rig.store.before["read"] = second
    (done,) = rig.run(fetch(1, keys, range(6)))
    assert done.bad == dict.fromkeys(keys[2:], Reason.FAILED)
    assert next(calls) == 2  # a store that raised is not asked on
    assert rig.worker.close(PATIENCE_S) == []


# -- writes


def test_the_chain_runs_through_group_0(rig):
    keys = chain(2)
    rig.stored(keys)
    assert {key: parent for key, (parent, _, _) in rig.store.records.items()} == {
        record(keys[0], 0): None,
        record(keys[0], 1): record(keys[0], 0),
        record(keys[1], 0): record(keys[0], 0),
        record(keys[1], 1): record(keys[1], 0),
    }
    assert rig.store.asked("write") == [RecordKey(k, g) for k in keys for g in (0, 1)]


def test_a_first_page_is_one_whose_parent_is_the_root_of_the_job(rig):
    keys = chain(2)
    put(rig.host, 0, keys[1])
    (done,) = rig.run(write(1, keys[1:], (0,), parents=keys[:1]))
    assert done.bad == {keys[1]: Reason.PARENT_ABSENT}
    (done,) = rig.run(write(2, keys[1:], (0,), parents=(NAMESPACE.root,)))
    assert done.bad == {}


@pytest.mark.parametrize(
    "outcome,reason",
    [
        (WriteOutcome.EXISTS, None),
        (WriteOutcome.NO_ROOM, Reason.REFUSED),
        (WriteOutcome.FAILED, Reason.FAILED),
        (WriteOutcome.PARENT_ABSENT, Reason.PARENT_ABSENT),
    ],
)
@pytest.mark.parametrize("group", [0, 1])
def test_outcomes_of_a_write(rig, group, outcome, reason):
    keys = [chain(1, salt)[0] for salt in range(3)]
    rig.store.after["write"] = lambda answer: [
        outcome if i == 2 + group else other for i, other in enumerate(answer)
    ]
    (done,) = rig.run(write(1, keys, (0, 1, 2), parents=[NAMESPACE.root] * 3))
    assert done.bad == ({} if reason is None else {keys[1]: reason})


def test_a_full_store_refuses_the_page_and_what_follows_it(rig):
    keys = chain(4)
    rig.store.room = 3
    (done,) = rig.run(write(1, keys, range(4)))
    assert done.bad == {keys[1]: Reason.REFUSED, keys[2]: Reason.UPSTREAM, keys[3]: Reason.UPSTREAM}


def test_a_failed_parent_of_an_earlier_call_is_remembered(monkeypatch):
    monkeypatch.setattr(moves, "WRITES_A_CALL", 1)
    rig = Rig(spec=EVEN)
    keys = chain(3)
    rig.store.after["write"] = lambda answer: [WriteOutcome.NO_ROOM for _ in answer]
    (done,) = rig.run(write(1, keys, range(3)))
    assert done.bad == {keys[0]: Reason.REFUSED, keys[1]: Reason.UPSTREAM, keys[2]: Reason.UPSTREAM}
    assert len(rig.store.asked("write")) == 1
    assert rig.worker.close(PATIENCE_S) == []


# -- look-ups


def looked_up(spec, present, pages) -> Rig:
    """A rig whose store holds the records named by (page, group)."""
    rig = Rig(spec=spec)
    keys = chain(pages)
    for page, group in present:
        rig.store.records[record(keys[page], group)] = (None, "page_first", b"")
    rig.keys = keys
    return rig


def found(spec, present, pages=10) -> int:
    rig = looked_up(spec, present, pages)
    (done,) = rig.run(lookup(1, rig.keys))
    assert done.bad == {}
    assert rig.worker.close(PATIENCE_S) == []
    return done.found


def some(group, pages):
    return [(page, group) for page in pages]


def test_look_up_follows_the_rules_of_all_groups():
    window = CacheSpec((MAIN, Group("window", MAIN.planes, Window(16))), 4)
    assert found(SPEC, some(0, range(10)) + some(1, range(7))) == 7
    assert found(window, some(0, range(10)) + some(1, (6, 7, 8))) == 0
    assert found(window, some(0, range(10)) + some(1, range(3, 9))) == 9
    assert found(STATES, some(0, range(10)) + some(1, (3, 7))) == 8
    assert found(SPEC, []) == 0


@pytest.mark.parametrize("rule", [Full(), Window(8), State()])
def test_look_ups_ask_in_growing_batches_and_stop_early(monkeypatch, rule):
    monkeypatch.setattr(moves, "LOOKUP_FIRST", 2)
    monkeypatch.setattr(moves, "LOOKUP_MOST", 8)
    spec = CacheSpec((Group("main", MAIN.planes, rule),), 4)
    rig = looked_up(spec, some(0, [*range(5), 29]), 30)
    (done,) = rig.run(lookup(1, rig.keys))
    sizes = [len(what) for _, what in rig.store.calls]
    if isinstance(rule, Full):
        assert sizes == [2, 4]
    else:
        assert sizes == [2, 4, 8, 8, 8]
    assert done.found == (30 if isinstance(rule, State) else 5)
    assert rig.worker.close(PATIENCE_S) == []


def test_a_look_up_that_breaks_gives_what_it_knows(monkeypatch):
    monkeypatch.setattr(moves, "LOOKUP_FIRST", 2)
    rig = looked_up(EVEN, some(0, range(10)), 10)
    calls = itertools.count()

    def third() -> None:
        if next(calls) == 2:
            raise OSError

    rig.store.before["contains"] = third
    (done,) = rig.run(lookup(1, rig.keys))
    assert done.found == 6
    assert done.bad == dict.fromkeys(rig.keys[6:], Reason.FAILED)
    assert rig.worker.close(PATIENCE_S) == []


def test_a_look_up_stops_at_a_page_that_failed_upstream(rig):
    keys = chain(4)
    rig.stored(keys)
    rig.run(fetch(1, chain(5)[4:], (0,)))
    rig.submit(fetch(2, [*chain(1, 6)], (0,)))
    rig.next()
    poison(rig.host)
    missing = chain(5)
    (_, done) = rig.run(
        fetch(3, missing[4:], (1,)), lookup(4, [*missing[:2], missing[4], missing[2]], after=(3,))
    )
    assert done.found == 2
    assert done.bad == {missing[4]: Reason.UPSTREAM, missing[2]: Reason.UPSTREAM}


def test_parents_of_a_chain():
    keys = chain(3)
    assert parents_of(keys) == (NAMESPACE.root, keys[0], keys[1])
