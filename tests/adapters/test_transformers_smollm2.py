"""A real model: two combinations on SmolLM2-135M, in float32 and bfloat16, with a restart."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from hits import complaints

from hicache.adapters.transformers import attach
from hicache.settings import load
from hicache.testing.model import smollm2_dir
from hicache.testing.replay import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHARED = "The lighthouse keeper wrote down the weather, the ships and the birds of every single day. " * 8
ENDINGS = (
    "On the first of May there was",
    "The oldest ship of all was called",
    "On the first of May there was",
)
PAGE = 16


@pytest.mark.parametrize(
    "dtype,tiers,chunk",
    [
        ("float32", {"device": {"bytes": "16MiB"}, "host": {"bytes": "32MiB"}, "layout": "page_first"}, None),
        (
            "bfloat16",
            {"host": {"bytes": "16MiB"}, "layout": "page_head", "into_store": "back", "fetch_at": "lookup"},
            64,
        ),
    ],
    ids=["float32", "bfloat16"],
)
def test_a_shared_beginning_is_computed_once_and_found_after_a_restart(tmp_path, dtype, tiers, chunk):
    folder = smollm2_dir(dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(SHARED + ending).input_ids for ending in ENDINGS]
    shared = next(i for i, (a, b) in enumerate(zip(*prompts[:2], strict=False)) if a != b) // PAGE * PAGE
    assert shared >= 8 * PAGE
    store = {"type": "segment", "path": str(tmp_path), "cap": "256MiB"}
    settings = load(environ={}, page_tokens=PAGE, store=store, **tiers)
    recorder, results = Recorder(), []
    for _ in range(2):
        with attach(model, settings, witness=recorder, prefill_chunk=chunk) as cached:
            for prompt in prompts:
                results.append(cached.generate(prompt, 8))
                cached.cache.run_until(lambda c=cached: c.cache.controller.idle, 20)
            cached.cache.controller.check()
            assert not cached.errors
    assert results[0].hit_tokens == 0
    assert results[1].hit_tokens == shared
    assert results[2].hit_tokens == (len(prompts[2]) - 1) // PAGE * PAGE
    assert results[3].sources["store"] == results[2].hit_tokens
    assert results[3].ttft_s < results[0].ttft_s
    if dtype == "float32":  # a cold run is cut differently: in 16 bits even its tokens may differ
        assert results[0].tokens == results[2].tokens == results[3].tokens
    assert complaints(model, recorder) == []


def calls(tokenizer, prompts):
    """A few calls of ``generate``, as keywords."""
    pad = tokenizer.eos_token_id
    one = {
        "input_ids": torch.tensor([prompts[0]]),
        "attention_mask": torch.ones((1, len(prompts[0])), dtype=int),
    }
    width = max(map(len, prompts))
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    four = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return {
        "greedy": one,
        "sampled": {**one, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
        "beams": {**one, "num_beams": 2},
        "prompt look-up": {**one, "prompt_lookup_num_tokens": 4},
        "stop strings": {**one, "stop_strings": [" the", "."], "tokenizer": tokenizer},
        "a batch": four,
    }


def test_calls_of_generate_say_the_same_with_the_cache_as_without(tmp_path):
    folder = smollm2_dir("float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(SHARED[start:] + ENDINGS[1]).input_ids for start in (0, 13, 40, 7)]
    settings = load(environ={}, page_tokens=PAGE, host={"bytes": "96MiB"})

    def run(kwargs):
        torch.manual_seed(5)
        return model.generate(**{"do_sample": False, **kwargs}, max_new_tokens=6).tolist()

    with torch.inference_mode():
        for name, kwargs in calls(tokenizer, prompts).items():
            plain = run(kwargs)
            with attach(model, settings) as cached:
                assert run(kwargs) == plain, name
                cached.cache.run_until(lambda c=cached: c.cache.controller.idle, 20)
                assert run(kwargs) == plain, name
                assert cached.last.hit_tokens > cached.last.prompt_tokens * 0.8, name
                assert (cached.errors, cached.uncacheable) == ({}, {})


def test_a_worker_thread_streams():
    folder = smollm2_dir("float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(SHARED + ENDINGS[0], return_tensors="pt")
    said = []
    with attach(model, load(environ={}, page_tokens=PAGE, host={"bytes": "32MiB"})) as cached:
        for _ in range(2):
            streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=120.0)
            asked = {**prompt, "streamer": streamer, "max_new_tokens": 8, "do_sample": False}
            worker = threading.Thread(target=model.generate, kwargs=asked)
            worker.start()
            said.append(list(streamer))
            worker.join(60)
            cached.cache.run_until(lambda c=cached: c.cache.controller.idle, 20)
        assert cached.last.hit_tokens == (prompt.input_ids.shape[1] - 1) // PAGE * PAGE
    assert said[0] == said[1]
    assert len(said[0]) > 3
