"""The segment store: fixed slots in large files, found through one LMDB index. Exact, durable, bounded.

Guarantees. A record is visible only through its row, and the row is committed only after the record's bytes are
durable. A read compares the record with its row and the payload with its sum, so a slot that was recycled, torn
or damaged meanwhile is a miss, never wrong bytes. Eviction is leaf-first by ranks kept in the index, so it
survives restarts and spans processes. The cap counts reserved segment files and is never exceeded (the index,
some 200-400 bytes a record, comes on top). Several threads and processes may use one directory on a local disk.

Two sizes of page share a directory as long as there is room for another segment: when the segments of other
sizes hold the whole cap, a size that has no segment yet is refused (NO_ROOM) until one of theirs is empty.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb

from hicache.data.store.base import Hit, Iovec, Miss, ReadOutcome, Record, WriteOutcome
from hicache.data.store.counters import Counters
from hicache.data.store.record import (
    HEADER_NBYTES,
)
from hicache.data.store.segment.check import check
from hicache.data.store.segment.directory import CONTRADICTIONS, Directory
from hicache.data.store.segment.files import Files
from hicache.data.store.segment.reader import Reader
from hicache.data.store.segment.sharing import close_directory, open_directory
from hicache.data.store.segment.tables import (
    BLOCK_NBYTES,
    segment_blocks_of,
    slot_blocks_of,
)
from hicache.data.store.segment.writer import Writer
from hicache.errors import ConfigError
from hicache.keys import Namespace, RecordKey
from hicache.policy import EvictionPolicy, Lru
from hicache.spec import positive

log = logging.getLogger("hicache.store")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FINGERPRINT_NBYTES = 32
_HEADER_PAD = bytes(HEADER_NBYTES)


class SegmentStore:
    """Records of one plane table in a directory. ``fingerprint`` is :meth:`CacheSpec.fingerprint`."""

    name = "segment"
    verifies = True

    def __init__(
        self,
        path: str | Path,
        cap_bytes: int,
        fingerprint: bytes = bytes(_FINGERPRINT_NBYTES),
        *,
        policy: EvictionPolicy | None = None,
        files: Files | None = None,
    ) -> None:
        positive("cap_bytes", cap_bytes, minimum=2 * BLOCK_NBYTES)
        if len(fingerprint) != _FINGERPRINT_NBYTES:
            raise ConfigError("a fingerprint has 32 bytes", got=len(fingerprint))
        self._directory = open_directory(Path(path).absolute(), cap_bytes, policy or Lru(), files or Files())
        self._reader = Reader(self._directory, fingerprint)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._closed = False
        trimmed = self._directory.trimmed
        self._counters = Counters(
            reclaimed_slots=self._directory.reclaimed, evicted=trimmed, evicted_for_cap=trimmed
        )
        self._writer = Writer(self._directory, fingerprint, self._counters, self._lock)

    @staticmethod
    def capacity(cap_bytes: int, page_nbytes: int) -> int:
        """Pages of this size that a directory with this cap holds, if it holds nothing else."""
        slot = slot_blocks_of(page_nbytes)
        segment = segment_blocks_of(cap_bytes, slot)
        return cap_bytes // (segment * BLOCK_NBYTES) * (segment // slot)

    @property
    def directory(self) -> Directory:
        """What this process holds of the directory; for tests and tools."""
        return self._directory

    # -- the contract -------------------------------------------------------------------------------------------

    def read(
        self, namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]
    ) -> list[ReadOutcome]:
        """Read each record straight into its buffers and verify it; marks the last hit as used."""
        with self._call() as closed:
            if closed:
                return [Miss(closed)] * len(keys)
            outcomes: list[ReadOutcome]
            if namespace.durable:
                raw = [bytes(key) for key in keys]
                outcomes = self._reader.read(namespace.root, raw, into)
                hits = [key for key, outcome in zip(raw, outcomes, strict=True) if isinstance(outcome, Hit)]
                self._directory.touch_later(hits[-1:])
            else:
                outcomes = [Miss("not_durable")] * len(keys)
            with self._lock:
                self._counters.count_read(outcomes)
            return outcomes

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """Write records; durable and visible when it returns. All of a batch become visible in one commit."""
        with self._call() as closed:
            if closed:
                return [WriteOutcome.FAILED] * len(records)
            return self._writer.write(namespace, records)

    def contains(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[bool]:
        """Which keys have a record now, in this namespace; a read may still miss."""
        with self._call() as closed:
            if closed or not namespace.durable:
                return [False] * len(keys)
            try:
                rows = self._directory.rows(bytes(key) for key in keys)
            except (lmdb.Error, OSError):
                return [False] * len(keys)
            return [row is not None and not row.hole and row.namespace == namespace.root[:8] for row in rows]

    def touch(self, keys: Sequence[RecordKey]) -> None:
        """Mark as used, soon; unknown keys are ignored."""
        with self._call() as closed:
            if not closed:
                self._directory.touch_later(bytes(key) for key in keys)

    def delete(self, keys: Sequence[RecordKey]) -> int:
        """Forget records; one with children leaves a hole that the next write of its key fills."""
        with self._call() as closed:
            if closed:
                return 0
            try:
                with self._directory.writing() as books:
                    gone = sum(books.drop(bytes(key)) for key in keys)
            except (lmdb.Error, OSError) as error:
                log.warning("delete in %s failed: %s", self._directory.path, error)
                return 0
            with self._lock:
                self._counters.deleted += gone
            return gone

    def flush(self) -> None:
        """Write marks of use that still wait for a transaction."""
        with self._call() as closed:
            if not closed:
                self._directory.flush()

    def usage(self) -> dict[str, int]:
        """Gauges of the directory, and what this store has counted. Empty after close and in a forked child."""
        with self._call() as closed:
            if closed:
                return {}
            gauges = self._directory.gauges()
            with self._lock:
                return {**gauges, **self._counters.as_gauges()}

    def trouble(self) -> str | None:
        """Why nothing is served (the index was removed, replaced or cut, or contradicts itself), or nothing new stored."""
        if not self._directory.ours or self._closed:
            return None
        if (trouble := self._directory.trouble) is not None:
            return f"{trouble}: attach the store anew"
        return self._writer.trouble

    def check(self) -> None:
        """Recount every invariant of the index; InvariantError says what does not hold."""
        with self._call() as closed:
            if not closed:
                check(self._directory)

    def close(self) -> None:
        """Wait for calls that run, then let go of the directory. Does nothing the second time, nor in a fork."""
        if not self._directory.ours:
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._calls)
        self._reader.close()
        self._writer.close()
        close_directory(self._directory)

    @contextmanager
    def _call(self) -> Iterator[str | None]:
        """Brackets every call: yields why it cannot be served (``forked``, ``closed``, ``gone``).

        Otherwise ``close`` waits for its end. Whatever meets an index that contradicts itself ends its use.

        A forked child takes no lock: its parent may have held it at the fork.
        """
        if not self._directory.ours:
            yield "forked"
            return
        with self._idle:
            closed = self._closed
            self._calls += not closed
        try:
            if closed:
                yield "closed"
            else:
                yield "gone" if self._directory.trouble else None
        except CONTRADICTIONS as error:
            self._directory.damage = f"the index of {self._directory.path} contradicts itself ({error})"
            raise
        finally:
            with self._idle:
                self._calls -= not closed
                self._idle.notify_all()
