"""A damaged index: it is found out before LMDB trusts it, because LMDB would take the process along."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.data.store.segment import SegmentStore
from hicache.data.store.segment.sound import check_whole
from hicache.errors import DataError, HiCacheError
from hicache.keys import Namespace
from hicache.testing.stores import chain_of

SLOT = 3 * 4096
PAGES = 300
NAMESPACE = Namespace.of({"weights": "test"})
RECORDS = chain_of("prompt", PAGES)
SEED = 20240


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A directory whose index has leaves, branches, free pages and every table."""
    path = tmp_path_factory.mktemp("index") / "kv"
    store = SegmentStore(path, PAGES * SLOT)
    for start in range(0, PAGES, 20):
        store.write(NAMESPACE, RECORDS[start : start + 20])
    store.delete([record.key for record in RECORDS[-40:]])
    store.close()
    return path


@pytest.fixture
def place(sound, tmp_path):
    """A copy of it to damage."""
    shutil.copytree(sound, tmp_path / "kv")
    return tmp_path / "kv"


def test_a_sound_index_is_sound(place):
    check_whole(place / "index.mdb")
    store = SegmentStore(place, PAGES * SLOT)
    check_whole(place / "index.mdb")
    store.write(NAMESPACE, RECORDS)
    check_whole(place / "index.mdb")
    store.close()


def cut(nbytes):
    return lambda file: os.truncate(file, nbytes)


def zeros(file):
    file.write_bytes(bytes(file.stat().st_size))


def garbage(file):
    file.write_bytes(random.Random(SEED).randbytes(file.stat().st_size))


def text(file):
    file.write_text("not an index\n" * 2000)


DAMAGES = {
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "one page": cut(4096),
    "two pages": cut(8192),
    "some bytes": cut(100),
    "zeros": zeros,
    "garbage": garbage,
    "text": text,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_is_refused_by_name_and_left_as_it_is(place, damage):
    damage(place / "index.mdb")
    before = (place / "index.mdb").read_bytes()
    with pytest.raises(DataError, match="the index is damaged"):
        SegmentStore(place, PAGES * SLOT)
    assert (place / "index.mdb").read_bytes() == before


USE = """
import sys
from pathlib import Path
from hicache.data.store.segment import SegmentStore
from hicache.errors import HiCacheError
from hicache.testing.stores import read_back
sys.path.insert(0, sys.argv[1])
from test_index_damage import NAMESPACE, PAGES, RECORDS, SLOT
for place in sys.argv[2:]:
    print(place, flush=True)
    try:
        store = SegmentStore(Path(place), PAGES * SLOT)
        read_back(store, NAMESPACE, RECORDS)
        store.write(NAMESPACE, RECORDS)
        read_back(store, NAMESPACE, RECORDS)
        store.close()
    except HiCacheError as error:
        print(type(error).__name__, error)
"""


def hit(file: Path, chance: random.Random) -> None:
    """One of the things that happen to files: a page of zeros, of noise, of another page; bytes that flip."""
    data = bytearray(file.read_bytes())
    page = chance.randrange(len(data) // 4096) * 4096
    kind = chance.randrange(4)
    if kind == 0:
        data[page : page + 4096] = bytes(4096)
    elif kind == 1:
        data[page : page + 4096] = chance.randbytes(4096)
    elif kind == 2:
        other = chance.randrange(len(data) // 4096) * 4096
        data[page : page + 4096] = data[other : other + 4096]
    else:
        for _ in range(3):
            data[page + chance.randrange(64)] = chance.randrange(256)
    file.write_bytes(data)


def damaged_copies(sound, tmp_path, count, seed):
    print("seed", seed)
    chance = random.Random(seed)
    for number in range(count):
        copy = tmp_path / f"{number}"
        copy.mkdir(mode=0o700)
        shutil.copy(sound / "index.mdb", copy)
        for segment in sound.glob("segment-*"):
            os.link(segment, copy / segment.name)
        hit(copy / "index.mdb", chance)
        yield copy


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_damage_to_the_index_ends_the_process_or_gives_wrong_bytes(sound, tmp_path, count):
    """Refused, or used and right: the child must come to its end, whatever the index says."""
    copies = [str(copy) for copy in damaged_copies(sound, tmp_path, count, SEED)]
    child = subprocess.run(
        [sys.executable, "-c", USE, str(Path(__file__).parent), *copies],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, f"{child.returncode}: {child.stdout[-400:]} {child.stderr[-2000:]}"
    assert "damaged" in child.stdout


def test_the_error_is_one_of_ours(place):
    (place / "index.mdb").unlink()
    (place / "index.mdb").mkdir()
    with pytest.raises(HiCacheError):
        SegmentStore(place, PAGES * SLOT)
