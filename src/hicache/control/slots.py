"""The places of one pool: their states and pins. Nothing outside this file changes either.

    FREE -reserve-> FILLING -commit-> READY -release-> FREE (or DOOMED while pinned; freed by the last unpin)
    FILLING -abort-> FREE (or DOOMED while pinned)      FILLING -quarantine-> QUARANTINED -settle-> FREE or DOOMED

A slot is pinned in READY, or in FILLING by a Job that names the filling Job in ``after``. Anything else is a bug
and raises :class:`InvariantError`.
"""

from __future__ import annotations

import enum
from array import array

from hicache.errors import InvariantError


class SlotState(enum.IntEnum):
    """What a place of a pool is doing."""

    FREE = 0
    FILLING = 1
    READY = 2
    DOOMED = 3
    QUARANTINED = 4


FREE, FILLING, READY, DOOMED, QUARANTINED = (int(state) for state in SlotState)
_PINNABLE = frozenset({FILLING, READY})


class Slots:
    """``total`` places, as parallel rows of numbers; about 17 bytes a slot.

    state, pins, filler (id of the Job that fills it, while FILLING or QUARANTINED) and page (row of the page in
    the index, while FILLING or READY; -1 otherwise) may be read by the rest of the control plane.
    """

    __slots__ = ("_free", "_fresh", "filler", "page", "pins", "state", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.state = bytearray(total)
        self.pins = array("i", bytes(4 * total))
        self.filler = array("q", bytes(8 * total))
        self.page = array("i", b"\xff" * (4 * total))
        self._free: list[int] = []
        self._fresh = 0  # slots from here on have never been used

    @property
    def free(self) -> int:
        """How many slots are FREE."""
        return len(self._free) + self.total - self._fresh

    def counts(self) -> dict[str, int]:
        """Slots by state; they add up to ``total``."""
        return {state.name.lower(): self.state.count(state) for state in SlotState}

    def _wrong(self, verb: str, slot: int) -> InvariantError:
        return InvariantError(
            f"a slot cannot {verb} from here",
            slot=slot,
            state=SlotState(self.state[slot]).name,
            pins=self.pins[slot],
            filler=self.filler[slot],
        )

    def reserve(self, page: int, filler: int) -> int:
        """FREE -> FILLING: give the page a place, filled by Job ``filler``; -1 when no slot is free."""
        if self._free:
            slot = self._free.pop()
        elif self._fresh < self.total:
            slot = self._fresh
            self._fresh += 1
        else:
            return -1
        self.state[slot] = FILLING
        self.page[slot] = page
        self.filler[slot] = filler
        return slot

    def commit(self, slot: int) -> None:
        """FILLING -> READY: the copy's end has been applied."""
        if self.state[slot] != FILLING:
            raise self._wrong("commit", slot)
        self.state[slot] = READY
        self.filler[slot] = 0

    def abort(self, slot: int) -> None:
        """FILLING -> FREE or DOOMED: the copy failed and has stopped; the page must have left the index."""
        if self.state[slot] != FILLING:
            raise self._wrong("abort", slot)
        self._let_go(slot)

    def release(self, slot: int) -> None:
        """READY -> FREE or DOOMED: the page has left the index."""
        if self.state[slot] != READY:
            raise self._wrong("release", slot)
        self._let_go(slot)

    def quarantine(self, slot: int) -> None:
        """FILLING -> QUARANTINED: the copy does not end; its bytes may still land here."""
        if self.state[slot] != FILLING:
            raise self._wrong("quarantine", slot)
        self.state[slot] = QUARANTINED
        self.page[slot] = -1

    def settle(self, slot: int) -> None:
        """QUARANTINED -> FREE or DOOMED: the late copy has ended after all."""
        if self.state[slot] != QUARANTINED:
            raise self._wrong("settle", slot)
        self._let_go(slot)

    def pin(self, slot: int) -> int:
        """One more reader. Returns the id of the Job that still fills the slot, which the reader must follow; else 0."""
        state = self.state[slot]
        if state not in _PINNABLE:
            raise self._wrong("pin", slot)
        self.pins[slot] += 1
        return self.filler[slot] if state == FILLING else 0

    def unpin(self, slot: int) -> bool:
        """One reader less. True when the slot is READY and nobody reads it any more."""
        pins = self.pins[slot] - 1
        if pins < 0:
            raise self._wrong("unpin", slot)
        self.pins[slot] = pins
        if pins:
            return False
        state = self.state[slot]
        if state == DOOMED:
            self._let_go(slot)
        return state == READY

    def _let_go(self, slot: int) -> None:
        self.page[slot] = -1
        if self.pins[slot]:
            self.state[slot] = DOOMED
            return
        self.state[slot] = FREE
        self.filler[slot] = 0
        self._free.append(slot)

    def check(self) -> None:
        """The free list holds exactly the FREE slots, once each; states agree with pins and pages."""
        if sorted(self._free) != [s for s in range(self._fresh) if self.state[s] == FREE]:
            raise InvariantError("the free list is not the FREE slots", free=sorted(self._free))
        for slot in range(self._fresh):
            state = self.state[slot]
            if (self.page[slot] >= 0) != (state in (FILLING, READY)):
                raise InvariantError("only FILLING and READY slots hold a page", slot=slot, state=state)
            if (state == FREE and self.pins[slot]) or (state == DOOMED and not self.pins[slot]):
                raise InvariantError("pins do not fit the state", slot=slot, state=state)
