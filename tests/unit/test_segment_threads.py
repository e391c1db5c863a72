"""Several threads on one call: all of its items end, in order, once; what is committed is whole at any moment."""

import threading

import lmdb
import pytest

from hicache.data.store.base import Hit, WriteOutcome
from hicache.data.store.segment import Files, SegmentStore, crew, writer
from hicache.data.store.segment.crew import HELPERS, Crew
from hicache.keys import Namespace
from hicache.testing.stores import PAGE_NBYTES, buffers, chain_of, read_back

SLOT = 3 * 4096
NAMESPACE = Namespace.of({"weights": "test"})
STORED, FAILED = WriteOutcome.STORED, WriteOutcome.FAILED
PATIENCE_S = 30.0
MUCH = crew.SHARE_NBYTES


@pytest.fixture
def team():
    made = Crew("test")
    yield made
    made.close()


@pytest.fixture
def in_parts(monkeypatch):
    """Every batch is shared out, and committed part by part."""
    monkeypatch.setattr(crew, "SHARE_NBYTES", 0)
    monkeypatch.setattr(writer, "GROUP_NBYTES", 2 * PAGE_NBYTES)


def helpers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hicache-test")]


# -- the crew


def test_results_come_in_the_order_of_the_items(team):
    assert team.each(lambda n: n * n, range(1000), MUCH) == [n * n for n in range(1000)]


def test_the_caller_and_its_helpers_work_at_once(team):
    everybody = threading.Barrier(HELPERS + 1)
    assert len(set(team.each(lambda n: everybody.wait(PATIENCE_S), range(HELPERS + 1), MUCH))) == HELPERS + 1


@pytest.mark.parametrize("items,nbytes", [([], MUCH), ([1], MUCH), ([1, 2, 3], MUCH - 1)])
def test_little_is_done_by_the_caller_alone(team, items, nbytes):
    assert team.each(lambda n: threading.current_thread(), items, nbytes) == [
        threading.current_thread()
    ] * len(items)
    assert helpers() == []


def test_an_error_ends_the_call_once_nobody_works_on_it_any_more(team):
    running = set()

    def work(number):
        running.add(number)
        try:
            if number == 3:
                raise KeyError(number)
        finally:
            running.discard(number)

    with pytest.raises(KeyError, match="3"):
        team.each(work, range(100), MUCH)
    assert not running
    assert team.each(str, range(5), MUCH) == list("01234")


