"""Reading records: rows first, then bytes, then the proof that the bytes are the row's.

The rows are copied in one short read transaction that ends before any I/O, so a slow disk never holds the index.
Between the two a slot may be recycled; that, and every damage, shows as a difference between record and row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import lmdb

from hicache.data.store.base import Corrupt, Hit, Iovec, Miss, ReadOutcome
from hicache.data.store.record import HEADER_NBYTES, LAYOUT_NAMES, differs, payload_wrong, trim
from hicache.data.store.segment.crew import Crew
from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.proof import NOT_NOW, fetch, is_of
from hicache.data.store.segment.tables import Row

log = logging.getLogger("hicache.store")

_OTHERS = ("spec", "version")
"""Differences of a sound record that is not for us: a miss, and it stays. (The row has vouched for the namespace.)"""


class Reader:
    """Reads for one store of a directory; ``fingerprint`` is what its records must carry."""

    def __init__(self, directory: Directory, fingerprint: bytes) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._crew = Crew("store-read")
        self._logged: set[str] = set()

    def close(self) -> None:
        """End the threads."""
        self._crew.close()

    def read(self, root: bytes, keys: Sequence[bytes], into: Sequence[Iovec]) -> list[ReadOutcome]:
        """One outcome a key; records found damaged are dropped from the index before this returns."""
        try:
            asked = list(zip(keys, self._directory.rows(keys), into, strict=True))
            nbytes = sum(row.nbytes for _, row, _ in asked if row is not None)
            return self._crew.each(lambda one: self._read(root, *one), asked, nbytes)
        except (lmdb.Error, OSError):
            return [Miss("unavailable")] * len(keys)

    def _read(self, root: bytes, key: bytes, row: Row | None, into: Iovec) -> ReadOutcome:
        wrong = None
        seen = row
        for _ in range(2):
            if row is None or row.hole:
                return Miss()
            if row.namespace != root[:8]:
                return Miss("namespace")
            views = trim(into, row.nbytes)
            if views is None:
                return Miss("length")
            wrong = self._fetch(root, key, row, views)
            if wrong is None:
                return Hit(LAYOUT_NAMES[row.layout], row.nbytes)
            if wrong in _OTHERS or wrong == NOT_NOW:
                return Miss(wrong)
            with suppress(lmdb.Error, OSError):  # marks of use change rows: first they, then the comparison
                self._directory.flush()
            seen = row  # recycled under our hands, or damaged: the row as it is now tells
            row = self._directory.rows([key])[0]
        if seen is None or not seen.same_bytes(row):
            return Miss("recycled")
        self._tell(wrong or "unknown", key)
        with suppress(lmdb.Error, OSError), self._directory.writing() as books:
            books.drop(key, seen)
        return Corrupt(wrong or "unknown")

    def _tell(self, wrong: str, key: bytes) -> None:
        """Log the first damage of a kind; the counters know of all."""
        if wrong not in self._logged:
            self._logged.add(wrong)
            path = self._directory.path
            log.warning("a record in %s is damaged (%s), logged once: key=%s", path, wrong, key.hex())

    def _fetch(self, root: bytes, key: bytes, row: Row, views: list[memoryview]) -> str | None:
        """Fill the views; None when they hold what the row says, else what is wrong."""
        head = memoryview(bytearray(HEADER_NBYTES))
        header = fetch(self._directory.segments, row, head, views)
        if isinstance(header, str):
            return header
        wrong = differs(header, namespace=root, key=key, fingerprint=self._fingerprint)
        if wrong in ("key", "namespace"):
            return wrong
        if not is_of(header, row):
            return "row"
        return wrong or payload_wrong(header, views)
