"""Bugs that caches of this kind have had, put back into the real classes by patches, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from worlds import WORLDS

from hicache.control.controller import Controller
from hicache.control.down import Below
from hicache.control.index import ROOT, STORED
from hicache.control.ledger import Draft, Ledger
from hicache.control.publish import Publisher
from hicache.control.request import Request
from hicache.control.settle import Settler
from hicache.control.slots import FILLING, READY
from hicache.control.tiers import Tier, Tiers
from hicache.records import Done, JobKind
from hicache.testing.small import Rules
from hicache.testing.world import ANSWERED, World

Patch = Callable[[pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Bug:
    """A patch, the world that finds it, the only oracle that is asked, and the steps of the shortest history when last seen."""

    patch: Patch
    world: str
    oracle: str
    steps: int

    @property
    def rules(self) -> Rules:
        return WORLDS[self.world]


def follow_without_pin(patch: pytest.MonkeyPatch) -> None:
    def read(draft: Draft, tier: Tier, slot: int) -> None:
        if tier.slots.state[slot] == FILLING:
            draft.after.add(tier.slots.filler[slot])

    patch.setattr(Draft, "read", read)


def _settle_own(patch: pytest.MonkeyPatch) -> None:
    """Let the end of a Job pass over slots that are no longer its own, as the faulty versions did."""
    settle, fills = Settler._settle_targets, Ledger.fills

    def own(ledger, job):
        for tier, key, slot in fills(ledger, job):
            if tier.slots.filler[slot] == job.id:
                yield tier, key, slot

    def settle_targets(settler, live):
        with patch.context() as inner:
            inner.setattr(Ledger, "fills", own)
            settle(settler, live)

    patch.setattr(Settler, "_settle_targets", settle_targets)


def free_on_abort(patch: pytest.MonkeyPatch) -> None:
    close = Controller.close
    _settle_own(patch)

    def close_and_free(controller, request, *, abort=False):
        jobs = [controller.books.ledger.live[job].job for job in request.jobs]
        close(controller, request, abort=abort)
        for job in jobs if abort else ():
            for tier, _key, slot in controller.books.ledger.fills(job):
                if tier.slots.state[slot] == FILLING and tier.slots.filler[slot] == job.id:
                    controller.books.tiers.abort(tier, slot)

    patch.setattr(Controller, "close", close_and_free)


def commit_before_copy(patch: pytest.MonkeyPatch) -> None:
    take = Ledger.take
    _settle_own(patch)

    def take_and_commit(ledger):
        for live in ledger.outbox.values():
            for tier, _key, slot in ledger.fills(live.job):
                tier.slots.commit(slot)
        return take(ledger)

    patch.setattr(Ledger, "take", take_and_commit)


def failure_is_done(patch: pytest.MonkeyPatch) -> None:
    apply = Settler.apply
    patch.setattr(Settler, "apply", lambda settler, done: apply(settler, replace(done, bad={})))


def register_late(patch: pytest.MonkeyPatch) -> None:
    enter, settle = Tiers.enter, Settler._settle_targets

    def enter_unseen(tiers, tier, row, filler, rank):
        slot = enter(tiers, tier, row, filler, rank)
        tier.at[row] = -1
        return slot

    def register(settler, live):
        for tier, _key, slot in settler._books.ledger.fills(live.job):
            tier.at[tier.slots.page[slot]] = slot
        settle(settler, live)

    patch.setattr(Tiers, "enter", enter_unseen)
    patch.setattr(Settler, "_settle_targets", register)


def first_shard_is_enough(patch: pytest.MonkeyPatch) -> None:
    apply = Settler.apply

    def apply_once(settler, done):
        live = settler._books.ledger.live.get(done.job)
        if live is not None and not done.stuck:
            live.waiting.intersection_update({done.shard})
        apply(settler, done)

    patch.setattr(Settler, "apply", apply_once)


def filling_is_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "read", lambda draft, tier, slot: draft.lease.pin(tier, slot) and None)


def endpoint_free_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "endpoint_jobs", lambda ledger, request, kind: 0)


def endpoint_free_of_an_earlier_release(patch: pytest.MonkeyPatch) -> None:
    def owe(settler, request):
        request.due |= {JobKind.LOAD, JobKind.SAVE}
        settler._request_moved_on(request)

    patch.setattr(Settler, "owe", owe)


def evict_parents(patch: pytest.MonkeyPatch) -> None:
    """No leaf rule: children in the page's own tier do not keep it."""

    def pop(tier, protect):
        rows = tier.slots.page
        slots = [
            slot
            for slot, state in enumerate(tier.slots.state)
            if state == READY and not tier.slots.pins[slot] and rows[slot] != protect
        ]
        return min(slots, key=lambda slot: tier.rank[slot], default=-1)

    def spare(tiers, tier, row):
        others = [other for other in tiers.all if other is not tier]
        return any(other.ready(row) for other in others) or not any(other.kids[row] for other in others)

    patch.setattr(Tier, "pop", pop)
    patch.setattr(Tiers, "spare", spare)


