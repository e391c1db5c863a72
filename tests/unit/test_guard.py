"""The guard before a store: breaker, retries, and what is not promised again."""

from __future__ import annotations

import threading

import pytest

from hicache.data.store.base import Corrupt, Hit, Miss, WriteOutcome
from hicache.data.store.guard import CLOSED, HALF_OPEN, OPEN, Guard, Limits
from hicache.data.store.memory import MemoryStore
from hicache.keys import Namespace
from hicache.testing.stores import buffers, chain_of, read_back

NAMESPACE = Namespace.of({"weights": "test"})
RECORDS = chain_of("prompt", 4)
FINGERPRINT = bytes(32)
KEYS = [record.key for record in RECORDS]
LIMITS = Limits(failures=3, pause_s=1.0, pause_max_s=4.0, hang_s=5.0, retries=0, negative_s=10.0)


class Hand:
    now = 100.0

    def __call__(self):
        return self.now


class Sick(MemoryStore):
    """A memory store that does as it is told: raise so many times, answer that it is down, or hang."""

    def __init__(self):
        super().__init__(10**6)
        self.raises, self.down, self.calls = 0, False, 0
        self.hold, self.inside = None, threading.Event()

    def _sick(self):
        self.calls += 1
        if self.hold is not None:
            self.inside.set()
            assert self.hold.wait(30)
        if self.raises:
            self.raises -= 1
            raise OSError("the wire is cut")

    def read(self, namespace, keys, into):
        self._sick()
        return [Miss("unavailable")] * len(keys) if self.down else super().read(namespace, keys, into)

    def write(self, namespace, records):
        self._sick()
        return [WriteOutcome.FAILED] * len(records) if self.down else super().write(namespace, records)

    def contains(self, namespace, keys):
        self._sick()
        return super().contains(namespace, keys)


@pytest.fixture
def clock():
    return Hand()


@pytest.fixture
def sick():
    return Sick()


@pytest.fixture
def guard(sick, clock):
    guard = Guard(sick, FINGERPRINT, clock, LIMITS)
    guard.write(NAMESPACE, RECORDS)
    return guard


def fails(guard, times=1):
    guard.inner.raises = times
    for _ in range(times):
        with pytest.raises(OSError, match="wire"):
            guard.contains(NAMESPACE, KEYS)


def asked(guard):
    """Calls that reach the store for one question each."""
    before = guard.inner.calls
    assert guard.contains(NAMESPACE, KEYS) == [False] * 4
    assert guard.read(NAMESPACE, KEYS, buffers(4)) == [Miss("breaker")] * 4
    return guard.inner.calls - before


def test_failures_in_a_row_open_it_and_nothing_reaches_the_store(guard):
    fails(guard, 2)
    assert all(read_back(guard, NAMESPACE, RECORDS)), "a success in between begins the row anew"
    fails(guard, 2)
    assert (guard.reads.state, guard.trouble()) == (CLOSED, None)
    fails(guard)
    assert guard.reads.state == OPEN
    assert "the wire is cut" in guard.trouble()
    assert asked(guard) == 0
    usage = guard.usage()
    assert (usage["read_breaker"], usage["write_breaker"], usage["breaker_opened"]) == (OPEN, CLOSED, 1)
    assert usage["calls_refused"] >= 2
    assert guard.write(NAMESPACE, RECORDS) == [WriteOutcome.EXISTS] * 4, "writes have a breaker of their own"


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_store_that_answers_that_nothing_works_has_failed(guard, sick, kind):
    sick.down = True
    for _ in range(3):
        if kind == "read":
            guard.read(NAMESPACE, KEYS, buffers(4))
        else:
            guard.write(NAMESPACE, RECORDS)
    broken, whole = (guard.reads, guard.writes)[:: 1 if kind == "read" else -1]
    assert (broken.state, whole.state) == (OPEN, CLOSED)
    sick.down, before = False, sick.calls
    if kind == "write":
        assert guard.write(NAMESPACE, RECORDS) == [WriteOutcome.FAILED] * 4
        guard.touch(KEYS)
        assert (guard.delete(KEYS), sick.calls) == (0, before)
        assert "nothing is written for a while" in guard.trouble()
    else:
        assert asked(guard) == 0
        assert "nothing is read for a while" in guard.trouble()
        guard.reads._clock.now += 1.0
    assert all(read_back(guard, NAMESPACE, RECORDS)), "what the store refused is still promised"


