"""A segment store over its life: restarts, recency, the cap, and the same answers as the model in memory."""

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.data.store.base import WriteOutcome
from hicache.data.store.memory import MemoryStore
from hicache.data.store.segment import SegmentStore
from hicache.errors import ConfigError
from hicache.keys import Namespace
from hicache.testing.stores import PAGE_NBYTES, chain_of, read_back

SLOT = 3 * 4096
NAMESPACE = Namespace.of({"weights": "test"})
STORED = WriteOutcome.STORED

PRELUDE = """
import os, sys
from hicache.data.store.segment import Files, SegmentStore
from hicache.keys import Namespace
from hicache.testing.stores import chain_of, read_back
namespace = Namespace.of({"weights": "test"})
store = SegmentStore(sys.argv[1], int(sys.argv[2]))
"""


def opened(tmp_path, pages, **more):
    return SegmentStore(tmp_path / "store", pages * SLOT, **more)


def run(tmp_path, pages, script, *, check=False):
    """Run a script in a fresh process on the store; ``store`` and ``namespace`` are there."""
    command = [sys.executable, "-c", PRELUDE + script, str(tmp_path / "store"), str(pages * SLOT)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)


def segment_bytes(tmp_path):
    return sum(path.stat().st_size for path in (tmp_path / "store").glob("segment-*"))


# -- restarts -----------------------------------------------------------------------------------------------


def test_another_process_finds_what_was_stored(tmp_path):
    store = opened(tmp_path, 32)
    store.write(NAMESPACE, chain_of("a", 8))
    script = "print(read_back(store, namespace, chain_of('a', 9)) == [True] * 8 + [False]); store.check()"
    assert run(tmp_path, 32, script, check=True).stdout == "True\n"  # beside us
    store.close()
    assert run(tmp_path, 32, script, check=True).stdout == "True\n"  # after us


def test_recency_outlives_a_restart(tmp_path):
    store = opened(tmp_path, 32)
    singles = [chain_of(f"s{i}", 1)[0] for i in range(32)]
    assert store.write(NAMESPACE, singles) == [STORED] * 32
    for record in singles[:8]:
        read_back(store, NAMESPACE, [record])
    store.close()
    store = opened(tmp_path, 32)
    store.write(NAMESPACE, chain_of("new", 16))
    held = store.contains(NAMESPACE, [r.key for r in singles])
    assert held == [True] * 8 + [False] * 16 + [True] * 8
    store.close()


