"""Several processes and ranks write one directory at once: nothing is lost, mixed up, doubled or left behind."""

from __future__ import annotations

import pytest
from segments import NAMESPACE, SLOT, cap_of, end, opened, start, used_on_disk

from hicache.data.store.base import Record, WriteOutcome
from hicache.data.store.segment import SegmentStore, local
from hicache.errors import ConfigError
from hicache.keys import Namespace, RecordKey
from hicache.testing.stores import PAGE_NBYTES, chain_of, page_of, read_back

PROMPTS, PAGES = 32, 16
CAP = cap_of(1024)
SHARDS = 8

WAIT = """
print("ready", flush=True)
sys.stdin.readline()
"""

WRITER = (
    WAIT
    + """
order = random.Random(int(sys.argv[3]))
for round_ in range(int(sys.argv[4])):
    space = Namespace.of({"weights": "test", "round": round_})
    prompts = list(range(32))
    order.shuffle(prompts)
    for prompt in prompts:
        outcomes = store.write(space, chain_of(f"{round_}/{prompt}", 16))
        assert all(outcome.ok for outcome in outcomes), (round_, prompt, outcomes)
gauges = store.usage()
print(gauges["stored"], gauges["failed"], gauges["no_room"], gauges["parent_absent"])
store.close()
"""
)

READER = (
    WAIT
    + """
order = random.Random(int(sys.argv[3]))
hits = 0
for round_ in range(int(sys.argv[4])):
    space = Namespace.of({"weights": "test", "round": round_})
    for prompt in order.sample(range(32), 32):
        found = read_back(store, space, chain_of(f"{round_}/{prompt}", 16))  # compares bytes
        assert found == sorted(found, reverse=True), "a prefix has a gap"
        hits += sum(found)
gauges = store.usage()
assert gauges["corrupt"] == 0, gauges
print(hits)
store.close()
"""
)

RANK = (
    WAIT
    + """
rank = int(sys.argv[3])
keys = lambda prompt: [RecordKey(r.key.page, shard=rank) for r in chain_of(prompt, 16)]
from hicache.data.store.base import Record
from hicache.testing.stores import page_of
mine = []
for prompt in range(32):
    of = keys(str(prompt))
    mine += [
        Record(key, of[n - 1] if n else None, "page_first", [memoryview(page_of(key, 500))]) for n, key in enumerate(of)
    ]
if sys.argv[4] == "write":
    for first in range(0, 512, 16):
        assert all(outcome.ok for outcome in store.write(namespace, mine[first : first + 16]))
else:
    assert read_back(store, namespace, mine) == [True] * 512, "a page is missing or foreign"
print(store.usage()["records"])
store.close()
"""
)


def together(processes):
    """Let all start in the same moment; what each printed at its end."""
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [end(process) for process in processes]


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_four_writers_and_two_readers_of_the_same_prompts(tmp_path, rounds):
    path, cap = tmp_path / "store", cap_of(640 * rounds)
    writers = [start(path, cap, WRITER, str(number), str(rounds)) for number in range(4)]
    readers = [start(path, cap, READER, str(number), str(rounds)) for number in range(2)]
    said = together(writers + readers)
    counts = [tuple(map(int, out.split())) for out in said[:4]]
    assert all(count[1:] == (0, 0, 0) for count in counts), "a duplicate counts as success"
    store = SegmentStore(path, cap)
    gauges = store.usage()
    assert gauges["records"] == PROMPTS * PAGES * rounds
    assert sum(count[0] for count in counts) == gauges["records"], "each page was stored by one of them"
    assert (gauges["slots_in_hand"], gauges["holes"]) == (0, 0)
    assert gauges["used_bytes"] == gauges["records"] * SLOT
    for round_ in range(rounds):
        space = Namespace.of({"weights": "test", "round": round_})
        for prompt in range(PROMPTS):
            assert read_back(store, space, chain_of(f"{round_}/{prompt}", PAGES)) == [True] * PAGES
    store.check()
    names = {entry.name.split("-")[0] for entry in path.iterdir()}
    assert names == {"index.mdb", "segment", "session"}
    assert len(list(path.glob("session-*"))) == 1, "nothing temporary is left"
    store.close()


def test_eight_ranks_started_at_once_read_back_their_own_bytes(tmp_path):
    path, cap = tmp_path / "store", cap_of(8 * 640, 500)
    together([start(path, cap, RANK, str(rank), "write") for rank in range(SHARDS)])
    said = together([start(path, cap, RANK, str(rank), "read") for rank in range(SHARDS)])
    assert {int(out) for out in said} == {SHARDS * PROMPTS * PAGES}


def test_a_batch_of_which_a_quarter_exists(tmp_path):
    store = opened(tmp_path / "store", 32)
    records = chain_of("a", 16)
    assert store.write(NAMESPACE, records[:4]) == [WriteOutcome.STORED] * 4
    assert store.write(NAMESPACE, records) == [WriteOutcome.EXISTS] * 4 + [WriteOutcome.STORED] * 12
    gauges = store.usage()
    assert (gauges["records"], gauges["stored"], gauges["exists"]) == (16, 16, 4)
    assert gauges["stored_bytes"] == 16 * PAGE_NBYTES
    assert gauges["used_bytes"] == 16 * SLOT <= used_on_disk(tmp_path / "store")
    assert read_back(store, NAMESPACE, records) == [True] * 16
    store.check()
    store.close()


def test_scattered_pages_that_exist_fail_none_of_the_others(tmp_path):
    store = opened(tmp_path / "store", 32)
    singles = [chain_of(str(n), 1)[0] for n in range(16)]
    store.write(NAMESPACE, singles[3::4])
    outcomes = store.write(NAMESPACE, singles)
    assert outcomes == [WriteOutcome.EXISTS if n % 4 == 3 else WriteOutcome.STORED for n in range(16)]
    assert read_back(store, NAMESPACE, singles) == [True] * 16
    store.close()


def test_the_same_page_from_two_stores_of_one_process(tmp_path):
    stores = [opened(tmp_path / "store", 32) for _ in range(2)]
    records = chain_of("a", 4)
    assert stores[0].write(NAMESPACE, records) == [WriteOutcome.STORED] * 4
    assert stores[1].write(NAMESPACE, records) == [WriteOutcome.EXISTS] * 4
    assert stores[1].usage()["records"] == 4
    for store in stores:
        store.close()


def test_shards_do_not_overwrite_each_other_under_one_page_key(tmp_path):
    store = opened(tmp_path / "store", 32)
    (record,) = chain_of("a", 1)
    keys = [RecordKey(record.key.page, shard=shard) for shard in range(SHARDS)]
    for key in keys:
        one = Record(key, None, "page_first", [memoryview(page_of(key))])
        assert store.write(NAMESPACE, [one]) == [WriteOutcome.STORED]
    assert store.usage()["records"] == SHARDS
    store.close()


def test_a_file_system_whose_locks_and_maps_cannot_be_trusted_is_refused_at_start(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 0:5 / / rw - ext4 /dev/vda rw\n40 22 0:6 / {tmp_path}/far rw - nfs4 server:/ rw\n"
    )
    monkeypatch.setattr(local, "MOUNTS", mounts)
    with pytest.raises(ConfigError, match=r"needs a local disk .*file_system=nfs4"):
        opened(tmp_path / "far" / "store", 16)
