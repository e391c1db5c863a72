"""A page that is cut, gone or out of reach costs the prefix from it on, once; the next store repairs it."""

from __future__ import annotations

import logging
import os
import random
import signal
import time

import pytest
from segments import (
    HOUSE_SLOT,
    NAMESPACE,
    PROMPT,
    SLOT,
    ask,
    cap_of,
    flip,
    house_on,
    house_store,
    opened,
    place,
    start,
)

from hicache.data.store.base import Corrupt, Hit, WriteOutcome
from hicache.data.store.record import HEADER_NBYTES
from hicache.data.store.segment import Files
from hicache.keys import RecordKey, page_keys
from hicache.records import Where
from hicache.testing.house import NAMESPACE as HOUSE_NAMESPACE
from hicache.testing.house import PAGE_TOKENS
from hicache.testing.stores import buffers, chain_of, read_back

VICTIM = 5
KEYS = [RecordKey(key) for key in page_keys(HOUSE_NAMESPACE.root, PROMPT, PAGE_TOKENS)]


def replace_by(make):
    def replace(path):
        path.unlink()
        make(path)

    return replace


def extend(path):
    with path.open("ab") as file:
        file.write(b"x")


DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "cut to half": lambda path: os.truncate(path, HOUSE_SLOT // 2),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "a directory": replace_by(lambda path: path.mkdir()),
    "a dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
    "a link to a file": replace_by(lambda path: path.symlink_to("/etc/passwd")),
    "a link to itself": replace_by(lambda path: path.symlink_to(path)),
    "a pipe": replace_by(os.mkfifo),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}
HARMLESS = {
    "a byte longer": extend,
    "closed to all": lambda path: path.chmod(0),  # root reads on; for anybody else it is damage
}
if os.geteuid() != 0:
    DAMAGES["closed to all"] = HARMLESS.pop("closed to all")


@pytest.fixture
def path(tmp_path):
    """A directory that holds the prompt's 16 pages, each in a segment of its own."""
    assert ask(tmp_path / "store")[0].loaded == 0
    return tmp_path / "store"


def spoil(path, damage):
    store = house_store(path)
    victim, _ = place(store, KEYS[VICTIM])
    store.close()
    damage(victim)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_exactly_the_pages_before_it_come_back_and_the_next_store_repairs_it(path, damage, caplog):
    spoil(path, damage)
    caplog.set_level(logging.WARNING, "hicache.store")
    served, gauges = ask(path)  # serving also stores what was missing
    assert served.loaded == VICTIM
    assert gauges["corrupt"] == 1
    assert sum("is damaged" in record.getMessage() for record in caplog.records) == 1, caplog.text
    caplog.clear()
    served, gauges = ask(path)
    assert (served.loaded, gauges["corrupt"]) == (16, 0)
    assert not caplog.records


@pytest.mark.parametrize("damage", HARMLESS.values(), ids=HARMLESS)
def test_what_leaves_the_page_readable_is_no_damage(path, damage):
    spoil(path, damage)
    assert ask(path)[0].loaded == 16


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_bad_page_does_not_come_back_in_the_next_look_up(path, damage):
    spoil(path, damage)
    store = house_store(path)
    assert all(store.contains(HOUSE_NAMESPACE, KEYS)), "a look-up is a hint"
    outcomes = store.read(HOUSE_NAMESPACE, KEYS, buffers(16, 4096))
    assert isinstance(outcomes[VICTIM], Corrupt)
    assert sum(isinstance(outcome, Hit) for outcome in outcomes) == 15
    assert store.contains(HOUSE_NAMESPACE, KEYS) == [n != VICTIM for n in range(16)]
    store.check()
    store.close()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_page_lost_between_look_up_and_fetch_is_a_shorter_prefix(path, damage):
    store = house_store(path)
    victim, _ = place(store, KEYS[VICTIM])
    with house_on(store) as one:
        request = one.open("a", one.keys(PROMPT))
        one.settle()
        match = request.match()
        assert match.pages == 16
        damage(victim)
        request.load(match, one.ids(request))
        one.settle()
        assert one.right(request, range(VICTIM))
        assert request.match().ready == VICTIM
        request.close()
        one.settle()
        assert one.controller.evict(Where.HOST, 10) == 10, "what was fetched of the rest goes first"
        assert one.controller.pools()[Where.HOST]["ready"] == VICTIM
    store.close()


