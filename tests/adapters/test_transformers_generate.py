"""Calls of ``model.generate``: with the cache they say what they say without it, cut into the same forward calls.

Each call runs three times: without a cache, with an empty one, and with what the second has left. The second must
give the very logits of the first. The third is compared with a run of Transformers' own cache, cropped to as many
tokens as came back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from hits import settle, spoil_loads, zeros
from models import latent, qwen, words

from hicache.adapters.transformers import attach
from hicache.records import Where
from hicache.settings import load
from hicache.testing.model import tiny_model

PAGE = 4
LONG = 8000
ONE_HEAD = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # attention of unequal widths is slow on a CPU
PAD = 0


def tokens(number: int, seed: int = 3) -> list[int]:
    return [1 + (seed * 131 + place * place * 7 + place * seed) % 500 for place in range(number)]


def rows(*lengths: int, alike: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of so many tokens, left-padded, of which the first ``alike`` are the same."""
    width = max(lengths)
    ids = [[PAD] * (width - length) + [*tokens(alike), *tokens(width, length)][:length] for length in lengths]
    mask = [[0] * (width - length) + [1] * length for length in lengths]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


class Louder(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 1.5 + (input_ids[:, -1:] % 3)


class StopAt(transformers.StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@dataclass
class Call:
    """Arguments of a call, made anew each time. several: rows that Transformers makes of each prompt."""

    more: Callable[[], dict] = dict
    prompt: dict[str, torch.Tensor] = field(default_factory=lambda: rows(45))
    several: int = 1
    chunk: int = 1 << 30
    exactly: bool = (
        True  # not where Transformers cuts it otherwise, or where a page of one row serves another
    )

    def arguments(self) -> dict:
        wanted = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD, **self.prompt, **self.more()}
        return {name: value for name, value in wanted.items() if value is not None}

    def run(self, model, **more):
        torch.manual_seed(11)
        return model.generate(**self.arguments(), return_dict_in_generate=True, output_logits=True, **more)


CONFIG = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=PAD, num_beams=2)

CALLS = {
    "greedy": Call(),
    "one new token": Call(lambda: {"max_new_tokens": 1}),
    "a prompt of one token": Call(prompt=rows(1)),
    "a prompt of whole pages": Call(prompt=rows(32)),
    "max_length": Call(lambda: {"max_new_tokens": None, "max_length": 50}),
    "a batch of four lengths": Call(prompt=rows(45, 30, 12, 44)),
    "a batch without its mask": Call(lambda: {"attention_mask": None}, rows(45, 30, 12, 44)),
    "a batch that begins alike": Call(prompt=rows(45, 30, 12, 44, alike=17), exactly=False),
    "the same prompt twice": Call(prompt=rows(45, 45), exactly=False),
    "sampling": Call(lambda: {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}),
    "sampling a batch": Call(lambda: {"do_sample": True}, rows(45, 30)),
    "three samples of each": Call(
        lambda: {"do_sample": True, "num_return_sequences": 3}, rows(45, 30), several=3
    ),
    "beams": Call(lambda: {"num_beams": 3, "num_return_sequences": 2}, several=3),
    "beams of a batch": Call(lambda: {"num_beams": 2, "early_stopping": True}, rows(45, 30), several=2),
    "sampled beams": Call(lambda: {"num_beams": 3, "do_sample": True}, several=3),
    "a configuration object": Call(
        lambda: {
            "generation_config": CONFIG,
            "max_new_tokens": None,
            "do_sample": None,
            "pad_token_id": None,
        },
        several=2,
    ),
    "an assistant": Call(lambda: {"assistant_model": tiny_model(5)}, exactly=False),
    "prompt look-up": Call(lambda: {"prompt_lookup_num_tokens": 3}, exactly=False),
    "stop strings": Call(lambda: {"stop_strings": ["2 ", "7 "], "tokenizer": words()}),
    "end tokens": Call(lambda: {"eos_token_id": list(range(1, 512, 2))}),
    "end tokens in a batch": Call(lambda: {"eos_token_id": list(range(3, 512, 9))}, rows(45, 30, 12, 44)),
    "repetition penalty": Call(lambda: {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}),
    "a logits processor": Call(
        lambda: {"logits_processor": transformers.LogitsProcessorList([Louder()])}, rows(45, 30)
    ),
    "a stopping criterion": Call(
        lambda: {"stopping_criteria": transformers.StoppingCriteriaList([StopAt(49)]), "max_new_tokens": 40}
    ),
    "allowed tokens": Call(lambda: {"prefix_allowed_tokens_fn": lambda _row, _ids: list(range(40, 90))}),
    "at least so many": Call(lambda: {"min_new_tokens": 7, "eos_token_id": list(range(3, 512, 3))}),
    "guidance": Call(lambda: {"guidance_scale": 1.6, "negative_prompt_ids": torch.tensor([tokens(9, 8)])}),
    "prefill in chunks": Call(lambda: {"prefill_chunk_size": 7}, chunk=7),
}

