"""A disk that is full, broken or read-only: one retry, then an outcome; never an exception, a leak or a wrong page."""

import errno
import os

import lmdb
import pytest

from hicache.data.store.base import Hit, WriteOutcome
from hicache.data.store.segment import Files, SegmentStore
from hicache.data.store.segment.directory import GROW_PAUSE
from hicache.data.store.segment.writer import ASIDE_MAX
from hicache.keys import Namespace
from hicache.testing.stores import PAGE_NBYTES, buffers, chain_of, read_back

SLOT = 3 * 4096
NAMESPACE = Namespace.of({"weights": "test"})
STORED, NO_ROOM, FAILED = WriteOutcome.STORED, WriteOutcome.NO_ROOM, WriteOutcome.FAILED


class Scripted(Files):
    """Fails chosen calls: ``fail["write"] = (how many, errno)``. ``log`` keeps the order of the calls."""

    def __init__(self):
        self.fail = {}
        self.log = []
        self.half = False

    def _call(self, name, fd=None, views=None, offset=0):
        self.log.append(name)
        left, code = self.fail.get(name, (0, 0))
        if left:
            self.fail[name] = (left - 1, code)
            if self.half and views:
                super().write(fd, [memoryview(b"".join(views))[: 4096 + 1000]], offset)
            if name == "commit":
                raise lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}")
            raise OSError(code, os.strerror(code))

    def make(self, path, nbytes):
        self._call("make")
        super().make(path, nbytes)

    def write(self, fd, views, offset):
        self._call("write", fd, views, offset)
        super().write(fd, views, offset)

    def sync(self, fd):
        self._call("sync")
        super().sync(fd)

    def read(self, fd, views, offset):
        self._call("read")
        return super().read(fd, views, offset)

    def commit(self, txn):
        self._call("commit")
        super().commit(txn)


@pytest.fixture
def files():
    return Scripted()


@pytest.fixture
def store(tmp_path, files):
    store = SegmentStore(tmp_path / "store", 48 * SLOT, files=files)
    yield store
    files.fail.clear()
    store.write(NAMESPACE, chain_of("at the end", 1))
    store.check()
    gauges = store.usage()
    assert gauges["used_bytes"] == (gauges["records"] + gauges["slots_in_hand"]) * SLOT
    store.close()


def test_the_commit_that_shows_a_record_comes_after_its_bytes_are_durable(store, files):
    assert store.write(NAMESPACE, chain_of("a", 3)) == [STORED] * 3
    assert files.log == ["make", "commit", "write", "write", "write", "sync", "commit"]
    assert store.write(NAMESPACE, chain_of("a", 3)) == [WriteOutcome.EXISTS] * 3
    assert len(files.log) == 7


def test_a_record_is_invisible_until_the_second_commit(store, files):
    seen = []
    keys = [r.key for r in chain_of("a", 2)]
    real = files.sync
    files.sync = lambda fd: (seen.append(store.contains(NAMESPACE, keys)), real(fd))
    store.write(NAMESPACE, chain_of("a", 2))
    assert seen == [[False, False]]
    assert store.contains(NAMESPACE, keys) == [True, True]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("half", [False, True], ids=["at once", "half-way"])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_full_disk_costs_the_coldest_leaves_and_one_retry(store, files, code, half, call):
    singles = [chain_of(f"s{i}", 1)[0] for i in range(40)]
    assert store.write(NAMESPACE, singles) == [STORED] * 40
    files.fail, files.half = {call: (1, code)}, half
    new = chain_of("new", 1)
    assert store.write(NAMESPACE, new) == [STORED]
    assert read_back(store, NAMESPACE, new) == [True]
    assert read_back(store, NAMESPACE, singles) == [False] + [True] * 39
    gauges = store.usage()
    assert (gauges["evicted_for_space"], gauges["slots_in_hand"]) == (1, 0)


