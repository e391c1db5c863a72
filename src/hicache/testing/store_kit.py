"""What the contract suite of stores stands on: records with known bytes, and a harness that opens stores."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hicache.data.store.base import Hit, Record, Store
from hicache.keys import Namespace, RecordKey

OpenStore = Callable[[int], Store]
"""Opens a store for so many pages."""

PAGE_NBYTES = 6000


def page_of(key: RecordKey, nbytes: int = PAGE_NBYTES) -> bytes:
    """The payload that tests store under a key: its own key, over and over, so that no two keys share bytes."""
    return (bytes(key) * (nbytes // 40 + 1))[:nbytes]


def chain_of(name: str, pages: int, nbytes: int = PAGE_NBYTES, *, start: int = 0) -> list[Record]:
    """Records ``start .. pages`` of the chain ``name``, each the parent of the next."""
    keys = [RecordKey(hashlib.sha256(f"{name}/{i}".encode()).digest()) for i in range(pages)]
    return [
        Record(
            key=keys[i],
            parent=keys[i - 1] if i else None,
            layout="page_first",
            payload=[memoryview(page_of(keys[i], nbytes))],
        )
        for i in range(start, pages)
    ]


def buffers(count: int, nbytes: int = PAGE_NBYTES) -> list[list[memoryview]]:
    """One writable buffer for each of ``count`` records."""
    return [[memoryview(bytearray(nbytes))] for _ in range(count)]


def read_back(store: Store, namespace: Namespace, records: Sequence[Record]) -> list[bool]:
    """Read records; which of them hit. Fails when a hit's bytes are not the record's."""
    into = [[memoryview(bytearray(sum(p.nbytes for p in r.payload)))] for r in records]
    outcomes = store.read(namespace, [r.key for r in records], into)
    for record, outcome, views in zip(records, outcomes, into, strict=True):
        if isinstance(outcome, Hit):
            assert bytes(views[0]) == b"".join(record.payload), "a hit delivered other bytes"
            assert outcome == Hit(record.layout, views[0].nbytes)
    return [isinstance(outcome, Hit) for outcome in outcomes]


class StoreHarness(ABC):
    """How a suite opens, damages and closes stores. Subclasses supply :meth:`make` and correct the facts."""

    durable = False
    """Records outlive ``close``: opening again finds them."""

    evicts = True
    """The store makes room by itself, coldest leaf first."""

    @abstractmethod
    def make(self, tmp_path: Path, cap_bytes: int) -> Store:
        """A store on ``tmp_path`` (the same records again, if durable) with this cap."""

    def cap_for(self, pages: int) -> int:
        """A cap under which exactly ``pages`` pages of ``PAGE_NBYTES`` fit."""
        return pages * (PAGE_NBYTES + 512)

    def corrupt(self, store: Store, key: RecordKey) -> bool:
        """Damage the stored payload of ``key`` behind the store's back; False when that cannot be done here."""
        return False

    def settle(self, store: Store) -> None:
        """Let pending marks of use take effect, where a store batches them."""
        flush = getattr(store, "flush", None)
        if flush is not None:
            flush()

    # -- fixtures -----------------------------------------------------------------------------------------------

    @pytest.fixture
    def opened(self) -> Iterator[list[Store]]:
        """Stores of this test; each is checked and closed at its end."""
        stores: list[Store] = []
        yield stores
        for store in stores:
            check = getattr(store, "check", None)
            if check is not None:
                check()
            store.close()

    @pytest.fixture
    def new(self, tmp_path: Path, opened: list[Store]) -> OpenStore:
        """Open a store for so many pages."""

        def open_store(pages: int) -> Store:
            store = self.make(tmp_path, self.cap_for(pages))
            opened.append(store)
            return store

        return open_store

    @pytest.fixture
    def namespace(self) -> Namespace:
        """The namespace of most tests."""
        return Namespace.of({"weights": "test"})
