"""Where the native engine's helper threads run, and what becomes of them at fork, at exit and between callers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from hicache.data.copy import host
from hicache.data.copy.host import HostEngine
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.pool import surface_of
from hicache.layout import LAYOUTS, place
from hicache.spec import Group, Plane

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.skipif(HostEngine.available() is not None, reason=str(HostEngine.available())),
    pytest.mark.skipif(len(CPUS) < 2, reason="one CPU: the engine has no helpers"),
]

HEAD = """
import os, signal, sys, threading
from pathlib import Path
first, *_ = sorted(os.sched_getaffinity(0))
whole = os.sched_getaffinity(0)

def helpers():
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "hicache-copy":
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found

def large_copy():
    import numpy as np
    from hicache.data.copy.host import HostEngine
    from hicache.data.pool import surface_of
    from hicache.layout import LAYOUTS, place
    from hicache.spec import Group, Plane
    group = Group("main", (Plane("k", 8, 16, 4, 256),))
    a, b = place(group, LAYOUTS["layer_first"], 40), place(group, LAYOUTS["page_first"], 40)
    source = np.random.default_rng(1).integers(0, 256, a.nbytes, dtype=np.uint8)
    target = np.zeros(b.nbytes, np.uint8)
    ours, theirs = surface_of(a, source), surface_of(b, target)
    HostEngine().submit(ours, range(40), theirs, list(reversed(range(40)))).wait()
    for page in range(40):
        for x, y in zip(ours.views[0], theirs.views[0]):
            assert (x[page] == y[39 - page]).all()
"""


def script(body: str) -> str:
    command = [sys.executable, "-c", HEAD + textwrap.dedent(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_main_thread_bound_later_does_not_bind_the_helpers():
    """As an OpenMP runtime does it at its first parallel region."""
    told = script("""
        import hicache.data.copy.host
        os.sched_setaffinity(0, {first})
        large_copy()
        assert helpers() and all(cpus == whole for cpus in helpers().values()), helpers()
        assert os.sched_getaffinity(0) == {first}
        print("free")
    """)
    assert told == "free"


def test_a_main_thread_bound_before_the_import_does_not_bind_the_helpers():
    """As an OpenMP runtime does it that was imported first: its other threads still tell where the process may run."""
    told = script("""
        end = threading.Event()
        other = threading.Thread(target=end.wait)
        other.start()
        os.sched_setaffinity(0, {first})
        large_copy()
        assert helpers() and all(cpus == whole for cpus in helpers().values()), helpers()
        end.set()
        print("free")
    """)
    assert told == "free"


def test_a_process_kept_to_one_cpu_stays_there():
    told = script("""
        os.sched_setaffinity(0, {first})
        large_copy()
        assert helpers() == {}
        print("kept")
    """)
    assert told == "kept"


def test_the_helpers_are_joined_at_exit():
    told = script("""
        import atexit
        atexit.register(lambda: print("left:", len(helpers())))
        large_copy()
        print("ran:", len(helpers()) > 0)
    """)
    assert told.splitlines() == ["ran: True", "left: 0"]


def test_a_copy_after_the_helpers_ended_is_whole():
    told = script("""
        import atexit
        atexit.register(lambda: (large_copy(), print("whole")))
        large_copy()
    """)
    assert told == "whole"


def test_a_forked_child_makes_helpers_of_its_own():
    told = script("""
        large_copy()
        mine = set(helpers())
        child = os.fork()
        if not child:
            assert helpers() == {}
            large_copy()
            ok = bool(helpers()) and not mine & set(helpers())
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        large_copy()
        assert set(helpers()) == mine
        print("both")
    """)
    assert told == "both"


def test_a_fork_in_the_middle_of_copies():
    told = script("""
        def copying():
            while not end.is_set():
                large_copy()
        large_copy()  # imports everything: a child forked in the middle of an import hangs in the interpreter
        end = threading.Event()
        lanes = [threading.Thread(target=copying) for _ in range(2)]
        for lane in lanes:
            lane.start()
        for _ in range(5):
            child = os.fork()
            if not child:
                signal.alarm(20)
                large_copy()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        end.set()
        for lane in lanes:
            lane.join()
        print("both")
    """)
    assert told == "both"


def test_calls_from_several_threads_share_the_helpers(monkeypatch):
    monkeypatch.setattr(host, "SMALL_NBYTES", 0)
    group = Group("main", (Plane("k", 4, 8, 2, 192), Plane("v", 4, 8, 2, 192)))
    pages = 24
    wrong: list[str] = []

    def lane(number: int) -> None:
        rng = np.random.default_rng(number)
        a, b = place(group, LAYOUTS["page_head"], pages), place(group, LAYOUTS["layer_first"], pages)
        memory = rng.integers(0, 256, a.nbytes, dtype=np.uint8)
        got, wanted = np.zeros(b.nbytes, np.uint8), np.zeros(b.nbytes, np.uint8)
        for turn in range(60):
            slots = rng.permutation(pages)
            got[:], wanted[:] = turn, turn
            HostEngine().submit(surface_of(a, memory), slots, surface_of(b, got), slots[::-1]).wait()
            ReferenceEngine().submit(surface_of(a, memory), slots, surface_of(b, wanted), slots[::-1])
            if not np.array_equal(got, wanted):
                wrong.append(f"lane {number} turn {turn}")

    lanes = [threading.Thread(target=lane, args=(number,)) for number in range(5)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    assert wrong == []
