"""The cap holds at every moment, survivors and their recency outlive a restart, and strangers' files are left alone."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from segments import NAMESPACE, SLOT, cap_of, end, opened, start, used_on_disk

from hicache.data.store.base import WriteOutcome
from hicache.data.store.segment import SegmentStore
from hicache.testing.stores import PAGE_NBYTES, chain_of, read_back

CAP, SMALLER = 112, 42
"""Caps in pages of which whole segments are made (a sixteenth of the first: 7 pages)."""

SINGLES = [chain_of(f"page {n}", 1)[0] for n in range(400)]
STORED = WriteOutcome.STORED


def held(store, numbers):
    return [n for n in numbers if store.contains(NAMESPACE, [SINGLES[n].key])[0]]


def filled(path, pages=250):
    """A store that took so many pages, one after the other, of which the last CAP are left."""
    store = opened(path, CAP)
    for first in range(0, pages, 10):
        assert store.write(NAMESPACE, SINGLES[first : first + 10]) == [STORED] * 10
    return store


def test_sixteen_writers_never_use_more_than_the_cap(tmp_path):
    store, samples, done = opened(tmp_path / "store", CAP), [], threading.Event()

    def watch():
        while not done.is_set():
            gauges = store.usage()
            used = (gauges["records"] + gauges["slots_in_hand"]) * SLOT
            samples.append(max(used, gauges["used_bytes"], used_on_disk(tmp_path / "store")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(lambda record: store.write(NAMESPACE, [record])[0], SINGLES[:250]))
    done.set()
    watcher.join()
    assert outcomes == [STORED] * 250
    assert len(samples) > 5
    assert max(samples) <= cap_of(CAP)
    gauges = store.usage()
    assert gauges["records"] == CAP == SegmentStore.capacity(cap_of(CAP), PAGE_NBYTES)
    assert gauges["evicted"] == 250 - CAP
    store.check()
    store.close()


def test_survivors_are_hits_after_a_restart_and_what_was_used_stays(tmp_path):
    store = filled(tmp_path / "store")
    for n in range(160, 170):
        assert read_back(store, NAMESPACE, [SINGLES[n]]) == [True]
    store.close()
    store = opened(tmp_path / "store", CAP)
    survivors = range(250 - CAP, 250)
    assert held(store, range(250)) == list(survivors)
    assert store.write(NAMESPACE, SINGLES[250:270]) == [STORED] * 20
    assert held(store, range(160, 170)) == list(range(160, 170)), "recency was lost"
    assert held(store, range(250 - CAP, 270)) == list(range(250 - CAP + 20, 270))
    assert read_back(store, NAMESPACE, SINGLES[160:170]) == [True] * 10
    store.close()


HALF_WRITTEN = """
class Dying(Files):
    def write(self, fd, views, offset):
        super().write(fd, [*views[:2], views[2][:3000]], offset)
        if sys.argv[3] != "never":
            self.left = getattr(self, "left", 5) - 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)

