"""The Controller's promises that small worlds do not show: write policies, and what a store does to it."""

from __future__ import annotations

import pytest
from driven import SPACE, controller, keys, publish, resident, run

from hicache.control import Controller
from hicache.errors import ConfigError, InvariantError
from hicache.keys import Namespace, page_keys
from hicache.policy import WritePolicy
from hicache.records import Done, JobKind, Loaded, Reason, Where


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


@pytest.mark.parametrize("came", [0, 3, 4])
def test_what_came_before_the_deadline_counts_and_the_late_end_frees_the_other_slots(came):
    late = dict.fromkeys(keys(4)[came:], Reason.DEADLINE)
    control = controller(store=True)
    request = control.open("r", SPACE, keys(4))
    (lookup,) = control.take_jobs().jobs
    control.apply([Done(lookup.id, found=4)])
    request.load(request.match(), range(4))
    fetch, load = control.take_jobs().jobs
    control.apply([Done(fetch.id, bad=late, stuck=True)])
    control.apply([Done(fetch.id, stuck=True)])
    control.check()
    assert control.pools()[Where.HOST]["quarantined"] == 4 - came
    assert control.stats.stuck_jobs == 1
    assert control.stats.bad[Reason.DEADLINE] == 4 - came
    events = control.apply([Done(load.id, bad=dict.fromkeys(late, Reason.UPSTREAM))])
    (loaded,) = (e for e in events if isinstance(e, Loaded))
    assert (loaded.good, loaded.reason) == (came, Reason.DEADLINE if came < 4 else Reason.END)
    assert request.match().pages == came, "what is not coming is not promised again"
    control.apply([Done(fetch.id)])
    control.check()
    assert control.pools()[Where.HOST]["free"] == 8 - came
    assert request.match().ready == came
    request.close()
    assert control.evict(Where.HOST, 8) == came


def test_a_page_counts_only_if_no_shard_gave_it_up():
    control = controller(store=True, shards=2)
    request = control.open("r", SPACE, keys(4))
    (lookup,) = control.take_jobs().jobs
    control.apply([Done(lookup.id, shard, found=4) for shard in (0, 1)])
    request.load(request.match(), range(4))
    fetch, load = control.take_jobs().jobs
    control.apply([Done(fetch.id, 0, dict.fromkeys(keys(4)[3:], Reason.DEADLINE), stuck=True)])
    assert control.pools()[Where.HOST]["filling"] == 4, "the other shard has not said anything"
    control.apply([Done(fetch.id, 1, dict.fromkeys(keys(4)[1:], Reason.DEADLINE), stuck=True)])
    control.check()
    pools = control.pools()[Where.HOST]
    assert (pools["ready"], pools["quarantined"], pools["filling"]) == (1, 3, 0)
    control.apply([Done(fetch.id, 0)])
    assert control.pools()[Where.HOST]["quarantined"] == 3, "the other shard's bytes may still land"
    control.apply([Done(load.id, shard, dict.fromkeys(keys(4)[1:], Reason.UPSTREAM)) for shard in (0, 1)])
    assert control.pools()[Where.HOST]["quarantined"] + control.pools()[Where.HOST]["doomed"] == 3
    control.apply([Done(fetch.id, 1)])
    control.check()
    assert control.pools()[Where.HOST]["free"] == 7


def test_a_write_that_is_given_up_is_settled_by_its_real_end():
    control = controller(store=True)
    request = control.open("r", SPACE, keys(2))
    request.publish(2, range(2))
    _, save, write = control.take_jobs().jobs
    control.apply([Done(save.id)])
    control.apply([Done(write.id, bad=dict.fromkeys(keys(2), Reason.DEADLINE), stuck=True)])
    assert control.stats.stored[Where.STORE] == 0
    control.apply([Done(write.id, bad={keys(2)[1]: Reason.REFUSED})])
    assert control.stats.stored[Where.STORE] == 1
    control.check()


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
        control.apply([Done(fetch.id, bad=dict.fromkeys(keys(4)[2:], Reason.DEADLINE), stuck=True)])
        control.apply([Done(fetch.id)])
    else:
        control.apply([Done(fetch.id, bad=dict.fromkeys(keys(4)[2:], Reason.MISS))])
    control.check()
    assert control.evict(Where.HOST, 8) == 0, "what is held stays"
    assert control.pools()[Where.HOST] | {"total": 8} == {
        "free": 6, "filling": 0, "ready": 2, "doomed": 0, "quarantined": 0, "total": 8
    }  # fmt: skip
    request.close()
    assert control.evict(Where.HOST, 8) == 2


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


@pytest.mark.parametrize("device_slots", [0, 8])
def test_what_is_invalidated_leaves_memory_at_once_and_nobody_elses_page_does(device_slots):
    control = controller(device_slots=device_slots)
    other = Namespace.of({"weights": "other"})
    theirs = page_keys(other.root, range(3), 1)
    publish(control, "a", keys(3))
    request = control.open("b", other, theirs)
    request.publish(3, range(3))
    run(control)
    reader = control.open("c", SPACE, keys(3))
    reader.load(reader.match(), range(3))
    assert control.invalidate(SPACE) == 3
    assert (reader.match().pages, request.match().ready) == (0, 3)
    doomed = sum(pool["doomed"] for pool in control.pools().values())
    assert doomed == 3, "what a copy reads stays until it has ended"
    control.check()
    run(control)
    assert sum(pool["doomed"] for pool in control.pools().values()) == 0
    assert control.invalidate(SPACE) == 0
    request.close()
    reader.close()
    run(control)
    assert resident(control, keys(3)) == 0