def forget_other_tiers(patch: pytest.MonkeyPatch) -> None:
    """No union rule: children in other tiers do not keep a page."""
    patch.setattr(Tiers, "spare", lambda tiers, tier, row: True)


def evict_own_parent(patch: pytest.MonkeyPatch) -> None:
    room = Below.room
    patch.setattr(Below, "room", lambda below, tier, protect, want=1: room(below, tier, ROOT, want))


def keep_the_cursor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "_roll_back", lambda publisher, request: None)


def keep_the_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "release_hold", lambda request: None)


def forget_failures(patch: pytest.MonkeyPatch) -> None:
    """The worker forgets which keys failed as soon as it has answered."""
    failed = World._failed_before

    def only_unanswered(world, task, shard):
        after = tuple(before for before in task.job.after if world.tasks[before].state[shard] != ANSWERED)
        short = replace(task, job=replace(task.job, after=after))
        return failed(world, short, shard)

    patch.setattr(World, "_failed_before", only_unanswered)


def forget_too_early(patch: pytest.MonkeyPatch) -> None:
    """The control plane lets the worker forget a Job that another one still follows."""
    emit = Ledger.emit

    def emit_without_followers(ledger, draft, request, **kwargs):
        job = emit(ledger, draft, request, **kwargs)
        ledger._followers = dict.fromkeys(ledger._followers, 0)
        return job

    def retire(ledger, live):
        live.lease.close()
        del ledger.live[live.job.id]
        if ledger.outbox.pop(live.job.id, None) is None:
            ledger.applied.append(live.job.id)
        if live.request is not None:
            live.request.jobs.discard(live.job.id)
            live.request.ignored.discard(live.job.id)

    patch.setattr(Ledger, "emit", emit_without_followers)
    patch.setattr(Ledger, "retire", retire)


def count_a_done_twice(patch: pytest.MonkeyPatch) -> None:
    apply = Settler.apply

    def apply_any(settler, done: Done):
        live = settler._books.ledger.live.get(done.job)
        if live is not None and done.shard not in live.waiting:
            done = replace(done, shard=next(iter(live.waiting)))
        apply(settler, done)

    patch.setattr(Settler, "apply", apply_any)


def free_a_stuck_target(patch: pytest.MonkeyPatch) -> None:
    _settle_own(patch)
    patch.setattr(Tiers, "quarantine", Tiers.abort)


def late_pages_have_come(patch: pytest.MonkeyPatch) -> None:
    """What had not come when a Job was given up is taken as there."""
    apply = Settler.apply
    patch.setattr(Settler, "apply", lambda s, done: apply(s, replace(done, bad={}) if done.stuck else done))


def late_end_frees_all(patch: pytest.MonkeyPatch) -> None:
    """The late end of a Job frees slots that hold pages that had come before it was given up."""
    end = Settler._end

    def end_and_free(settler, live):
        for tier, _key, slot in settler._books.ledger.fills(live.job) if live.settled and live.bad else ():
            if tier.slots.state[slot] == READY and not tier.slots.pins[slot]:
                tier.slots.release(slot)
        end(settler, live)

    patch.setattr(Settler, "_end", end_and_free)