def test_a_disk_that_stays_full_refuses_and_keeps_serving(store, files):
    chains = [chain_of(f"c{i}", 4) for i in range(10)]
    for chain in chains:
        store.write(NAMESPACE, chain)
    files.fail = {"write": (10**6, errno.ENOSPC)}
    files.log.clear()
    for number in range(20):
        assert store.write(NAMESPACE, chain_of(f"n{number}", 1)) == [NO_ROOM]
    assert files.log.count("write") == 40
    assert store.usage()["records"] >= 20
    for chain in chains:
        hits = read_back(store, NAMESPACE, chain)
        assert hits == sorted(hits, reverse=True)
    files.fail.clear()
    assert store.write(NAMESPACE, chain_of("after", 8)) == [STORED] * 8
    assert store.usage()["slots_in_hand"] == 0
    assert store.usage()["corrupt"] == 0


def test_only_the_records_without_room_are_refused(store, files):
    files.fail = {"write": (1, errno.ENOSPC)}
    singles = [chain_of(f"s{i}", 1)[0] for i in range(3)]
    assert store.write(NAMESPACE, singles) == [NO_ROOM, STORED, STORED]  # nothing there to evict yet
    assert store.write(NAMESPACE, singles) == [STORED, WriteOutcome.EXISTS, WriteOutcome.EXISTS]


def test_children_of_a_record_that_failed_are_refused(store, files):
    files.fail = {"write": (1, errno.ENOSPC)}
    assert store.write(NAMESPACE, chain_of("a", 3)) == [NO_ROOM] + [WriteOutcome.PARENT_ABSENT] * 2
    assert store.usage()["records"] == 0


def test_without_room_for_a_segment_the_store_stays_as_large_as_it_is(store, files):
    assert store.write(NAMESPACE, chain_of("a", 6)) == [STORED] * 6  # two segments of three slots
    files.fail = {"make": (10**6, errno.ENOSPC)}
    files.log.clear()
    for number in range(10):
        assert store.write(NAMESPACE, chain_of(f"b{number}", 2)) == [STORED] * 2
    assert files.log.count("make") == 1  # then no attempt for a while
    assert store.usage()["records"] == 6
    files.fail.clear()
    for number in range(GROW_PAUSE):
        store.write(NAMESPACE, chain_of(f"c{number}", 2))
    assert store.usage()["records"] > 6


def test_no_room_for_the_first_segment_is_an_outcome(store, files):
    files.fail = {"make": (1, errno.ENOSPC)}
    assert store.write(NAMESPACE, chain_of("a", 2)) == [NO_ROOM] * 2
    assert not list(store.directory.path.glob("segment-*"))


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_broken_disk_fails_the_record_and_sets_its_slot_aside(store, files, code, call):
    store.write(NAMESPACE, chain_of("a", 4))
    files.fail = {call: (1, code)}
    assert store.write(NAMESPACE, chain_of("b", 1)) == [FAILED]
    assert store.usage()["slots_in_hand"] == 1
    assert store.contains(NAMESPACE, [chain_of("b", 1)[0].key]) == [False]
    assert store.write(NAMESPACE, chain_of("b", 1)) == [STORED]
    assert read_back(store, NAMESPACE, chain_of("a", 4) + chain_of("b", 1)) == [True] * 5


@pytest.mark.parametrize(
    "call,code,aside,said",
    [
        ("write", errno.EROFS, 0, "the file system is read-only"),
        ("sync", errno.EROFS, 0, "the file system is read-only"),
        ("write", errno.EIO, ASIDE_MAX, f"spoilt {ASIDE_MAX} slots"),
        ("write", errno.ENOSPC, 0, "the disk is full"),
        ("commit", errno.EIO, 0, "the last write failed"),
    ],
)
def test_a_disk_that_refuses_all_writes_costs_no_page_beyond_a_few(store, files, call, code, aside, said):
    singles = [chain_of(f"s{i}", 1)[0] for i in range(30)]
    store.write(NAMESPACE, singles)
    assert store.trouble() is None
    evicted = 20 if code == errno.ENOSPC else 0
    files.fail = {call: (10**6, code)}
    for number in range(40 if code != errno.ENOSPC else evicted):
        assert store.write(NAMESPACE, chain_of(f"n{number}", 1)) in ([FAILED], [NO_ROOM])
    assert said in store.trouble()
    store.delete([])  # a transaction that takes owed slots along
    gauges = store.usage()
    assert (gauges["slots_in_hand"], gauges["set_aside"]) == (aside, aside)
    assert read_back(store, NAMESPACE, singles) == [False] * evicted + [True] * (30 - evicted)
    files.fail.clear()
    wanted = [FAILED] if aside else [STORED]
    assert store.write(NAMESPACE, chain_of("after", 1)) == wanted
    assert (store.trouble() is None) == (not aside)


