"""What is in storage is reachable from the root: a page is written only when its ancestors are there or go with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hicache.data.store.segment import SegmentStore
from hicache.policy import WritePolicy
from hicache.records import Where
from hicache.testing.house import SPEC, House

CAP = 64 << 20
TOKENS = range(128 * 64)
HOT = range(2 * 64)
BACK = {"into_host": WritePolicy.BACK, "into_store": WritePolicy.BACK}


def spill(one) -> None:
    """Serve 128 pages whose first two are hot, then press both memory tiers so that the tail goes to storage."""
    one.serve("long", one.keys(TOKENS))
    for number in range(4):
        one.serve(("hot", number), one.keys(HOT))
    for _ in range(200):
        one.controller.evict(Where.DEVICE, 8)
        one.settle()
        one.controller.evict(Where.HOST, 8)
        one.settle()
        one.serve(("hot again", _), one.keys(HOT))
        if one.controller.stats.stored[Where.STORE] >= 60:
            return
    raise AssertionError("nothing was spilled")


def pressed(path: Path) -> House:
    store = SegmentStore(path, CAP, SPEC.fingerprint())
    one = House(device_slots=160, host_slots=40, store=store, endpoint=300, **BACK)
    spill(one)
    return one


def fresh_hits(path: Path, tokens=TOKENS) -> int:
    """Pages of the prompt that a fresh process' cache loads from storage, byte for byte."""
    store = SegmentStore(path, CAP, SPEC.fingerprint())
    one = House(host_slots=160, store=store, endpoint=300)
    served = one.serve("fresh", one.keys(tokens))
    one.close()
    store.close()
    assert served.by_tier[Where.STORE] == served.loaded
    return served.loaded


def test_a_spilled_tail_brings_its_ancestors_along(tmp_path):
    one = pressed(tmp_path)
    written = one.controller.stats.stored[Where.STORE]
    one.close()
    one.store.close()
    hits = fresh_hits(tmp_path)
    assert hits >= 60
    assert hits == written, "every page that was written is reachable from the root"


def test_the_same_after_a_kill(tmp_path):
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import importlib.util
spec = importlib.util.spec_from_file_location("case36", {__file__!r})
case = importlib.util.module_from_spec(spec); spec.loader.exec_module(case)
one = case.pressed(Path({str(tmp_path)!r}))
print(one.controller.stats.stored[case.Where.STORE], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == -9, ended.stderr
    assert fresh_hits(tmp_path) == int(ended.stdout)


def test_flush_writes_everything_or_says_how_much_it_could_not(tmp_path):
    one = pressed(tmp_path)
    missing = one.controller.flush()
    while True:
        one.settle()
        left = one.controller.flush()
        if left >= missing:
            break
        missing = left
    one.settle()
    one.close()
    one.store.close()
    assert fresh_hits(tmp_path) == 128 - missing
    assert missing <= 128 - 40, "what fits in the host tier at once must have gone down with its ancestors"


def test_flush_with_room_writes_all(tmp_path):
    store = SegmentStore(tmp_path, CAP, SPEC.fingerprint())
    one = House(device_slots=160, host_slots=160, store=store, endpoint=300, **BACK)
    one.serve("long", one.keys(TOKENS))
    assert store.usage()["records"] == 0
    while one.controller.flush():
        one.settle()
    one.close()
    store.close()
    assert fresh_hits(tmp_path) == 128


@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_a_store_attached_late_gets_whole_chains(tmp_path, policy):
    store = SegmentStore(tmp_path, CAP, SPEC.fingerprint())
    one = House(host_slots=64, store=store, attached=False, endpoint=128, into_store=policy)
    one.serve("before", one.keys(range(640)))
    one.controller.attach_store()
    one.serve("after", one.keys(range(1280)))
    one.empty()
    one.close()
    store.close()
    assert fresh_hits(tmp_path, range(1280)) == 20
    assert fresh_hits(tmp_path, range(640, 1280)) == 0, "a suffix is not a prefix"


def test_keys_do_not_depend_on_when_the_store_came(tmp_path):
    with_store = SegmentStore(tmp_path / "a", CAP, SPEC.fingerprint())
    early = House(host_slots=64, store=with_store, endpoint=128)
    early.serve("whole", early.keys(range(1280)))
    early.close()
    with_store.close()
    late_store = SegmentStore(tmp_path / "a", CAP, SPEC.fingerprint())
    late = House(host_slots=64, store=late_store, attached=False, endpoint=128)
    late.serve("first half", late.keys(range(640)))
    late.controller.attach_store()
    assert late.serve("whole", late.keys(range(1280))).by_tier[Where.STORE] == 10
    late.close()
    late_store.close()
