"""Prompts that branch off a page while its copies are pending: nothing is lost, events name every page once."""

from __future__ import annotations

import pytest

from hicache.data.store.base import WriteOutcome
from hicache.data.store.memory import MemoryStore
from hicache.records import JobKind, Reason, Stored, Where
from hicache.testing.house import SPEC

TOKENS = list(range(512))  # 8 pages
SHARED_5 = TOKENS[:320] + list(range(7000, 7064))
SHARED_2 = TOKENS[:128] + list(range(8000, 8064))


def publish(one, name, tokens):
    request = one.open(name, one.keys(tokens))
    one.settle()
    one.compute(request, range(len(request.keys)))
    request.publish(len(request.keys), one.ids(request))
    request.close()
    return request


def pending(house, store):
    """8 pages whose save has ended and whose way down is held."""
    one = house(device_slots=16, host_slots=16, store=store, kv_events=True)
    one.held = {JobKind.DOWN, JobKind.WRITE}
    publish(one, "whole", TOKENS)
    one.settle()
    return one


@pytest.mark.parametrize("branches", [[SHARED_5], [SHARED_5, SHARED_2]])
def test_branches_while_copies_are_pending_lose_no_page(house, store, branches):
    one = pending(house, store)
    for number, tokens in enumerate(branches):
        publish(one, number, tokens)
        one.settle()
    one.release()
    for where in (Where.DEVICE, Where.HOST, Where.STORE):
        stored = [event for event in one.log if isinstance(event, Stored) and event.tier == where]
        keys = [key for event in stored for key in event.keys]
        parents = [key for event in stored for key in event.parents]
        assert len(keys) == len(set(keys)) == 8 + len(branches), f"{where.name}: every page once"
        seen = {one.controller.books.spaces[0].root}
        for key, parent in zip(keys, parents, strict=True):
            assert parent in seen, f"{where.name}: a child was announced before its parent"
            seen.add(key)
        assert set(one.keys(TOKENS)) <= set(keys)
    assert one.controller.idle
    one.empty()
    assert one.serve("from the store", one.keys(TOKENS)).by_tier[Where.STORE] == 8


class Partly(MemoryStore):
    """Takes only the first ``most`` records of its life."""

    most = 8

    def write(self, namespace, records):
        taken = super().write(namespace, records[: self.most])
        self.most -= len(taken)
        return taken + [WriteOutcome.FAILED] * (len(records) - len(taken))


@pytest.mark.parametrize("most", [5, 0])
def test_a_store_that_takes_only_some_leaves_the_rest_unstored_and_the_tree_unchanged(house, most):
    store = Partly(64 << 20, SPEC.fingerprint())
    store.most = most
    one = house(device_slots=16, host_slots=16, store=store)
    publish(one, "whole", TOKENS)
    one.settle()
    stats = one.controller.stats
    assert (stats.stored[Where.STORE], stats.not_stored) == (most, 8 - most)
    assert sum(stats.bad[reason] for reason in (Reason.FAILED, Reason.UPSTREAM)) == 8 - most
    assert one.open("memory", one.keys(TOKENS)).match().ready == 8
    one.empty()
    assert one.serve("from the store", one.keys(TOKENS)).by_tier[Where.STORE] == most


def test_pages_that_were_not_stored_are_stored_when_a_request_passes_over_them(house):
    store = Partly(64 << 20, SPEC.fingerprint())
    store.most = 5
    one = house(device_slots=16, host_slots=16, store=store)
    publish(one, "whole", TOKENS)
    one.settle()
    store.most = 100
    publish(one, "again", TOKENS)
    one.settle()
    one.empty()
    assert one.serve("from the store", one.keys(TOKENS)).by_tier[Where.STORE] == 8
