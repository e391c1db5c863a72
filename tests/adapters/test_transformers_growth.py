"""Rows are made when they are needed, not when they are asked for; pages survive the move."""

from __future__ import annotations

import pytest
from hits import A, complaints, settings, settle

from hicache.adapters.transformers import attach, runs
from hicache.testing.replay import Recorder


def test_a_huge_limit_costs_nothing(tiny):
    with attach(tiny, settings(host=9)) as cached:
        first = cached.generate(A, 9).tokens
        assert cached.generate(A, 10**12, eos=first[4]).tokens == first[: first.index(first[4]) + 1]
        assert cached._rows.capacity < 1000


@pytest.mark.parametrize("room", [1, 5])
def test_pages_from_before_and_after_a_growth_come_back_as_they_were(tiny, monkeypatch, room):
    monkeypatch.setattr(runs, "ROOM_TOKENS", room)
    recorder = Recorder()
    with attach(tiny, settings(host=40), witness=recorder) as cached:
        first = cached.generate(A, 80)
        assert cached._rows.capacity >= len(A) + 79
        settle(cached)
        again = cached.generate([*A, *first.tokens], 3)
        assert again.hit_tokens == (len(A) + 79) // 4 * 4
    assert complaints(tiny, recorder) == []
