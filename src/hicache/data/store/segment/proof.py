"""Fetching one record from its place, and its proof: the bytes against the row."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from hicache.data.store.record import HEADER_NBYTES, Header, parse_header, payload_sum
from hicache.data.store.segment.files import OpenSegments
from hicache.data.store.segment.tables import BLOCK_NBYTES, Row
from hicache.errors import UnavailableError

NOT_NOW = "not_now"
_NOT_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that say nothing about the record."""


def fetch(segments: OpenSegments, row: Row, head: memoryview, payload: Sequence[memoryview]) -> Header | str:
    """Read what lies in a row's place into ``head`` (``HEADER_NBYTES``) and ``payload`` (``row.nbytes``).

    Returns the record's header, or why there is none: ``not_now``, ``missing``, ``unreadable``, ``short``, or a
    reason of :func:`parse_header`.
    """
    try:
        with segments.use(row.segment) as fd:
            done = segments.files.read(fd, [head, *payload], row.offset * BLOCK_NBYTES)
    except OSError as error:
        if error.errno in _NOT_NOW:
            return NOT_NOW
        return "missing" if error.errno == errno.ENOENT else "unreadable"
    return "short" if done < HEADER_NBYTES + row.nbytes else parse_header(head)


def is_of(header: Header, row: Row) -> bool:
    """True when the header describes the payload that the row promises."""
    return (header.layout, header.nbytes, header.sum) == (row.layout, row.nbytes, row.sum)


def fault_of(segments: OpenSegments, key: bytes, row: Row, into: memoryview) -> str | None:
    """Read header and payload of a row's place into ``into``; None if they are what the row says, else what is wrong.

    ``into`` takes ``HEADER_NBYTES`` + ``row.nbytes`` bytes. The reasons are those of :func:`fetch`, ``row`` and
    ``payload``. UnavailableError when the system has no means to read, which says nothing of the record.
    """
    payload = into[HEADER_NBYTES : HEADER_NBYTES + row.nbytes]
    header = fetch(segments, row, into[:HEADER_NBYTES], [payload])
    if header == NOT_NOW:
        raise UnavailableError("a record cannot be read now: no memory, or too many files", key=key.hex())
    if isinstance(header, str):
        return header
    if (header.key, header.namespace[:8]) != (key, row.namespace) or not is_of(header, row):
        return "row"
    return None if payload_sum([payload]) == row.sum else "payload"