def test_recency_outlives_a_kill_that_comes_a_little_later(tmp_path):
    store = opened(tmp_path, 32)
    singles = [chain_of(f"s{i}", 1)[0] for i in range(32)]
    store.write(NAMESPACE, singles)
    store.close()
    script = (
        "import signal, time\n"
        "for i in range(8): read_back(store, namespace, chain_of(f's{i}', 1))\n"
        "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run(tmp_path, 32, script).returncode == -9
    store = opened(tmp_path, 32)
    store.write(NAMESPACE, chain_of("new", 16))
    assert store.contains(NAMESPACE, [r.key for r in singles[:10]]) == [True] * 8 + [False] * 2
    store.close()


def test_an_open_store_behaves_like_the_model(tmp_path):
    rng = random.Random(11)
    store, model = opened(tmp_path, 24), MemoryStore(24 * (PAGE_NBYTES + 512))
    chains = [chain_of(f"m{i}", 7) for i in range(9)]
    everything = [record for records in chains for record in records]
    for step in range(250):
        records = rng.choice(chains)
        start, end = sorted(rng.sample(range(8), 2))
        deed = rng.randrange(10)
        if deed < 6:
            ours, theirs = (s.write(NAMESPACE, records[start:end]) for s in (store, model))
            assert [o.ok for o in ours] == [o.ok for o in theirs], (step, ours, theirs)
        elif deed < 8:
            ours, theirs = (read_back(s, NAMESPACE, records[start:end]) for s in (store, model))
            assert ours == theirs, step
        elif deed == 8:
            for s in (store, model):
                s.touch([records[start].key])
        else:
            gone = [s.delete([records[start].key]) for s in (store, model)]
            assert gone[0] == gone[1]
        if step % 40 == 39:
            store.close()
            store = opened(tmp_path, 24)
        store.check()
        model.check()
        keys = [r.key for r in everything]
        assert store.contains(NAMESPACE, keys) == model.contains(NAMESPACE, keys), step
    assert model.usage()["evicted"] > 50
    store.close()


# -- the cap -------------------------------------------------------------------------------------------------


def test_files_on_disk_never_exceed_the_cap(tmp_path):
    store = opened(tmp_path, 37)
    for number in range(60):
        outcomes = store.write(NAMESPACE, chain_of(f"c{number}", 1 + number % 7))
        assert outcomes == [STORED] * len(outcomes)
        assert segment_bytes(tmp_path) <= 37 * SLOT
        gauges = store.usage()
        assert gauges["reserved_bytes"] == segment_bytes(tmp_path)
        assert gauges["records"] <= SegmentStore.capacity(37 * SLOT, PAGE_NBYTES)
    assert store.usage()["records"] == SegmentStore.capacity(37 * SLOT, PAGE_NBYTES)
    assert store.usage()["evicted"] > 0
    store.check()
    store.close()


@pytest.mark.parametrize("cap_pages,page_nbytes", [(1, 6000), (3, 6000), (17, 1), (100, 8192), (1000, 4097)])
def test_capacity_is_what_fits(tmp_path, cap_pages, page_nbytes):
    slot = (4096 + page_nbytes + 4095) // 4096 * 4096
    pages = SegmentStore.capacity(cap_pages * slot, page_nbytes)
    assert 0.9 * cap_pages - 1 < pages <= cap_pages
    if cap_pages <= 100:
        store = SegmentStore(tmp_path / "store", cap_pages * slot)
        records = chain_of("a", pages + 3, page_nbytes)
        assert [o.ok for o in store.write(NAMESPACE, records)] == [True] * pages + [False] * 3
        store.close()


def test_a_smaller_cap_keeps_the_warmest_records(tmp_path):
    store = opened(tmp_path, 96)
    singles = [chain_of(f"s{i}", 1)[0] for i in range(96)]
    assert store.write(NAMESPACE, singles) == [STORED] * 96
    warm = [*singles[3:90:5], *singles[60:82]]
    for record in warm:
        read_back(store, NAMESPACE, [record])
    store.close()
    store = opened(tmp_path, 48)
    held = store.contains(NAMESPACE, [r.key for r in singles])
    assert sum(held) == 48
    assert all(store.contains(NAMESPACE, [r.key for r in warm]))
    assert read_back(store, NAMESPACE, singles) == held
    assert segment_bytes(tmp_path) <= 48 * SLOT
    assert store.usage()["evicted"] == 48
    store.check()
    store.close()


def test_a_smaller_cap_keeps_chains_whole_from_the_root(tmp_path):
    store = opened(tmp_path, 48)
    chains = [chain_of(f"c{i}", 12) for i in range(4)]
    for chain in chains:
        assert store.write(NAMESPACE, chain) == [STORED] * 12
    store.close()
    store = opened(tmp_path, 24)
    lengths = []
    for chain in chains:
        hits = read_back(store, NAMESPACE, chain)
        lengths.append(sum(hits))
        assert hits == [True] * lengths[-1] + [False] * (12 - lengths[-1])
    assert lengths == [0, 0, 12, 12]
    store.check()
    store.close()


def test_a_larger_cap_makes_room_at_once(tmp_path):
    store = opened(tmp_path, 32)
    store.write(NAMESPACE, chain_of("a", 32))
    store.close()
    store = opened(tmp_path, 64)
    assert store.write(NAMESPACE, chain_of("b", 32)) == [STORED] * 32
    assert read_back(store, NAMESPACE, chain_of("a", 32)) == [True] * 32
    store.close()


def test_a_cap_below_one_segment_is_refused_with_the_values(tmp_path):
    store = opened(tmp_path, 64)
    store.write(NAMESPACE, chain_of("a", 1))
    store.close()
    with pytest.raises(ConfigError, match=rf"cap_bytes={SLOT} segment_bytes={4 * SLOT}"):
        opened(tmp_path, 1)
    store = opened(tmp_path, 64)
    assert read_back(store, NAMESPACE, chain_of("a", 1)) == [True]
    store.close()


def test_a_page_larger_than_a_segment_finds_no_room(tmp_path):
    store = opened(tmp_path, 32)
    store.write(NAMESPACE, chain_of("small", 2))
    outcomes = store.write(NAMESPACE, chain_of("large", 1, 40_000))
    assert outcomes == [WriteOutcome.NO_ROOM]
    store.check()
    store.close()


def test_two_page_sizes_share_a_directory_as_long_as_there_are_segments(tmp_path):
    store = opened(tmp_path, 64)
    small, large = chain_of("small", 8), chain_of("large", 4, 20_000)
    assert store.write(NAMESPACE, small) == [STORED] * 8
    assert store.write(NAMESPACE, large) == [STORED] * 4
    assert store.write(NAMESPACE, chain_of("more", 64))[0] is STORED
    assert read_back(store, NAMESPACE, large) == [True] * 4
    third = chain_of("third", 1, 9000)
    assert store.write(NAMESPACE, third) == [WriteOutcome.NO_ROOM]
    store.check()
    store.delete([r.key for r in reversed(large)])
    assert store.write(NAMESPACE, third) == [STORED]  # an empty segment is cut anew
    assert read_back(store, NAMESPACE, third) == [True]
    store.check()
    store.close()


def test_sixteen_writers_never_exceed_the_cap(tmp_path):
    store = opened(tmp_path, 48)
    done, samples = threading.Event(), []

    def sample():
        while not done.is_set():
            gauges = store.usage()
            samples.append((segment_bytes(tmp_path), gauges["used_bytes"], gauges["reserved_bytes"]))

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        with ThreadPoolExecutor(16) as pool:
            chains = [chain_of(f"w{i}", 5) for i in range(50)]
            outcomes = list(pool.map(lambda chain: store.write(NAMESPACE, chain), chains))
    finally:
        done.set()
        watcher.join()
    stored = sum(o is STORED for batch in outcomes for o in batch)
    assert stored > 20  # more is in flight than fits, so some are refused, and how many is chance
    assert not any(o is WriteOutcome.FAILED for batch in outcomes for o in batch)
    assert len(samples) > 3
    assert max(max(sample) for sample in samples) <= 48 * SLOT
    gauges = store.usage()
    assert gauges["records"] == gauges["stored"] - gauges["evicted"] == stored - gauges["evicted"]
    for chain in chains:
        hits = read_back(store, NAMESPACE, chain)
        assert hits == sorted(hits, reverse=True)
    store.check()
    store.close()
