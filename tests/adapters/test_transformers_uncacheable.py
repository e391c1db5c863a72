"""What pages cannot serve runs as without a cache, counted by the name of what stood against it; nothing is stored."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from hits import A, B, settings, settle
from models import SMALL, made

from hicache.adapters.transformers import attach
from hicache.adapters.transformers.rows import Rows
from hicache.errors import ConfigError, InvariantError, UnavailableError
from hicache.testing.model import tiny_model

IDS = torch.tensor([[*A, *B]])
ONES = torch.ones_like(IDS)
TWO = torch.tensor([[*A], [*B]])


def run(model, **more):
    torch.manual_seed(4)
    wanted = {"input_ids": IDS, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **more}
    return model.generate(**{name: value for name, value in wanted.items() if value is not None})


def own_cache(model):
    return transformers.DynamicCache(config=model.config)


def right_padded():
    return torch.cat([torch.ones((1, 20)), torch.zeros((1, 8))], 1).long()


def hole():
    mask = torch.ones_like(IDS)
    mask[0, 9] = 0
    return mask


def embeds(model):
    return model.get_input_embeddings()(IDS).detach()


CALLS = {
    "inputs_embeds": lambda model: {"input_ids": None, "inputs_embeds": embeds(model)},
    "past_key_values": lambda model: {"past_key_values": own_cache(model)},
    "cache": lambda model: {"cache": own_cache(model)},
    "use_cache": lambda _: {"use_cache": False},
    "cache_implementation": lambda _: {"cache_implementation": "static"},
    "output_hidden_states": lambda _: {"output_hidden_states": True, "return_dict_in_generate": True},
    "position_ids": lambda _: {"position_ids": torch.arange(5, 5 + IDS.shape[1])[None]},
    "attention_mask": lambda _: {"attention_mask": hole()},
    "training": lambda _: {},
    "custom_generate": lambda _: {"custom_generate": lambda model, input_ids, **_more: input_ids + 1},
    "assistant_early_exit": lambda _: {"assistant_early_exit": 1},
    "arguments": lambda _: {"max_new_tokens": "many"},
    "no_such_argument": lambda _: {"no_such_argument": 3},
    "inputs": lambda _: {"input_ids": None, "bos_token_id": 3},
}
FAILS = {"arguments": TypeError, "no_such_argument": ValueError}


def outcome(model, name):
    if name == "training":
        model.train()
    try:
        found = run(model, **CALLS[name](model))
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    finally:
        model.eval()
    return getattr(found, "sequences", found).tolist()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_it_says_the_same_is_counted_by_name_and_stores_nothing(name):
    model = tiny_model()
    plain = outcome(model, name)
    assert (plain[0] == FAILS[name]) if name in FAILS else isinstance(plain, list)
    with attach(model, settings(host=40)) as cached:
        assert outcome(model, name) == plain
        assert cached.uncacheable.pop(name) == 1
        assert set(cached.uncacheable) <= {"is_assistant"}  # an early exit asks the model itself for a draft
        assert (cached.last, cached.errors) == (None, {})
        settle(cached)
        assert cached.cache.controller.stats.requests == 0
        run(model)
        assert cached.last.prompt_tokens == IDS.shape[1]


def test_right_padding_and_autocast(monkeypatch):
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        run(model, attention_mask=right_padded())
        assert cached.uncacheable == {"attention_mask": 1}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            said = run(model)
        assert cached.uncacheable == {"attention_mask": 1, "autocast": 1}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(said, run(model))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "original_max_position_embeddings": 64, "factor": 8.0},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_that_depends_on_the_length_is_refused_at_the_start_and_the_model_left_alone(rope):
    config = transformers.LlamaConfig(**SMALL, head_dim=8, rope_parameters={"rope_theta": 10_000.0, **rope})
    model = made(config)
    with pytest.raises(ConfigError, match="depend on the sequence's length") as refusal:
        attach(model, settings(host=4))
    assert refusal.value.context["rope_type"] == rope["rope_type"]
    assert "generate" not in vars(model)


# ---- what callers keep


def test_a_cache_that_a_caller_keeps_is_transformers_own_and_stays_as_it_is():
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        first = run(model, return_dict_in_generate=True)
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in first.cache.layers]
        run(model, input_ids=torch.tensor([[*B, *B]]))
        assert type(first.cache) is transformers.DynamicCache
        assert first.cache.get_seq_length() == IDS.shape[1] + 4
        assert all(
            torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
            for layer, (keys, values) in zip(first.cache.layers, kept, strict=True)
        )
        ids = torch.cat([first.sequences, torch.tensor([[9, 8]])], 1)
        said = run(model, input_ids=ids, cache=first.cache)
        assert cached.uncacheable == {"cache": 1}
    assert torch.equal(said, run(model, input_ids=ids))


@pytest.mark.parametrize("inference", [False, True])
def test_rows_may_grow_in_one_grad_mode_and_be_used_in_another(inference, monkeypatch):
    from hicache.adapters.transformers import runs

    monkeypatch.setattr(runs, "ROOM_TOKENS", 1)
    model = tiny_model()
    plain = run(model, max_new_tokens=60)
    with attach(model, settings(host=90)) as cached:
        with torch.inference_mode(inference):
            said = run(model, max_new_tokens=60)
        settle(cached)
        assert torch.equal(said, plain)
        assert torch.equal(run(model, max_new_tokens=60), plain)
        cached.generate(IDS, 60)
        assert torch.equal(run(model, max_new_tokens=60), plain)
        assert (cached.errors, cached.uncacheable) == ({}, {})


# ---- driving the model oneself


def by_hand(model, cached, ids, mask=None, *, steps: int = 4, spelling: str = "cache"):
    """A loop of one's own."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad(), cached.sequences(ids, mask) as held:
        at = held.length
        for _ in range(steps):
            places = (mask.cumsum(-1) - 1).clamp(min=0)
            out = model(
                input_ids=ids[:, at:],
                attention_mask=mask,
                position_ids=places[:, at:],
                **{spelling: held.cache},
            )
            at = ids.shape[1]
            ids = torch.cat([ids, out.logits[:, -1].argmax(-1)[:, None]], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        held.wrote(ids)
    return ids, held


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("spelling", ["cache", "past_key_values"])
def test_a_loop_of_ones_own_stores_and_finds_what_generate_does(spelling):
    model = tiny_model()
    plain = run(model, max_new_tokens=4)
    with attach(model, settings(host=40)) as cached:
        ids, held = by_hand(model, cached, IDS, spelling=spelling)
        assert torch.equal(ids, plain)
        assert held.served.sources == {"device": 0, "host": 0, "store": 0, "computed": 28}
        settle(cached)
        assert torch.equal(run(model, max_new_tokens=4), plain)
        assert cached.last.hit_tokens == 24
        settle(cached)
        again, held = by_hand(model, cached, ids, spelling=spelling)
        assert held.length == held.served.hit_tokens == 28
        with pytest.raises(ConfigError, match="belong to a sequence that has ended"):
            held.cache.layers[0].update(torch.zeros((1, 2, 1, 16)), torch.zeros((1, 2, 1, 16)))
    assert torch.equal(again, run(model, input_ids=plain, max_new_tokens=4))


def test_a_padded_batch_by_hand():
    model = tiny_model()
    ids = torch.tensor([[0] * 6 + A[:8], B])
    mask = (ids != 0).long()
    plain = run(model, input_ids=ids, attention_mask=mask, max_new_tokens=4)
    with attach(model, settings(host=40)) as cached:
        assert torch.equal(by_hand(model, cached, ids, mask)[0], plain)
        settle(cached)
        again, held = by_hand(model, cached, ids, mask)
        assert held.length == 10
        assert held.served.sources["host"] == 4 + 10
        assert held.served.reasons == {"tail": 4 + 2, "batch": 2}
    assert torch.equal(again, plain)


def test_sequences_that_go_on_from_each_other_leave_their_prompts_and_nothing_else():
    model = tiny_model()
    ids = torch.tensor([[*A], [*B]])
    with attach(model, settings(host=40)) as cached, torch.no_grad():
        with cached.sequences(ids) as held:
            for _ in range(4):
                rest = ids if ids.shape[1] == len(A) else ids[:, -1:]
                out = model(input_ids=rest, cache=held.cache)
                ids = torch.cat([ids, out.logits[:, -1].argmax(-1)[:, None]], 1)
            turned = torch.cat([torch.tensor([[*A], [*B]]), ids[:, len(A) :].flip(0)], 1)
            held.cache.reorder_cache(torch.tensor([1, 0]))
            held.wrote(turned)
        settle(cached)
        assert cached.cache.controller.stats.saved == 2 * (len(A) // 4)


@pytest.mark.parametrize("told", [False, True])
def test_a_prompt_that_was_written_over_is_not_taken_for_what_it_was(told):
    model = tiny_model()
    ids, other = torch.tensor([A]), torch.tensor([[*A[:6], *B[6:]]])
    with attach(model, settings(host=40)) as cached, torch.no_grad():
        with cached.sequences(ids) as held:
            model(input_ids=ids, cache=held.cache)
            held.cache.crop(-8)
            model(input_ids=(ids if told else other)[:, 6:], cache=held.cache)
            if told:
                held.wrote(ids)
        settle(cached)
        assert cached.cache.controller.stats.saved == (3 if told else 1)


def test_misuse_of_sequences_is_refused_by_name():
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        for ids, mask in [(TWO, hole()), (IDS, hole()), (torch.zeros((2, 0)), None), ([], None)]:
            with pytest.raises(ConfigError):
                cached.sequences(ids, mask)
        with cached.sequences(A) as held:
            with pytest.raises(ConfigError, match="do not begin with the sequence's prompt"):
                held.wrote([B])
            with pytest.raises(ConfigError, match="one row for each sequence"):
                held.wrote([A, B])
            with pytest.raises(ConfigError, match="from inside generate"):
                cached.generate(A, 2)
            run(model)
            assert cached.uncacheable == {"nested": 1}
        run(model)
        assert cached.last is not None
    with pytest.raises(ConfigError, match="closed"), cached.sequences(A):
        pass


# ---- errors inside the cache, and callers that stop


@pytest.mark.parametrize(
    "error", [UnavailableError("not now"), MemoryError("full"), OSError("gone")], ids=repr
)
@pytest.mark.parametrize("where", ["load", "publish", "open", "match", "close"])
def test_an_error_inside_the_cache_costs_a_recomputation_and_a_count(monkeypatch, where, error):
    model = tiny_model()
    plain = run(model)
    with attach(model, settings(host=40)) as cached:
        run(model)
        settle(cached)

        def fails(*_args, **_more):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(cached.cache.controller, where, fails)
            assert torch.equal(run(model, input_ids=torch.cat([IDS, IDS], 1))[:, :28], IDS)
            assert torch.equal(run(model), plain)
        assert cached.errors[type(error).__name__] >= 1
        settle(cached)
        assert torch.equal(run(model), plain)
        settle(cached)
        run(model)
        assert cached.last.hit_tokens == 24
        cached.cache.controller.check()


def test_no_memory_for_rows_costs_a_recomputation_and_a_count(monkeypatch):
    model = tiny_model()
    plain = run(model)
    with attach(model, settings(host=40)) as cached:
        run(model)
        settle(cached)
        with monkeypatch.context() as patch:
            patch.setattr(Rows, "reserve", lambda *_args: torch.empty(1 << 60))
            assert torch.equal(run(model), plain)
        assert cached.errors == {"RuntimeError": 1}
        assert cached.last is None
        run(model)
        assert cached.last.hit_tokens == 24


def test_our_own_bugs_are_not_hidden(monkeypatch):
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:

        def bug(*_args, **_more):
            raise InvariantError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(cached.cache.controller, "publish", bug)
            with pytest.raises(InvariantError):
                run(model)
        assert run(model).shape == (1, 33)
        assert cached.last is not None


@pytest.mark.parametrize("error, kept", [(RuntimeError, True), (KeyboardInterrupt, False)])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_caller_that_stops_in_the_middle_keeps_the_prompt_that_was_computed(error, kept, after):
    model, steps = tiny_model(), []
    plain = run(model)

    def stop(_ids, _scores, **_):
        steps.append(1)
        if len(steps) > after:
            raise error("enough")
        return torch.zeros(1, dtype=torch.bool)

    with attach(model, settings(host=40)) as cached:
        with pytest.raises(error, match="enough"):
            run(model, stopping_criteria=transformers.StoppingCriteriaList([stop]))
        settle(cached)
        assert torch.equal(run(model), plain)
        assert cached.last.hit_tokens == (24 if kept else 0)
        assert cached.errors == {}
        cached.cache.controller.check()


def test_a_thread_that_asks_meanwhile_waits_and_is_served():
    model = tiny_model()
    inside, go, said = threading.Event(), threading.Event(), []

    def hold(_ids, _scores, **_):
        inside.set()
        assert go.wait(30)
        return torch.zeros(1, dtype=torch.bool)

    criteria = transformers.StoppingCriteriaList([hold])
    with attach(model, settings(host=40)) as cached:
        first = threading.Thread(target=lambda: run(model, stopping_criteria=criteria))
        first.start()
        assert inside.wait(30)
        second = threading.Thread(target=lambda: said.append(run(model)))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        go.set()
        first.join(30)
        second.join(30)
        assert cached.last.hit_tokens == 24
        assert cached.uncacheable == {}
    assert torch.equal(said[0], run(model))
