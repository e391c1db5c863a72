"""One write transaction over the records' tree and the slots: every change to the index goes through here.

A slot travels free -> owned by a session -> in a record's row -> free (or straight to the next owner when its
record is evicted). Nothing here does I/O; segments are made by the ``grow`` callable that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import lmdb

from hicache.data.store.base import Iovec, WriteOutcome
from hicache.data.store.record import NO_PARENT
from hicache.data.store.segment.clock import now
from hicache.data.store.segment.slots import Slots
from hicache.data.store.segment.tables import Place, Row, Tables
from hicache.data.store.segment.tree import Tree
from hicache.data.store.segment.who import WHO_MAX, about
from hicache.keys import Namespace
from hicache.policy import EvictionPolicy

USES_MAX = 2**32 - 1


@dataclass(slots=True)
class Pending:
    """A record on its way into the store. ``outcome`` is None as long as it may still be stored; ``sum`` comes last."""

    key: bytes
    parent: bytes
    namespace: bytes
    layout: int
    nbytes: int
    hint: bytes
    payload: Iovec
    blocks: int
    sum: int = 0
    place: Place | None = None
    outcome: WriteOutcome | None = None

    def row(self, place: Place, rank: int, time: int) -> Row:
        """The index row of this record in ``place``, written at ``time``."""
        return Row(
            segment=place.segment,
            offset=place.offset,
            nbytes=self.nbytes,
            layout=self.layout,
            hole=False,
            sum=self.sum,
            rank=rank,
            hint=self.hint,
            children=0,
            parent=self.parent,
            namespace=self.namespace[:8],
            written=time,
            used=time,
        )


@dataclass(slots=True)
class Tally:
    """What one transaction did, to be counted once it has been committed."""

    evicted: int = 0
    reclaimed: int = 0


@dataclass(slots=True)
class Need:
    """Slots wanted, and what may be done for them: which records stay, and how a new segment is made."""

    blocks: int
    count: int
    keep: AbstractSet[bytes] = frozenset()
    grow: Callable[[Books, int], bool] = field(default=lambda _books, _blocks: False)


class Books:
    """The tree and the slots of one write transaction, for one session."""

    def __init__(
        self, txn: lmdb.Transaction[bytes], tables: Tables, policy: EvictionPolicy, session: int
    ) -> None:
        self.txn = txn
        self.tree = Tree(txn, tables)
        self.slots = Slots(txn, tables)
        self.tally = Tally()
        self._policy = policy
        self._session = session
        self._who = tables.who
        self._tick = self.slots.number(b"tick")
        self._now = now()

    def finish(self) -> None:
        """Write what is kept in memory during the transaction; to be called just before its commit."""
        self.slots.set_number(b"tick", self._tick)

    def next_rank(self, hint: bytes) -> int:
        """The order key of a record used now."""
        self._tick += 1
        return self._policy.rank(self._tick, hint)

    def touch(self, key: bytes) -> None:
        """Mark a record as used; unknown keys are ignored."""
        row = self.tree.row(key)
        if row is not None:
            row.used = max(row.used, self._now)
            row.uses = min(row.uses + 1, USES_MAX)
            self.tree.rerank(key, row, self.next_rank(row.hint))

    def introduce(self, namespace: Namespace) -> None:
        """Note what a namespace is, for whoever inspects the directory; not beyond ``WHO_MAX`` namespaces."""
        short = namespace.root[:8]
        known = self.txn.get(short, db=self._who) is not None
        if not known and self.txn.stat(self._who)["entries"] < WHO_MAX:
            self.txn.put(short, about(namespace).encode(), db=self._who)

    # -- taking and giving slots --------------------------------------------------------------------------------

    def take(self, need: Need, dead_sessions: Callable[[Books], Sequence[int]]) -> list[Place]:
        """Up to ``need.count`` slots for this session: free ones, a dead process's, a new segment's, evicted ones."""
        slots, want = self.slots, need.count
        places = slots.take_free(need.blocks, want)
        if len(places) < want:
            for session in dead_sessions(self):
                self.reclaim(session)
            places += slots.take_free(need.blocks, want - len(places))
        while len(places) < want and need.grow(self, need.blocks):
            places += slots.take_free(need.blocks, want - len(places))
        for place in places:
            slots.own(self._session, place)
        if len(places) < want:
            rest = Need(need.blocks, want - len(places), need.keep)
            places += self.take_evicted(rest)
        return places

    def take_evicted(self, need: Need) -> list[Place]:
        """Up to ``need.count`` slots of the coldest leaves of this slot size, each owned by this session at once."""
        places: list[Place] = []
        rank = 0
        while len(places) < need.count:
            victim = self.tree.coldest(need.blocks, rank, need.keep)
            if victim is None:
                break
            key, row = victim
            rank = row.rank
            self.tree.remove(key, row)
            self.slots.own(self._session, row.place)
            places.append(row.place)
        self.tally.evicted += len(places)
        return places

    def give(self, place: Place) -> None:
        """Give a slot of this session back."""
        self.slots.disown(self._session, place)
        self.slots.put_free(place)

    def reclaim(self, session: int) -> None:
        """Free every slot of a session that is over."""
        for place in self.slots.owned(session):
            self.slots.disown(session, place)
            self.slots.put_free(place)
            self.tally.reclaimed += 1

    # -- records ------------------------------------------------------------------------------------------------

    def judge(self, record: Pending) -> WriteOutcome | None:
        """Why a record is not to be written now, or None: its key is absent (or a hole) and its parent is there."""
        row = self.tree.row(record.key)
        if row is not None and not row.hole:
            return WriteOutcome.EXISTS if row.namespace == record.namespace[:8] else WriteOutcome.FAILED
        if record.parent != NO_PARENT and not self.tree.present(record.parent):
            return WriteOutcome.PARENT_ABSENT
        return None

    def publish(self, record: Pending, place: Place) -> WriteOutcome:
        """Make a record visible whose bytes lie durably in ``place``, or give the place back and say why not."""
        verdict = self.judge(record)
        if verdict is not None:
            self.give(place)
            return verdict
        self.slots.disown(self._session, place)
        fresh = record.row(place, self.next_rank(record.hint), self._now)
        hole = self.tree.row(record.key)
        if hole is None:
            self.tree.insert(record.key, fresh)
        else:  # the hole's place in the tree stays: its parent counts it, its children name it
            fresh.children, fresh.parent, fresh.rank = hole.children, hole.parent, max(fresh.rank, hole.rank)
            fresh.used, fresh.uses = max(fresh.used, hole.used), hole.uses
            self.tree.put(record.key, fresh)
        return WriteOutcome.STORED

    def drop(self, key: bytes, seen: Row | None = None) -> bool:
        """Forget a record and free its slot; one with children stays as a hole. False when there is nothing to drop.

        With ``seen``, only if the row is still that one: what was found damaged may have been dropped and written
        anew since, even into the same place.
        """
        row = self.tree.row(key)
        if row is None or row.hole or (seen is not None and not seen.same_record(row)):
            return False
        place = row.place
        if row.children:
            row.hole, row.segment, row.offset, row.nbytes, row.sum = True, 0, 0, 0, 0
            self.tree.put(key, row)
        else:
            self.tree.remove(key, row)
        self.slots.put_free(place)
        return True
