"""Bugs put back on purpose: each must be found by the same two checks that the product test relies on."""

from __future__ import annotations

import threading
import time

import pytest
from hits import (
    WHOLE,
    A,
    B,
    complaints,
    settings,
    settle,
    skip_first,
    spoil_loads,
    swap_k_and_v,
    work,
)

from hicache.adapters.transformers import TransformersCache, attach, runs
from hicache.deadlines import Deadlines
from hicache.records import Where
from hicache.testing.replay import Recorder


@pytest.mark.parametrize("spoil", [skip_first, swap_k_and_v])
def test_a_load_that_skips_a_page_or_swaps_k_and_v_is_found(tiny, spoil):
    recorder = Recorder()
    with attach(tiny, settings(host=9), witness=recorder) as cached:
        engine = spoil_loads(cached, Where.HOST, spoil)
        work(cached, [A, B, A])
        assert engine.spoiled > 0
    found = complaints(tiny, recorder)
    assert "bytes of page 0 of run 2" in found
    assert "tokens of run 2" in found


def test_pages_published_before_the_forward_call_that_fills_them_are_found(tiny, monkeypatch):
    def too_early(self, run, cache, start, end):
        run.calls.append((start, end))
        self._publish(run)
        run.calls.pop()
        settle(self)
        return forward(self, run, cache, start, end)

    forward = TransformersCache._forward
    monkeypatch.setattr(TransformersCache, "_forward", too_early)
    recorder = Recorder()
    with attach(tiny, settings(host=9), witness=recorder) as cached:
        work(cached, [A, B, A])
    assert "tokens of run 2" in complaints(tiny, recorder)


def test_a_page_published_before_its_last_row_is_found(tiny, monkeypatch):
    def one_more(self, run):
        if run.request is not None:
            full = (run.calls[-1][1] + 1) // self._page
            if full > run.offered and full * self._page <= len(run.ids) + 1:
                run.ids.append(run.ids[-1])
                self._offer(run, full)
                run.ids.pop()

    monkeypatch.setattr(TransformersCache, "_publish", one_more)
    recorder, prompt = (
        Recorder(),
        [*A, A[-1]],
    )  # its last page lacks one row, whose token the bug guesses right
    with attach(tiny, settings(host=12), witness=recorder) as cached:
        work(cached, [prompt, B, [*prompt, A[-1], 7]])
    assert complaints(tiny, recorder) != []


def test_loading_the_last_token_too_is_found(tiny, monkeypatch):
    monkeypatch.setattr(runs, "loadable_pages", lambda tokens, page: tokens // page)
    recorder = Recorder()
    with attach(tiny, settings(host=9), witness=recorder) as cached:
        cached.generate(WHOLE, 4)
        settle(cached)
        try:
            result = cached.generate(WHOLE, 4)
        except (IndexError, RuntimeError):  # nothing was left to compute
            return
        said = [recorder.programs[0].tokens, result.tokens]
    assert complaints(tiny, recorder, said) != []


class Slow:
    """A copy engine whose saves start late, so that rows are still being read when the next prompt comes."""

    name = "slow"

    def __init__(self, cache, go: threading.Event) -> None:
        self._inner, self._go = cache.data.engine, go
        self._pools = [pool.surface(0) for pool in cache.data.pools.values()]
        object.__setattr__(cache.data, "engine", self)

    def submit(self, source, source_slots, target, target_slots, *, layers=None):
        if not any(source is pool for pool in self._pools) and not self._go.wait(0.3):
            pass
        return self._inner.submit(source, source_slots, target, target_slots, layers=layers)


def _three_times_with_slow_saves(tiny, recorder) -> None:
    with attach(tiny, settings(host=20), witness=recorder) as cached:
        go = threading.Event()
        Slow(cached.cache, go)
        cached.generate(A, 2)
        cached.generate(B, 2)
        go.set()
        settle(cached)
        work(cached, [A, B])


def test_rows_are_not_reused_while_a_save_reads_them(tiny):
    recorder = Recorder()
    _three_times_with_slow_saves(tiny, recorder)
    assert recorder.restored_pages == 6
    assert complaints(tiny, recorder) == []


def test_reusing_rows_at_once_is_found(tiny, monkeypatch):
    monkeypatch.setattr(TransformersCache, "_await_rows", lambda self: None)
    recorder = Recorder()
    _three_times_with_slow_saves(tiny, recorder)
    assert any(text.startswith("bytes") for text in complaints(tiny, recorder))


def test_a_save_that_hangs_costs_new_rows_not_wrong_ones(tiny, monkeypatch):
    monkeypatch.setattr(runs, "ROWS_S", 0.1)
    recorder, go = Recorder(), threading.Event()
    limits = Deadlines(fetch_s=0.2)
    with attach(tiny, settings(host=20, deadlines=limits), witness=recorder) as cached:
        slow = Slow(cached.cache, go)
        slow._go = type("Never", (), {"wait": staticmethod(lambda _s: go.wait(30))})
        cached.generate(A, 2)
        first = cached._rows._memory
        began = time.monotonic()
        for _ in range(3):
            cached.generate(B, 2)
        assert time.monotonic() - began < 10
        assert cached._rows._memory is not first
        assert cached.errors.pop("UnavailableError") == 2  # two loads that wait for the save
        assert len(cached._lingering) == 3
        go.set()
        settle(cached)
        work(cached, [A, B])
        assert cached._lingering == []
        assert len(cached._rows._bound) == 1
    assert recorder.restored_pages == 6
    assert complaints(tiny, recorder) == []