EARLY = ("stop strings", "end tokens", "a stopping criterion")

KINDS = {"llama": tiny_model, "qwen": qwen, "deepseek": latent}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return KINDS[request.param]()


def attached(model, pages: int = 400, page_tokens: int = PAGE):
    from hicache.adapters.transformers.probe import probe

    size = pages * probe(model).spec(page_tokens).page_nbytes + (1 << 20)
    return attach(
        model, load(environ={}, page_tokens=page_tokens, layout="layer_first", host={"bytes": size})
    )


def cropped(model, call: Call, columns: int):
    """Transformers' own cache of the call's prompts, as far as ``columns``."""
    ids = call.prompt["input_ids"].repeat_interleave(call.several, 0)
    mask = call.prompt["attention_mask"].repeat_interleave(call.several, 0)
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    cache = None
    with torch.no_grad():
        for start in range(0, ids.shape[1], call.chunk):
            end = min(start + call.chunk, ids.shape[1])
            part = {"input_ids": ids[:, start:end], "position_ids": places[:, start:end], "logits_to_keep": 1}
            seen = None if mask.all() else mask[:, :end]
            cache = model(**part, attention_mask=seen, cache=cache, use_cache=True).cache
    cache.crop(columns - ids.shape[1])
    return cache


def same(one, other, *, exactly: bool = True) -> None:
    assert torch.equal(one.sequences, other.sequences)
    assert len(one.logits) == len(other.logits)
    for left, right in zip(one.logits, other.logits, strict=True):
        if exactly:
            assert torch.equal(left, right)
        else:
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    assert one.cache.get_seq_length() == other.cache.get_seq_length()


