"""A process that is stopped while it holds the index's write lock stops nobody else's reads nor requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from test_build import PAGES, Engine, load_all, make, publish

from hicache.records import Where

HOLD = """
import os, signal, sys
from hicache.data.store.segment import SegmentStore
store = SegmentStore(sys.argv[1], 8 << 20)
txn = store.directory.env.begin(write=True)
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
txn.abort()
store.close()
"""


@pytest.fixture
def stopped(tmp_path):
    """Starts the process that holds the lock and is stopped; it goes on, and ends, with the test."""
    children = []

    def start():
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "kv")], stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        assert child.stdout.readline() == "locked\n"
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        return child

    yield start
    for child in children:
        child.send_signal(signal.SIGCONT)
        assert child.wait(60) == 0
        child.stdout.close()


def test_reads_and_requests_go_on_and_closing_comes_to_an_end(tmp_path, stopped):
    engine = Engine()
    store = {"type": "segment", "path": str(tmp_path / "kv"), "cap": "8MiB"}
    cache = make(engine, host={"bytes": "128KiB"}, store=store)
    kept = [publish(cache, engine, seed) for seed in (1, 2, 3)]
    assert cache.flush(30) == 0
    stopped()
    for keys, before in kept:
        cache.controller.evict(Where.HOST, 100)
        engine.fill(9)
        assert load_all(cache, engine, keys)[Where.STORE] == PAGES
        assert engine.bytes() == before
    new, bytes_of_new = publish(cache, engine, 4)  # its write to the store hangs
    cache.controller.evict(Where.HOST, 100)
    keys, before = kept[0]
    engine.fill(9)
    assert load_all(cache, engine, keys)[Where.STORE] == PAGES, "reads go on beside a write that hangs"
    assert engine.bytes() == before
    engine.fill(9)
    assert load_all(cache, engine, new)[Where.HOST] == PAGES, "what waits to be written is served from memory"
    assert engine.bytes() == bytes_of_new
    began = time.monotonic()
    assert set(cache.close(0.5)) & {"write", "store.close"}
    assert time.monotonic() - began < 20
