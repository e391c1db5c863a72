"""A complete store in RAM, for one process: the model other stores are tested against, and a real L3 for tests.

Guarantees: the record rules of every store (verified reads, chained parents, leaf-first eviction by rank, a cap
in bytes that holds at every moment). Not durable: pages end with the process. One lock guards everything; the
table owns its copies of the bytes.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.data.store.base import Corrupt, Hit, Iovec, Miss, ReadOutcome, Record, WriteOutcome
from hicache.data.store.counters import Counters
from hicache.data.store.record import (
    CORE_NBYTES,
    NO_PARENT,
    Header,
    differs,
    pack_header,
    parse_header,
    payload_nbytes,
    payload_sum,
    trim,
)
from hicache.errors import InvariantError
from hicache.keys import Namespace, RecordKey
from hicache.layout import LAYOUTS
from hicache.policy import EvictionPolicy, Lru
from hicache.spec import positive

RANK_MAX = 2**64 - 1


@dataclass(slots=True)
class _Entry:
    """One record: ``data`` is header and payload, or empty for a hole (damaged, kept for its children's sake)."""

    data: bytearray
    parent: bytes
    rank: int
    hint: bytes
    children: int = 0


class MemoryStore:
    """Records in a dictionary. ``fingerprint`` is the plane table's; a record of another one is a miss."""

    name = "memory"
    verifies = True

    def __init__(
        self, cap_bytes: int, fingerprint: bytes = bytes(32), *, policy: EvictionPolicy | None = None
    ) -> None:
        self._cap = positive("cap_bytes", cap_bytes)
        self._fingerprint = fingerprint
        self._policy: EvictionPolicy = policy or Lru()
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: list[tuple[int, bytes]] = []  # a heap; entries that no longer hold are skipped
        self._used = 0
        self._tick = 0
        self._closed = False
        self._counters = Counters()

    @staticmethod
    def capacity(cap_bytes: int, page_nbytes: int) -> int:
        """Pages of ``page_nbytes`` that fit under the cap."""
        return cap_bytes // (page_nbytes + CORE_NBYTES)

    # -- the contract ---------------------------------------------------------------------------------------

    def read(
        self, namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]
    ) -> list[ReadOutcome]:
        """Copy each record into its buffers and verify the copy."""
        with self._lock:
            outcomes = [
                self._read_one(namespace, bytes(key), views) for key, views in zip(keys, into, strict=True)
            ]
            deepest = [key for key, outcome in zip(keys, outcomes, strict=True) if isinstance(outcome, Hit)][
                -1:
            ]
            for key in deepest:
                self._touch(bytes(key))
            self._counters.count_read(outcomes)
            return outcomes

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """Copy records in, evicting the coldest leaves that the batch does not need."""
        with self._lock:
            keep = {bytes(r.key) for r in records} | {bytes(r.parent) for r in records if r.parent}
            outcomes = [self._write_one(namespace, record, keep) for record in records]
            self._counters.count_write(outcomes, [payload_nbytes(r.payload) for r in records])
            return outcomes

    def contains(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[bool]:
        """Which keys are there now, in this namespace."""
        with self._lock:
            return [self._holds(namespace, bytes(key)) for key in keys]

    def touch(self, keys: Sequence[RecordKey]) -> None:
        """Mark as used; unknown keys are ignored."""
        with self._lock:
            for key in keys:
                self._touch(bytes(key))

    def delete(self, keys: Sequence[RecordKey]) -> int:
        """Forget records; one with children leaves a hole that the next write of its key fills."""
        with self._lock:
            known = [bytes(key) for key in keys if (entry := self._entries.get(bytes(key))) and entry.data]
            for key in known:
                self._drop(key)
            self._counters.deleted += len(known)
            return len(known)

    def usage(self) -> dict[str, int]:
        """Gauges and counters."""
        with self._lock:
            holes = sum(not entry.data for entry in self._entries.values())
            return {
                "records": len(self._entries) - holes,
                "holes": holes,
                "used_bytes": self._used,
                "cap_bytes": self._cap,
                **self._counters.as_gauges(),
            }

    def close(self) -> None:
        """Let go of all bytes; afterwards every read misses and every write fails."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._leaves.clear()
            self._used = 0

    def check(self) -> None:
        """Recount parents, children, leaves and bytes; InvariantError names what does not add up."""
        with self._lock:
            children = dict.fromkeys(self._entries, 0)
            for key, entry in self._entries.items():
                if entry.parent != NO_PARENT:
                    if entry.parent not in children:
                        raise InvariantError(
                            "a record's parent is gone", key=key.hex(), parent=entry.parent.hex()
                        )
                    children[entry.parent] += 1
            offered = set(self._leaves)
            for key, entry in self._entries.items():
                if entry.children != children[key]:
                    raise InvariantError(
                        "children miscounted", key=key.hex(), kept=entry.children, counted=children[key]
                    )
                if not entry.children and ((entry.rank, key) not in offered or not entry.data):
                    raise InvariantError("a leaf cannot be evicted", key=key.hex(), rank=entry.rank)
            used = sum(len(entry.data) for entry in self._entries.values())
            if used != self._used or used > self._cap:
                raise InvariantError("bytes do not add up", used=used, kept=self._used, cap=self._cap)

    def damage(self, key: RecordKey, *, at: int = CORE_NBYTES) -> bool:
        """For tests: flip one bit of byte ``at`` of a record (its header comes first). False when it is not there."""
        with self._lock:
            entry = self._entries.get(bytes(key))
            if entry is None or not entry.data:
                return False
            entry.data[at] ^= 1
            return True

    # -- one record, under the lock ---------------------------------------------------------------------------

    def _holds(self, namespace: Namespace, key: bytes) -> bool:
        entry = self._entries.get(key)
        if entry is None or not entry.data:
            return False
        header = parse_header(entry.data)
        return isinstance(header, str) or header.namespace == namespace.root

    def _read_one(self, namespace: Namespace, key: bytes, into: Iovec) -> ReadOutcome:
        if self._closed:
            return Miss("closed")
        entry = self._entries.get(key)
        if entry is None or not entry.data:
            return Miss()
        header = parse_header(entry.data)
        wrong = (
            header
            if isinstance(header, str)
            else differs(header, namespace=namespace.root, key=key, fingerprint=self._fingerprint)
        )
        if wrong in ("namespace", "spec"):
            return Miss(wrong)
        if wrong is not None or isinstance(header, str):
            self._drop(key)
            return Corrupt(wrong or "header")
        views = trim(into, header.nbytes)
        if views is None:
            return Miss("length")
        at = CORE_NBYTES
        for view in views:
            view[:] = memoryview(entry.data)[at : at + view.nbytes]
            at += view.nbytes
        if payload_sum(views) != header.sum:
            self._drop(key)
            return Corrupt("sum")
        return Hit(header.layout_name, header.nbytes)

    def _write_one(self, namespace: Namespace, record: Record, keep: set[bytes]) -> WriteOutcome:
        key = bytes(record.key)
        parent = bytes(record.parent) if record.parent else NO_PARENT
        nbytes = payload_nbytes(record.payload)
        if self._closed or not nbytes or record.layout not in LAYOUTS:
            return WriteOutcome.FAILED
        entry = self._entries.get(key)
        if entry is not None and entry.data:
            return WriteOutcome.EXISTS if self._holds(namespace, key) else WriteOutcome.FAILED
        above = self._entries.get(parent)
        if parent != NO_PARENT and (above is None or not above.data):
            return WriteOutcome.PARENT_ABSENT
        if not self._make_room(nbytes + CORE_NBYTES, keep):
            return WriteOutcome.NO_ROOM
        header = Header(
            namespace=namespace.root,
            key=key,
            parent=parent,
            fingerprint=self._fingerprint,
            layout=LAYOUTS[record.layout].code,
            nbytes=nbytes,
            sum=payload_sum(record.payload),
        )
        data = bytearray(pack_header(header))
        for piece in record.payload:
            data += piece
        self._used += len(data)
        rank = self._next_rank(record.hint)
        if entry is not None:  # a hole is filled: its place in the tree and its children stay
            entry.data, entry.rank, entry.hint = data, max(rank, entry.rank), record.hint
            return WriteOutcome.STORED
        self._entries[key] = _Entry(data, parent, rank, record.hint)
        if above is not None:
            above.children += 1
        heapq.heappush(self._leaves, (rank, key))
        return WriteOutcome.STORED

    # -- the tree: children before parents, coldest first ------------------------------------------------------

    def _next_rank(self, hint: bytes) -> int:
        self._tick += 1
        return self._policy.rank(self._tick, hint)

    def _touch(self, key: bytes) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.rank = self._next_rank(entry.hint)
        if not entry.children:
            heapq.heappush(self._leaves, (entry.rank, key))
            if len(self._leaves) > 64 + 4 * len(self._entries):
                self._leaves = [(e.rank, k) for k, e in self._entries.items() if not e.children]
                heapq.heapify(self._leaves)

    def _make_room(self, nbytes: int, keep: set[bytes]) -> bool:
        """Evict leaves, coldest first, until ``nbytes`` more fit; those in ``keep`` stay."""
        if nbytes > self._cap:
            return False
        kept: list[tuple[int, bytes]] = []
        while self._used + nbytes > self._cap and self._leaves:
            rank, key = heapq.heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is None or entry.children or entry.rank != rank:
                continue
            if key in keep:
                kept.append((rank, key))
                continue
            self._remove(key)
            self._counters.evicted += 1
        for leaf in kept:
            heapq.heappush(self._leaves, leaf)
        return self._used + nbytes <= self._cap

    def _drop(self, key: bytes) -> None:
        """A damaged or deleted record: gone when it is a leaf, else a hole until its last child goes."""
        entry = self._entries[key]
        if entry.children:
            self._used -= len(entry.data)
            entry.data = bytearray()
        else:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        """Take a leaf out; a parent left without children takes the larger rank and becomes a leaf, or goes if a hole."""
        entry = self._entries.pop(key)
        self._used -= len(entry.data)
        above = self._entries.get(entry.parent)
        if above is None:
            return
        above.children -= 1
        above.rank = max(above.rank, entry.rank)
        if above.children:
            return
        if above.data:
            heapq.heappush(self._leaves, (above.rank, entry.parent))
        else:
            self._remove(entry.parent)
