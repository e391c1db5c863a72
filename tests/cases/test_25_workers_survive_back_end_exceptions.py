"""Whatever a back end raises or returns, workers live on, every Job is answered and no host page is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hicache.build import build
from hicache.data.store.memory import MemoryStore
from hicache.data.store.segment import Files, SegmentStore
from hicache.keys import Namespace
from hicache.records import JobKind, Reason, Where
from hicache.settings import MemoryStoreSettings, SegmentStoreSettings, load
from hicache.testing.house import PAGE_TOKENS, PATIENCE_S, SPEC, House

BACKUPS, PAGES, HOST = 10, 2, 64
THIRD = 2


def raising(error):
    def fault(answer):
        raise error

    return fault


ANSWERS = {
    "OSError": raising(OSError(5, "input/output error")),
    "time-out": raising(TimeoutError("too slow")),
    "ValueError": raising(ValueError("bad value")),
    "KeyError": raising(KeyError("no such key")),
    "MemoryError": raising(MemoryError()),
    "AssertionError": raising(AssertionError()),
    "SystemExit": raising(SystemExit(1)),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "False": lambda answer: False,
    "None": lambda answer: None,
    "a number": lambda answer: 7,
    "too short": lambda answer: answer[:-1],
    "empty": lambda answer: [],
    "too long": lambda answer: [*answer, *answer],
    "None entries": lambda answer: [None] * len(answer),
    "a bad last entry": lambda answer: [*answer[:-1], "stored"],
}
FIRST_GOOD = ("too short", "a bad last entry")
"""Faults after which the first page of the batch is known to be written."""


class Faulty:
    """A store in memory whose method ``method`` spoils its calls number ``which``."""

    name = "faulty"

    def __init__(self, method, fault, which):
        self.inner = MemoryStore(64 << 20, SPEC.fingerprint())
        self.method, self.fault, self.which = method, fault, which
        self.calls = 0

    def _call(self, method, *arguments):
        if method == self.method:
            self.calls += 1
            if self.calls - 1 in self.which:
                return self.fault(getattr(self.inner, method)(*arguments))
        return getattr(self.inner, method)(*arguments)

    def read(self, namespace, keys, into):
        return self._call("read", namespace, keys, into)

    def write(self, namespace, records):
        return self._call("write", namespace, records)

    def contains(self, namespace, keys):
        return self._call("contains", namespace, keys)

    def close(self):
        self.inner.close()


def prompt(number):
    return range(1000 * number, 1000 * number + PAGES * PAGE_TOKENS)


def threads():
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith("hicache-")}


def free_pages(one):
    pool = one.controller.pools()[Where.HOST]
    assert pool["free"] + pool["ready"] == pool["total"] == HOST
    return pool["free"]


def run(one, store):
    """Ten backups; then everything leaves memory, and ten prefetches. Pages that came back, for each prompt."""
    for number in range(BACKUPS):
        served = one.serve(number, one.keys(prompt(number)))
        assert served.loaded == 0
    assert one.controller.idle
    assert free_pages(one) == HOST - BACKUPS * PAGES
    one.empty()
    assert free_pages(one) == HOST, "a page of a backup was not given back"
    loaded = [one.serve((number, "again"), one.keys(prompt(number))).loaded for number in range(BACKUPS)]
    one.empty()
    assert free_pages(one) == HOST, "a page of a prefetch was not given back"
    assert one.controller.idle
    assert one.worker.idle
    return loaded


@pytest.mark.parametrize("how", ANSWERS)
@pytest.mark.parametrize("method", ["write", "read", "contains"])
def test_nine_of_ten_go_through_and_the_workers_live_on(how, method):
    which = {"write": {THIRD}, "read": {THIRD}, "contains": {BACKUPS + THIRD}}[method]
    store = Faulty(method, ANSWERS[how], which)
    one = House(store=store, host_slots=HOST)
    one.serve("first", one.keys(range(90_000, 90_000 + PAGE_TOKENS)))  # so that every lane runs
    one.empty()
    store.calls = 0
    alive = threads()
    loaded = run(one, store)
    whole = [number for number in range(BACKUPS) if loaded[number] == PAGES]
    others = [number for number in range(BACKUPS) if number != THIRD]
    if method == "read":
        others = [number for number in range(BACKUPS) if number not in store.which]
    assert len(whole) >= BACKUPS - 1, loaded
    assert set(others) <= set(whole), loaded
    assert alive <= threads(), "a worker died"
    counters = one.worker.counters
    assert counters.bad[Reason.FAILED] + counters.bad[Reason.UPSTREAM] >= 1
    assert sum(counters.exceptions.values()) == 1, counters.exceptions
    one.close()


@pytest.mark.parametrize("how", ANSWERS)
def test_a_failed_backup_is_acknowledged_with_its_kind_and_its_unwritten_pages(how):
    store = Faulty("write", ANSWERS[how], {THIRD})
    one = House(store=store, host_slots=HOST)
    run_of = []
    apply = one.controller.apply
    one.controller.apply = lambda dones: run_of.extend(dones) or apply(dones)
    for number in range(BACKUPS):
        one.serve(number, one.keys(prompt(number)))
    dones = [done for done in run_of if one._kinds.get(done.job) is JobKind.WRITE]
    assert len(dones) == BACKUPS, "each backup is acknowledged once"
    bad = [len(done.bad) for done in dones]
    written = 1 if how in FIRST_GOOD else 0
    assert bad == [PAGES - written if number == THIRD else 0 for number in range(BACKUPS)]
    assert set(dones[THIRD].bad.values()) == {Reason.FAILED}
    one.close()


@pytest.mark.parametrize("how", FIRST_GOOD)
def test_pages_before_the_first_bad_entry_count_as_written_and_later_ones_do_not(how):
    store = Faulty("write", ANSWERS[how], {0})
    one = House(store=store, host_slots=HOST)
    one.serve("a", one.keys(range(4 * PAGE_TOKENS)))
    assert one.controller.stats.stored[Where.STORE] == 3
    assert one.serve("again", one.keys(range(4 * PAGE_TOKENS))).loaded == 4  # from memory
    one.close()


class Broken(Files):
    """Calls of the segment store's files that fail with what no file raises."""

    error: BaseException | None = None
    call = ""

    def _at(self, name):
        if name == self.call and self.error is not None:
            error, self.error = self.error, None
            raise error

    def write(self, fd, views, offset):
        self._at("write")
        super().write(fd, views, offset)

    def sync(self, fd):
        self._at("sync")
        super().sync(fd)

    def read(self, fd, views, offset):
        self._at("read")
        return super().read(fd, views, offset)

    def commit(self, txn):
        self._at("commit")
        super().commit(txn)


