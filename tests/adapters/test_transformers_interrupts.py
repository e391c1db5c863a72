"""Ctrl-C in the middle of anything costs the cache at most, never a wrong token or a hang."""

from __future__ import annotations

import sys

import pytest

from hicache.adapters.transformers import attach
from hicache.settings import load
from hicache.testing.model import tiny_model

PROMPT = [token * 7 % 500 for token in range(70)]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of our own code that runs in this thread."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame, event, arg):
        if "/hicache/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("line", range(200, 3200, 250))
def test_generation_goes_on_rightly_after_an_interrupt(line):
    model = tiny_model()
    settings = load(
        page_tokens=8,
        device={"bytes": "64KiB"},
        host={"bytes": "128KiB"},
        store={"type": "memory", "cap": "1MiB"},
    )
    with attach(model, settings) as cached:
        want = cached.generate(PROMPT, 4).tokens
        other = cached.generate([*PROMPT[:40], 1, 2, 3], 4).tokens
        sys.settrace(Interrupt(line))
        try:
            cached.generate([*PROMPT[:48], 9, 9, 9], 4)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        for _ in range(2):
            assert cached.generate(PROMPT, 4).tokens == want
            assert cached.generate([*PROMPT[:40], 1, 2, 3], 4).tokens == other
