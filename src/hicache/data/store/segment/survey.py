"""Looking at a directory from outside, beside whatever runs on it: nothing is written, no session is opened.

A scan is cut into short read transactions, because a long one would keep the index's old pages from being used
again; what changes meanwhile is seen as it is when its turn comes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lmdb

from hicache.data.store.segment.place import INDEX
from hicache.data.store.segment.slots import Slots
from hicache.data.store.segment.sound import check_whole
from hicache.data.store.segment.tables import BLOCK_NBYTES, FORMAT, Row, SegmentRow, Tables
from hicache.errors import ConfigError, IncompatibleError, UnavailableError

CHUNK = 2000
"""Rows a read transaction: some milliseconds."""


class Survey:
    """One directory's index, read only. Made by :func:`survey`."""

    def __init__(self, path: Path, env: lmdb.Environment) -> None:
        self.path = path
        self._env = env
        self._tables = Tables.of(env, create=False)
        with env.begin() as txn:
            slots = Slots(txn, self._tables)
            self.format = slots.number(b"format")
            self.cap_bytes = slots.number(b"cap")
            self.segment_bytes = slots.number(b"segment_blocks") * BLOCK_NBYTES
            self.policy = (txn.get(b"policy", db=self._tables.meta) or b"").decode()

    def rows(self) -> Iterator[tuple[bytes, Row]]:
        """Every record and hole, in the order of their keys: (40 bytes, row)."""
        after = b""
        while True:
            with self._env.begin() as txn, txn.cursor(db=self._tables.rec) as cursor:
                found = cursor.set_range(after)
                if found and cursor.key() == after:
                    found = cursor.next()
                chunk: list[tuple[bytes, bytes]] = []
                while found and len(chunk) < CHUNK:
                    chunk.append((cursor.key(), cursor.value()))
                    found = cursor.next()
            for key, value in chunk:
                yield key, Row.unpack(value)
            if len(chunk) < CHUNK:
                return
            after = chunk[-1][0]

    def count(self) -> int:
        """Rows of the index, holes included."""
        with self._env.begin() as txn:
            return int(txn.stat(self._tables.rec)["entries"])

    def namespaces(self) -> dict[bytes, Mapping[str, object]]:
        """First 8 bytes of a root -> what :func:`hicache.data.store.segment.who.about` said of it."""
        with self._env.begin() as txn:
            found = list(txn.cursor(db=self._tables.who))
        return {root: json.loads(value) for root, value in found}

    def space(self) -> dict[str, int]:
        """Bytes: the cap, what segments reserve, what of that is in use, and the index file."""
        with self._env.begin() as txn:
            heads = [SegmentRow.head(value) for _, value in txn.cursor(db=self._tables.seg)]
        return {
            "cap_bytes": self.cap_bytes,
            "reserved_bytes": len(heads) * self.segment_bytes,
            "used_bytes": sum((slots - free) * blocks for blocks, slots, free in heads) * BLOCK_NBYTES,
            "index_bytes": (self.path / INDEX).stat().st_blocks * 512,
        }


@contextmanager
def survey(path: Path) -> Iterator[Survey]:
    """Open the index of ``path`` to look at it.

    ConfigError where no store is, IncompatibleError for another format, DataError for a damaged index,
    UnavailableError when it cannot be read.
    """
    index = path / INDEX
    if not index.is_file():
        raise ConfigError("there is no segment store here", path=path, missing=INDEX)
    check_whole(index)
    try:
        env = lmdb.open(
            os.fspath(index), subdir=False, readonly=True, create=False, max_dbs=len(Tables.__slots__)
        )
    except (lmdb.Error, OSError) as error:
        raise UnavailableError("the index cannot be opened", path=index, reason=error) from error
    try:
        yield _looked_at(path, env)
    finally:
        env.close()


def _looked_at(path: Path, env: lmdb.Environment) -> Survey:
    try:
        found = Survey(path, env)
    except lmdb.Error as error:
        raise IncompatibleError("the index is not one of a segment store", path=path, reason=error) from error
    if found.format != FORMAT:
        raise IncompatibleError("another format of the index", path=path, format=found.format, ours=FORMAT)
    return found