@pytest.mark.parametrize(
    "error", [ValueError("x"), TimeoutError("x"), KeyError("x"), MemoryError(), SystemExit()]
)
@pytest.mark.parametrize("call", ["write", "sync", "commit", "read"])
def test_the_segment_store_loses_no_slot_to_an_error_that_no_file_raises(tmp_path, call, error):
    files = Broken()
    store = SegmentStore(tmp_path / "store", 64 * 8192, SPEC.fingerprint(), files=files)
    one = House(store=store, host_slots=HOST)
    alive = threads()
    one.serve("before", one.keys(prompt(50)))
    one.empty()
    files.call, files.error = call, error
    loaded = run(one, store)
    assert files.error is None, "the error was raised"
    assert sum(loaded) >= (BACKUPS - 1) * PAGES
    assert alive <= threads()
    one.close()
    store.delete([])  # a transaction that takes owed slots along
    gauges = store.usage()
    assert gauges["slots_in_hand"] == gauges["set_aside"], "lost until the process ends"
    spoilt = {"write": 1, "sync": PAGES}.get(call, 0) if isinstance(error, OSError) else 0
    assert gauges["set_aside"] == spoilt
    store.check()
    store.close()
    store = SegmentStore(tmp_path / "store", 64 * 8192, SPEC.fingerprint())
    gauges = store.usage()
    assert gauges["slots_in_hand"] == 0
    assert gauges["used_bytes"] == gauges["records"] * 8192
    store.check()
    store.close()


def stores(tmp_path: Path):
    return {
        "memory": MemoryStoreSettings(cap="16MiB"),
        "segment": SegmentStoreSettings(path=str(tmp_path / "store"), cap="16MiB"),
    }


def cache_of(one, store):
    settings = load(environ={}, page_tokens=PAGE_TOKENS, host={"bytes": "1MiB"}, store=store)
    return build(settings, SPEC, Namespace.of({"weights": "the only ones"}), one)


@pytest.mark.parametrize("kind", ["memory", "segment"])
def test_twenty_resets_under_load_leave_no_thread_behind(tmp_path, kind):
    one = House()
    settings = stores(tmp_path)[kind]
    cache = cache_of(one, settings)
    counts = []
    for round_ in range(21):
        request = cache.open(round_, one.keys(range(100 * round_, 100 * round_ + 4 * PAGE_TOKENS)))
        request.publish(4, range(4))
        cache.step()  # the backup is under way
        request.close()
        assert cache.detach_store(PATIENCE_S) == []
        assert cache.attach_store(settings).store is None
        counts.append(len(threads()))
    assert set(counts[1:]) == {counts[0]}, counts
    assert cache.close(PATIENCE_S) == []
    one.close()


@pytest.mark.parametrize("method", ["write", "read", "contains", "close"])
def test_shutdown_ends_in_time_and_reports_the_call_that_hangs(tmp_path, monkeypatch, method):
    before = set(threading.enumerate())
    gate, inside = threading.Event(), threading.Event()
    one = House()
    cache = cache_of(one, MemoryStoreSettings(cap="16MiB"))
    store = cache.data.store.inner
    real = getattr(store, method)

    def hang(*arguments):
        inside.set()
        gate.wait(PATIENCE_S)
        return real(*arguments)

    keys = one.keys(range(4 * PAGE_TOKENS))
    if method in ("read", "contains"):
        request = cache.open("before", keys)
        request.publish(4, range(4))
        request.close()
        cache.run_until(lambda: cache.controller.idle, PATIENCE_S)
        cache.controller.evict(Where.HOST, 4)
    monkeypatch.setattr(store, method, hang)
    request = cache.open("a", keys)
    if method == "read":
        cache.run_until(lambda: not request.match().pending, PATIENCE_S)
        request.load(request.match(), range(4))
    if method == "write":
        request.publish(4, range(4))
    cache.step()
    if method == "write":
        cache.run_until(inside.is_set, PATIENCE_S)
    hanging = cache.close(0.5)
    assert inside.is_set()
    lane = {"write": "write", "read": "read", "contains": "ask", "close": "store.close"}[method]
    assert hanging == [lane]
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    one.close()
