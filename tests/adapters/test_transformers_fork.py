"""A forked child has neither the threads nor the store: it may not touch them, wait for them, or harm its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
from hicache.adapters.transformers import attach
from hicache.errors import UnavailableError
from hicache.settings import load
from hicache.testing.model import tiny_model

settings = load(environ={}, page_tokens=4, host={"bytes": "64KiB"}, into_store=sys.argv[2],
                store={"type": "segment", "path": sys.argv[1], "cap": "4MiB"})
prompt = [token * 7 % 500 for token in range(30)]
with attach(tiny_model(), settings) as cached:
    want = cached.generate(prompt, 4).tokens
    if sys.argv[3] == "locked":
        cached.cache.lock.acquire()
    child = os.fork()
    if not child:
        for call in (lambda: cached.generate(prompt, 4), lambda: cached.flush(5.0), cached.cache.step):
            try:
                call()
            except UnavailableError as error:
                assert "forked child" in str(error)
            else:
                os._exit(3)
    else:
        if sys.argv[3] == "locked":
            cached.cache.lock.release()
        began = time.monotonic()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        took = time.monotonic() - began
        assert (status, took < settings.deadlines.close_s - 5) == (0, True), (status, took)
        assert cached.generate(prompt, 4).tokens == want
        assert cached.generate(prompt, 4).hit_tokens == 28
        print("parent served")
"""


@pytest.mark.parametrize("into_store,lock", [("through", "free"), ("back", "locked")])
def test_a_forked_child_ends_at_once_and_its_parent_goes_on(tmp_path, into_store, lock):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), into_store, lock]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "parent served", done.stdout