store.close()
store = SegmentStore(sys.argv[1], int(sys.argv[2]), files=Dying())
store.write(namespace, chain_of("half", 8))
"""


def test_a_process_killed_with_five_pages_half_written_leaves_nothing_behind(tmp_path):
    store = filled(tmp_path / "store")
    store.close()
    writer = start(tmp_path / "store", cap_of(CAP), HALF_WRITTEN, "at the fifth")
    _, err = writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL, err
    store = opened(tmp_path / "store", CAP)
    gauges = store.usage()
    assert gauges["slots_in_hand"] == 0
    assert gauges["reclaimed_slots"] == 8
    assert gauges["records"] == CAP - 8, "what was evicted for them on purpose"
    assert not any(store.contains(NAMESPACE, [r.key for r in chain_of("half", 8)]))
    assert len(list((tmp_path / "store").glob("session-*"))) == 1
    assert len(held(store, range(250))) == CAP - 8
    assert store.write(NAMESPACE, SINGLES[250:270]) == [STORED] * 20
    store.check()
    store.close()


def test_a_smaller_cap_removes_the_least_recently_used_and_says_how_many(tmp_path):
    store = filled(tmp_path / "store")
    for n in range(160, 170):
        read_back(store, NAMESPACE, [SINGLES[n]])
    store.close()
    store = opened(tmp_path / "store", SMALLER)
    kept = [*range(160, 170), *range(250 - SMALLER + 10, 250)]
    assert held(store, range(250)) == sorted(kept)
    gauges = store.usage()
    assert gauges["evicted_for_cap"] == gauges["evicted"] == CAP - SMALLER
    assert gauges["records"] * SLOT == gauges["used_bytes"] == gauges["reserved_bytes"] == cap_of(SMALLER)
    assert gauges["cap_bytes"] == cap_of(SMALLER) >= used_on_disk(tmp_path / "store")
    assert read_back(store, NAMESPACE, [SINGLES[n] for n in kept]) == [True] * SMALLER
    store.check()
    store.close()


def test_trimming_never_takes_a_slot_that_a_running_process_is_writing(tmp_path):
    writing, going = threading.Event(), threading.Event()

    from hicache.data.store.segment import Files

    class Gated(Files):
        def sync(self, fd):
            writing.set()
            assert going.wait(30)
            super().sync(fd)

    store = opened(tmp_path / "store", CAP, files=Gated())
    outcomes = []
    writer = threading.Thread(target=lambda: outcomes.extend(store.write(NAMESPACE, SINGLES[:20])))
    writer.start()
    assert writing.wait(30)
    script = "store.check(); print(store.usage()['slots_in_hand'])"
    assert end(start(tmp_path / "store", cap_of(SMALLER), script)) == "20\n"
    going.set()
    writer.join()
    assert outcomes == [STORED] * 20
    assert read_back(store, NAMESPACE, SINGLES[:20]) == [True] * 20
    store.check()
    store.close()


def test_strangers_entries_are_left_alone_and_are_no_pages(tmp_path):
    filled(tmp_path / "store").close()
    strange = {
        "readme.txt": b"mine",
        "segment-notes": b"mine too",
        "segment-00000001.bak": b"and this",
        "session-x": b"and that",
    }
    for name, data in strange.items():
        (tmp_path / "store" / name).write_bytes(data)
    (tmp_path / "store" / "segment-99999999").mkdir()
    (tmp_path / "store" / "folder").mkdir()
    store = opened(tmp_path / "store", CAP)
    assert store.usage()["records"] == CAP
    assert store.write(NAMESPACE, SINGLES[250:300]) == [STORED] * 50
    store.check()
    store.close()
    store = opened(tmp_path / "store", SMALLER)
    assert store.usage()["records"] == SMALLER
    store.close()
    for name, data in strange.items():
        assert (tmp_path / "store" / name).read_bytes() == data
    assert (tmp_path / "store" / "folder").is_dir()
    assert (tmp_path / "store" / "segment-99999999").is_dir()


PEER = """
print("ready", flush=True)
sys.stdin.readline()
for n in range(60):
    outcomes = store.write(namespace, chain_of(f"{sys.argv[3]}/{n}", 3))
    assert all(outcome.value in ("stored", "no_room", "parent_absent") for outcome in outcomes), outcomes
    read_back(store, namespace, chain_of(f"{sys.argv[3]}/{n - 3}", 3))
gauges = store.usage()
assert gauges["corrupt"] == gauges["failed"] == 0, gauges
print(gauges["stored"], gauges["evicted"])
store.close()
"""


@pytest.mark.parametrize("peers", [2, 4])
def test_instances_that_share_a_directory_stay_under_one_cap(tmp_path, peers):
    store = opened(tmp_path / "store", CAP)
    processes = [start(tmp_path / "store", cap_of(CAP), PEER, str(n)) for n in range(peers)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    samples = []
    while any(process.poll() is None for process in processes):
        samples.append(max(used_on_disk(tmp_path / "store"), store.usage()["used_bytes"]))
    counts = [tuple(map(int, end(process).split())) for process in processes]
    assert max(samples) <= cap_of(CAP)
    stored, evicted = map(sum, zip(*counts, strict=True))
    assert store.usage()["records"] == stored - evicted <= CAP
    assert evicted > 0
    store.check()
    store.close()


def test_gauges_after_a_restart_are_those_of_the_disk(tmp_path):
    store = filled(tmp_path / "store")
    before = store.usage()
    store.close()
    store = opened(tmp_path / "store", CAP)
    after = store.usage()
    for gauge in ("records", "used_bytes", "reserved_bytes", "cap_bytes", "segment_bytes"):
        assert after[gauge] == before[gauge], gauge
    assert (before["evicted"], after["evicted"], after["evicted_for_cap"]) == (250 - CAP, 0, 0)
    store.close()
