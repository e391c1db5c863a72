"""One directory of segments as this process holds it: its index, its session, its descriptors.

All stores of a process on one directory share one :class:`Directory`, because LMDB must not be opened twice.
It is counted: the last one out gives the session's slots back and closes. A forked child has none of it and
touches nothing, not even to close: the index belongs to the process that opened it.

The directory is ours alone (0700, our uid). In it lie ``index.mdb`` (and its lock), ``segment-NNNNNNNN`` and
``session-XXXXXXXXXXXXXXXX``; other entries are left alone. Whatever names a segment or a session without one in
the index is debris of a process that died, and is removed at open, under the index's write lock.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb

from hicache.data.store.segment.books import Books
from hicache.data.store.segment.files import Files, OpenSegments
from hicache.data.store.segment.place import INDEX, READERS_MAX, SEGMENT, Watch, reserve_lock
from hicache.data.store.segment.sessions import Sessions
from hicache.data.store.segment.slots import Slots
from hicache.data.store.segment.sound import check_whole
from hicache.data.store.segment.tables import (
    BLOCK_NBYTES,
    FORMAT,
    Place,
    Row,
    SegmentRow,
    Tables,
    segment_blocks_of,
)
from hicache.data.store.segment.trim import trim
from hicache.errors import ConfigError, DataError, IncompatibleError, InvariantError, UnavailableError
from hicache.policy import EvictionPolicy

log = logging.getLogger("hicache.store")

CONTRADICTIONS = (InvariantError, struct.error)
"""What shows that rows of the index do not fit together: a bit that flipped in one, as a rule."""

MAP_NBYTES = 1 << 43
MAP_NBYTES_MIN = 1 << 26
GROW_PAUSE = 64
"""How many further requests for slots go without a new segment after the disk had no room for one."""

FLUSH_S = 0.05
"""How long marks of use may wait for a write transaction to travel with."""


def open_index(path: Path) -> lmdb.Environment:
    """Open the index with a map so large that it never grows; halved where the address space is limited.

    DataError for a damaged index, UnavailableError for one that cannot be opened.
    """
    check_whole(path)
    reserve_lock(path.parent)
    nbytes = MAP_NBYTES
    while True:
        try:
            return lmdb.open(
                os.fspath(path),
                map_size=nbytes,
                subdir=False,
                mode=0o600,
                max_dbs=len(Tables.__slots__),
                max_readers=READERS_MAX,
            )
        except (MemoryError, lmdb.MemoryError) as error:
            nbytes //= 2
            if nbytes < MAP_NBYTES_MIN:
                raise UnavailableError(
                    "no address space for the index", path=path, tried=nbytes * 2
                ) from error
        except lmdb.Error as error:
            raise UnavailableError("the index cannot be opened", path=path, reason=error) from error


class Directory:
    """See the module. Made by :func:`hicache.data.store.segment.sharing.open_directory` only."""

    def __init__(self, path: Path, cap_bytes: int, policy: EvictionPolicy, files: Files) -> None:
        self.path = path
        self.policy = policy
        self.files = files
        self.pid = os.getpid()
        self.users = 0
        self.closed = False
        self.session = self.trimmed = 0
        self.segments = OpenSegments(path, files)
        self.sessions = Sessions(path)
        self.damage: str | None = None
        self.env = open_index(path / INDEX)
        try:
            self._watch = Watch(path)
            self.tables = Tables.of(self.env)
            self.env.reader_check()
            self._start()
            self.set_cap(cap_bytes)
        except BaseException as error:
            self.sessions.end()
            self.env.close()
            if isinstance(error, (lmdb.Error, OSError)):
                raise UnavailableError("the index cannot be used", path=path, reason=error) from error
            if isinstance(error, CONTRADICTIONS):
                raise DataError("the index contradicts itself", path=path, reason=error) from error
            raise
        self._lock = threading.Lock()
        self._touched: list[bytes] = []
        self._owed: list[Place] = []
        self._protected: Counter[bytes] = Counter()
        self._grow_pause = 0
        self._wake = threading.Event()
        self._flusher: threading.Thread | None = None

    # -- start and end --------------------------------------------------------------------------------------

    def _start(self) -> None:
        """In one transaction: agree on the format, free what dead processes held, sweep, open a session."""
        with self._begin(write=True) as txn:
            books = Books(txn, self.tables, self.policy, 0)
            slots = books.slots
            known = slots.number(b"format")
            if known not in (0, FORMAT):
                raise IncompatibleError(
                    "another format of the index", path=self.path, format=known, ours=FORMAT
                )
            policy = txn.get(b"policy", db=self.tables.meta) or self.policy.name.encode()
            if policy != self.policy.name.encode():
                raise ConfigError(
                    "the directory's records are ranked by another policy",
                    path=self.path,
                    theirs=policy.decode(),
                    ours=self.policy.name,
                )
            txn.put(b"policy", policy, db=self.tables.meta)
            slots.set_number(b"format", FORMAT)
            for session in self.dead_sessions(books):
                books.reclaim(session)
            self._sweep(books)
            self.session = slots.number(b"session") + 1
            slots.set_number(b"session", self.session)
            self.sessions.start(self.session)
            self.reclaimed = books.tally.reclaimed
            books.finish()

    def set_cap(self, cap_bytes: int) -> None:
        """Make this the directory's cap, for every process; a smaller one evicts and gives segments up at once."""
        with self._begin(write=True) as txn:
            slots = Books(txn, self.tables, self.policy, self.session).slots
            segment_nbytes = slots.number(b"segment_blocks") * BLOCK_NBYTES
            if slots.segments and cap_bytes < segment_nbytes:
                raise ConfigError(
                    "the cap is smaller than one segment of this directory",
                    path=self.path,
                    cap_bytes=cap_bytes,
                    segment_bytes=segment_nbytes,
                )
            if slots.number(b"cap") not in (0, cap_bytes):
                log.info("cap of %s changes from %d to %d bytes", self.path, slots.number(b"cap"), cap_bytes)
            slots.set_number(b"cap", cap_bytes)
        while (evicted := self._trim_once()) is not None:
            self.trimmed += evicted

    def _trim_once(self) -> int | None:
        """Give up one segment if more are reserved than the cap allows; how many records were evicted for it."""
        with self._begin(write=True) as txn:
            books = Books(txn, self.tables, self.policy, self.session)
            victim = trim(books, self.tables, self.segments)
            books.finish()
        if victim is None:
            return None
        self.segments.forget(victim)
        self.files.remove(self.segments.path(victim))
        return books.tally.evicted

    def close(self) -> None:
        """Give the session back and close. Called once, by the last user, and never in a forked child."""
        with self._lock:
            self.closed = True
            flusher = self._flusher
        self._wake.set()
        if flusher is not None:
            flusher.join()
        try:
            with suppress(lmdb.Error, OSError, *CONTRADICTIONS), self.writing() as books:
                books.reclaim(self.session)
        finally:
            self.segments.close()
            self.sessions.end()
            self._watch.make_closable()
            self.env.close()

    def dead_sessions(self, books: Books) -> Sequence[int]:
        """Sessions that hold slots and whose process is gone."""
        return [s for s in books.slots.owners() if s != self.session and self.sessions.is_over(s)]

    def _sweep(self, books: Books) -> None:
        """Remove segment files without a row and lock files of sessions that are over."""
        self.sessions.sweep()
        for path in list(self.path.iterdir()):
            found = SEGMENT.match(path.name)
            if (
                found
                and path.is_file()
                and not path.is_symlink()
                and books.slots.segment(int(found[1])) is None
            ):
                self.files.remove(path)

    # -- transactions -------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why nothing here can be used any more: the index was removed, replaced, cut, or contradicts itself."""
        return self.damage or self._watch.trouble()

    @property
    def ours(self) -> bool:
        """False in a forked child of the process that opened it."""
        return self.pid == os.getpid()

    def _begin(self, *, write: bool = False) -> lmdb.Transaction[bytes]:
        """A transaction; OSError when the index is not what it was, because LMDB would take the process along."""
        if (trouble := self.trouble) is not None:
            raise OSError(errno.ESTALE, trouble)
        return self.env.begin(write=write)

    @contextmanager
    def writing(self) -> Iterator[Books]:
        """One write transaction; waiting marks of use and owed slots travel with it. Commits when the block ends."""
        with self._lock:
            touched, self._touched = self._touched, []
            owed, self._owed = self._owed, []
        try:
            txn = self._begin(write=True)
            try:
                books = Books(txn, self.tables, self.policy, self.session)
                for place in owed:
                    if books.slots.owns(
                        self.session, place
                    ):  # a commit that failed may have been made all the same
                        books.give(place)
                for key in touched:
                    books.touch(key)
                yield books
                books.finish()
                self.files.commit(txn)
            except BaseException:
                txn.abort()
                raise
        except BaseException:
            with self._lock:
                self._owed += owed
            raise

    def rows(self, keys: Iterable[bytes]) -> list[Row | None]:
        """Copies of the rows; the read transaction ends before this returns."""
        with self._begin() as txn:
            values = [txn.get(key, db=self.tables.rec) for key in keys]
        return [None if value is None else Row.unpack(value) for value in values]

    def segment_nbytes(self) -> int:
        """Size of every segment file of the directory; 0 as long as there is none."""
        with self._begin() as txn:
            return Slots(txn, self.tables).number(b"segment_blocks") * BLOCK_NBYTES

    def gauges(self) -> dict[str, int]:
        """How full the directory is, counted from its segments."""
        with self._begin() as txn:
            slots = Slots(txn, self.tables)
            heads = [SegmentRow.head(value) for _, value in txn.cursor(db=self.tables.seg)]
            owned = txn.stat(self.tables.own)["entries"]
            rows = txn.stat(self.tables.rec)["entries"]
            segment_nbytes = slots.number(b"segment_blocks") * BLOCK_NBYTES
            cap = slots.number(b"cap")
        records = sum(count - free for _, count, free in heads) - owned
        return {
            "records": records,
            "holes": rows - records,
            "slots_in_hand": owned,
            "used_bytes": sum((count - free) * blocks for blocks, count, free in heads) * BLOCK_NBYTES,
            "reserved_bytes": len(heads) * segment_nbytes,
            "segment_bytes": segment_nbytes,
            "cap_bytes": cap,
        }

    def grow(self, books: Books, slot_blocks: int) -> bool:
        """Reserve one more segment under the cap and make its file, or recut an empty one of another slot size.

        The file is made inside the transaction that reserves it and under the number that comes next: if we die
        here, whoever grows next makes the same file again, so what lies on the disk never exceeds the cap.
        """
        slots = books.slots
        if not slots.segments:
            size = segment_blocks_of(slots.number(b"cap"), slot_blocks)
            slots.set_number(b"segment_blocks", size)
        blocks = slots.number(b"segment_blocks")
        if slot_blocks > blocks:
            return False
        if (slots.segments + 1) * blocks * BLOCK_NBYTES > slots.number(b"cap") or self._grow_pause > 0:
            self._grow_pause = max(0, self._grow_pause - 1)
            return slots.recut(blocks, slot_blocks)
        number = slots.number(b"segment") + 1
        path = self.segments.path(number)
        try:
            self.files.make(path, blocks * BLOCK_NBYTES)
        except OSError as error:
            log.warning("no new segment in %s: %s", self.path, error)
            self._grow_pause = GROW_PAUSE
            with suppress(OSError):
                self.files.remove(path)
            return slots.recut(blocks, slot_blocks)
        slots.set_number(b"segment", number)
        slots.add_segment(number, SegmentRow.all_free(blocks, slot_blocks))
        return True

    # -- notes for the next transaction -----------------------------------------------------------------------

    def owe(self, places: Iterable[Place]) -> None:
        """Slots of this session to be given back by the next transaction."""
        with self._lock:
            self._owed += places

    def touch_later(self, keys: Iterable[bytes]) -> None:
        """Mark records as used: with the next write transaction, else within ``FLUSH_S``."""
        with self._lock:
            self._touched += keys
            if self._flusher is None and self._touched and not self.closed:
                self._flusher = threading.Thread(target=self._flush, name="hicache-recency", daemon=True)
                self._flusher.start()
        self._wake.set()

    def flush(self) -> None:
        """Write waiting marks of use and owed slots now."""
        with self._lock:
            if not self._touched and not self._owed:
                return
        with self.writing():
            pass

    def _flush(self) -> None:
        pause = threading.Event()
        while not self.closed:
            self._wake.wait()
            self._wake.clear()
            if not self.closed:
                pause.wait(FLUSH_S)
                with suppress(lmdb.Error, OSError, *CONTRADICTIONS):
                    self.flush()

    @contextmanager
    def protecting(self, keys: set[bytes]) -> Iterator[None]:
        """Keep these records from eviction by this process while the block runs."""
        with self._lock:
            self._protected.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._protected.subtract(keys)
                for key in keys:
                    if self._protected[key] <= 0:
                        del self._protected[key]

    def protected(self) -> frozenset[bytes]:
        """What no transaction of this process may evict now."""
        with self._lock:
            return frozenset(self._protected)
