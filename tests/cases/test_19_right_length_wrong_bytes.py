"""A page of the right length with wrong bytes is found out at every read; there is no way to switch that off."""

from __future__ import annotations

import os

import pytest
from segments import (
    HOUSE_SLOT,
    NAMESPACE,
    PROMPT,
    ask,
    cap_of,
    end,
    flip,
    house_on,
    house_store,
    opened,
    place,
    start,
)

from hicache.data.store.base import Corrupt, Record, WriteOutcome
from hicache.data.store.memory import MemoryStore
from hicache.data.store.record import HEADER_NBYTES
from hicache.errors import ConfigError
from hicache.keys import Namespace, RecordKey, page_keys
from hicache.records import Where
from hicache.settings import load
from hicache.testing.house import NAMESPACE as HOUSE_NAMESPACE
from hicache.testing.house import PAGE_TOKENS, POISON, holds
from hicache.testing.stores import buffers, chain_of, read_back

VICTIM = 5
KEYS = [RecordKey(key) for key in page_keys(HOUSE_NAMESPACE.root, PROMPT, PAGE_TOKENS)]
OTHER = Namespace.of({"weights": "another model"})


def take(where, nbytes=HOUSE_SLOT):
    path, at = where
    with path.open("rb") as file:
        file.seek(at)
        return file.read(nbytes)


def lay(where, data):
    path, at = where
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def bit_at(offset):
    def damage(store, tmp_path):
        path, at = place(store, KEYS[VICTIM])
        flip(path, at + offset)

    return damage


def swap(store, tmp_path):
    one, other = place(store, KEYS[VICTIM]), place(store, KEYS[VICTIM + 1])
    left, right = take(one), take(other)
    lay(one, right)
    lay(other, left)


def page_of_another_model(store, tmp_path):
    """The record that another model wrote under the same key: sound in itself."""
    foreign = house_store(tmp_path / "foreign")
    payload = [memoryview(os.urandom(4096))]
    records = [Record(key, KEYS[n - 1] if n else None, "page_first", payload) for n, key in enumerate(KEYS)]
    assert foreign.write(OTHER, records[: VICTIM + 1]) == [WriteOutcome.STORED] * (VICTIM + 1)
    data = take(place(foreign, KEYS[VICTIM]))
    foreign.close()
    lay(place(store, KEYS[VICTIM]), data)


def earlier_bytes(store, tmp_path):
    """A whole, sound record of the same key with other bytes: what a slot held before it was written again."""
    older = house_store(tmp_path / "older")
    payload = [memoryview(os.urandom(4096))]
    records = [Record(key, KEYS[n - 1] if n else None, "page_first", payload) for n, key in enumerate(KEYS)]
    older.write(HOUSE_NAMESPACE, records)
    data = take(place(older, KEYS[VICTIM]))
    older.close()
    lay(place(store, KEYS[VICTIM]), data)


def half_rewritten(store, tmp_path):
    where = place(store, KEYS[VICTIM])
    lay((where[0], where[1] + HEADER_NBYTES + 2048), bytes(2048))


DAMAGES = {
    "a bit of the payload": (bit_at(HEADER_NBYTES + 1000), 1),
    "the last bit of the payload": (bit_at(HOUSE_SLOT - 1), 1),
    "a bit of the layout": (bit_at(10), 1),
    "a bit of the length": (bit_at(17), 1),
    "a bit of the sum": (bit_at(24), 1),
    "a bit of the namespace": (bit_at(40), 1),
    "a bit of the key": (bit_at(70), 1),
    "a bit of the plane table's digest": (bit_at(150), 1),
    "swapped with the next page": (swap, 2),
    "another model's page": (page_of_another_model, 1),
    "older bytes of the same page": (earlier_bytes, 1),
    "half rewritten": (half_rewritten, 1),
}


@pytest.fixture
def path(tmp_path):
    assert ask(tmp_path / "store")[0].loaded == 0
    return tmp_path / "store"


@pytest.mark.parametrize("damage,corrupt", DAMAGES.values(), ids=DAMAGES)
def test_only_the_pages_before_it_are_used_and_storing_again_mends_it(path, tmp_path, damage, corrupt):
    store = house_store(path)
    damage(store, tmp_path)
    store.close()
    served, gauges = ask(path)  # compares every loaded byte, and stores what was missing
    assert served.loaded == VICTIM
    assert gauges["corrupt"] == corrupt
    served, gauges = ask(path)
    assert (served.loaded, gauges["corrupt"]) == (16, 0)


@pytest.mark.parametrize("damage,corrupt", DAMAGES.values(), ids=DAMAGES)
def test_the_slot_that_received_wrong_bytes_is_never_ready(path, tmp_path, damage, corrupt):
    store = house_store(path)
    damage(store, tmp_path)
    with house_on(store) as one:
        request = one.open("a", one.keys(PROMPT))
        one.settle()
        request.load(request.match(), one.ids(request))
        one.settle()
        index, at = one.controller.books.index, one.controller.books.tiers.top.at
        assert request.match().ready == VICTIM
        found = {key: index.find(key) for key in request.keys}
        ready = [key for key, number in found.items() if number is not None and at[number] >= 0]
        for key in ready:
            assert holds(one.pools[Where.HOST].surface(0), at[found[key]], key)
        assert request.keys[VICTIM] not in ready
        surface = one.engine.surface(0).views[0][0]
        assert (surface[one.ids(request)[VICTIM]] == POISON).all(), "wrong bytes reached the engine"
        request.close()
        one.settle()
    store.close()


def test_a_fresh_process_finds_it_too(tmp_path):
    store = opened(tmp_path / "store", 16)
    records = chain_of("prompt", 16)
    store.write(NAMESPACE, records)
    where, at = place(store, records[VICTIM].key)
    flip(where, at + HEADER_NBYTES + 3)
    store.close()
    script = "print(*map(int, read_back(store, namespace, chain_of('prompt', 16)))); store.close()"
    assert end(start(tmp_path / "store", cap_of(16), script)).split() == ["1"] * 5 + ["0"] + ["1"] * 10


def test_a_record_carries_identity_length_and_sum_itself(tmp_path):
    """Moved with its index row to another key, it is still refused: the header says whose it is."""
    store = opened(tmp_path / "store", 16)
    records = chain_of("prompt", 2)
    store.write(NAMESPACE, records)
    with store.directory.writing() as books:
        row, other = (books.tree.row(bytes(record.key)) for record in records)
        row.segment, row.offset, row.sum = other.segment, other.offset, other.sum
        books.tree.put(bytes(records[0].key), row)
    assert store.read(NAMESPACE, [records[0].key], buffers(1)) == [Corrupt("key")]


@pytest.mark.parametrize("key", ["verify", "checksum", "verify_reads", "checksums"])
def test_verification_cannot_be_switched_off(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"unknown key .*{key}"):
        load(environ={}, store={"type": "segment", "path": str(tmp_path), key: False})


def test_a_store_in_memory_verifies_as_well():
    store = MemoryStore(10**6)
    records = chain_of("a", 2)
    store.write(NAMESPACE, records)
    assert store.damage(records[1].key, at=600)
    assert read_back(store, NAMESPACE, records) == [True, False]
