"""Power cut at every single call: what was not synced is lost, torn or kept by chance; what was acknowledged is there.

The file layer keeps writes to itself until they are synced; a commit of the index is one atomic, durable step. At the
cut, each unsynced sector reaches the file or does not, by the toss of a seeded coin.
"""

import os
import random
import threading

import pytest

from hicache.data.store.base import Corrupt, Hit, WriteOutcome
from hicache.data.store.segment import Files, SegmentStore, crew, sharing, writer
from hicache.keys import Namespace
from hicache.testing.stores import PAGE_NBYTES, buffers, chain_of, read_back

SLOT = 3 * 4096
PAGES = 18
NAMESPACE = Namespace.of({"weights": "test"})
SECTOR = 512


class PowerCut(BaseException):
    """Not an Exception: nothing in the store may catch it and go on."""


def reach(fd, data, offset):
    """Bytes reach the file: through a descriptor of its own, because the store's takes whole blocks only."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.pwrite(own, data, offset)
    os.close(own)


class Volatile(Files):
    """Loses what is not synced. Cuts the power at call number ``cut``: most calls count before and after they act."""

    def __init__(self, cut=None):
        self.cut = cut
        self.calls = 0
        self.lock = threading.Lock()
        self.dirty = []

    def _call(self):
        with self.lock:
            self.calls += 1
            dark = self.cut is not None and self.calls >= self.cut
        if dark:  # for every thread, from then on
            raise PowerCut

    def make(self, path, nbytes):
        self._call()
        with path.open("ab") as file:  # as durable as any other, and quicker than a real one
            file.truncate(nbytes)
        path.chmod(0o600)
        self._call()

    def write(self, fd, views, offset):
        self._call()
        with self.lock:
            self.dirty.append((fd, offset, b"".join(views)))

    def sync(self, fd):
        self._call()
        with self.lock:
            mine = [entry for entry in self.dirty if entry[0] == fd]
            self.dirty = [entry for entry in self.dirty if entry[0] != fd]
        for entry in mine:
            reach(fd, entry[2], entry[1])
        self._call()

    def commit(self, txn):
        self._call()
        super().commit(txn)
        self._call()

    def lose(self, rng):
        """Some sectors of what was never synced have reached the disk all the same."""
        for fd, offset, data in self.dirty:
            for at in range(0, len(data), SECTOR):
                if rng.random() < 0.5:
                    reach(fd, data[at : at + SECTOR], offset + at)


def abandon(store):
    """Drop the store as a dying process would: nothing is given back, the locks are free."""
    directory = store.directory
    directory.closed = True
    directory._wake.set()
    if directory._flusher is not None:
        directory._flusher.join()
    fd, _ = directory.sessions._ours
    os.close(fd)
    directory.sessions._ours = None
    directory.segments.close()
    directory.env.close()
    for identity in [i for i, d in sharing._directories.items() if d is directory]:
        del sharing._directories[identity]


def work(store, acks):
    """Fill the store, evict, delete, refill a hole and write on; ``acks`` lists the chains known to be stored."""
    for number in range(5):
        outcomes = store.write(NAMESPACE, chain_of(f"c{number}", 5))
        assert outcomes == [WriteOutcome.STORED] * 5
        acks.append((f"c{number}", 5))
    middle = chain_of("c4", 3, start=2)
    acks.pop()
    store.delete([middle[0].key])
    assert store.write(NAMESPACE, middle) == [WriteOutcome.STORED]
    acks.append(("c4", 5))
    assert store.write(NAMESPACE, chain_of("c4", 7, start=5)) == [WriteOutcome.STORED] * 2
    acks.append(("c4", 7))


def check_after(path, acks):
    store = SegmentStore(path, PAGES * SLOT)
    store.check()
    gauges = store.usage()
    assert gauges["slots_in_hand"] == 0
    on_disk = sum(p.stat().st_size for p in path.glob("segment-*"))
    assert on_disk == gauges["reserved_bytes"] <= PAGES * SLOT
    names = {f"c{number}": 7 for number in range(5)}
    for name, length in names.items():
        records = chain_of(name, length)
        outcomes = store.read(NAMESPACE, [r.key for r in records], buffers(length))
        assert not any(isinstance(o, Corrupt) for o in outcomes), (name, outcomes)
        assert read_back(store, NAMESPACE, records) == [isinstance(o, Hit) for o in outcomes]
    if acks:
        name, length = acks[-1]
        assert read_back(store, NAMESPACE, chain_of(name, length)) == [True] * length, name
    assert all(o.ok for o in store.write(NAMESPACE, chain_of("after", 6)))
    assert read_back(store, NAMESPACE, chain_of("after", 6)) == [True] * 6
    store.check()
    store.close()


def calls_of_a_whole_run(path):
    files = Volatile()
    store = SegmentStore(path, PAGES * SLOT, files=files)
    work(store, [])
    calls = files.calls
    store.close()
    return calls


@pytest.fixture(params=[False, True], ids=["by one thread", "in parts by several"])
def parts(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(crew, "SHARE_NBYTES", 0)
        monkeypatch.setattr(writer, "GROUP_NBYTES", PAGE_NBYTES)


@pytest.mark.parametrize("seed,step", [(1, 7), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_after_a_cut_at_any_call_records_are_exact_or_absent(parts, tmp_path, seed, step):
    calls = calls_of_a_whole_run(tmp_path / "whole")
    assert calls > 80
    for cut in range(seed, calls + 1, step):
        files, acks = Volatile(cut), []
        path = tmp_path / f"cut{cut}"
        store = SegmentStore(path, PAGES * SLOT, files=files)
        with pytest.raises(PowerCut):
            work(store, acks)
        files.lose(random.Random(1000 * seed + cut))
        abandon(store)
        check_after(path, acks)


def test_the_volatile_layer_really_loses_what_is_not_synced(tmp_path):
    class Unsynced(Volatile):
        def sync(self, fd):
            """A store that forgot to sync."""

    files = Unsynced()
    store = SegmentStore(tmp_path / "store", PAGES * SLOT, files=files)
    records = chain_of("a", 3)
    store.write(NAMESPACE, records)
    assert sum(len(data) for _, _, data in files.dirty) == 3 * (4096 + PAGE_NBYTES)
    files.lose(random.Random(1))
    outcomes = store.read(NAMESPACE, [r.key for r in records], buffers(3))
    assert any(isinstance(outcome, Corrupt) for outcome in outcomes)
    store.close()