def test_slots_set_aside_come_back_with_the_next_session(tmp_path, files):
    store = SegmentStore(tmp_path / "store", 48 * SLOT, files=files)
    files.fail = {"write": (1, errno.EIO)}
    store.write(NAMESPACE, chain_of("b", 1))
    assert store.usage()["slots_in_hand"] == 1
    store.close()
    store = SegmentStore(tmp_path / "store", 48 * SLOT)
    assert store.usage()["slots_in_hand"] == 0
    assert store.write(NAMESPACE, chain_of("a", 48)) == [STORED] * 48
    store.check()
    store.close()


@pytest.mark.parametrize("which", [1, 2])
def test_an_index_that_cannot_commit_fails_the_batch_and_nothing_leaks(store, files, which):
    store.write(NAMESPACE, chain_of("a", 4))
    real, calls = files.commit, []

    def commit(txn):
        calls.append(1)
        if len(calls) == which:
            raise lmdb.DiskError("injected", errno.ENOSPC)
        real(txn)

    files.commit = commit
    assert store.write(NAMESPACE, chain_of("b", 3)) == [FAILED] * 3
    store.check()
    assert store.contains(NAMESPACE, [r.key for r in chain_of("b", 3)]) == [False] * 3
    assert store.write(NAMESPACE, chain_of("b", 3)) == [STORED] * 3
    assert store.usage()["slots_in_hand"] == 0


def test_a_page_found_damaged_stays_a_miss_even_if_the_index_cannot_be_told(store, files):
    records = chain_of("a", 3)
    store.write(NAMESPACE, records)
    row = store.directory.rows([bytes(records[1].key)])[0]
    with store.directory.segments.path(row.segment).open("r+b") as file:
        file.seek(row.offset * 4096)
        file.write(bytes(SLOT))
    files.fail = {"commit": (1, errno.EIO)}
    assert read_back(store, NAMESPACE, records) == [True, False, True]
    assert store.contains(NAMESPACE, [records[1].key]) == [True]
    assert read_back(store, NAMESPACE, records) == [True, False, True]
    assert store.contains(NAMESPACE, [records[1].key]) == [False]


def test_a_read_error_costs_one_page(store, files):
    records = chain_of("a", 3)
    store.write(NAMESPACE, records)
    files.fail = {"read": (2, errno.EIO)}
    outcomes = store.read(NAMESPACE, [r.key for r in records], buffers(3))
    assert [isinstance(o, Hit) for o in outcomes] == [False, True, True]


class Lying(Files):
    """Delivers something else than what lies on the disk, once in a while."""

    toxic = ""

    def __init__(self):
        self.calls = 0

    def read(self, fd, views, offset):
        self.calls += 1
        if self.calls % 3 or not self.toxic:
            return super().read(fd, views, offset)
        if self.toxic == "short":
            super().read(fd, views, offset)
            return 4096 + PAGE_NBYTES // 2
        if self.toxic == "swapped":
            return super().read(fd, views, offset - SLOT if offset else SLOT)
        done = super().read(fd, views, offset)
        if self.toxic == "flipped":
            views[1][77] ^= 8
        if self.toxic == "torn":
            views[1][1024:] = bytes(len(views[1]) - 1024)
        return done


@pytest.mark.parametrize("toxic", ["short", "swapped", "flipped", "torn"])
def test_a_disk_that_lies_now_and_then_never_gets_through(tmp_path, toxic):
    files = Lying()
    store = SegmentStore(tmp_path / "store", 96 * SLOT, files=files)
    records = chain_of("a", 30)
    store.write(NAMESPACE, records)
    files.toxic = toxic
    assert (
        read_back(store, NAMESPACE, records) == [True] * 30
    )  # read_back compares bytes; a second look helps
    assert files.calls > 40
    store.check()
    store.close()
