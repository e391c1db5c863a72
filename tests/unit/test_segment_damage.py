"""Damage to segment files, from outside and at rest: the cost is a shorter prefix, and the next write repairs it."""

import errno
import subprocess
import sys

import pytest

from hicache.data.store.base import Corrupt, Hit, Miss, WriteOutcome
from hicache.data.store.record import HEADER_NBYTES
from hicache.data.store.segment import Files, SegmentStore
from hicache.keys import Namespace
from hicache.testing.stores import PAGE_NBYTES, buffers, chain_of, read_back

SLOT = 3 * 4096
NAMESPACE = Namespace.of({"weights": "test"})
RECORDS = chain_of("prompt", 16)
VICTIM = 5


def place(store, page):
    """(path of the segment, byte offset of the slot) of a page of the prompt."""
    row = store.directory.rows([bytes(RECORDS[page].key)])[0]
    return store.directory.segments.path(row.segment), row.offset * 4096


def flip(store, offset):
    path, at = place(store, VICTIM)
    with path.open("r+b") as file:
        file.seek(at + offset)
        byte = file.read(1)[0]
        file.seek(at + offset)
        file.write(bytes([byte ^ 4]))


def swap(store):
    (one, at), (other, by) = place(store, VICTIM), place(store, VICTIM + 1)
    with one.open("r+b") as a, other.open("r+b") as b:
        a.seek(at)
        b.seek(by)
        left, right = a.read(SLOT), b.read(SLOT)
        a.seek(at)
        b.seek(by)
        a.write(right)
        b.write(left)


def replace_by_another_models(store):
    """The same key and bytes, but a record of another namespace (of a sound header)."""
    path, at = place(store, VICTIM)
    other = SegmentStore(store.directory.path.parent / "other", 16 * SLOT)
    foreign = Namespace.of({"weights": "other"})
    other.write(foreign, RECORDS[: VICTIM + 1])
    row = other.directory.rows([bytes(RECORDS[VICTIM].key)])[0]
    source = other.directory.segments.path(row.segment)
    with source.open("rb") as file:
        file.seek(row.offset * 4096)
        data = file.read(SLOT)
    other.close()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def cut_to(nbytes):
    def cut(store):
        path, _ = place(store, VICTIM)
        with path.open("r+b") as file:
            file.truncate(nbytes)

    return cut


def replace_by_directory(store):
    path, _ = place(store, VICTIM)
    path.unlink()
    path.mkdir()


def replace_by_full_directory(store):
    replace_by_directory(store)
    (place(store, VICTIM)[0] / "somebody's").touch()


def replace_by_dangling_link(store):
    path, _ = place(store, VICTIM)
    path.unlink()
    path.symlink_to("nowhere")


def overwrite_with_zeros(store):
    path, at = place(store, VICTIM)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(SLOT))