WRITER = """
rng = random.Random(int(sys.argv[3]))
print("open", flush=True)
for number in range(10**6):
    records = chain_of(f"{sys.argv[3]}/{number}", rng.randrange(1, 17))
    if all(outcome.ok for outcome in store.write(namespace, records)):
        print(number, len(records), flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_after_a_kill_at_a_random_moment_every_page_that_is_read_is_complete(tmp_path, kills):
    draw = random.Random(18)
    path, pages = tmp_path / "store", 64
    for kill in range(kills):
        writer = start(path, cap_of(pages), WRITER, str(kill))
        assert writer.stdout.readline() == "open\n", writer.communicate()
        time.sleep(draw.random() * 0.2)  # the random moment
        writer.send_signal(signal.SIGKILL)
        out, err = writer.communicate(timeout=60)
        assert not err
        store = opened(path, pages)
        store.check()
        assert store.usage()["slots_in_hand"] == 0
        assert len(list(path.glob("session-*"))) == 1, "only ours"
        done = [tuple(map(int, line.split())) for line in out.split("\n")[:-1]]
        newest = done[-2:]
        for number, length in [*done[:-2][-20:], *newest]:
            hits = read_back(store, NAMESPACE, chain_of(f"{kill}/{number}", length))
            assert hits == sorted(hits, reverse=True)
            assert all(hits) or (number, length) not in newest, "an acknowledged page is lost"
        assert store.usage()["corrupt"] == 0
        store.close()


class Watched(Files):
    """Lets somebody act right after a read, before the reader has looked at what it got."""

    def __init__(self):
        self.reads = 0
        self.act = {}

    def read(self, fd, views, offset):
        done = super().read(fd, views, offset)
        self.reads += 1
        self.act.pop(self.reads, lambda: None)()
        return done


@pytest.mark.parametrize("mended_after", [1, 2])
def test_a_good_replacement_is_not_removed_by_the_reader_that_saw_the_bad_page(tmp_path, mended_after):
    """The replacement has the same bytes in the same slot, so that only its row tells it from the bad one."""
    files = Watched()
    store = opened(tmp_path / "store", 16, files=files)
    records = chain_of("a", 16)
    store.write(NAMESPACE, records)
    victim = records[15]
    where, at = place(store, victim.key)
    flip(where, at + HEADER_NBYTES + 77)

    def mend():
        store.delete([victim.key])
        assert store.write(NAMESPACE, [victim]) == [WriteOutcome.STORED]
        assert place(store, victim.key) == (where, at)

    files.act[mended_after] = mend
    store.read(NAMESPACE, [victim.key], buffers(1))
    assert store.contains(NAMESPACE, [victim.key]) == [True], "the replacement was thrown away"
    assert read_back(store, NAMESPACE, records) == [True] * 16
    store.check()
    store.close()


def test_a_page_that_is_bad_for_good_is_dropped_although_it_was_used_a_moment_ago(tmp_path):
    store = opened(tmp_path / "store", 16)
    records = chain_of("a", 3)
    store.write(NAMESPACE, records)
    assert read_back(store, NAMESPACE, records) == [True] * 3  # leaves a mark of use that is not written yet
    where, at = place(store, records[2].key)
    flip(where, at + HEADER_NBYTES + 5)
    assert read_back(store, NAMESPACE, records) == [True, True, False]
    assert store.contains(NAMESPACE, [records[2].key]) == [False]
    assert store.usage()["used_bytes"] == 2 * SLOT
    store.close()
