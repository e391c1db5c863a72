"""A full, read-only or over-quota disk: evict once, try once more, keep serving; nothing is left half-written."""

from __future__ import annotations

import errno
import os
import subprocess

import lmdb
import pytest
from segments import HOUSE_SLOT, NAMESPACE, SLOT, cap_of, house_on, opened, used_on_disk

from hicache.build import build
from hicache.data.store.base import WriteOutcome
from hicache.data.store.segment import Files, SegmentStore
from hicache.records import Where
from hicache.settings import load
from hicache.testing.house import NAMESPACE as HOUSE_NAMESPACE
from hicache.testing.house import PAGE_TOKENS, SPEC, House
from hicache.testing.stores import chain_of, read_back

CAP_PAGES, DISK_PAGES, STORED_PAGES = 100, 50, 40
NBYTES = 64 << 10
PAGE_SLOT = NBYTES + 4096
STORED, NO_ROOM, FAILED = WriteOutcome.STORED, WriteOutcome.NO_ROOM, WriteOutcome.FAILED
FULL = [errno.ENOSPC, errno.EDQUOT]


class Volume(Files):
    """A disk of ``room`` bytes for segment files, and calls that fail on request: {call: (times, errno)}."""

    def __init__(self, room=1 << 60):
        self.room = room
        self.fail = {}
        self.calls = []
        self.half = False

    def _call(self, name, fd=None, views=None, offset=0):
        self.calls.append(name)
        times, code = self.fail.get(name, (0, 0))
        if not times:
            return
        self.fail[name] = (times - 1, code)
        if self.half and views:
            super().write(fd, [memoryview(b"".join(views))[: NBYTES // 2]], offset)
        if name == "commit":
            raise lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}")
        raise OSError(code, os.strerror(code))

    def make(self, path, nbytes):
        self._call("make")
        if used_on_disk(path.parent) + nbytes > self.room:
            raise OSError(errno.ENOSPC, "the volume is full")
        super().make(path, nbytes)

    def write(self, fd, views, offset):
        self._call("write", fd, views, offset)
        super().write(fd, views, offset)

    def sync(self, fd):
        self._call("sync")
        super().sync(fd)

    def commit(self, txn):
        self._call("commit")
        super().commit(txn)


def single(name):
    return chain_of(name, 1, NBYTES)


def held(store):
    return [read_back(store, NAMESPACE, single(f"s{n}"))[0] for n in range(STORED_PAGES)]


@pytest.fixture
def files():
    return Volume(DISK_PAGES * PAGE_SLOT)


@pytest.fixture
def store(tmp_path, files):
    """40 pages on a volume of 50, under a cap of 100."""
    store = SegmentStore(tmp_path / "store", CAP_PAGES * PAGE_SLOT, files=files)
    pages = [single(f"s{n}")[0] for n in range(STORED_PAGES)]
    assert store.write(NAMESPACE, pages) == [STORED] * STORED_PAGES
    files.calls.clear()
    yield store
    files.fail.clear()
    store.check()
    gauges = store.usage()
    assert gauges["used_bytes"] == (gauges["records"] + gauges["slots_in_hand"]) * PAGE_SLOT
    assert gauges["reserved_bytes"] == used_on_disk(tmp_path / "store") <= DISK_PAGES * PAGE_SLOT
    store.close()


@pytest.mark.parametrize("code", FULL)
def test_no_room_once_evicts_the_least_recently_used_and_tries_once_more(store, files, code):
    assert all(held(store)[:1])  # s0 is used last now, s1 is the coldest... of those that are not read below
    for n in range(2, STORED_PAGES):
        read_back(store, NAMESPACE, single(f"s{n}"))
    files.fail = {"write": (1, code)}
    files.calls.clear()
    assert store.write(NAMESPACE, single("new")) == [STORED]
    assert files.calls.count("write") == 2, "one retry"
    assert read_back(store, NAMESPACE, single("new")) == [True]
    assert store.usage()["evicted_for_space"] == 1


@pytest.mark.parametrize("code", FULL)
def test_no_room_for_long_refuses_each_write_after_one_retry_and_keeps_the_rest_readable(store, files, code):
    files.fail = {"write": (10**6, code)}
    for n in range(20):
        assert store.write(NAMESPACE, single(f"n{n}")) == [NO_ROOM]
        assert read_back(store, NAMESPACE, single("s39")) == [True]
    assert files.calls.count("write") <= 40
    assert sum(held(store)) >= STORED_PAGES - 20
    assert "the disk is full" in store.trouble()
    files.fail.clear()
    assert store.write(NAMESPACE, single("after")) == [STORED]
    assert store.trouble() is None


def test_a_volume_that_is_full_below_the_cap_goes_on_in_the_room_it_has(store, files):
    """Nobody frees anything: the store stays as large as the disk lets it, and takes every new page."""
    for n in range(200):
        assert store.write(NAMESPACE, single(f"n{n}")) == [STORED]
        assert read_back(store, NAMESPACE, single(f"n{n}")) == [True]
    gauges = store.usage()
    assert STORED_PAGES <= gauges["records"] <= DISK_PAGES
    assert gauges["no_room"] == gauges["failed"] == 0


@pytest.mark.parametrize("half", [False, True], ids=["at once", "half-way"])
@pytest.mark.parametrize("code", [*FULL, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["make", "write", "sync", "commit"])
def test_wherever_it_fails_nothing_partial_is_left_and_the_books_agree_with_the_disk(
    store, files, call, code, half, tmp_path
):
    before = sum(held(store))
    files.fail, files.half = {call: (1, code)}, half
    outcomes = [store.write(NAMESPACE, chain_of(f"n{n}", 3, NBYTES)) for n in range(5)]
    assert sum(o is STORED for batch in outcomes for o in batch) >= 12
    for n, batch in enumerate(outcomes):
        assert read_back(store, NAMESPACE, chain_of(f"n{n}", 3, NBYTES)) == [o.ok for o in batch]
    assert sum(held(store)) >= before - 15
    assert store.usage()["corrupt"] == 0
    names = {entry.name.split("-")[0] for entry in (tmp_path / "store").iterdir()}
    assert names == {"index.mdb", "segment", "session"}


@pytest.mark.parametrize("call", ["write", "sync", "commit"])
def test_a_read_only_disk_is_named_keeps_every_page_and_is_forgiven(store, files, call):
    files.fail = {call: (10**6, errno.EROFS)}
    for n in range(20):
        assert store.write(NAMESPACE, single(f"n{n}")) == [FAILED]
    assert all(held(store))
    assert "read-only" in store.trouble()
    files.fail.clear()
    assert store.write(NAMESPACE, single("after")) == [STORED]
    assert store.trouble() is None


FAULTS = {
    "no room once": {"write": (1, errno.ENOSPC)},
    "no room": {"write": (10**6, errno.ENOSPC)},
    "no room for a segment": {"make": (10**6, errno.ENOSPC)},
    "no room at the flush": {"sync": (10**6, errno.ENOSPC)},
    "no room for the index": {"commit": (10**6, errno.ENOSPC)},
    "over quota": {"write": (10**6, errno.EDQUOT)},
    "read-only": {"write": (10**6, errno.EROFS)},
    "broken": {"write": (10**6, errno.EIO)},
}


@pytest.mark.parametrize("fail", FAULTS.values(), ids=FAULTS)
def test_a_request_whose_pages_cannot_be_stored_is_answered_as_ever(tmp_path, fail):
    files = Volume()
    store = SegmentStore(tmp_path / "store", 16 * HOUSE_SLOT, SPEC.fingerprint(), files=files)
    with house_on(store) as one:
        one.serve("before", one.keys(range(4 * PAGE_TOKENS)))
        files.fail = dict(fail)
        for number in range(3):
            tokens = range(1000 * (number + 1), 1000 * (number + 1) + 4 * PAGE_TOKENS)
            served = one.serve(number, one.keys(tokens))
            assert (served.loaded, served.computed) == (0, 4)
            assert one.serve((number, "again"), one.keys(tokens)).by_tier[Where.HOST] == 4
        files.fail.clear()
    store.close()


def test_the_health_of_a_running_cache_says_that_the_disk_is_read_only(tmp_path, monkeypatch):
    one = House()
    settings = load(
        environ={},
        page_tokens=PAGE_TOKENS,
        host={"bytes": "1MiB"},
        store={"type": "segment", "path": str(tmp_path / "store"), "cap": "8MiB"},
    )
    cache = build(settings, SPEC, HOUSE_NAMESPACE, one)
    assert cache.health == {}

    def refuse(self, fd, views, offset):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Files, "write", refuse)
    request = cache.open("a", one.keys(range(2 * PAGE_TOKENS)))
    request.publish(2, [0, 1])
    request.close()
    cache.flush(10.0)
    assert "read-only" in cache.health["store"]
    monkeypatch.undo()
    cache.close()
    one.close()


def test_a_store_of_another_page_size_is_full_in_the_same_way(tmp_path):
    files = Volume(16 * SLOT)
    store = opened(tmp_path / "store", 32, files=files)
    assert cap_of(32) == 32 * SLOT
    for n in range(64):
        assert store.write(NAMESPACE, chain_of(f"n{n}", 2)) == [STORED] * 2
    assert store.usage()["records"] == 16
    store.check()
    store.close()


@pytest.fixture
def tiny_volume(tmp_path):
    """A real file system of 4 MiB; skipped where we may not mount one."""
    mount = tmp_path / "volume"
    mount.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(mount)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        pytest.skip(f"cannot mount a volume: {error}")
    if made.returncode:
        pytest.skip(f"may not mount a volume: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True, timeout=60)


def test_a_real_volume_that_is_smaller_than_the_cap(tiny_volume):
    store = SegmentStore(tiny_volume, CAP_PAGES * PAGE_SLOT)
    for n in range(150):
        assert store.write(NAMESPACE, single(f"s{n}")) == [STORED]
        assert read_back(store, NAMESPACE, single(f"s{n}")) == [True]
    records = store.usage()["records"]
    assert records >= 40
    assert read_back(store, NAMESPACE, single("s0")) == [False]
    (tiny_volume / "somebody's").write_bytes(bytes(os.statvfs(tiny_volume).f_bavail * 4096))
    for n in range(50):  # now not even the index may grow
        store.write(NAMESPACE, single(f"t{n}"))
    assert store.usage()["corrupt"] == 0
    (tiny_volume / "somebody's").unlink()
    assert store.write(NAMESPACE, single("after")) == [STORED]
    assert read_back(store, NAMESPACE, single("after")) == [True]
    store.check()
    store.close()
