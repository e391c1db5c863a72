"""Slots: every legal move works, every other one is a bug that says so."""

from __future__ import annotations

import pytest

from hicache.control.slots import Slots, SlotState
from hicache.errors import InvariantError


def filling(slots: Slots) -> int:
    return slots.reserve(0, 7)


def ready(slots: Slots) -> int:
    slot = filling(slots)
    slots.commit(slot)
    return slot


def doomed(slots: Slots) -> int:
    slot = ready(slots)
    slots.pin(slot)
    slots.release(slot)
    return slot


def quarantined(slots: Slots) -> int:
    slot = filling(slots)
    slots.quarantine(slot)
    return slot


STATES = {
    "FREE": lambda slots: 0,
    "FILLING": filling,
    "READY": ready,
    "DOOMED": doomed,
    "QUARANTINED": quarantined,
}
LEGAL = {
    ("FILLING", "commit"): "READY",
    ("FILLING", "abort"): "FREE",
    ("FILLING", "quarantine"): "QUARANTINED",
    ("FILLING", "pin"): "FILLING",
    ("READY", "release"): "FREE",
    ("READY", "pin"): "READY",
    ("DOOMED", "unpin"): "FREE",
    ("QUARANTINED", "settle"): "FREE",
}
VERBS = ["commit", "abort", "release", "quarantine", "settle", "pin", "unpin"]


@pytest.mark.parametrize("state", list(STATES))
@pytest.mark.parametrize("verb", VERBS)
def test_every_move_is_legal_or_refused(state, verb):
    slots = Slots(2)
    slot = STATES[state](slots)
    assert SlotState(slots.state[slot]).name == state
    if (state, verb) in LEGAL:
        getattr(slots, verb)(slot)
        assert SlotState(slots.state[slot]).name == LEGAL[state, verb]
        if slots.pins[slot]:
            slots.unpin(slot)
        slots.check()
    else:
        with pytest.raises(InvariantError, match="cannot"):
            getattr(slots, verb)(slot)
        assert SlotState(slots.state[slot]).name == state, "a refused move changes nothing"


def test_release_of_a_pinned_slot_waits_for_the_last_unpin():
    slots = Slots(1)
    slot = ready(slots)
    slots.pin(slot)
    slots.pin(slot)
    slots.release(slot)
    assert slots.reserve(1, 8) == -1
    assert slots.unpin(slot) is False
    assert slots.free == 0
    slots.unpin(slot)
    assert slots.free == 1


def test_an_aborted_slot_that_is_pinned_is_not_reused_before_its_reader_is_done():
    slots = Slots(1)
    slot = filling(slots)
    assert slots.pin(slot) == 7, "the reader is told whom to follow"
    slots.abort(slot)
    assert SlotState(slots.state[slot]) is SlotState.DOOMED
    assert slots.free == 0
    slots.unpin(slot)
    assert slots.free == 1


def test_a_late_copy_frees_a_quarantined_slot_only_when_nobody_reads_it():
    slots = Slots(1)
    slot = filling(slots)
    slots.pin(slot)
    slots.quarantine(slot)
    slots.settle(slot)
    assert SlotState(slots.state[slot]) is SlotState.DOOMED
    slots.unpin(slot)
    assert slots.free == 1


def test_counts_add_up_to_the_total():
    slots = Slots(9)
    for make in STATES.values():
        make(slots)
    counts = slots.counts()
    assert sum(counts.values()) == slots.total == 9
    assert counts == {"free": 5, "filling": 1, "ready": 1, "doomed": 1, "quarantined": 1}


def test_a_full_pool_says_so_and_changes_nothing():
    slots = Slots(2)
    assert {slots.reserve(0, 1), slots.reserve(1, 1)} == {0, 1}
    before = bytes(slots.state)
    assert slots.reserve(2, 1) == -1
    assert bytes(slots.state) == before
