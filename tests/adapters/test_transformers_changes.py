"""Weights that change under an attached cache are noticed before the next prompt; the model is left as it was found."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading

import pytest
import torch
from hits import A, settings, settle, spoil_loads, zeros
from models import qwen

from hicache.adapters.transformers import attach
from hicache.adapters.transformers.hook import Generate
from hicache.errors import ConfigError
from hicache.records import Where
from hicache.testing.model import tiny_model

IDS = torch.tensor([[*A, *A[:10]]])
LOADABLE = (IDS.shape[1] - 1) // 4 * 4


def say(model, **more) -> list[int]:
    mask = torch.ones_like(IDS)
    return model.generate(
        IDS, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **more
    )[0].tolist()


def as_other_weights(model) -> None:
    with torch.no_grad():
        for name, weight in tiny_model(seed=9).named_parameters():
            model.get_parameter(name).copy_(weight)


def replaced_parameter(model) -> None:
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)


def replaced_module(model) -> None:
    other = tiny_model(seed=9)
    model.model.layers[1] = other.model.layers[1]


def loaded_state(model) -> None:
    model.load_state_dict(tiny_model(seed=9).state_dict())


def moved_data(model) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data = (
        model.model.layers[0].self_attn.v_proj.weight.data * 1.5
    )


def one_step(model) -> None:
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.eval()


CHANGES = [as_other_weights, replaced_parameter, replaced_module, loaded_state, moved_data, one_step]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_noticed_before_the_next_prompt(change):
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        before = say(model)
        settle(cached)
        assert say(model) == before
        assert cached.last.hit_tokens == LOADABLE
        change(model)
        after = say(model)
        assert cached.last.hit_tokens == 0
        settle(cached)
        assert say(model) == after
        assert cached.last.hit_tokens == LOADABLE
        settle(cached)
        cached.generate(IDS, 3)
        assert (cached.errors, cached.uncacheable) == ({}, {})
    assert after == say(model) != before


def test_weights_that_come_back_find_their_pages_again():
    model = tiny_model()
    first = copy.deepcopy(model.state_dict())
    with attach(model, settings(host=40)) as cached:
        before = say(model)
        settle(cached)
        as_other_weights(model)
        say(model)
        settle(cached)
        model.load_state_dict(first)
        assert say(model) == before
        assert cached.last.hit_tokens == LOADABLE


def test_what_torch_does_not_count_takes_a_word():
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        say(model)
        settle(cached)
        assert cached.invalidate() is False
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight.data.mul_(1.5)
        assert cached.invalidate() is True
        after = say(model)
        assert cached.last.hit_tokens == 0
    assert after == say(model)


def test_another_way_to_compute_attention_is_noticed():
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        say(model)
        settle(cached)
        model.set_attn_implementation("eager")
        say(model)
        assert cached.last.hit_tokens == 0


def test_a_model_that_keeps_other_kv_by_now_runs_without_the_cache():
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        say(model)
        settle(cached)
        model.to(torch.bfloat16)
        said = say(model)
        assert (cached.uncacheable, cached.last, cached.errors) == ({"model": 1}, None, {})
        with pytest.raises(ConfigError, match="keeps other KV than when it was attached"):
            cached.generate(IDS, 3)
        with pytest.raises(ConfigError, match="keeps other KV"):
            cached.invalidate()
        model.to(torch.float32)
        say(model)
        assert cached.uncacheable == {"model": 1}
        model.train()
        with pytest.raises(ConfigError, match="training mode"):
            cached.generate(IDS, 3)
        model.eval()
    assert said == say(model.to(torch.bfloat16))


# ---- left as it was found


def looks(model) -> dict[str, object]:
    """Everything that hangs on the model and its modules, by identity where it can change and by value where not."""
    seen = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inner = list(value.items()) if isinstance(value, dict) else value
            seen[f"{name}.{key}"] = inner if isinstance(value, dict) else id(value)
    return seen


def spoilt(_model, cached):
    spoil_loads(cached, Where.HOST, zeros)


def raising(model, cached):
    def stop(*_args):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        say(model, stopping_criteria=[stop])


def refused(model, cached):
    say(model, use_cache=False)


@pytest.mark.parametrize("what", [say, raising, refused, spoilt], ids=lambda what: what.__name__)
def test_the_model_is_left_as_it_was_found(what):
    model = tiny_model()
    before, text = looks(model), repr(model)
    with attach(model, settings(host=40)) as cached:
        assert isinstance(model.generate, Generate)
        if what is say:
            say(model)
            say(model)
        else:
            what(model, cached)
    assert looks(model) == before
    assert repr(model) == text
    assert model.generate.__func__ is type(model).generate


def test_an_error_in_the_block_or_in_closing_leaves_the_model_as_it_was_found(monkeypatch):
    model = tiny_model()
    before = looks(model)

    def fails(*_args):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), attach(model, settings(host=40)):
        fails(say(model))
    assert looks(model) == before
    cached = attach(model, settings(host=40))
    with monkeypatch.context() as patch:
        patch.setattr(cached.cache, "close", fails)
        with pytest.raises(RuntimeError, match="mine"):
            cached.close()
    assert looks(model) == before
    cached.close()


def test_a_second_cache_is_refused_until_the_first_is_closed():
    model = tiny_model()
    with attach(model, settings(host=40)):
        with pytest.raises(ConfigError, match="has a cache attached; close that one first"):
            attach(model, settings(host=40))
        say(model)
    with attach(model, settings(host=40)) as cached:
        say(model)
        assert cached.last is not None


def test_who_wraps_generate_keeps_it_and_finds_the_models_own_behind_it():
    model = tiny_model()
    plain = say(model)
    cached = attach(model, settings(host=40))
    model.generate = theirs = functools.partial(model.generate)
    assert say(model) == plain
    assert cached.last is not None
    cached.last = None
    cached.close()
    assert model.generate is theirs
    assert say(model) == plain
    assert cached.last is None


def test_what_stood_in_generate_before_is_used_and_put_back():
    model, calls = tiny_model(), []

    def mine(*args, **kwargs):
        calls.append(1)
        return type(model).generate(model, *args, **kwargs)

    model.generate = mine
    with attach(model, settings(host=40)) as cached:
        say(model)
        assert (calls, cached.last is not None) == ([1], True)
    assert model.generate is mine


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved], ids=lambda copied: copied.__name__)
def test_a_copy_of_an_attached_model_is_its_own(copied):
    model = tiny_model()
    with attach(model, settings(host=40)) as cached:
        before = say(model)
        other = copied(model)
        as_other_weights(other)
        cached.last = None
        assert say(other) != before
        assert cached.last is None
        assert other.generate.__self__ is other
        assert say(model) == before
        with attach(other, settings(host=40)):
            say(other)


def test_closing_waits_for_a_generation_of_another_thread():
    model = qwen()
    begun, said = threading.Event(), []

    def watch(ids, _scores, **_):
        begun.set()
        return torch.zeros(len(ids), dtype=torch.bool)

    cached = attach(model, settings(host=100))
    worker = threading.Thread(target=lambda: said.append(say(model, stopping_criteria=[watch])))
    worker.start()
    assert begun.wait(30)
    cached.close()
    worker.join(30)
    assert "generate" not in vars(model)
    assert said == [say(model)]
