"""Whatever a tier does, a generation says the same and ends in time; and what callers can get wrong is refused."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hits import AGAIN, FIRST, LOADABLE, NEW, PAGE, A, B, complaints, settings, settle, work

from hicache.adapters.transformers import attach, engine
from hicache.deadlines import Deadlines
from hicache.errors import ConfigError, InvariantError, UnavailableError
from hicache.keys import RecordKey
from hicache.records import Reason, Where
from hicache.settings import load
from hicache.testing.replay import Recorder, replay


def memory_store(load_when="always", **more):
    store = {"type": "memory", "cap": "8MiB"}
    return load(
        environ={}, page_tokens=PAGE, host={"bytes": "64KiB"}, store=store, load_when=load_when, **more
    )


def test_a_damaged_record_shortens_the_prefix_and_says_why(tiny):
    recorder = Recorder()
    with attach(tiny, memory_store(), witness=recorder) as cached:
        work(cached, [A])
        cached.cache.controller.evict(Where.HOST, 16)
        keys = cached._memo.keys(cached.cache.namespace, A)
        assert cached.cache.data.store.inner.damage(RecordKey(keys[1]), at=600)
        result = work(cached, [A])[0]
        assert result.sources == {"device": 0, "host": 0, "store": PAGE, "computed": len(A) - PAGE}
        assert result.reasons == {"tail": 2, "corrupt": 2 * PAGE}
        assert cached.cache.controller.stats.bad[Reason.CORRUPT] == 1
        assert work(cached, [A])[0].hit_tokens == LOADABLE
    assert complaints(tiny, recorder) == []


@pytest.mark.parametrize("call", ["contains", "read"])
def test_a_store_that_hangs_costs_its_deadline_and_closing_does_not_wait_for_it(tiny, call):
    recorder, go = Recorder(), threading.Event()
    limits = Deadlines(lookup_s=0.3, fetch_s=0.3, write_s=0.3, close_s=1.0)
    cached = attach(tiny, memory_store(deadlines=limits), witness=recorder)
    try:
        work(cached, [A])
        cached.cache.controller.evict(Where.HOST, 16)
        setattr(cached.cache.data.store.inner, call, lambda *_args: go.wait(60) and [])
        began = time.monotonic()
        result = cached.generate(A, NEW)
        assert result.hit_tokens == 0
        assert time.monotonic() - began < 10
        assert not cached.errors
        began = time.monotonic()
        assert cached.close() == [{"contains": "ask", "read": "read"}[call]]
        assert time.monotonic() - began < 10
        assert complaints(tiny, recorder) == []
    finally:
        go.set()


def test_a_store_that_raises_is_a_miss(tiny):
    recorder = Recorder()

    def broken(*_args):
        raise OSError("the disk has gone")

    with attach(tiny, memory_store(), witness=recorder) as cached:
        work(cached, [A])
        cached.cache.controller.evict(Where.HOST, 16)
        cached.cache.data.store.inner.read = broken
        result = work(cached, [A])[0]
        assert result.reasons == {"tail": 2, "failed": LOADABLE}
    assert complaints(tiny, recorder) == []


def test_an_error_of_the_cache_costs_a_recomputation_and_a_count(tiny, monkeypatch):
    recorder = Recorder()
    with attach(tiny, settings(host=9), witness=recorder) as cached:
        work(cached, [A])

        def refuses(*_args, **_more):
            raise UnavailableError("not now")

        with monkeypatch.context() as patch:
            patch.setattr(cached.cache.controller, "load", refuses)
            result = cached.generate(A, NEW)
        assert result.reasons == {"tail": 2, "error": LOADABLE}
        assert result.hit_tokens == 0
        with monkeypatch.context() as patch:
            patch.setattr(cached.cache.controller, "publish", refuses)
            cached.generate(B, NEW)
        assert cached.errors == {"UnavailableError": 2}
        cached.errors.clear()
        settle(cached)
        assert work(cached, [A])[0].hit_tokens == LOADABLE
    assert complaints(tiny, recorder) == []


def test_our_own_bugs_are_not_hidden(tiny, monkeypatch):
    with attach(tiny, settings(host=9)) as cached:

        def bug(*_args, **_more):
            raise InvariantError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(cached.cache.controller, "publish", bug)
            with pytest.raises(InvariantError):
                cached.generate(A, NEW)


def test_a_model_that_raises_leaves_the_cache_whole(tiny, monkeypatch):
    recorder = Recorder()
    with attach(tiny, settings(host=9), witness=recorder) as cached:
        work(cached, [A])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "forward", lambda *_args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                cached.generate(A, NEW)
        settle(cached)
        cached.cache.controller.check()
        assert work(cached, [A])[0].hit_tokens == LOADABLE


def test_a_prefix_longer_than_the_host_tier_comes_back_load_by_load(tiny, tmp_path):
    recorder = Recorder()
    with attach(tiny, settings(host=9, store=tmp_path / "s"), witness=recorder) as cached:
        work(cached, [A])
    with attach(tiny, settings(host=2, store=tmp_path / "s"), witness=recorder) as cached:
        result = work(cached, [A])[0]
        assert result.sources["store"] == LOADABLE > 2 * PAGE
        assert result.reasons == {"tail": len(A) - LOADABLE}
    assert complaints(tiny, recorder) == []


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_prefill_in_chunks(tiny, tmp_path, chunk):
    recorder = Recorder()
    chosen = settings(host=6, store=tmp_path / "s")
    with attach(tiny, chosen, witness=recorder, prefill_chunk=chunk) as cached:
        results = work(cached, FIRST)
        assert all(end - start <= chunk for result in results for start, end in result.calls)
    with attach(tiny, chosen, witness=recorder, prefill_chunk=chunk) as cached:
        assert work(cached, AGAIN)[0].sources["store"] == LOADABLE
    assert complaints(tiny, recorder) == []


@pytest.mark.parametrize("fetch_at", ["load", "lookup"])
def test_fetching_early_or_late_says_the_same(tiny, tmp_path, fetch_at):
    recorder = Recorder()
    chosen = settings(host=6, store=tmp_path / "s", fetch_at=fetch_at)
    for _ in range(2):
        with attach(tiny, chosen, witness=recorder) as cached:
            result = work(cached, [A, B, A])[0]
    assert result.sources["store"] == LOADABLE
    assert complaints(tiny, recorder) == []


def test_generating_again_with_everything_says_what_transformers_says(tiny):
    """The chunking is the same here, so Transformers' own generate is an oracle too."""
    ids = torch.tensor([A])
    with torch.inference_mode():
        wanted = tiny.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    with attach(tiny, settings(host=9)) as cached:
        first = cached.generate(ids, 9)
        assert first.tokens == wanted[0, len(A) :].tolist()
        assert cached.generate(A, 9).tokens == first.tokens
        stop = first.tokens[3]
        upto = first.tokens.index(stop) + 1
        assert cached.generate(A, 9, eos=stop).tokens == first.tokens[:upto]
        assert cached.generate(A, 9, eos=[511, stop]).tokens == first.tokens[:upto]


