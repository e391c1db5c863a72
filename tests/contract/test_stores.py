"""Both stores keep the contract that every store inherits."""

import time
from pathlib import Path

import pytest

from hicache.data.store.base import Delete, Hit, Store, Touch, Usage
from hicache.data.store.guard import Guard
from hicache.data.store.memory import MemoryStore
from hicache.data.store.record import HEADER_NBYTES
from hicache.data.store.segment import Files, SegmentStore, crew, writer
from hicache.errors import UnavailableError
from hicache.keys import Namespace, RecordKey
from hicache.testing.stores import PAGE_NBYTES, FaultyStore, StoreContract, buffers, chain_of

SLOT = 3 * 4096
"""A header and 6,000 bytes, in whole blocks."""


class TestMemoryStore(StoreContract):
    def make(self, tmp_path: Path, cap_bytes: int) -> MemoryStore:
        return MemoryStore(cap_bytes)

    def corrupt(self, store: Store, key: RecordKey) -> bool:
        assert isinstance(store, MemoryStore)
        return store.damage(key, at=600)


class TestSegmentStore(StoreContract):
    durable = True

    def make(self, tmp_path: Path, cap_bytes: int) -> SegmentStore:
        return SegmentStore(tmp_path / "store", cap_bytes)

    def cap_for(self, pages: int) -> int:
        return pages * SLOT

    def corrupt(self, store: Store, key: RecordKey) -> bool:
        assert isinstance(store, SegmentStore)
        row = store.directory.rows([bytes(key)])[0]
        assert row is not None
        path = store.directory.segments.path(row.segment)
        with path.open("r+b") as file:
            at = row.offset * 4096 + HEADER_NBYTES + 1000
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ 0x10]))
        return True


class TestGuardedStore(TestSegmentStore):
    def make(self, tmp_path: Path, cap_bytes: int) -> Guard:
        return Guard(super().make(tmp_path, cap_bytes), bytes(32), time.monotonic)

    def corrupt(self, store: Store, key: RecordKey) -> bool:
        assert isinstance(store, Guard)
        return super().corrupt(store.inner, key)


class TestSegmentStoreInParts(TestSegmentStore):
    """The same with every batch shared out among threads and committed part by part."""

    @pytest.fixture(autouse=True)
    def in_parts(self, monkeypatch):
        monkeypatch.setattr(crew, "SHARE_NBYTES", 0)
        monkeypatch.setattr(writer, "GROUP_NBYTES", 2 * PAGE_NBYTES)


class TestSegmentStoreThroughThePageCache(TestSegmentStore):
    """The same without direct I/O."""

    def make(self, tmp_path: Path, cap_bytes: int) -> SegmentStore:
        return SegmentStore(tmp_path / "store", cap_bytes, files=Files(direct=False))


@pytest.mark.parametrize("pages", [16, 24, 32, 40, 48])
def test_the_contracts_caps_hold_exactly_their_pages(pages):
    assert SegmentStore.capacity(pages * SLOT, PAGE_NBYTES) == pages
    assert MemoryStore.capacity(pages * (PAGE_NBYTES + 512), PAGE_NBYTES) == pages


def test_both_stores_offer_the_optional_abilities(tmp_path):
    for store in (MemoryStore(10**6), SegmentStore(tmp_path / "s", 10**6)):
        assert isinstance(store, Touch)
        assert isinstance(store, Delete)
        assert isinstance(store, Usage)
        store.close()


@pytest.mark.parametrize("toxic", ["flipped", "torn", "swapped", "short"])
def test_a_faulty_store_spoils_what_a_hit_delivers(toxic):
    namespace, records = Namespace.of({"w": "1"}), chain_of("a", 8)
    store = FaultyStore(MemoryStore(10**6), {toxic: 0.5}, seed=7)
    store.write(namespace, records)
    into = buffers(8)
    outcomes = store.read(namespace, [r.key for r in records], into)
    wrong = [bytes(v[0]) != bytes(r.payload[0]) for v, r in zip(into, records, strict=True)]
    assert all(isinstance(outcome, Hit) for outcome in outcomes)
    assert sum(wrong) == store.seen[toxic]
    assert 0 < sum(wrong) < 8
    again = FaultyStore(MemoryStore(10**6), {toxic: 0.5}, seed=7)
    again.write(namespace, records)
    again.read(namespace, [r.key for r in records], buffers(8))
    assert again.seen == store.seen


def test_a_faulty_store_is_late_full_raising_and_dead_on_request():
    namespace, records = Namespace.of({"w": "1"}), chain_of("a", 2)
    calls = []
    late = FaultyStore(MemoryStore(10**6), {"late": 1.0}, seed=1, late=lambda: calls.append(1))
    late.write(namespace, records)
    assert calls == [1]
    full = FaultyStore(MemoryStore(10**6), {"full": 1.0}, seed=1)
    assert not any(outcome.ok for outcome in full.write(namespace, records))
    with pytest.raises(OSError, match="injected"):
        FaultyStore(MemoryStore(10**6), {"raising": 1.0}, seed=1).contains(namespace, [])
    dead = FaultyStore(MemoryStore(10**6), {"dead": 1.0}, seed=1)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            dead.read(namespace, [], [])
    dead.close()
