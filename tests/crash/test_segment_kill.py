"""kill -9 at named points and at random moments: what was acknowledged is there, and nothing leaks.

Power loss is another matter (the page cache survives a kill); the order of sync and commit has its own test.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from hicache.data.store.segment import SegmentStore
from hicache.keys import Namespace, RecordKey
from hicache.testing.stores import PAGE_NBYTES, chain_of, read_back

SLOT = 3 * 4096
PAGES = 48
NAMESPACE = Namespace.of({"weights": "test"})
POINTS = ("make", "write", "sync", "before commit", "after commit")

WRITER = """
import os, random, signal, sys
from hicache.data.store.segment import Files, SegmentStore, crew, writer
from hicache.keys import Namespace
from hicache.testing.stores import chain_of, read_back

path, cap, seed, point, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])

class Deadly(Files):
    left = count
    def at(self, name):
        if name == point:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
    def make(self, path, nbytes):
        super().make(path, nbytes)
        self.at("make")
    def write(self, fd, views, offset):
        super().write(fd, [views[0], views[1], views[2][:2000]], offset)
        self.at("write")
        super().write(fd, views, offset)
    def sync(self, fd):
        super().sync(fd)
        self.at("sync")
    def commit(self, txn):
        self.at("before commit")
        super().commit(txn)
        self.at("after commit")

rng = random.Random(seed)
if rng.random() < 0.5:  # each batch by several threads, committed part by part
    crew.SHARE_NBYTES, writer.GROUP_NBYTES = 0, 6000
namespace = Namespace.of({"weights": "test"})
store = SegmentStore(path, cap, files=Deadly())
print("open", flush=True)
for number in range(100000):
    name = f"{seed}/{number}"
    length = rng.randrange(1, 6)
    outcomes = store.write(namespace, chain_of(name, length))
    if all(outcome.ok for outcome in outcomes):
        print("ack", name, length, flush=True)
    if rng.random() < 0.2:
        read_back(store, namespace, chain_of(name, length))
"""


def acknowledged(output):
    """(name, pages) of each batch whose acknowledgement came through whole, oldest first."""
    lines = output.split("\n")[:-1]
    return [(line.split()[1], int(line.split()[2])) for line in lines if line.startswith("ack ")]


def start(path, seed, point, count):
    command = [sys.executable, "-c", WRITER, str(path), str(PAGES * SLOT), seed, point, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_all(path, acks):
    """A fresh store: every row reads back exact, the newest acknowledged pages are there, and slots add up."""
    store = SegmentStore(path, PAGES * SLOT)
    store.check()
    gauges = store.usage()
    assert gauges["slots_in_hand"] == 0
    assert sum(p.stat().st_size for p in path.glob("segment-*")) == gauges["reserved_bytes"] <= PAGES * SLOT
    with store.directory.env.begin() as txn:
        keys = [key for key, _ in txn.cursor(db=store.directory.tables.rec)]
    for raw in keys:
        key = RecordKey(raw[:32], int.from_bytes(raw[32:34], "big"), int.from_bytes(raw[34:], "big"))
        into = memoryview(bytearray(PAGE_NBYTES))
        outcome = store.read(NAMESPACE, [key], [[into]])[0]
        assert type(outcome).__name__ == "Hit", (key, outcome)
        assert bytes(into) == (raw * 200)[:PAGE_NBYTES]
    kept = 0
    for name, length in reversed(acks):  # the newest: eviction cannot have reached them yet
        kept += length
        if kept > PAGES // 3:
            break
        assert read_back(store, NAMESPACE, chain_of(name, length)) == [True] * length, name
    for name, length in acks:
        hits = read_back(store, NAMESPACE, chain_of(name, length))
        assert hits == sorted(hits, reverse=True), "an orphan survived"
    store.check()
    store.close()
    return len(keys), gauges["reclaimed_slots"]


@pytest.mark.parametrize("rounds", [6, pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_killed_writers_lose_nothing_they_acknowledged(tmp_path, rounds):
    rng = random.Random(rounds)
    path = tmp_path / "store"
    random_from = rounds * 4 // 5 + 1
    fired = dict.fromkeys(POINTS, 0)
    reclaimed = acks_seen = 0
    for number in range(rounds):
        point = POINTS[number % len(POINTS)] if number < random_from else "never"
        count = 1 + rng.randrange(4 if point == "make" and number < 5 else 40)
        writers = [start(path, f"{number}a", point, count)]
        if number % 4 == 3:
            writers.append(start(path, f"{number}b", point, count + 7))
        if point == "never" or (point == "make" and number >= 5):  # a full store makes no segment any more
            for writer in writers:
                assert writer.stdout.readline() == "open\n"
            time.sleep(rng.random() * 0.3)
            for writer in writers:
                os.kill(writer.pid, signal.SIGKILL)
        results = [writer.communicate(timeout=60) for writer in writers]
        assert all(writer.returncode == -signal.SIGKILL for writer in writers), results
        assert not any(err for _, err in results), results
        fired[point] = fired.get(point, 0) + 1
        acks = [ack for out, _ in results for ack in acknowledged(out)]
        acks_seen += len(acks)
        if len(writers) > 1:
            acks = []  # two writers' acknowledgements have no common order; their rows are still all read
        _, freed = check_all(path, acks)
        reclaimed += freed
    assert all(fired.values()), fired
    assert fired.get("never"), fired
    assert reclaimed > 0
    assert acks_seen > rounds