def one_shard_gives_up(patch: pytest.MonkeyPatch) -> None:
    """The first shard that gives up settles the Job for all."""
    give_up = Settler._give_up

    def at_once(settler, live, shard):
        give_up(settler, live, shard)
        live.waiting.clear()

    patch.setattr(Settler, "_give_up", at_once)


def stored_though_failed(patch: pytest.MonkeyPatch) -> None:
    written = Settler._written

    def flag_all(settler, live):
        written(settler, live)
        for span in live.job.spans:
            for key in span.keys:
                settler._flag(key, STORED)

    patch.setattr(Settler, "_written", flag_all)


def withdraw_followed(patch: pytest.MonkeyPatch) -> None:
    """A Job is withdrawn though another one reads what it fills."""
    patch.setattr(Ledger, "may_withdraw", lambda ledger, live: live.job.id in ledger.outbox)


def write_without_parents(patch: pytest.MonkeyPatch) -> None:
    """A page goes to the store though its parent's record is only on its way."""
    emit = Ledger.emit

    def emit_alone(ledger, draft, request, **kwargs):
        if draft.kind is JobKind.WRITE:
            draft.after &= {
                live.job.id for live in ledger.live.values() if live.job.kind is not JobKind.WRITE
            }
        return emit(ledger, draft, request, **kwargs)

    patch.setattr(Ledger, "emit", emit_alone)


BUGS: dict[str, Bug] = {
    "source_not_pinned": Bug(follow_without_pin, "w1_through", "bytes", 9),
    "slot_freed_on_abort": Bug(free_on_abort, "w2_no_store", "bytes", 12),
    "commit_before_copy": Bug(commit_before_copy, "w1_through", "bytes", 3),
    "failed_copy_is_done": Bug(failure_is_done, "w1_through", "bytes", 5),
    "registered_late": Bug(register_late, "w2_no_store", "check", 3),
    "one_shard_missing": Bug(first_shard_is_enough, "w5", "bytes", 5),
    "filling_is_ready": Bug(filling_is_ready, "w2", "bytes", 4),
    "endpoint_free_too_early": Bug(endpoint_free_at_once, "w2_no_store", "bytes", 7),
    "endpoint_free_of_an_earlier_release": Bug(endpoint_free_of_an_earlier_release, "w2_preempt", "bytes", 9),
    "no_leaf_rule": Bug(evict_parents, "w1_through", "check", 8),
    "no_union_rule": Bug(forget_other_tiers, "w1_chunks", "check", 16),
    "own_parent_evicted": Bug(evict_own_parent, "w4", "check", 8),
    "cursor_not_rolled_back": Bug(keep_the_cursor, "w1_chunks", "check", 6),
    "hold_not_released": Bug(keep_the_hold, "w2_prefetch", "liveness", 6),
    "worker_forgets_failures": Bug(forget_failures, "w2", "bytes", 6),
    "told_to_forget_too_early": Bug(forget_too_early, "w2", "contract", 5),
    "done_counted_twice": Bug(count_a_done_twice, "w5_twice", "contract", 6),
    "stuck_target_freed": Bug(free_a_stuck_target, "w4_fetch", "bytes", 14),
    "late_pages_have_come": Bug(late_pages_have_come, "w4_part", "bytes", 4),
    "late_end_frees_all": Bug(late_end_frees_all, "w4_part", "check", 8),
    "one_shard_gives_up": Bug(one_shard_gives_up, "w5_stuck", "bytes", 6),
    "stored_though_failed": Bug(stored_though_failed, "w4", "bytes", 6),
    "followed_job_withdrawn": Bug(withdraw_followed, "w2_shared", "contract", 7),
    "child_stored_before_parent": Bug(write_without_parents, "w2_writes", "bytes", 6),
}