def test_after_a_pause_one_call_is_tried_and_each_that_fails_doubles_the_pause(guard, clock):
    fails(guard, 3)
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.01
        assert guard.reads.state == OPEN
        assert guard.contains(NAMESPACE, KEYS) == [False] * 4
        clock.now += 0.01
        assert guard.reads.state == HALF_OPEN
        fails(guard)
        assert asked(guard) == 0
    clock.now += 4.0
    assert guard.contains(NAMESPACE, KEYS) == [True] * 4
    assert (guard.reads.state, guard.trouble()) == (CLOSED, None)
    fails(guard, 3)
    clock.now += 1.0
    assert guard.reads.state == HALF_OPEN, "after a success the pause is the first again"


def test_only_one_call_is_let_through_at_a_time_while_it_is_half_open(guard, sick, clock):
    fails(guard, 3)
    clock.now += 1.0
    sick.hold = threading.Event()
    found = []
    trial = threading.Thread(target=lambda: found.append(guard.contains(NAMESPACE, KEYS)))
    trial.start()
    assert sick.inside.wait(30)
    assert asked(guard) == 0
    sick.hold.set()
    trial.join(30)
    assert found == [[True] * 4]
    assert guard.reads.state == CLOSED


def test_a_call_that_hangs_opens_it_and_its_late_success_closes_nothing(guard, sick, clock):
    sick.hold = threading.Event()
    hung = threading.Thread(target=lambda: guard.read(NAMESPACE, KEYS, buffers(4)))
    hung.start()
    assert sick.inside.wait(30)
    clock.now += 4.9
    assert guard.reads.state == CLOSED
    clock.now += 0.1
    assert asked(guard) == 0
    assert "not come back for 5 s" in guard.trouble()
    assert guard.usage()["calls_hanging"] == 1
    clock.now += 100.0
    assert asked(guard) == 0, "as long as it hangs nobody else is sent after it"
    sick.hold.set()
    hung.join(30)
    assert guard.contains(NAMESPACE, KEYS) == [True] * 4
    assert guard.reads.state == CLOSED


def test_a_call_that_raises_is_made_once_more_unless_it_took_long(sick, clock):
    guard = Guard(sick, FINGERPRINT, clock, Limits(retries=1, retry_s=0.5))
    sick.raises = 1
    assert guard.write(NAMESPACE, RECORDS) == [WriteOutcome.STORED] * 4
    assert (guard.usage()["calls_retried"], guard.writes.state) == (1, CLOSED)
    sick.raises = 2
    with pytest.raises(OSError, match="wire"):
        guard.contains(NAMESPACE, KEYS)
    contains = sick.contains

    def slow(namespace, keys):
        clock.now += 0.6
        return contains(namespace, keys)

    sick.contains, sick.raises, sick.calls = slow, 1, 0
    with pytest.raises(OSError, match="wire"):
        guard.contains(NAMESPACE, KEYS)
    assert sick.calls == 1


def test_what_could_not_be_read_is_not_promised_until_it_is_written_or_time_has_passed(guard, sick, clock):
    sick.damage(KEYS[1], at=600)
    found = guard.read(NAMESPACE, KEYS, buffers(4))
    assert [type(one) for one in found] == [Hit, Corrupt, Hit, Hit]
    MemoryStore.write(sick, NAMESPACE, RECORDS)  # somebody else has
    assert guard.contains(NAMESPACE, KEYS) == [True, False, True, True]
    assert guard.usage()["records_not_promised"] == 1
    clock.now += 10.0
    assert guard.contains(NAMESPACE, KEYS) == [True] * 4
    sick.damage(KEYS[2], at=600)
    guard.read(NAMESPACE, KEYS, buffers(4))
    assert guard.contains(NAMESPACE, KEYS)[2] is False
    assert guard.write(NAMESPACE, RECORDS)[2] is WriteOutcome.STORED
    assert guard.contains(NAMESPACE, KEYS) == [True] * 4


def test_another_namespaces_records_are_its_own_affair(guard):
    other = Namespace.of({"weights": "other"})
    assert not any(isinstance(one, Hit) for one in guard.read(other, KEYS, buffers(4)))
    assert guard.contains(NAMESPACE, KEYS) == [True] * 4


def test_what_is_not_promised_is_bounded(sick, clock):
    guard = Guard(sick, FINGERPRINT, clock, Limits(negative_max=3))
    guard.read(NAMESPACE, KEYS, buffers(4))
    assert guard.usage()["records_not_promised"] == 3


def test_a_store_without_abilities_gets_along(clock):
    class Plain:
        name = "plain"

        def contains(self, namespace, keys):
            return [False for _ in keys]

    guard = Guard(Plain(), FINGERPRINT, clock)
    guard.touch(KEYS)
    assert guard.delete(KEYS) == 0
    assert guard.trouble() is None
    assert guard.usage()["read_breaker"] == CLOSED
