"""The self-describing record: one header block and a payload, checked by whoever reads it.

The header says which bytes follow (namespace, key, plane table, layout, length, sum), so a record is proof of
itself: a store that moved, mixed, cut or bent it is found out at the next read. Everything that is checked,
the header's own sum included, lies in the first 512 bytes of a 4 KiB block, so a header is never torn inside
a disk sector. The byte table is in ``docs/format.md``. Pure functions over bytes; owned by no one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from hicache.layout import LAYOUTS

MAGIC = b"\x89HiCREC\n"
VERSION = 1
HEADER_NBYTES = 4096
"""What a header takes in a store that aligns its payloads."""

CORE_NBYTES = 512
"""The part of the header that means something; the rest is zero and never looked at."""

NO_PARENT = bytes(40)
"""The parent key of a record that starts a chain."""


class _Names(Mapping[int, str]):
    """Names of layouts by code, looked up when asked: another package may have brought one along since."""

    def __getitem__(self, code: int) -> str:
        for layout in LAYOUTS.values():
            if layout.code == code:
                return layout.name
        raise KeyError(code)

    def __contains__(self, code: object) -> bool:
        return any(layout.code == code for layout in LAYOUTS.values())

    def __iter__(self) -> Iterator[int]:
        return (layout.code for layout in LAYOUTS.values())

    def __len__(self) -> int:
        return len(LAYOUTS)


LAYOUT_NAMES: Mapping[int, str] = _Names()

_CORE = struct.Struct("<8sHBBIQQ32s40s40s32s")
_SUM = struct.Struct("<Q")
_SUM_AT = CORE_NBYTES - _SUM.size
_RESERVED = bytes(_SUM_AT - _CORE.size)


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says about itself. ``key`` and ``parent`` are the 40 bytes of a record key."""

    namespace: bytes
    key: bytes
    parent: bytes
    fingerprint: bytes
    layout: int
    nbytes: int
    sum: int

    @property
    def layout_name(self) -> str:
        """The layout's name; the parser lets no unknown code through."""
        return LAYOUT_NAMES[self.layout]


def payload_sum(pieces: Iterable[memoryview]) -> int:
    """xxh3 of the concatenated pieces: the payload as it is, without any padding."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def payload_nbytes(pieces: Iterable[memoryview]) -> int:
    """Bytes of all pieces together."""
    return sum(piece.nbytes for piece in pieces)


def trim(pieces: Sequence[memoryview], nbytes: int) -> list[memoryview] | None:
    """The views over the first ``nbytes`` of the pieces, or None when there are not so many."""
    views, left = [], nbytes
    for piece in pieces:
        if left <= 0:
            break
        views.append(piece if piece.nbytes <= left else piece[:left])
        left -= views[-1].nbytes
    return views if left <= 0 else None


def pack_header(header: Header) -> bytes:
    """The 512 meaningful bytes; pad with zeros to ``HEADER_NBYTES`` where the store aligns."""
    core = _CORE.pack(
        MAGIC,
        VERSION,
        header.layout,
        0,
        0,
        header.nbytes,
        header.sum,
        header.namespace,
        header.key,
        header.parent,
        header.fingerprint,
    )
    body = core + _RESERVED
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def parse_header(buf: bytes | bytearray | memoryview) -> Header | str:
    """The header in the first 512 bytes, or the reason why there is none. Any bytes are fine; nothing is raised.

    Reasons: ``short``, ``magic``, ``header_sum``, ``version`` (written by a later HiCache: where magic, version
    and header sum lie never changes), ``layout``, ``reserved`` and ``length``.
    """
    core = bytes(memoryview(buf).cast("B")[:CORE_NBYTES])
    if len(core) < CORE_NBYTES:
        return "short"
    magic, version, layout, codec, zero, nbytes, total, namespace, key, parent, fingerprint = (
        _CORE.unpack_from(core)
    )
    if magic != MAGIC:
        return "magic"
    if _SUM.unpack_from(core, _SUM_AT)[0] != xxhash.xxh3_64_intdigest(core[:_SUM_AT]):
        return "header_sum"
    if version != VERSION:
        return "version"
    if layout not in LAYOUT_NAMES:
        return "layout"
    if codec or zero or core[_CORE.size : _SUM_AT] != _RESERVED:
        return "reserved"
    if not nbytes:
        return "length"
    return Header(namespace, key, parent, fingerprint, layout, nbytes, total)


def differs(header: Header, *, namespace: bytes, key: bytes, fingerprint: bytes) -> str | None:
    """Why a well-formed record is not the one that was asked for (``key``, ``namespace``, ``spec``), or None.

    Asked in this order, because only a wrong key means that the store has mixed its records up.
    """
    if header.key != key:
        return "key"
    if header.namespace != namespace:
        return "namespace"
    if header.fingerprint != fingerprint:
        return "spec"
    return None


def payload_wrong(header: Header, pieces: Sequence[memoryview]) -> str | None:
    """``sum`` when the pieces, already cut to the header's length, are not the payload it describes; else None."""
    return None if payload_sum(pieces) == header.sum else "sum"