def test_calls_of_several_threads_do_not_mix(team):
    answers = {}

    def call(base):
        answers[base] = team.each(lambda n: (base, n), range(200), MUCH)

    callers = [threading.Thread(target=call, args=(base,)) for base in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers == {base: [(base, n) for n in range(200)] for base in range(6)}


def test_a_helper_that_hangs_holds_up_its_own_call_only(team):
    gate, entered = threading.Event(), threading.Event()

    def hang(number):
        entered.set()
        gate.wait(PATIENCE_S)

    stuck = threading.Thread(target=lambda: team.each(hang, range(2), MUCH))
    stuck.start()
    assert entered.wait(PATIENCE_S)
    assert team.each(str, range(50), MUCH) == [str(n) for n in range(50)]
    gate.set()
    stuck.join()


def test_work_that_was_begun_is_waited_for_and_done_once(team):
    done = []
    wait = team.begin(lambda: done.append(threading.current_thread()) or 7)
    assert wait() == 7
    assert wait() == 7
    assert len(done) == 1


def test_an_error_of_what_was_begun_comes_out_where_it_is_waited_for(team):
    def fail():
        raise ValueError("late")

    wait = team.begin(fail)
    with pytest.raises(ValueError, match="late"):
        wait()


def test_without_threads_the_caller_does_it_all(team, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert team.each(str, range(4), MUCH) == list("0123")
    assert team.begin(lambda: 5)() == 5


def test_closing_ends_the_threads_and_calls_still_work():
    team = Crew("test")
    team.each(str, range(10), MUCH)
    assert len(helpers()) == HELPERS
    team.close()
    assert helpers() == []
    assert team.each(str, range(3), MUCH) == list("012")
    assert helpers() == []


# -- the store


class Watched(Files):
    """Counts calls, and lets a test stand in any of them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.calls = []
        self.on = {}

    def _at(self, name):
        with self.lock:
            self.calls.append(name)
            count = self.calls.count(name)
        self.on.get(name, lambda count: None)(count)

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
        self._at("committed")


@pytest.fixture
def files():
    return Watched()


@pytest.fixture
def store(tmp_path, files):
    store = SegmentStore(tmp_path / "store", 96 * SLOT, files=files)
    yield store
    files.on.clear()
    store.delete([])
    store.check()
    gauges = store.usage()
    assert gauges["slots_in_hand"] == gauges["set_aside"]
    store.close()


def test_four_records_of_a_batch_are_read_at_once(in_parts, store, files):
    records = chain_of("a", 8)
    store.write(NAMESPACE, records)
    four = threading.Barrier(HELPERS + 1)
    files.on["read"] = lambda count: four.wait(PATIENCE_S)
    assert read_back(store, NAMESPACE, records) == [True] * 8


def test_four_records_of_a_batch_are_written_at_once(in_parts, store, files):
    four = threading.Barrier(HELPERS + 1)
    files.on["write"] = lambda count: four.wait(PATIENCE_S)
    assert store.write(NAMESPACE, chain_of("a", 8)) == [STORED] * 8


def test_what_is_written_is_committed_while_the_rest_is_still_being_written(in_parts, store, files):
    """The writes of the second half wait for the first half to be seen: whoever commits only at the end never ends."""
    records, seen = chain_of("a", 12), threading.Event()

    def after_commit(count):
        if store.contains(NAMESPACE, [records[0].key]) == [True]:
            seen.set()

    def write(count):
        if count > 6:
            assert seen.wait(PATIENCE_S), "nothing was committed meanwhile"

    files.on = {"write": write, "committed": after_commit}
    assert store.write(NAMESPACE, records) == [STORED] * 12
    assert files.calls.count("commit") > 3


def test_what_is_visible_is_the_front_of_the_batch_at_any_moment(in_parts, store, files):
    records, pictures = chain_of("a", 40), []
    keys = [record.key for record in records]
    files.on["sync"] = lambda count: pictures.append(store.contains(NAMESPACE, keys))
    assert store.write(NAMESPACE, records) == [STORED] * 40
    assert len(pictures) > 1
    assert all(picture == sorted(picture, reverse=True) for picture in pictures)
    assert read_back(store, NAMESPACE, records) == [True] * 40


@pytest.mark.parametrize("which", [2, 3, 4])
def test_a_commit_that_fails_half_way_keeps_what_came_before(in_parts, store, files, which):
    records = chain_of("a", 40)

    def commit(count):
        if count == which:
            raise lmdb.Error("injected")

    files.on["commit"] = commit
    outcomes = store.write(NAMESPACE, records)
    stored = outcomes.count(STORED)
    assert outcomes == [STORED] * stored + [FAILED] * (40 - stored)
    assert read_back(store, NAMESPACE, records) == [True] * stored + [False] * (40 - stored)
    files.on.clear()
    assert store.write(NAMESPACE, records)[stored:] == [STORED] * (40 - stored)
    assert read_back(store, NAMESPACE, records) == [True] * 40


def test_an_error_that_no_disk_raises_ends_the_call_and_what_was_committed_stays(in_parts, store, files):
    records = chain_of("a", 40)

    def write(count):
        if count == 25:
            raise ValueError("injected")

    files.on["write"] = write
    with pytest.raises(ValueError, match="injected"):
        store.write(NAMESPACE, records)
    files.on.clear()
    there = store.contains(NAMESPACE, [record.key for record in records])
    assert there == sorted(there, reverse=True)
    assert not all(there)
    assert all(outcome.ok for outcome in store.write(NAMESPACE, records))
    assert read_back(store, NAMESPACE, records) == [True] * 40


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("code", [28, 5])
def test_a_disk_that_refuses_some_of_a_batch(in_parts, store, files, call, code):
    records = chain_of("a", 40)
    colder = [chain_of(f"s{n}", 1)[0] for n in range(30)]
    store.write(NAMESPACE, colder)
    files.calls.clear()

    def refuse(count):
        if count == 3:
            raise OSError(code, "injected")

    files.on[call] = refuse
    outcomes = store.write(NAMESPACE, records)
    stored = [outcome is STORED for outcome in outcomes]
    assert stored == sorted(stored, reverse=True), "a child without its parent"
    if code == 28:
        assert all(stored), "evicted for space, and tried once more"
        assert store.usage()["evicted_for_space"] >= 1
    assert read_back(store, NAMESPACE, records) == stored
    files.on.clear()
    assert all(outcome.ok for outcome in store.write(NAMESPACE, records))


def test_two_threads_write_and_two_read_at_once(in_parts, store):
    chains = [chain_of(f"c{n}", 10) for n in range(8)]
    wrong = []

    def write(some):
        for chain in some:
            wrong.extend(outcome for outcome in store.write(NAMESPACE, chain) if not outcome.ok)

    def read():
        for _ in range(20):
            for chain in chains:
                hits = read_back(store, NAMESPACE, chain)
                if hits != sorted(hits, reverse=True):
                    wrong.append(hits)

    threads = [threading.Thread(target=write, args=(chains[n::2],)) for n in range(2)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(read_back(store, NAMESPACE, chain) == [True] * 10 for chain in chains)
    assert store.usage()["corrupt"] == 0


def test_damage_found_by_a_helper_is_dropped_and_told_once(in_parts, store):
    records = chain_of("a", 20)
    store.write(NAMESPACE, records)
    for number in (3, 11, 17):
        row = store.directory.rows([bytes(records[number].key)])[0]
        with store.directory.segments.path(row.segment).open("r+b") as file:
            file.seek(row.offset * 4096 + 4096 + 9)
            file.write(b"\xff\xfe")
    outcomes = store.read(NAMESPACE, [r.key for r in records], buffers(20))
    assert [isinstance(outcome, Hit) for outcome in outcomes] == [n not in (3, 11, 17) for n in range(20)]
    assert store.usage()["corrupt"] == 3
    assert sum(store.contains(NAMESPACE, [r.key for r in records])) == 17


def test_closing_a_store_ends_its_threads(in_parts, tmp_path):
    before = set(threading.enumerate())
    store = SegmentStore(tmp_path / "other", 96 * SLOT)
    store.write(NAMESPACE, chain_of("a", 20))
    read_back(store, NAMESPACE, chain_of("a", 20))
    assert len(set(threading.enumerate()) - before) >= 2 * HELPERS
    store.close()
    assert set(threading.enumerate()) - before == set()
