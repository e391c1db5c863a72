"""Memory stays flat over thousands of generations of every kind, those included that are stopped in the middle."""

from __future__ import annotations

import gc
import random
import resource
from pathlib import Path

import pytest
import torch
import transformers
from hits import settings

from hicache.adapters.transformers import attach
from hicache.testing.model import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GENERATIONS = 2000
WARM = 500
LONGEST = 120
SEED = 20


class StopError(Exception):
    """A caller that wants no more."""


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def prompt(rng: random.Random) -> torch.Tensor:
    """One of many beginnings, and an end of its own."""
    shared = random.Random(rng.randrange(40)).choices(range(1, 500), k=60)
    return torch.tensor([shared + rng.choices(range(1, 500), k=rng.randrange(1, LONGEST - 60))])


def generate(model, cached, rng: random.Random) -> str:
    """One generation of some kind; returns which."""
    ids = prompt(rng)
    kind = rng.choice(["whole", "stopped", "interrupted", "batch", "own", "kept", "refused"])
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": rng.randrange(1, 5), "pad_token_id": 0}
    left = rng.randrange(3)

    def stop(_ids, _scores, **_):
        nonlocal left
        left -= 1
        if left < 0:
            raise (StopError if kind == "stopped" else KeyboardInterrupt)
        return torch.zeros(1, dtype=torch.bool)

    if kind in ("stopped", "interrupted"):
        asked["stopping_criteria"] = transformers.StoppingCriteriaList([stop])
    elif kind == "batch":
        ids, asked["attention_mask"] = ids.repeat(2, 1), torch.ones((2, ids.shape[1]), dtype=torch.long)
    elif kind == "kept":
        asked["return_dict_in_generate"] = True
    elif kind == "refused":
        asked["use_cache"] = False
    try:
        if kind == "own":
            cached.generate(ids, 2)
        else:
            model.generate(ids, **asked)
    except (StopError, KeyboardInterrupt):
        return kind + "!"
    return kind


def test_memory_is_flat_over_2000_generations_with_aborts(tmp_path):
    model, rng = tiny_model(), random.Random(SEED)
    print("seed", SEED)
    kinds: dict[str, int] = {}
    with attach(model, settings(device=40, host=80, store=tmp_path / "store")) as cached:
        marks = []
        for number in range(GENERATIONS + 1):
            if number >= WARM and number % 250 == 0:
                cached.cache.run_until(lambda: cached.cache.controller.idle, 20)
                cached._await_rows()
                gc.collect()
                marks.append((resident(), len(gc.get_objects())))
            kind = generate(model, cached, rng)
            kinds[kind] = kinds.get(kind, 0) + 1
        cached.cache.run_until(lambda: cached.cache.controller.idle, 20)
        cached._await_rows()
        cached.cache.controller.check()
        assert not cached.errors
        assert (cached._closing, cached._lingering, cached._rows._bound) == ([], [], {})
        assert cached.cache._inbox == {}
        assert not cached.cache.controller.books.open
    assert min(kinds.values()) > 50, kinds
    print(kinds, marks)
    nbytes, objects = ([mark[which] for mark in marks] for which in (0, 1))
    assert max(nbytes) - nbytes[0] < 8 << 20, nbytes
    assert max(objects) - objects[0] < 2000, objects
