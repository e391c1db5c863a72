"""A recount of everything the index promises; the oracle of the tests, and of ``hicache verify``."""

from __future__ import annotations

from collections import Counter

import lmdb

from hicache.data.store.record import NO_PARENT
from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.slots import Slots
from hicache.data.store.segment.tables import (
    BLOCK_NBYTES,
    Place,
    Row,
    SegmentRow,
    Tables,
    slot_blocks_of,
    unpack_leaf,
    unpack_own,
    unpack_u32,
)
from hicache.errors import InvariantError


def check(directory: Directory) -> None:
    """Raise InvariantError if the index contradicts itself, in one read transaction.

    I1 a slot is exactly one of free, owned, in one row. I2 reserved segments are within the cap. I3 a parent row
    exists and counts its children. I4 ``leaf`` is exactly the rows without children; a hole has children.
    """
    tables = directory.tables
    with directory.env.begin() as txn:
        rows = {key: Row.unpack(value) for key, value in txn.cursor(db=tables.rec)}
        _check_slots(txn, tables, rows)
        _check_tree(rows)
        _check_leaves(txn, tables, rows)


def _fail(what: str, **values: object) -> None:
    raise InvariantError(f"the index contradicts itself: {what}", **values)


def _check_slots(txn: lmdb.Transaction[bytes], tables: Tables, rows: dict[bytes, Row]) -> None:
    segments = {unpack_u32(k): SegmentRow.unpack(v) for k, v in txn.cursor(db=tables.seg)}
    slots = Slots(txn, tables)
    reserved = len(segments) * slots.number(b"segment_blocks") * BLOCK_NBYTES
    if reserved > slots.number(b"cap"):
        _fail("more is reserved than the cap", reserved=reserved, cap=slots.number(b"cap"))
    holders = _holders(txn, tables, rows, segments)
    free: Counter[int] = Counter()
    for number, segment_row in segments.items():
        for index in range(segment_row.slots):
            is_free = bool(segment_row.bitmap >> index & 1)
            if is_free == ((number, index) in holders):
                _fail("a slot is neither free nor held, or both", segment=number, slot=index, free=is_free)
        if segment_row.free != segment_row.bitmap.bit_count():
            _fail("free slots of a segment are miscounted", segment=number, kept=segment_row.free)
        free[segment_row.slot_blocks] += segment_row.free
    for blocks in {row.slot_blocks for row in segments.values()}:
        if slots.free(blocks) != free[blocks]:
            _fail(
                "free slots of a size are miscounted",
                blocks=blocks,
                kept=slots.free(blocks),
                found=free[blocks],
            )


def _holders(
    txn: lmdb.Transaction[bytes], tables: Tables, rows: dict[bytes, Row], segments: dict[int, SegmentRow]
) -> dict[tuple[int, int], str]:
    """Who holds which (segment, slot); each place must exist and have one holder."""
    held = [(row.place, key.hex()) for key, row in rows.items() if not row.hole]
    for key, value in txn.cursor(db=tables.own):
        session, segment, offset = unpack_own(key)
        held.append((Place(segment, offset, unpack_u32(value)), f"session {session}"))
    holders: dict[tuple[int, int], str] = {}
    for place, who in held:
        row = segments.get(place.segment)
        index, rest = divmod(place.offset, place.blocks)
        if row is None or row.slot_blocks != place.blocks or rest or index >= row.slots:
            _fail("a slot that does not exist is in use", place=place, who=who)
        if (place.segment, index) in holders:
            _fail("a slot has two holders", place=place, who=who, other=holders[place.segment, index])
        holders[place.segment, index] = who
    return holders


def _check_tree(rows: dict[bytes, Row]) -> None:
    children: Counter[bytes] = Counter()
    for key, row in rows.items():
        if row.parent != NO_PARENT:
            if row.parent not in rows:
                _fail("a parent is gone", key=key.hex(), parent=row.parent.hex())
            children[row.parent] += 1
    for key, row in rows.items():
        if row.children != children[key]:
            _fail("children are miscounted", key=key.hex(), kept=row.children, found=children[key])
        if row.hole and not row.children:
            _fail("a hole has no children", key=key.hex())


def _check_leaves(txn: lmdb.Transaction[bytes], tables: Tables, rows: dict[bytes, Row]) -> None:
    offered = {}
    for at, key in txn.cursor(db=tables.leaf):
        if key in offered:
            _fail("a leaf is offered twice", key=key.hex())
        offered[key] = unpack_leaf(at)
    leaves = {key: (slot_blocks_of(row.nbytes), row.rank) for key, row in rows.items() if not row.children}
    if offered != leaves:
        wrong = {key.hex() for key in offered.keys() ^ leaves.keys()}
        _fail(
            "leaves and offers differ",
            only_one_side=sorted(wrong)[:4],
            leaves=len(leaves),
            offers=len(offered),
        )