ONE_PAGE = {
    "bit of the payload": lambda store: flip(store, HEADER_NBYTES + 700),
    "last bit of the payload": lambda store: flip(store, HEADER_NBYTES + PAGE_NBYTES - 1),
    "magic": lambda store: flip(store, 0),
    "version": lambda store: flip(store, 8),
    "length": lambda store: flip(store, 16),
    "key": lambda store: flip(store, 70),
    "header sum": lambda store: flip(store, 511),
    "zeros": overwrite_with_zeros,
    "cut to half": cut_to(SLOT // 2),
    "cut to nothing": cut_to(0),
}
IN_THE_WAY = {"directory": replace_by_directory, "dangling link": replace_by_dangling_link}


def filled(tmp_path, files=None, slots=16):
    """A store with segments of one slot, 16 of which hold the pages of the prompt."""
    store = SegmentStore(tmp_path / "store", slots * SLOT, files=files)
    assert store.write(NAMESPACE, RECORDS) == [WriteOutcome.STORED] * 16
    return store


def leading(hits):
    return hits.index(False) if False in hits else len(hits)


@pytest.mark.parametrize("reopened", [False, True], ids=["same store", "reopened"])
@pytest.mark.parametrize("damage", ONE_PAGE.values(), ids=ONE_PAGE)
def test_one_damaged_page_shortens_the_prefix_once(tmp_path, damage, reopened):
    store = filled(tmp_path)
    damage(store)
    if reopened:
        store.close()
        store = SegmentStore(tmp_path / "store", 16 * SLOT)
    outcomes = store.read(NAMESPACE, [r.key for r in RECORDS], buffers(16))
    assert isinstance(outcomes[VICTIM], Corrupt)
    assert [isinstance(o, Hit) for o in outcomes] == [page != VICTIM for page in range(16)]
    assert store.usage()["corrupt"] == 1
    assert not store.contains(NAMESPACE, [RECORDS[VICTIM].key])[0]
    assert store.read(NAMESPACE, [RECORDS[VICTIM].key], buffers(1)) == [Miss("absent")]
    store.check()
    wanted = [WriteOutcome.EXISTS] * 16
    wanted[VICTIM] = WriteOutcome.STORED
    assert store.write(NAMESPACE, RECORDS) == wanted
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.check()
    store.close()


def test_a_header_bit_beyond_the_512_bytes_that_count_is_harmless(tmp_path):
    store = filled(tmp_path)
    flip(store, 600)
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.close()


def test_a_file_longer_than_its_segment_is_harmless(tmp_path):
    store = filled(tmp_path)
    path, _ = place(store, VICTIM)
    with path.open("ab") as file:
        file.write(b"x")
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.close()


def test_two_swapped_slots_are_both_found(tmp_path):
    store = filled(tmp_path)
    swap(store)
    outcomes = store.read(NAMESPACE, [r.key for r in RECORDS], buffers(16))
    assert outcomes[VICTIM : VICTIM + 2] == [Corrupt("key")] * 2
    assert store.usage()["corrupt"] == 2
    assert sum(isinstance(o, Hit) for o in outcomes) == 14
    store.check()
    assert all(outcome.ok for outcome in store.write(NAMESPACE, RECORDS))
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.close()


def test_a_record_of_another_model_in_its_place_is_not_used(tmp_path):
    store = filled(tmp_path)
    replace_by_another_models(store)
    assert leading(read_back(store, NAMESPACE, RECORDS)) == VICTIM
    assert all(outcome.ok for outcome in store.write(NAMESPACE, RECORDS))
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.check()
    store.close()


def lost(tmp_path, damage):
    """A reopened store after damage to a whole segment: its page is gone, and only its page."""
    store = filled(tmp_path)
    damage(store)
    store.close()
    store = SegmentStore(tmp_path / "store", 16 * SLOT)
    assert leading(read_back(store, NAMESPACE, RECORDS)) == VICTIM
    assert not store.contains(NAMESPACE, [RECORDS[VICTIM].key])[0]
    return store


@pytest.mark.parametrize("damage", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_what_stands_where_a_segment_was_makes_way_for_the_next_write(tmp_path, damage):
    store = lost(tmp_path, damage)
    assert store.write(NAMESPACE, [RECORDS[VICTIM]]) == [WriteOutcome.STORED]
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.check()
    store.close()


def test_what_cannot_make_way_costs_that_segment_only(tmp_path):
    store = lost(tmp_path, replace_by_full_directory)
    outcomes = store.write(NAMESPACE, [RECORDS[VICTIM]])
    assert outcomes == [WriteOutcome.FAILED]
    again = store.write(NAMESPACE, [RECORDS[VICTIM]])  # the bad slot is set aside; a cold leaf makes room
    assert again == [WriteOutcome.STORED]
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 15 + [False]
    store.check()
    store.close()


class Denied(Files):
    """Opening one segment fails with an error of choice."""

    def __init__(self, code):
        self.code = code
        self.name = ""

    def open(self, path):
        if path.name == self.name:
            raise OSError(self.code, "denied")
        return super().open(path)


@pytest.mark.parametrize(
    "code,outcome,stays",
    [
        (errno.EACCES, Corrupt("unreadable"), False),
        (errno.EIO, Corrupt("unreadable"), False),
        (errno.EMFILE, Miss("not_now"), True),
    ],
)
def test_a_segment_that_cannot_be_opened(tmp_path, code, outcome, stays):
    files = Denied(code)
    store = filled(tmp_path)
    files.name = place(store, VICTIM)[0].name
    store.close()
    store = SegmentStore(tmp_path / "store", 16 * SLOT, files=files)
    found = store.read(NAMESPACE, [r.key for r in RECORDS], buffers(16))
    assert found[VICTIM] == outcome
    assert sum(isinstance(o, Hit) for o in found) == 15
    assert store.contains(NAMESPACE, [RECORDS[VICTIM].key]) == [stays]
    store.check()
    store.close()


def test_damage_is_found_by_a_fresh_process(tmp_path):
    store = filled(tmp_path)
    flip(store, HEADER_NBYTES + 700)
    store.close()
    script = (
        "import sys; from hicache.data.store.segment import SegmentStore\n"
        "from hicache.keys import Namespace\n"
        "from hicache.testing.stores import chain_of, read_back\n"
        "store = SegmentStore(sys.argv[1], int(sys.argv[2]))\n"
        "print(*map(int, read_back(store, Namespace.of({'weights': 'test'}), chain_of('prompt', 16))))\n"
        "store.check(); store.close()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "store"), str(16 * SLOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["1"] * 5 + ["0"] + ["1"] * 10


def move_the_last_page(store):
    """Page 15 leaves its slot to another record and is written again elsewhere."""
    store.delete([RECORDS[15].key])
    assert store.write(NAMESPACE, chain_of("other", 1)) == [WriteOutcome.STORED]
    assert store.write(NAMESPACE, RECORDS[15:]) == [WriteOutcome.STORED]


def test_a_record_written_anew_is_not_dropped_by_an_old_report(tmp_path):
    store = filled(tmp_path, slots=20)
    key = bytes(RECORDS[15].key)
    seen = store.directory.rows([key])[0]
    move_the_last_page(store)
    assert not seen.same_bytes(store.directory.rows([key])[0])
    with store.directory.writing() as books:
        assert not books.drop(key, seen)
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.check()
    store.close()


def test_a_deleted_segment_file_costs_its_pages_when_it_is_opened_next(tmp_path):
    store = filled(tmp_path)
    place(store, VICTIM)[0].unlink()
    store.close()
    store = SegmentStore(tmp_path / "store", 16 * SLOT)
    outcomes = store.read(NAMESPACE, [r.key for r in RECORDS], buffers(16))
    assert outcomes[VICTIM] == Corrupt("missing")
    assert store.write(NAMESPACE, RECORDS)[VICTIM] is WriteOutcome.STORED
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.check()
    store.close()


def test_a_segment_file_deleted_under_a_writer_is_made_again(tmp_path):
    store = filled(tmp_path)
    path, _ = place(store, 15)
    store.delete([RECORDS[15].key])
    path.unlink()
    assert store.write(NAMESPACE, RECORDS[15:]) == [WriteOutcome.STORED]
    store.close()
    store = SegmentStore(tmp_path / "store", 16 * SLOT)
    assert read_back(store, NAMESPACE, RECORDS) == [True] * 16
    store.close()


class Recycling(Files):
    """Between the look-up of a row and the read of its slot, the slot goes to another record."""

    def __init__(self):
        self.before_read = None

    def read(self, fd, views, offset):
        if self.before_read is not None:
            hook, self.before_read = self.before_read, None
            hook()
        return super().read(fd, views, offset)


def test_a_slot_recycled_under_a_reader_is_a_miss_and_not_damage(tmp_path):
    files = Recycling()
    store = filled(tmp_path, files)

    def recycle():
        store.delete([RECORDS[15].key])
        assert store.write(NAMESPACE, chain_of("other", 1)) == [WriteOutcome.STORED]

    files.before_read = recycle
    assert store.read(NAMESPACE, [RECORDS[15].key], buffers(1)) == [Miss("absent")]
    assert store.usage()["corrupt"] == 0
    assert read_back(store, NAMESPACE, chain_of("other", 1)) == [True]
    store.close()


def test_a_record_moved_under_a_reader_is_read_from_its_new_place(tmp_path):
    files = Recycling()
    store = filled(tmp_path, files, slots=20)

    files.before_read = lambda: move_the_last_page(store)
    assert read_back(store, NAMESPACE, RECORDS[15:]) == [True]
    store.close()
