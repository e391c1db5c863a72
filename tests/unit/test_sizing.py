"""Host memory: control groups of both versions, ranks that share a machine, and nothing clamped in silence."""

from __future__ import annotations

import threading
from itertools import permutations

import pytest
from resolve_rig import machines, spec_of

from hicache.build import Surroundings
from hicache.data.platform.memory import MemoryProbe
from hicache.data.pool import nbytes_for
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import resolve
from hicache.resolve.choose import choose
from hicache.resolve.request import Request
from hicache.resolve.sizing import GIB, Budget, Facts, HostSize, Peers, Sized, Snapshot, size
from hicache.settings import load

SPEC = spec_of("mha")
FACTS = Facts(SPEC, LAYOUTS["page_first"], device_nbytes=1 << 30)


def machine(root, available, *, v2=None, v1=None, used=0, cache=0, group="/"):
    """A file system that describes a machine, with a limit in a control group of either version."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(f"0::{group}\n" if v1 is None else f"4:cpu,memory:{group}\n0::/\n")
    rows = (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", v2),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", v1),
    )
    for mount, limit, use, row, value in rows:
        if value is not None:
            folder = root / mount / group.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / limit).write_text(f"{value}\n")
            (folder / use).write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon 5\n{row} {cache}\n")
    return MemoryProbe(root)


@pytest.mark.parametrize("version", ["v2", "v1"])
@pytest.mark.parametrize("group", ["/", "/pods/ours"])
def test_a_control_groups_limit_counts_with_what_its_cache_can_give_back(tmp_path, version, group):
    probe = machine(tmp_path, 1007 * GIB, **{version: 90 * GIB}, used=30 * GIB, cache=20 * GIB, group=group)
    assert probe.available() == 1007 * GIB
    assert probe.headroom() == 80 * GIB


def test_a_limit_above_ours_counts_too(tmp_path):
    probe = machine(tmp_path, 500 * GIB, v2=90 * GIB, group="/pods/ours")
    (tmp_path / "sys/fs/cgroup/pods/memory.max").write_text(str(40 * GIB))
    assert probe.headroom() == 40 * GIB


@pytest.mark.parametrize("text", ["max", "9223372036854771712", "", "what"])
def test_no_limit_is_none(tmp_path, text):
    probe = machine(tmp_path, 500 * GIB, v2=text, v1=text)
    assert probe.headroom() is None
    assert MemoryProbe(tmp_path / "nowhere").headroom() is None
    assert MemoryProbe(tmp_path / "nowhere").available() is None


# -- sizes


def test_what_is_asked_is_given_or_refused_with_both_numbers():
    budget = Budget(Snapshot(10 << 20), reserve=0)
    assert size(HostSize(nbytes=8 << 20), FACTS, budget).asked == 8 << 20
    refusal = size(HostSize(nbytes=11 << 20), FACTS, budget)
    assert str(11 << 20) in refusal
    assert str(10 << 20) in refusal
    assert "1073741824" in size(HostSize(ratio=1.0), FACTS, budget)
    assert size(HostSize(fraction=1.0), FACTS, budget).asked == 10 << 20
    assert size(HostSize(fraction=0.5), FACTS, budget).asked == 5 << 20
    assert size(HostSize(ratio=0.001), FACTS, budget).asked == (1 << 30) // 1000
    assert size(HostSize(nbytes=11 << 20), FACTS, None).asked == 11 << 20


@pytest.mark.parametrize("wish", [HostSize(ratio=1.0), HostSize(fraction=0.5)])
def test_what_cannot_be_worked_out_is_refused(wish):
    assert "not known" in size(wish, Facts(SPEC, LAYOUTS["page_first"]), None)


@pytest.mark.parametrize("bad", [0, -0.1, 1.5, float("nan"), float("inf"), True, "1"])
def test_what_is_no_fraction_is_refused(bad):
    with pytest.raises(ConfigError, match="not a fraction"):
        HostSize(fraction=bad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["mha", "draft", "window", "opaque"])
def test_one_budget_covers_every_plane_and_group(layout, attention):
    spec = spec_of(attention)
    for asked in (50_000, 1 << 20, (1 << 20) + 4095):
        sized = size(HostSize(nbytes=asked), Facts(spec, LAYOUTS[layout]), None)
        assert isinstance(sized, Sized)
        assert sized.nbytes == nbytes_for(spec, LAYOUTS[layout], sized.slots) <= asked
        assert nbytes_for(spec, LAYOUTS[layout], sized.slots + 1) > asked


def test_a_size_that_nobody_asked_for_fits_and_says_how():
    large, small = Budget(Snapshot(1 << 40)), Budget(Snapshot(100 << 20), reserve=0)
    assert size(HostSize(), FACTS, large).asked == 2 << 30
    assert size(HostSize(), Facts(SPEC, LAYOUTS["page_first"]), large).asked == 512 << 20
    fitted = size(HostSize(), FACTS, small)
    assert fitted.asked == 80 << 20
    assert "less to leave 2 tenths" in fitted.how


def test_what_our_other_tiers_take_is_not_given_twice():
    facts = Facts(SPEC, LAYOUTS["page_first"], taken_nbytes=6 << 20)
    budget = Budget(Snapshot(10 << 20), reserve=0)
    assert isinstance(size(HostSize(nbytes=4 << 20), facts, budget), Sized)
    assert "6291456 taken" in size(HostSize(nbytes=5 << 20), facts, budget)
    assert size(HostSize(nbytes=1), facts, Budget(Snapshot(6 << 20), reserve=0)).startswith("the device tier")


def test_a_host_tier_smaller_than_the_device_works_and_one_below_a_page_does_not():
    there = machines()["cpu"]
    small = resolve(Request(SPEC, size=HostSize(nbytes=4096), device_nbytes=1 << 30), there)
    assert small.chosen.size.slots == 1
    with pytest.raises(ConfigError, match=r"4095 bytes .* do not hold one page of 4096"):
        resolve(Request(SPEC, size=HostSize(nbytes=4095)), there).require()


# -- ranks that share a machine


class Exchange:
    """An all-gather between threads."""

    def __init__(self, ranks):
        self.rows, self.barrier = [None] * ranks, threading.Barrier(ranks, timeout=20)

    def of(self, rank, before):
        def exchange(row):
            before(rank)
            self.rows[rank] = row
            self.barrier.wait()
            rows = list(self.rows)
            self.barrier.wait()
            return rows

        return exchange


def together(tmp_path, wishes, order, available):
    """Every rank resolves on its own thread, arriving in a given order; what each came to."""
    ranks = len(wishes)
    exchange, found, turns = Exchange(ranks), [None] * ranks, [threading.Event() for _ in range(ranks)]
    first: set[int] = set()

    def in_turn(rank):
        if rank in first:
            return
        first.add(rank)
        at = order.index(rank)
        if at:
            turns[order[at - 1]].wait(20)
        turns[rank].set()

    def one(rank):
        probe = machine(tmp_path / str(rank), available[rank])
        around = Surroundings(peers=Peers(ranks, exchange.of(rank, in_turn)), probe=probe, reserve=10 * GIB)
        host = {} if wishes[rank] is None else {"bytes": wishes[rank] * GIB}
        found[rank] = choose(load(environ={}, page_tokens=SPEC.page_tokens, host=host), SPEC, around)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("order", list(permutations(range(3)))[::2])
def test_ranks_that_fit_together_are_all_accepted_in_every_order(tmp_path, order):
    """The third one looked again after two had taken theirs, divided what was left, and refused what fits."""
    found = together(tmp_path, [130] * 3, order, [500 * GIB, 240 * GIB + 200 * GIB, 450 * GIB])
    assert len({one.require().size.slots for one in found}) == 1


def test_ranks_that_do_not_fit_together_are_all_refused_before_any_allocates(tmp_path):
    for one in together(tmp_path, [150] * 4, (2, 0, 3, 1), [500 * GIB] * 4):
        with pytest.raises(ConfigError, match=f"{150 * GIB} bytes .* {490 * GIB // 4} are there"):
            one.require()


def test_all_ranks_go_by_the_same_view_and_give_the_same_reason(tmp_path):
    found = together(tmp_path, [150] * 3, (1, 0, 2), [500 * GIB, 440 * GIB, 500 * GIB])
    assert {one.refusals for one in found} == {found[0].refusals}
    assert str(430 * GIB // 3) in found[0].refusals[0]


def test_all_ranks_hold_as_many_pages_as_the_least(tmp_path):
    found = together(tmp_path, [100, 20, 50], (0, 1, 2), [500 * GIB] * 3)
    slots = {one.require().size.slots for one in found}
    assert len(slots) == 1
    assert found[1].require().size.nbytes <= 20 * GIB
    assert [step.field for step in found[0].steps] == ["host_slots"]
    assert not found[1].steps


def test_one_rank_that_cannot_makes_all_refuse(tmp_path):
    found = together(tmp_path, [100, 400], (0, 1), [500 * GIB] * 2)
    for one, reason in zip(found, ("another rank", "to have"), strict=True):
        with pytest.raises(ConfigError, match=reason):
            one.require()