def loadable(call: Call, page: int = PAGE) -> int:
    """How many columns can come back: those that every row has pages for."""
    mask = call.prompt["attention_mask"]
    lengths = mask.sum(1).tolist()
    offsets = [mask.shape[1] - length for length in lengths]
    pages = [(length - 1) // page for length in lengths]
    if not any(pages):
        return 0
    return min(offset + count * page for offset, count in zip(offsets, pages, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_the_same_with_the_cache_as_without(model, name):
    call = CALLS[name]
    plain = call.run(model)
    assert plain.sequences.shape[1] < 45 + 9 or name not in EARLY
    again, columns = None, loadable(call)
    if columns and call.exactly:
        again = call.run(model, cache=cropped(model, call, columns))
    with attached(model) as cached:
        same(call.run(model), plain)
        assert cached.last.sources["computed"] == cached.last.prompt_tokens
        settle(cached)
        third = call.run(model)
        assert cached.last.hit_tokens == call.several * sum(
            max(0, columns - offset) for offset in (call.prompt["attention_mask"] == 0).sum(1).tolist()
        )
        assert sum(cached.last.reasons.values()) == cached.last.sources["computed"]
        assert (cached.errors, cached.uncacheable) == ({}, {})
        settle(cached)
        cached.cache.controller.check()
    same(third, plain, exactly=False)
    if again is not None:
        same(third, again)
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    "name", ["greedy", "a batch of four lengths", "beams", "an assistant", "prefill in chunks"]
)
def test_zeros_instead_of_what_was_stored_are_found_out(model, name):
    """The negative control: the comparison above can fail."""
    call = CALLS[name]
    plain = call.run(model)
    with attached(model) as cached:
        spoiled = spoil_loads(cached, Where.HOST, zeros)
        same(call.run(model), plain)
        settle(cached)
        third = call.run(model)
        assert spoiled.spoiled > 0
    with pytest.raises(AssertionError):
        same(third, plain, exactly=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_8000_tokens(kind):
    size = {"max_position_embeddings": 2 * LONG}
    model = {
        "llama": tiny_model,
        "qwen": lambda: qwen(**size),
        "deepseek": lambda: latent(**size, **ONE_HEAD),
    }[kind]()
    call = Call(prompt=rows(LONG))
    columns = loadable(call, 64)
    again = call.run(model, cache=cropped(model, call, columns))
    with attached(model, 130, 64) as cached:
        call.run(model)
        settle(cached)
        third = call.run(model)
        assert cached.last.hit_tokens == columns == LONG - 64
        assert cached.errors == {}
    same(third, again)


def test_a_worker_thread_streams(model):
    call, speech = Call(prompt=rows(45)), words()
    wanted = call.run(model).sequences[0, 45:].tolist()
    with attached(model) as cached:
        for hits in (0, 44):
            streamer = transformers.TextIteratorStreamer(speech, skip_prompt=True, timeout=60.0)
            worker = threading.Thread(
                target=model.generate, kwargs={**call.arguments(), "streamer": streamer}
            )
            worker.start()
            text = "".join(streamer)
            worker.join(60)
            assert text == speech.decode(wanted, skip_special_tokens=False)
            assert cached.last.hit_tokens == hits
            settle(cached)
        assert (cached.errors, cached.uncacheable) == ({}, {})


def test_calls_of_several_threads_wait_for_one_another(model):
    calls = [Call(prompt=rows(length)) for length in (45, 30, 12, 44)]
    wanted = [call.run(model).sequences.tolist() for call in calls]
    said = [[] for _ in calls]
    with attached(model) as cached:

        def work(number: int) -> None:
            for _ in range(3):
                said[number].append(model.generate(**calls[number].arguments()).tolist())

        workers = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert (cached.errors, cached.uncacheable) == ({}, {})
        settle(cached)
        cached.cache.controller.check()
    assert said == [[one] * 3 for one in wanted]


def test_a_conversation_goes_on_from_what_was_generated(model):
    with attached(model) as cached:
        first = Call(lambda: {"max_new_tokens": 20}).run(model)
        settle(cached)
        ids = torch.cat([first.sequences, torch.tensor([tokens(6, 9)])], 1)
        turn = Call(prompt={"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        answer = turn.run(model)
        assert cached.last.hit_tokens == (first.sequences.shape[1] - 1) // PAGE * PAGE
    same(answer, turn.run(model), exactly=False)


@pytest.mark.parametrize("new", [{"max_new_tokens": 0}, {"max_new_tokens": None, "max_length": 45}])
def test_no_new_tokens_are_refused_in_the_words_of_transformers(model, new):
    call = Call(lambda: new)
    with pytest.raises(ValueError, match=r"max_(new_tokens|length)") as plain:
        call.run(model)
    with attached(model) as cached:
        with pytest.raises(ValueError, match=r"max_(new_tokens|length)") as served:
            call.run(model)
        assert str(served.value) == str(plain.value)
        settle(cached)
        assert cached.cache.controller.stats.saved == 0
        assert Call().run(model).sequences.shape[1] == 45 + 9
