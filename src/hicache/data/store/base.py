"""The contract of a store: synchronous, batched, bytes in and bytes out.

A store is called from worker lanes only, possibly from several threads at once. It never raises for data that
is missing, short or wrong: those are outcomes. Optional abilities are protocols of one method each; a caller
asks with ``isinstance``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hicache.keys import Namespace, RecordKey

Iovec = Sequence[memoryview]
"""Byte views (format ``B``, contiguous) whose concatenation is one record's payload."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The payload, verified, is in the caller's buffers: ``nbytes`` of them, laid out as ``layout`` (a name)."""

    layout: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Miss:
    """Not there, or not usable here (other format version, longer than the buffers): ``reason`` is for counters."""

    reason: str = "absent"


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A record was there and its bytes are not what it claims. The buffers hold garbage."""

    reason: str


ReadOutcome = Hit | Miss | Corrupt


class WriteOutcome(enum.Enum):
    """What became of one record; STORED and EXISTS both mean it is there now."""

    STORED = "stored"
    EXISTS = "exists"
    PARENT_ABSENT = "parent_absent"
    NO_ROOM = "no_room"
    FAILED = "failed"

    @property
    def ok(self) -> bool:
        """True when the record is in the store."""
        return self in (WriteOutcome.STORED, WriteOutcome.EXISTS)


@dataclass(frozen=True, slots=True)
class Record:
    """One record to write. ``parent`` is None for the first page of a chain (group 0)."""

    key: RecordKey
    parent: RecordKey | None
    layout: str
    payload: Iovec
    hint: bytes = bytes(8)


class Store(Protocol):
    """What every store can do. All methods may be called from any thread."""

    name: str

    def read(
        self, namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]
    ) -> list[ReadOutcome]:
        """Read each record into its buffers and verify it; one outcome a key, in order. Counts as use."""
        ...

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """Write records, parents before children; one outcome a record. Durable when it returns, if the store is.

        A record whose parent is neither in the store nor earlier in ``records`` is refused (PARENT_ABSENT).
        """
        ...

    def contains(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[bool]:
        """Which keys are there, as a hint: a later read may still miss."""
        ...

    def close(self) -> None:
        """Finish what was accepted and let go of files and threads. Calling it again does nothing."""
        ...


@runtime_checkable
class Touch(Protocol):
    """A store with recency: mark records as used without reading them."""

    def touch(self, keys: Sequence[RecordKey]) -> None:
        """Mark as used; unknown keys are ignored."""
        ...


@runtime_checkable
class Delete(Protocol):
    """A store that can forget on request."""

    def delete(self, keys: Sequence[RecordKey]) -> int:
        """Remove records; returns how many were there."""
        ...


@runtime_checkable
class Trouble(Protocol):
    """A store that knows when it cannot serve."""

    def trouble(self) -> str | None:
        """Why reads miss or writes fail now, and what to do about it; None as long as all is well."""
        ...


@runtime_checkable
class Usage(Protocol):
    """A store that knows its size."""

    def usage(self) -> dict[str, int]:
        """Gauges, at least ``records``, ``used_bytes`` and ``cap_bytes``."""
        ...