def test_generated_pages_are_found_by_the_next_turn(tiny):
    recorder = Recorder()
    with attach(tiny, settings(host=20), witness=recorder) as cached:
        first = cached.generate(A, 11)
        settle(cached)
        turn = [*A, *first.tokens, 5, 6]
        assert cached.generate(turn, 2).sources["host"] == (len(A) + 10) // PAGE * PAGE
    assert replay(tiny, recorder) == recorder.programs[-1].tokens
    assert complaints(tiny, recorder) == []


@pytest.mark.parametrize(
    "prompt", [[], [[1, 2], [3, 4]], torch.zeros((2, 3), dtype=torch.long), [1.5], [-1], "abc"]
)
def test_a_prompt_that_is_not_one_row_of_tokens_is_refused(tiny, prompt):
    with attach(tiny, settings(host=9)) as cached, pytest.raises(ConfigError, match="prompt"):
        cached.generate(prompt, 3)


def test_misuse_is_refused(tiny):
    with pytest.raises(ConfigError, match="unknown option"):
        attach(tiny, settings(host=9), prefil_chunk=3)
    with pytest.raises(ConfigError, match="prefill_chunk"):
        attach(tiny, settings(host=9), prefill_chunk=0)
    cached = attach(tiny, settings(host=9))
    with pytest.raises(ConfigError, match="max_new_tokens"):
        cached.generate(A, 0)
    assert cached.close() == []
    assert cached.close() == []
    with pytest.raises(ConfigError, match="closed"):
        cached.generate(A, 1)


def test_the_model_is_as_it_was(tiny):
    before = {name: id(value) for name, value in vars(tiny).items()}
    weights = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    with attach(tiny, settings(host=9)) as cached:
        cached.generate(A, 3)
    assert {name: id(value) for name, value in vars(tiny).items()} == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in tiny.state_dict().items())


def test_a_store_slower_than_the_model_is_left_alone_and_the_reason_told(tiny):
    recorder = Recorder()
    with attach(tiny, memory_store(load_when="faster"), witness=recorder) as cached:
        inner = cached.cache.data.store.inner
        read = inner.read

        def slow(*args):
            time.sleep(1.0)  # what this store takes
            return read(*args)

        work(cached, [A])
        inner.read = slow
        for reasons in ({"tail": 2}, {"tail": 2, "slower": LOADABLE}):
            cached.cache.controller.evict(Where.HOST, 16)
            result = work(cached, [A])[0]
            assert result.reasons == reasons
        text = cached.cache.metrics().text()
        assert "hicache_slower_total 3.0" in text
        assert 'hicache_estimate_seconds{of="fetch_page"}' in text
    assert complaints(tiny, recorder) == []
    with attach(tiny, memory_store()) as cached:
        work(cached, [A])
        cached.cache.computed(1000, 0.001)
        cached.cache.controller.evict(Where.HOST, 16)
        assert work(cached, [A])[0].reasons == {"tail": 2}
