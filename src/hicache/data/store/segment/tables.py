"""The index's tables: what a row holds and how it is packed. All integers big endian, so that keys sort.

``rec``  record key (40) -> :class:`Row`
``leaf`` (slot blocks u32, rank u64) -> record key, exactly the records without children
``seg``  segment u32 -> :class:`SegmentRow`
``own``  (session u64, segment u32, offset u32) -> slot blocks u32: slots in the hands of a running process
``meta`` name -> u64 (or a name's bytes)
``who``  first 8 bytes of a namespace's root -> what it is, as JSON for people

Places are counted in blocks of 4 KiB. Pure packing; the transactions live in ``tree``, ``slots`` and ``books``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import lmdb

from hicache.data.store.record import HEADER_NBYTES

BLOCK_NBYTES = 4096
FORMAT = 2
RANK_MAX = 2**64 - 1
SEGMENT_NBYTES_MAX = 256 << 20

_ROW = struct.Struct(">IIIBBQQ8sI40s8sIII")
_SEGMENT = struct.Struct(">III")
_LEAF = struct.Struct(">IQ")
_OWN = struct.Struct(">QII")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_HOLE = 1


def slot_blocks_of(payload_nbytes: int) -> int:
    """Blocks of the slot that holds a header and so many payload bytes."""
    return (HEADER_NBYTES + payload_nbytes + BLOCK_NBYTES - 1) // BLOCK_NBYTES


def segment_blocks_of(cap_bytes: int, slot_blocks: int) -> int:
    """Blocks of a segment in a directory with this cap whose first record needs ``slot_blocks``.

    min(256 MiB, a sixteenth of the cap), cut to whole slots of that size; at least one slot.
    """
    target = min(SEGMENT_NBYTES_MAX, cap_bytes // 16) // BLOCK_NBYTES
    return max(1, target // slot_blocks) * slot_blocks


LENGTHS = {
    b"rec": (40, _ROW.size),
    b"leaf": (_LEAF.size, 40),
    b"seg": (_U32.size, 0),
    b"own": (_OWN.size, _U32.size),
    b"meta": (0, 0),
    b"who": (8, 0),
}
"""Bytes of each table's keys and values; 0 = any."""


@dataclass(frozen=True, slots=True)
class Place:
    """One slot: a run of ``blocks`` at block ``offset`` of a segment."""

    segment: int
    offset: int
    blocks: int


@dataclass(slots=True)
class Row:
    """One record of the index. A hole has no place: it stands for a lost record that still has children.

    ``namespace`` is the first 8 bytes of the namespace root (the record's header holds all 32). ``written`` and
    ``used`` are seconds since 1970; ``uses`` counts the reads that ended at this record.
    """

    segment: int
    offset: int
    nbytes: int
    layout: int
    hole: bool
    sum: int
    rank: int
    hint: bytes
    children: int
    parent: bytes
    namespace: bytes
    written: int
    used: int
    uses: int = 0

    def pack(self) -> bytes:
        """The row's value in ``rec``."""
        return _ROW.pack(
            self.segment,
            self.offset,
            self.nbytes,
            self.layout,
            _HOLE if self.hole else 0,
            self.sum,
            self.rank,
            self.hint,
            self.children,
            self.parent,
            self.namespace,
            self.written,
            self.used,
            self.uses,
        )

    @classmethod
    def unpack(cls, value: bytes) -> Row:
        """The row of a value in ``rec``."""
        segment, offset, nbytes, layout, flags, *rest = _ROW.unpack(value)
        return cls(segment, offset, nbytes, layout, bool(flags & _HOLE), *rest)

    @property
    def place(self) -> Place:
        """Where the record lies; of no meaning for a hole."""
        return Place(self.segment, self.offset, slot_blocks_of(self.nbytes))

    def same_bytes(self, other: Row | None) -> bool:
        """True when ``other`` still says that these bytes lie in this place."""
        if other is None or other.hole:
            return False
        return (self.segment, self.offset, self.sum) == (other.segment, other.offset, other.sum)

    def same_record(self, other: Row | None) -> bool:
        """True when ``other`` is this very record: the same bytes written anew into the same place have another rank."""
        return self.same_bytes(other) and other is not None and self.rank == other.rank


@dataclass(slots=True)
class SegmentRow:
    """One segment file: the size of its slots, how many it has, and which are free (bit set = free)."""

    slot_blocks: int
    slots: int
    free: int
    bitmap: int

    def pack(self) -> bytes:
        """The row's value in ``seg``."""
        head = _SEGMENT.pack(self.slot_blocks, self.slots, self.free)
        return head + self.bitmap.to_bytes((self.slots + 7) // 8, "little")

    @classmethod
    def unpack(cls, value: bytes) -> SegmentRow:
        """The row of a value in ``seg``."""
        slot_blocks, slots, free = _SEGMENT.unpack_from(value)
        return cls(slot_blocks, slots, free, int.from_bytes(value[_SEGMENT.size :], "little"))

    @classmethod
    def head(cls, value: bytes) -> tuple[int, int, int]:
        """(slot blocks, slots, free) without the bitmap."""
        slot_blocks, slots, free = _SEGMENT.unpack_from(value)
        return slot_blocks, slots, free

    @classmethod
    def all_free(cls, segment_blocks: int, slot_blocks: int) -> SegmentRow:
        """An empty segment cut into slots of this size."""
        slots = segment_blocks // slot_blocks
        return cls(slot_blocks, slots, slots, (1 << slots) - 1)


def pack_leaf(slot_blocks: int, rank: int) -> bytes:
    """A key of ``leaf``."""
    return _LEAF.pack(slot_blocks, rank)


def unpack_leaf(key: bytes) -> tuple[int, int]:
    """(slot blocks, rank) of a key of ``leaf``."""
    slot_blocks, rank = _LEAF.unpack(key)
    return slot_blocks, rank


def pack_own(session: int, segment: int, offset: int) -> bytes:
    """A key of ``own``."""
    return _OWN.pack(session, segment, offset)


def unpack_own(key: bytes) -> tuple[int, int, int]:
    """(session, segment, offset) of a key of ``own``."""
    session, segment, offset = _OWN.unpack(key)
    return session, segment, offset


def pack_u32(value: int) -> bytes:
    """A key of ``seg``, a value of ``own``."""
    return _U32.pack(value)


def unpack_u32(value: bytes) -> int:
    """The number of :func:`pack_u32`."""
    return int(_U32.unpack(value)[0])


def pack_u64(value: int) -> bytes:
    """A value of ``meta``."""
    return _U64.pack(value)


def unpack_u64(value: bytes) -> int:
    """The number of :func:`pack_u64`."""
    return int(_U64.unpack(value)[0])


@dataclass(frozen=True, slots=True)
class Tables:
    """Handles of the tables of one environment."""

    rec: lmdb._Database
    leaf: lmdb._Database
    seg: lmdb._Database
    own: lmdb._Database
    meta: lmdb._Database
    who: lmdb._Database

    @classmethod
    def of(cls, env: lmdb.Environment, *, create: bool = True) -> Tables:
        """Open the tables, making those that are not there yet."""
        return cls(*(env.open_db(name.encode(), create=create) for name in cls.__slots__))
