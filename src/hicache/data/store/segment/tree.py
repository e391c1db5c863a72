"""The records' tree inside one write transaction: parents, child counts, ranks, and which leaf goes next.

Keeps two facts true at every step: a record's parent row exists and counts it (I3); ``leaf`` lists exactly the
records without children, each under its own rank (I4). A lost record with children stays as a hole and goes
with its last child. When its last child goes, a parent takes the larger rank of the two, so touching only the
deepest record of a prefix gives the order that touching all of it would.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import lmdb

from hicache.data.store.record import NO_PARENT
from hicache.data.store.segment.tables import RANK_MAX, Row, Tables, pack_leaf, slot_blocks_of, unpack_leaf
from hicache.errors import InvariantError


class Tree:
    """Rows and leaves of one write transaction."""

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables) -> None:
        self._txn = txn
        self._rec = tables.rec
        self._leaf = tables.leaf

    def row(self, key: bytes) -> Row | None:
        """The row of a record or a hole."""
        value = self._txn.get(key, db=self._rec)
        return None if value is None else Row.unpack(value)

    def present(self, key: bytes) -> bool:
        """True when the record is there; a hole is not."""
        row = self.row(key)
        return row is not None and not row.hole

    def put(self, key: bytes, row: Row) -> None:
        """Write a row whose place in the tree does not change."""
        self._txn.put(key, row.pack(), db=self._rec)

    def insert(self, key: bytes, row: Row) -> None:
        """Add a record as a leaf below its parent, which must have a row."""
        if row.parent != NO_PARENT:
            above = self.row(row.parent)
            if above is None:
                raise InvariantError("a record is inserted below nothing", key=key.hex())
            if not above.children:
                self._withdraw(above)
            above.children += 1
            self.put(row.parent, above)
        self._offer(key, row)
        self.put(key, row)

    def rerank(self, key: bytes, row: Row, rank: int) -> None:
        """Give a record (or hole) a new order key."""
        if not row.children:
            self._withdraw(row)
        row.rank = rank
        if not row.children:
            self._offer(key, row)
        self.put(key, row)

    def remove(self, key: bytes, row: Row) -> None:
        """Take a leaf out, and with it every hole above it that has no other child."""
        if row.children:
            raise InvariantError("a record with children is removed", key=key.hex(), children=row.children)
        self._withdraw(row)
        while True:
            self._txn.delete(key, db=self._rec)
            if row.parent == NO_PARENT:
                return
            child, key = row, row.parent
            above = self.row(key)
            if above is None or not above.children:
                raise InvariantError("a parent does not know its child", parent=key.hex())
            row = above
            row.children -= 1
            row.rank, row.used = max(row.rank, child.rank), max(row.used, child.used)
            if row.children or not row.hole:
                break
        if not row.children:
            self._offer(key, row)
        self.put(key, row)

    def coldest(self, slot_blocks: int, rank: int, keep: AbstractSet[bytes]) -> tuple[bytes, Row] | None:
        """The leaf of this slot size with the lowest rank from ``rank`` on that is not in ``keep``."""
        with self._txn.cursor(db=self._leaf) as cursor:
            found = cursor.set_range(pack_leaf(slot_blocks, rank))
            while found:
                at, key = cursor.item()
                if unpack_leaf(at)[0] != slot_blocks:
                    return None
                if key not in keep:
                    row = self.row(key)
                    if row is None:
                        raise InvariantError("a leaf has no row", key=key.hex())
                    return key, row
                found = cursor.next()
        return None

    def _offer(self, key: bytes, row: Row) -> None:
        """List a record as evictable; ranks are made unique by the next free number."""
        blocks = slot_blocks_of(row.nbytes)
        while not self._txn.put(pack_leaf(blocks, row.rank), key, overwrite=False, db=self._leaf):
            row.rank = row.rank + 1 if row.rank < RANK_MAX else 0

    def _withdraw(self, row: Row) -> None:
        if not self._txn.delete(pack_leaf(slot_blocks_of(row.nbytes), row.rank), db=self._leaf):
            raise InvariantError("a leaf is not on offer", rank=row.rank, nbytes=row.nbytes)
