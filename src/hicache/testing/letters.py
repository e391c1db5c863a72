"""Page keys that can be read: a page of a small world is a letter, and its key the letters of its prefix."""

from __future__ import annotations

from hicache.keys import PageKey

GARBAGE: PageKey = b""
"""Content that is no page."""


def key_of(prompt: str) -> PageKey:
    """A page key that can be read: the letters of its prefix."""
    return prompt.encode().ljust(32, b".")


def name_of(key: PageKey) -> str:
    """The letters back, or ``garbage``."""
    return key.decode(errors="replace").rstrip(".") or "garbage"


def chain(prompt: str) -> list[PageKey]:
    """The keys of a prompt of one-letter pages."""
    return [key_of(prompt[: n + 1]) for n in range(len(prompt))]
