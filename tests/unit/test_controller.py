"""The Controller's promises that small worlds do not show: idempotence, order of eviction, costs, policies."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hicache.control import ControlConfig, Controller
from hicache.errors import ConfigError, InvariantError
from hicache.keys import Namespace, page_keys
from hicache.policy import WritePolicy
from hicache.records import Done, EndpointFree, JobKind, Loaded, LookedUp, Reason, Where

SPACE = Namespace.of({"weights": "w"})


def keys(pages: int, start: int = 0) -> list[bytes]:
    return page_keys(SPACE.root, range(start, start + pages), 1)


def controller(**config) -> Controller:
    return Controller(ControlConfig(**{"host_slots": 8, **config}), lambda: 0.0)


def run(control: Controller, bad=None, found: int = 0) -> list:
    """Run and apply everything there is."""
    events = []
    while True:
        jobs = control.take_jobs().jobs
        events += control.apply(
            [
                Done(j.id, bad=(bad or {}).get(j.kind, {}), found=found if j.kind is JobKind.LOOKUP else 0)
                for j in jobs
            ]
        )
        if not jobs:
            control.check()
            return events


def publish(control: Controller, name, chain) -> None:
    request = control.open(name, SPACE, chain)
    run(control)
    request.publish(len(chain), range(len(chain)))
    run(control)
    request.close()
    run(control)


def resident(control: Controller, chain) -> int:
    request = control.open(object(), SPACE, chain)
    pages = request.match().ready
    request.close(abort=True)
    run(control)
    return pages


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


# ---- write policies


def counts(control: Controller) -> tuple[int, int]:
    stats = control.stats
    return sum(p["ready"] for w, p in control.pools().items() if w is Where.HOST), stats.stored[Where.STORE]


@pytest.mark.parametrize(
    "policy, first, second",
    [(WritePolicy.THROUGH, 4, 4), (WritePolicy.SELECTIVE, 0, 4), (WritePolicy.BACK, 0, 0)],
)
@pytest.mark.parametrize("leg", ["into_host", "into_store"])
def test_when_a_page_goes_down_a_leg(policy, first, second, leg):
    control = controller(device_slots=8, store=True, **{leg: policy})
    at = 0 if leg == "into_host" else 1
    publish(control, "one", keys(4))
    assert counts(control)[at] == first
    publish(control, "two", keys(4))
    assert counts(control)[at] == second
    if policy is WritePolicy.BACK:
        for _ in range(20):
            control.evict(Where.DEVICE, 8)
            run(control)
            control.evict(Where.HOST, 8)
            run(control)
        assert control.stats.stored[Where.STORE] == 4


def test_one_request_counts_once_however_often_it_publishes():
    control = controller(device_slots=8, into_host=WritePolicy.SELECTIVE)
    request = control.open("r", SPACE, keys(4))
    for upto in (1, 2, 2, 3, 4, 4):
        request.publish(upto, range(4))
        run(control)
    assert counts(control)[0] == 0
    request.close()
    publish(control, "second", keys(4))
    assert counts(control)[0] == 4


def test_selective_without_a_device_tier_saves_nothing_at_first_sight():
    control = controller(into_host=WritePolicy.SELECTIVE)
    publish(control, "one", keys(4))
    assert counts(control)[0] == 0
    publish(control, "two", keys(4))
    assert counts(control)[0] == 4


def test_ghosts_are_bounded_and_forget_the_least_recently_wanted():
    control = controller(into_host=WritePolicy.SELECTIVE, ghosts=6)
    publish(control, "a", keys(4))
    publish(control, "b", keys(4, start=100))
    assert len(control.books.ghosts.hits) == 6
    publish(control, "a again", keys(4))
    assert counts(control)[0] == 0, "a's first pages were forgotten, so the chain starts anew"


def test_back_into_host_needs_a_device_tier_of_our_own():
    with pytest.raises(ConfigError, match="does not say when it evicts"):
        controller(into_host=WritePolicy.BACK)


# ---- the store


def test_a_detached_store_is_asked_nothing_and_nothing_counts_as_stored():
    control = controller(store=True)
    publish(control, "a", keys(2))
    control.detach_store()
    publish(control, "b", keys(4))
    assert control.stats.stored[Where.STORE] == 2
    control.attach_store()
    publish(control, "c", keys(4))
    assert control.stats.stored[Where.STORE] == 2 + 4


def test_a_stuck_fetch_is_quarantined_and_its_late_end_frees_the_slots():
    control = controller(store=True)
    request = control.open("r", SPACE, keys(4))
    (lookup,) = control.take_jobs().jobs
    control.apply([Done(lookup.id, found=4)])
    request.load(request.match(), range(4))
    fetch, load = control.take_jobs().jobs
    control.apply([Done(fetch.id, stuck=True)])
    control.apply([Done(fetch.id, stuck=True)])
    control.check()
    assert control.pools()[Where.HOST]["quarantined"] == 4
    assert control.stats.stuck_jobs == 1
    events = control.apply([Done(load.id, bad=dict.fromkeys(keys(4), Reason.UPSTREAM))])
    assert [e.good for e in events if isinstance(e, Loaded)] == [0]
    assert request.match().pages == 0, "what is not coming is not promised again"
    control.apply([Done(fetch.id)])
    control.check()
    assert control.pools()[Where.HOST]["free"] == 8


def test_a_copy_with_the_engines_memory_is_never_given_up():
    control = controller()
    publish(control, "a", keys(2))
    request = control.open("r", SPACE, keys(2))
    request.load(request.match(), range(2))
    (load,) = control.take_jobs().jobs
    with pytest.raises(InvariantError, match="never given up"):
        control.apply([Done(load.id, stuck=True)])


def test_ids_are_forgotten_by_the_worker_only_when_nobody_follows_them():
    control = controller(store=True)
    request = control.open("r", SPACE, keys(2))
    run(control)
    request.publish(2, range(2))
    save, write = control.take_jobs().jobs
    assert write.after == (save.id,)
    control.apply([Done(save.id)])
    assert save.id not in control.take_jobs().applied, "the write may still have to ask what the save failed"
    control.apply([Done(write.id)])
    assert set(control.take_jobs().applied) >= {save.id, write.id}


def test_the_deepest_page_of_a_served_request_is_touched_in_the_store():
    control = controller(store=True)
    publish(control, "a", keys(4))
    request = control.open("r", SPACE, keys(4))
    request.load(request.match(), range(4))
    assert control.take_jobs().touched == (keys(4)[3],)


def test_a_prompt_longer_than_the_device_tier_goes_on_in_the_host_tier():
    control = controller(device_slots=2, host_slots=16)
    request = control.open("r", SPACE, keys(6))
    for upto in range(1, 7):
        assert request.publish(upto, range(6)) == upto
        run(control)
    request.close()
    run(control)
    request = control.open("again", SPACE, keys(6))
    load = request.load(request.match(), range(6))
    assert (load.pages, load.by_tier[Where.DEVICE], load.by_tier[Where.HOST]) == (6, 2, 4)


def test_a_lost_page_is_told_by_its_own_reason():
    control = controller(store=True)
    request = control.open("r", SPACE, keys(4))
    (lookup,) = control.take_jobs().jobs
    control.apply([Done(lookup.id, found=4)])
    request.load(request.match(), range(4))
    fetch, load = control.take_jobs().jobs
    control.apply([Done(fetch.id, bad={keys(4)[2]: Reason.CORRUPT})])
    (loaded,) = [
        e for e in control.apply([Done(load.id, bad={keys(4)[2]: Reason.UPSTREAM})]) if isinstance(e, Loaded)
    ]
    assert (loaded.good, loaded.reason) == (2, Reason.CORRUPT)


def test_a_page_that_left_and_came_again_is_not_ready_before_its_bytes_are():
    control = controller()
    publish(control, "a", keys(2))
    request = control.open("r", SPACE, keys(2))
    assert request.match().ready == 2
    assert control.evict(Where.HOST, 2) == 2
    other = control.open("b", SPACE, keys(2))
    other.publish(2, range(2))
    assert (request.match().memory, request.match().ready) == (2, 0)
    run(control)
    assert request.match().ready == 2


def test_answers_of_a_store_that_was_detached_promise_nothing():
    control = controller(store=True)
    request = control.open("r", SPACE, keys(4))
    (lookup,) = control.take_jobs().jobs
    control.detach_store()
    control.apply([Done(lookup.id, found=4)])
    assert request.match().pages == 0
    control.attach_store()
    assert request.match().pages == 0
    assert request.load(request.match(), range(4)).pages == 0


@pytest.mark.parametrize("how", ["partly", "stuck"])
def test_a_prefetch_that_fails_holds_only_what_it_brought(how):
    control = controller(store=True, fetch_at="lookup")
    request = control.open("r", SPACE, keys(4))
    (lookup,) = control.take_jobs().jobs
    control.apply([Done(lookup.id, found=4)])
    (fetch,) = control.take_jobs().jobs
    assert control.evict(Where.HOST, 8) == 0
    if how == "stuck":
        control.apply([Done(fetch.id, stuck=True)])
        control.apply([Done(fetch.id)])
    else:
        control.apply([Done(fetch.id, bad=dict.fromkeys(keys(4)[2:], Reason.MISS))])
    control.check()
    kept = 2 if how == "partly" else 0
    assert control.evict(Where.HOST, 8) == 0, "what is held stays"
    assert control.pools()[Where.HOST] | {"total": 8} == {
        "free": 8 - kept, "filling": 0, "ready": kept, "doomed": 0, "quarantined": 0, "total": 8
    }  # fmt: skip
    request.close()
    assert control.evict(Where.HOST, 8) == kept


def test_preemption_does_not_stop_a_prefetch():
    control = controller(store=True, fetch_at="lookup")
    request = control.open("r", SPACE, keys(4))
    (lookup,) = control.take_jobs().jobs
    control.apply([Done(lookup.id, found=4)])
    request.release_endpoint()
    (fetch,) = control.take_jobs().jobs
    assert fetch.kind is JobKind.FETCH
    control.apply([Done(fetch.id)])
    assert request.match().ready == 4
