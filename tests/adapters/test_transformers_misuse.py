"""What cannot be served right is refused by name; it never leaves a wrong page behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.adapters.transformers import attach
from hicache.errors import ConfigError
from hicache.settings import load
from hicache.testing.model import tiny_model

PROMPT = [token * 7 % 500 for token in range(64)]


@pytest.fixture
def cached():
    with attach(tiny_model(), load(host={"bytes": "1MiB"})) as one:
        yield one


def test_autocast_is_refused_and_poisons_nothing(cached):
    with attach(tiny_model(), load(host={"bytes": "1MiB"})) as fresh:
        want = fresh.generate([*PROMPT, 1], 8).tokens
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ConfigError, match="autocast is not supported"),
    ):
        cached.generate(PROMPT, 1)
    assert cached.generate([*PROMPT, 1], 8).tokens == want


def test_generate_from_inside_generate_is_refused_and_the_outer_one_could_go_on(cached):
    want = cached.generate([*PROMPT, 1], 6).tokens
    refused = []

    def hook(*_):
        if not refused:
            with pytest.raises(ConfigError, match="from inside generate") as error:
                cached.generate([5] * 90, 3)
            refused.append(error.value)

    handle = cached.model.register_forward_pre_hook(hook)
    assert cached.generate([*PROMPT, 1], 6).tokens == want
    handle.remove()
    assert refused


@pytest.mark.parametrize(
    "prompt", [5, None, "abc", [], [[]], [1.5], [True], [-1], [None], torch.tensor(3), [[1], [2]]], ids=str
)
def test_a_prompt_that_is_none_is_a_clear_error(cached, prompt):
    with pytest.raises(ConfigError, match="one row of at least one token id"):
        cached.generate(prompt, 1)


@pytest.mark.parametrize("eos", ["abc", 2.5, [None], True, -1], ids=str)
def test_an_end_token_that_is_none_is_a_clear_error(cached, eos):
    with pytest.raises(ConfigError, match="eos is a token id or several"):
        cached.generate(PROMPT, 1, eos=eos)


def test_integers_of_any_make_will_do(cached):
    want = cached.generate(PROMPT, 3).tokens
    rows = [np.array(PROMPT), [np.int64(t) for t in PROMPT], torch.tensor([PROMPT]), tuple(PROMPT), [PROMPT]]
    for prompt in rows:
        assert cached.generate(prompt, 3).tokens == want
    for eos in (want[1], np.int64(want[1]), torch.tensor(want[1]), [want[1]], {want[1]}, np.array([want[1]])):
        assert cached.generate(PROMPT, 3, eos=eos).tokens == want[: want.index(want[1]) + 1]
