"""The Controller's promises that small worlds do not show: idempotence, order of eviction, costs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from driven import SPACE, controller, keys, publish, resident, run

from hicache.control import ControlConfig, Controller
from hicache.errors import ConfigError, InvariantError, UnavailableError
from hicache.records import Done, EndpointFree, JobKind, Loaded, LookedUp, Reason, Where

# ---- one caller, one request


def test_a_call_from_inside_a_call_is_a_bug():
    seen = []

    def clock() -> float:
        with pytest.raises(InvariantError, match="one caller at a time"):
            control.take_jobs()
        seen.append(True)
        return 0.0

    control = Controller(ControlConfig(host_slots=2, store=True, deadlines={JobKind.LOOKUP: 1.0}), clock)
    control.open("r", SPACE, keys(1))
    assert seen


def test_opening_an_open_id_again_gives_the_same_request_and_takes_longer_keys():
    control = controller()
    first = control.open("r", SPACE, keys(2))
    assert control.open("r", SPACE, keys(3)) is first
    assert first.keys == keys(3)
    with pytest.raises(InvariantError, match="does not change"):
        control.open("r", SPACE, keys(3, start=1))


def test_a_closing_id_opened_again_is_a_new_generation():
    control = controller(store=True)
    first = control.open("r", SPACE, keys(2))
    (lookup,) = control.take_jobs().jobs
    first.close()
    second = control.open("r", SPACE, keys(2))
    assert second.handle != first.handle
    with pytest.raises(InvariantError, match="closed request"):
        first.match()
    events = control.apply([Done(lookup.id, found=2)])
    assert [e for e in events if isinstance(e, LookedUp)] == [], "the old answer is not the new request's"
    assert second.match().pending


def test_every_close_and_release_says_once_for_each_kind_when_the_memory_is_free():
    control = controller()
    request = control.open("r", SPACE, keys(2))
    request.publish(2, [5, 6])
    (save,) = control.take_jobs().jobs
    request.release_endpoint()
    assert control.apply() == [EndpointFree(request.handle, JobKind.LOAD)]
    assert control.apply([Done(save.id)]) == [EndpointFree(request.handle, JobKind.SAVE)]
    request.close()
    assert set(control.apply()) == {EndpointFree(request.handle, k) for k in (JobKind.LOAD, JobKind.SAVE)}


def test_publishing_more_than_there_are_keys_or_ids_is_a_bug():
    request = controller().open("r", SPACE, keys(2))
    with pytest.raises(InvariantError, match="beyond"):
        request.publish(3, range(3))
    with pytest.raises(InvariantError, match="beyond"):
        request.publish(2, range(1))


def test_a_key_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="32 bytes"):
        controller().open("r", SPACE, [b"short"])


# ---- match


def test_asking_again_costs_nothing_and_notices_what_came_and_went(monkeypatch):
    control = controller(host_slots=64)
    publish(control, "a", keys(40))
    request = control.open("r", SPACE, keys(60))
    assert request.match().ready == 40
    looks = []
    find = type(control.books.index).find
    monkeypatch.setattr(
        type(control.books.index), "find", lambda self, key: looks.append(key) or find(self, key)
    )
    for _ in range(5):
        assert request.match().ready == 40
    assert len(looks) <= 5, "the remembered run is checked by its last page only"
    publish(control, "b", keys(50))
    assert request.match().ready == 50
    control.evict(Where.HOST, 30)
    assert request.match().ready == 20


def test_pages_that_are_being_filled_are_promised_but_not_ready():
    control = controller()
    first = control.open("a", SPACE, keys(4))
    first.publish(2, range(4))
    second = control.open("b", SPACE, keys(4))
    match = second.match()
    assert (match.memory, match.ready, match.ends) == (2, 0, Reason.ABSENT)
    assert second.load(match, range(4), arriving=False).pages == 0
    assert second.load(match, range(4)).pages == 2


def test_a_match_behind_what_the_engine_has_starts_there():
    control = controller()
    publish(control, "a", keys(4))
    match = control.open("b", SPACE, keys(4)).match(3)
    assert (match.start, match.pages, match.ends) == (3, 1, Reason.END)


def test_a_load_gives_no_more_than_there_are_targets_and_says_so():
    control = controller()
    publish(control, "a", keys(4))
    request = control.open("b", SPACE, keys(4))
    load = request.load(request.match(), [9, 8])
    assert (load.pages, load.ends) == (2, Reason.TARGET_FULL)
    (loaded,) = [e for e in run(control) if isinstance(e, Loaded)]
    assert (loaded.start, loaded.good, loaded.reason) == (0, 2, Reason.END)


# ---- eviction


def test_eviction_takes_the_shortfall_deepest_first_and_least_recent_chain_first():
    control = controller(host_slots=8)
    publish(control, "old", keys(4))
    publish(control, "new", keys(4, start=100))
    publish(control, "more", keys(2, start=200))
    assert (resident(control, keys(4)), resident(control, keys(4, start=100))) == (2, 4)
    assert control.stats.evicted[Where.HOST] == 2


def test_a_used_chain_outlives_an_unused_one():
    control = controller(host_slots=8)
    publish(control, "a", keys(4))
    publish(control, "b", keys(4, start=100))
    request = control.open("use", SPACE, keys(4))
    request.load(request.match(), range(4))
    run(control)
    publish(control, "c", keys(3, start=200))
    assert (resident(control, keys(4)), resident(control, keys(4, start=100))) == (4, 1)


def test_touching_the_deepest_page_evicts_as_touching_the_whole_path_would():
    seed = 11
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(60):
        control = controller(host_slots=40)
        chains = [keys(draw.randint(1, 6), start=100 * n) for n in range(3)]
        chains += [draw.choice(chains)[: draw.randint(0, 3)] or chains[0] for _ in range(2)]
        used: dict[bytes, int] = {}
        for tick in range(12):
            chain = draw.choice(chains)
            publish(control, tick, chain)
            request = control.open(("use", tick), SPACE, chain)
            request.load(request.match(), range(len(chain)))
            run(control)
            request.close()
            run(control)
            used.update(dict.fromkeys(chain, tick))
        while used:
            parents = {p for chain in chains for p, c in pairwise(chain) if c in used}
            want = min((tick, key) for key, tick in used.items() if key not in parents)[0]
            before = set(used)
            assert control.evict(Where.HOST, 1) == 1
            index = control.books.index
            (gone,) = [key for key in before if index.find(key) < 0]
            assert gone not in parents
            assert used.pop(gone) == want, "the leaf of the least recently used path goes first"


def test_nothing_evictable_is_said_without_looking(monkeypatch):
    control = controller(host_slots=8)
    publish(control, "a", keys(8))
    request = control.open("r", SPACE, keys(8))
    request.load(request.match(), range(8))
    assert control.evict(Where.HOST, 4) == 0
    monkeypatch.setattr("hicache.control.tiers.heappop", None)  # a second look would fail
    for _ in range(3):
        assert control.evict(Where.HOST, 4) == 0


def test_each_page_waits_on_the_heap_at_most_once():
    control = controller(host_slots=8)
    for n in range(50):
        publish(control, n, keys(4, start=100 * (n % 3)))
        assert len(control.books.tiers.top._heap) <= 8


def test_a_call_that_is_broken_off_turns_the_cache_off_and_nothing_else():
    armed = []

    def clock() -> float:
        if armed:
            raise KeyboardInterrupt
        return 0.0

    control = Controller(ControlConfig(host_slots=8, store=True, deadlines={JobKind.WRITE: 1.0}), clock)
    publish(control, "a", keys(2))
    request = control.open("r", SPACE, keys(4))
    run(control)
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        request.publish(4, range(4))
    armed.clear()
    assert "publish was interrupted by KeyboardInterrupt" in control.broken
    assert request.match().pages == 0
    assert request.load(request.match(), range(4)).pages == 0
    assert request.publish(4, range(4)) == 0
    assert control.take_jobs().jobs == ()
    assert control.apply([Done(1)]) == []
    assert control.evict(Where.HOST, 8) == control.flush() == 0
    assert control.idle
    request.close()
    with pytest.raises(UnavailableError, match="this cache is off"):
        control.open("s", SPACE, keys(2))
