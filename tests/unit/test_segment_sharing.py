"""Who may use a segment store's directory, and who leaves what behind: users, processes, forks, debris."""

import os
import re
import subprocess
import sys

import lmdb
import pytest

from hicache.data.store.base import Hit, Miss, WriteOutcome
from hicache.data.store.segment import Files, SegmentStore, local
from hicache.data.store.segment.directory import open_index
from hicache.errors import ConfigError, DataError, IncompatibleError, InvariantError, UnavailableError
from hicache.keys import Namespace
from hicache.testing.stores import PAGE_NBYTES, buffers, chain_of, read_back

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


# -- whose directory it is ------------------------------------------------------------------------------------


def test_the_directory_and_all_files_in_it_are_ours_alone(tmp_path):
    store = opened(tmp_path, 16)
    store.write(NAMESPACE, chain_of("a", 2))
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "store").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    store.close()


def test_a_directory_open_to_others_is_refused_with_the_values(tmp_path):
    (tmp_path / "store").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"mode=0o755 wanted=0o700") as caught:
        opened(tmp_path, 16)
    assert caught.value.context["us"] == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "store").mkdir(mode=0o700)
    os.chown(tmp_path / "store", 12345, 12345)
    with pytest.raises(ConfigError, match="owner=12345"):
        opened(tmp_path, 16)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(ConfigError, match="needs a directory"):
        opened(tmp_path, 16)
    (tmp_path / "store").unlink()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be made"):
        SegmentStore(tmp_path / "file" / "store", 10**6)


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:35 / {net} rw,relatime shared:7 - {kind} server:/export rw,vers=4.2
41 40 0:36 / {net}/disk rw,relatime - xfs /dev/vdb rw
42 40 0:37 / {net}/a\\040b rw - nfs server:/other rw
a line that is none
"""


def mounted(tmp_path, monkeypatch, kind):
    text = MOUNTS.format(net=tmp_path / "net", kind=kind)
    (tmp_path / "mountinfo").write_text(text)
    monkeypatch.setattr(local, "MOUNTS", tmp_path / "mountinfo")


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "ceph", "lustre", "fuse.sshfs", "fuse.glusterfs"])
def test_a_network_file_system_is_refused_and_nothing_is_made_on_it(tmp_path, monkeypatch, kind):
    mounted(tmp_path, monkeypatch, kind)
    (tmp_path / "net").mkdir()
    (tmp_path / "link").symlink_to("net")
    for path in (tmp_path / "net" / "store", tmp_path / "link" / "deep" / "store"):
        with pytest.raises(ConfigError, match="needs a local disk") as caught:
            SegmentStore(path, 16 * SLOT)
        assert caught.value.context["file_system"] == kind
    assert not list((tmp_path / "net").iterdir())


def test_a_local_disk_is_told_from_a_network_around_it(tmp_path, monkeypatch):
    mounted(tmp_path, monkeypatch, "nfs4")
    assert local.file_system(tmp_path / "net" / "disk" / "store") == "xfs"
    assert local.file_system(tmp_path / "net" / "a b" / "store") == "nfs"
    assert local.file_system(tmp_path / "network") == "ext4"
    SegmentStore(tmp_path / "net" / "disk" / "store", 16 * SLOT).close()
    monkeypatch.setattr(local, "MOUNTS", tmp_path / "nothing")
    SegmentStore(tmp_path / "net" / "store", 16 * SLOT).close()


def test_an_index_of_another_format_is_refused(tmp_path):
    store = opened(tmp_path, 16)
    with store.directory.writing() as books:
        books.slots.set_number(b"format", 99)
    store.close()
    with pytest.raises(IncompatibleError, match="format=99 ours=2"):
        opened(tmp_path, 16)


def test_an_index_of_rubbish_is_refused_and_nothing_is_deleted(tmp_path):
    store = opened(tmp_path, 16)
    store.write(NAMESPACE, chain_of("a", 4))
    store.close()
    (tmp_path / "store" / "index.mdb").write_bytes(b"rubbish" * 5000)
    with pytest.raises(DataError, match="the index is damaged"):
        opened(tmp_path, 16)
    assert segment_bytes(tmp_path) > 0


def test_foreign_entries_are_left_alone_and_debris_is_removed(tmp_path):
    store = opened(tmp_path, 16)
    store.write(NAMESPACE, chain_of("a", 4))
    store.close()
    folder = tmp_path / "store"
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-of-mine").write_text("mine")
    (folder / "segment-00000777x").write_text("mine")
    (folder / "folder").mkdir()
    (folder / "segment-00000099").mkdir()
    (folder / "segment-00000098").symlink_to(folder / "notes.txt")
    (folder / "segment-00000777").write_bytes(bytes(SLOT))
    (folder / "session-00000000000000ff").write_text("")
    store = opened(tmp_path, 16)
    names = {path.name for path in folder.iterdir()}
    assert {"notes.txt", "segment-of-mine", "segment-00000777x", "folder"} <= names
    assert {"segment-00000099", "segment-00000098"} <= names
    assert not {"segment-00000777", "session-00000000000000ff"} & names
    assert read_back(store, NAMESPACE, chain_of("a", 4)) == [True] * 4
    assert store.usage()["records"] == 4
    store.close()
    assert not list(folder.glob("session-*"))


def test_segments_whose_index_is_gone_are_removed(tmp_path):
    store = opened(tmp_path, 16)
    store.write(NAMESPACE, chain_of("a", 8))
    store.close()
    for name in ("index.mdb", "index.mdb-lock"):
        (tmp_path / "store" / name).unlink()
    store = opened(tmp_path, 16)
    assert segment_bytes(tmp_path) == 0
    assert read_back(store, NAMESPACE, chain_of("a", 1)) == [False]
    store.close()


# -- several users --------------------------------------------------------------------------------------------


def test_two_stores_on_one_directory_share_it_and_close_apart(tmp_path):
    one, two = opened(tmp_path, 32), opened(tmp_path, 32)
    assert one.directory is two.directory
    one.write(NAMESPACE, chain_of("a", 4))
    assert two.write(NAMESPACE, chain_of("a", 5)) == [WriteOutcome.EXISTS] * 4 + [STORED]
    one.close()
    one.close()
    assert one.read(NAMESPACE, [chain_of("a", 1)[0].key], buffers(1)) == [Miss("closed")]
    assert read_back(two, NAMESPACE, chain_of("a", 5)) == [True] * 5
    two.close()
    three = opened(tmp_path, 32)
    assert three.directory is not two.directory
    assert read_back(three, NAMESPACE, chain_of("a", 5)) == [True] * 5
    three.close()


def test_a_record_of_another_plane_table_is_a_miss_and_stays(tmp_path):
    one, two = opened(tmp_path, 32), opened(tmp_path, 32, fingerprint=b"f" * 32)
    one.write(NAMESPACE, chain_of("a", 1))
    key = chain_of("a", 1)[0].key
    assert two.read(NAMESPACE, [key], buffers(1)) == [Miss("spec")]
    assert read_back(one, NAMESPACE, chain_of("a", 1)) == [True]
    one.close()
    two.close()


def test_a_forked_child_touches_nothing_and_the_parent_goes_on(tmp_path):
    store = opened(tmp_path, 32)
    records = chain_of("a", 4)
    store.write(NAMESPACE, records)
    read_back(store, NAMESPACE, records)
    child = os.fork()
    if not child:
        verdict = 1
        try:
            assert store.read(NAMESPACE, [records[0].key], buffers(1)) == [Miss("forked")]
            assert store.write(NAMESPACE, chain_of("b", 1)) == [WriteOutcome.FAILED]
            assert store.contains(NAMESPACE, [records[0].key]) == [False]
            assert store.delete([records[0].key]) == 0
            assert store.usage() == {}
            store.touch([records[0].key])
            store.close()
            try:
                opened(tmp_path, 32)
            except UnavailableError:
                verdict = 0
        finally:
            os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_back(store, NAMESPACE, records) == [True] * 4
    assert store.write(NAMESPACE, chain_of("b", 2)) == [STORED] * 2
    store.check()
    store.close()
    store = opened(tmp_path, 32)
    assert read_back(store, NAMESPACE, chain_of("b", 2)) == [True] * 2
    store.close()


def test_slots_of_a_process_that_died_are_reclaimed_at_open_and_when_slots_run_short(tmp_path):
    script = (
        "class Deadly(Files):\n"
        "    def sync(self, fd): os.kill(os.getpid(), 9)\n"
        "store.directory.files = Deadly()\n"
        "store.write(namespace, chain_of('dead', 8))\n"
    )
    assert run(tmp_path, 32, script).returncode == -9
    store = opened(tmp_path, 32)
    assert store.usage()["reclaimed_slots"] == 8
    assert store.usage()["slots_in_hand"] == 0
    assert read_back(store, NAMESPACE, chain_of("dead", 8)) == [False] * 8
    assert run(tmp_path, 32, script).returncode == -9  # beside a running process
    assert store.usage()["slots_in_hand"] == 8
    assert store.write(NAMESPACE, chain_of("a", 32)) == [STORED] * 32
    assert store.usage()["slots_in_hand"] == 0
    assert store.usage()["evicted"] == 0
    store.check()
    store.close()


def test_slots_of_a_running_process_are_left_alone(tmp_path):
    store = opened(tmp_path, 16)
    script = (
        "from hicache.data.store.segment.books import Need\n"
        "with store.directory.writing() as books: books.take(Need(3, 6), store.directory.dead_sessions)\n"
        "print(store.usage()['slots_in_hand'], flush=True)\n"
        "with store.directory.writing() as books:\n"
        "    books.take(Need(3, 6, grow=store.directory.grow), store.directory.dead_sessions)\n"
        "print(store.usage()['slots_in_hand'], flush=True); sys.stdin.read(1)\n"
    )
    command = [sys.executable, "-c", PRELUDE + script, str(tmp_path / "store"), str(16 * SLOT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "0\n"
        assert other.stdout.readline() == "6\n"
        outcomes = store.write(NAMESPACE, chain_of("a", 16))
        assert outcomes == [STORED] * 10 + [WriteOutcome.NO_ROOM] * 6
        assert store.usage()["slots_in_hand"] == 6
        other.communicate("x")
    assert store.write(NAMESPACE, chain_of("a", 16)) == [WriteOutcome.EXISTS] * 10 + [STORED] * 6
    store.check()
    store.close()


def test_processes_that_store_the_same_prompts_at_once_agree(tmp_path):
    script = (
        "import random\n"
        "order = list(range(12)); random.Random(sys.argv[3]).shuffle(order)\n"
        "for i in order:\n"
        "    records = chain_of(f'p{i}', 4)\n"
        "    assert all(o.ok for o in store.write(namespace, records))\n"
        "    read_back(store, namespace, chain_of(f'p{order[0]}', 4))\n"
        "print(store.usage()['stored'], store.usage()['failed'], store.usage()['corrupt']); store.close()\n"
    )
    base = [sys.executable, "-c", PRELUDE + script, str(tmp_path / "store"), str(64 * SLOT)]
    others = [
        subprocess.Popen([*base, seed], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in ("1", "2", "3")
    ]
    store = opened(tmp_path, 64)
    results = [other.communicate(timeout=60) for other in others]
    assert [other.returncode for other in others] == [0] * 3, results
    counts = [list(map(int, out.split())) for out, _ in results]
    assert [c[1:] for c in counts] == [[0, 0]] * 3
    assert sum(c[0] for c in counts) == 48
    for i in range(12):
        assert read_back(store, NAMESPACE, chain_of(f"p{i}", 4)) == [True] * 4
    gauges = store.usage()
    assert (gauges["records"], gauges["slots_in_hand"]) == (48, 0)
    store.check()
    store.close()


def test_an_exact_small_map_is_found_where_the_address_space_is_limited(tmp_path, monkeypatch):
    sizes = []
    real = lmdb.open

    def narrow(path, map_size, **more):
        sizes.append(map_size)
        if map_size > 1 << 30:
            raise lmdb.MemoryError("no space")
        return real(path, map_size=map_size, **more)

    monkeypatch.setattr(lmdb, "open", narrow)
    open_index(tmp_path / "index.mdb").close()
    assert sizes[0] == 1 << 43
    assert sizes[-1] == 1 << 30


def test_a_broken_index_is_noticed_by_the_recount(tmp_path):
    store = opened(tmp_path, 16)
    records = chain_of("a", 3)
    store.write(NAMESPACE, records)
    store.check()
    tree_key = bytes(records[1].key)

    def bend(change):
        with store.directory.writing() as books:
            row = books.tree.row(tree_key)
            change(row)
            books.tree.put(tree_key, row)

    def recount_fails(match):
        with pytest.raises(InvariantError, match=match):
            store.check()
        assert re.search(match, store.trouble()), "what contradicts itself is not used any more"
        store.directory.damage = None

    bend(lambda row: setattr(row, "children", 2))
    recount_fails("children are miscounted")
    bend(lambda row: setattr(row, "children", 1))
    store.check()
    bend(lambda row: setattr(row, "offset", row.offset + 1))
    recount_fails("does not exist")
    bend(lambda row: setattr(row, "offset", row.offset - 1))
    bend(lambda row: setattr(row, "hole", True))
    recount_fails("neither free nor held")
    bend(lambda row: setattr(row, "hole", False))
    with store.directory.writing() as books:
        books.slots.set_number(b"cap", 1)
    recount_fails("more is reserved than the cap")
    with store.directory.writing() as books:
        books.slots.set_number(b"cap", 16 * SLOT)
    with store.directory.writing() as books:
        books.txn.delete(bytes(records[0].key), db=store.directory.tables.rec)
    recount_fails("neither free nor held")
    store.close()


def test_the_default_policy_is_named_in_the_directory(tmp_path):
    class Other:
        name = "other"

        def rank(self, now, hint):
            return now

    store = opened(tmp_path, 16)
    store.close()
    with pytest.raises(ConfigError, match="theirs=lru ours=other"):
        opened(tmp_path, 16, policy=Other())


def test_hits_are_whole_and_reported_with_their_layout(tmp_path):
    store = opened(tmp_path, 16, files=Files())
    records = chain_of("a", 1)
    store.write(NAMESPACE, records)
    assert store.read(NAMESPACE, [records[0].key], buffers(1)) == [Hit("page_first", PAGE_NBYTES)]
    assert re.fullmatch(r"segment-\d{8}", store.directory.segments.path(1).name)
    store.close()
