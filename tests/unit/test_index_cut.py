"""The index under a running store: cut, emptied, put elsewhere or without room, it costs the store and not the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hicache.data.store.base import WriteOutcome
from hicache.data.store.segment import SegmentStore
from hicache.data.store.segment.place import LOCK_NBYTES
from hicache.errors import DataError, InvariantError, UnavailableError
from hicache.keys import Namespace
from hicache.testing.stores import chain_of, read_back

SLOT = 3 * 4096
NAMESPACE = Namespace.of({"weights": "test"})

USE = """
import os, sys
from pathlib import Path
from hicache.data.store.base import WriteOutcome
from hicache.data.store.segment import SegmentStore
from hicache.keys import Namespace
from hicache.testing.stores import chain_of, read_back
namespace = Namespace.of({"weights": "test"})
place, name, nbytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
records = chain_of("prompt", 200)
store = SegmentStore(place, 300 * 12288)
store.write(namespace, records)
assert all(read_back(store, namespace, records)) and store.trouble() is None
store.touch([record.key for record in records])  # waits for the next transaction, as the cut comes
os.truncate(place / name, nbytes)
assert name in store.trouble() and "was cut" in store.trouble()
assert not any(read_back(store, namespace, records))
assert set(store.write(namespace, records)) == {WriteOutcome.FAILED}
assert not any(store.contains(namespace, [record.key for record in records]))
assert (store.delete([records[-1].key]), store.usage()) == (0, {})
store.flush()
try:
    SegmentStore(place, 300 * 12288)
except Exception as error:
    print(type(error).__name__)
store.close()
print("closed")
"""


def child(*arguments):
    return subprocess.run(
        [sys.executable, "-c", USE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "name,nbytes",
    [("index.mdb", 0), ("index.mdb", 4096), ("index.mdb", 3 * 4096), ("index.mdb-lock", 0)],
)
def test_a_cut_under_a_running_store_costs_the_store_and_not_the_process(tmp_path, name, nbytes):
    ended = child(tmp_path / "kv", name, nbytes)
    assert ended.returncode == 0, (ended.returncode, ended.stdout, ended.stderr[-2000:])
    assert ended.stdout.split() == ["UnavailableError", "closed"]


@pytest.fixture
def store(tmp_path):
    store = SegmentStore(tmp_path / "kv", 64 * SLOT)
    store.write(NAMESPACE, chain_of("prompt", 8))
    yield store
    store.close()


def bend(store, key, change):
    with store.directory.writing() as books:
        row = books.tree.row(bytes(key))
        change(row)
        books.tree.put(bytes(key), row)


def test_an_index_that_contradicts_itself_ends_the_stores_use_once(store):
    records = chain_of("prompt", 8)
    bend(store, records[-1].key, lambda row: setattr(row, "segment", 77))
    with pytest.raises(InvariantError):
        store.delete([records[-1].key])
    assert "contradicts itself" in store.trouble()
    assert not any(read_back(store, NAMESPACE, records))
    assert set(store.write(NAMESPACE, records)) == {WriteOutcome.FAILED}


def test_a_row_of_another_length_is_a_contradiction_and_closing_works(store):
    records = chain_of("prompt", 8)
    with store.directory.writing() as books:
        books.txn.put(bytes(records[3].key), b"short", db=store.directory.tables.rec)
    with pytest.raises(Exception, match="unpack"):
        read_back(store, NAMESPACE, records)
    assert "contradicts itself" in store.trouble()
    assert not any(store.contains(NAMESPACE, [record.key for record in records]))


def test_an_index_that_contradicts_itself_is_refused_at_open_by_name(tmp_path):
    place = tmp_path / "kv"
    store = SegmentStore(place, 64 * SLOT)
    store.write(NAMESPACE, chain_of("prompt", 8))
    with store.directory.writing() as books:
        number, _ = next(iter(books.slots.rows()))
        books.txn.put(number.to_bytes(4, "big"), b"short", db=store.directory.tables.seg)
    store.close()
    with pytest.raises(DataError, match="contradicts itself"):
        SegmentStore(place, 32 * SLOT)


@pytest.mark.parametrize("name", ["index.mdb", "index.mdb-lock"])
@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_only_a_file_is_an_index_or_its_lock(tmp_path, name, kind):
    place = tmp_path / "kv"
    place.mkdir(mode=0o700)
    {
        "directory": (place / name).mkdir,
        "fifo": lambda: os.mkfifo(place / name),
        "link": lambda: (place / name).symlink_to(tmp_path / "elsewhere"),
    }[kind]()
    with pytest.raises(UnavailableError, match="not a file") as error:
        SegmentStore(place, 64 * SLOT)
    assert str(place / name) in str(error.value)
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_is_followed_once(tmp_path):
    (tmp_path / "here").mkdir(mode=0o700)
    (tmp_path / "there").mkdir(mode=0o700)
    link = tmp_path / "kv"
    link.symlink_to("here")
    store = SegmentStore(link, 64 * SLOT)
    records = chain_of("prompt", 8)
    store.write(NAMESPACE, records[:4])
    link.unlink()
    link.symlink_to("there")
    store.write(NAMESPACE, records[4:])
    assert read_back(store, NAMESPACE, records) == [True] * 8
    store.close()
    assert not list((tmp_path / "there").iterdir())


SMALL = """
mount -t tmpfs -o size=256k tmpfs "$1" && chmod 700 "$1" || exit 77
dd if=/dev/zero of="$1/filler" bs=4096 status=none 2>/dev/null
truncate -s "-$2" "$1/filler"
exec "$3" -c "$4" "$1"
"""
OPEN = """
import sys
from hicache.data.store.segment import SegmentStore
from hicache.errors import UnavailableError
from hicache.keys import Namespace
from hicache.testing.stores import chain_of
try:
    store = SegmentStore(sys.argv[1], 1 << 20)
except UnavailableError as error:
    print(error)
else:
    print("open")
    print({outcome.name for outcome in store.write(Namespace.of({"weights": "test"}), chain_of("prompt", 8))})
    store.close()
"""


@pytest.mark.skipif(not shutil.which("unshare") or os.geteuid() != 0, reason="needs the right to mount")
@pytest.mark.parametrize(
    "room,said", [(0, "no room"), (8192, "no room"), (LOCK_NBYTES + 4096, "index cannot")]
)
def test_a_full_disk_refuses_the_index_and_kills_nobody(tmp_path, room, said):
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", SMALL, "sh", str(tmp_path), str(room), sys.executable, OPEN],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ended.returncode == 77:
        pytest.skip("this system does not let us mount")
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])
    assert said in ended.stdout
