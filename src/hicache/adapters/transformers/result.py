"""What a generation has come to, and who may watch it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hicache.data.copy.base import Bytes
from hicache.keys import PageKey

SOURCES = ("device", "host", "store", "computed")
TAIL = "tail"
"""Why the end of a prompt was computed: the last token always is, and so is what does not fill a page before it."""

BATCH = "batch"
"""Why tokens were computed although their pages were there: another sequence of the batch lacked them."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where the KV of a call's prompts came from, over all its sequences, padding left out.

    sources: prompt tokens by where their KV came from (:data:`SOURCES`); they add up to ``prompt_tokens``.
    reasons: why tokens were computed, in tokens; they add up to ``sources["computed"]``. ttft_s: from the call to
    the first token; load_s: the part of it before the first forward call (making rows free, looking up, loading).
    load_bytes: what was copied into the working rows; save_bytes: what was given to the cache.
    """

    prompt_tokens: int
    sources: Mapping[str, int]
    reasons: Mapping[str, int]
    ttft_s: float
    load_s: float
    load_bytes: int
    save_bytes: int

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.prompt_tokens - self.sources["computed"]


@dataclass(frozen=True, slots=True)
class Result(Served):
    """One generation of :meth:`TransformersCache.generate`.

    tokens: what was generated. calls: (start, end) of every forward call, in order.
    """

    tokens: list[int]
    calls: Sequence[tuple[int, int]]


class Witness(Protocol):
    """Sees every page that comes back and every page that is offered; for tests (``hicache.testing.replay``)."""

    def began(self, prompt: Sequence[int], page_tokens: int) -> None:
        """A generation begins."""
        ...

    def restored(self, page: int, key: PageKey, rows: Sequence[Bytes]) -> None:
        """A page lies in the working rows; no forward call has run since the load."""
        ...

    def called(self, start: int, end: int, token: int) -> None:
        """A forward call over these positions has returned; ``token`` is the likeliest next one."""
        ...

    def offered(self, page: int, key: PageKey, rows: Sequence[Bytes]) -> None:
        """A page that forward calls filled is given to the cache."""
        ...
