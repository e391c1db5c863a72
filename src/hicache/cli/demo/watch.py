"""Who watches the pages come back: a recorder, a clock for its work, and, for a test, a spoiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hicache.data.copy.base import Bytes
from hicache.keys import PageKey
from hicache.records import Where
from hicache.testing.replay import Recorder

WHERE = {"device": Where.DEVICE, "host": Where.HOST, "storage": Where.STORE}


class Watch:
    """Passes on to a recorder what a generation does.

    seconds: what checking has cost the generation before its first token; not part of what a hit costs. spoil: the
    tier whose pages are overwritten with zeros after they have come back and before anyone looks.
    """

    def __init__(self, recorder: Recorder, spoil: str = "") -> None:
        self.recorder = recorder
        self.loaded: Callable[[], Mapping[Where, int]] = dict  # pages loaded so far from each tier
        self.seconds = 0.0
        self._spoil = WHERE.get(spoil)
        self._before: dict[Where, int] = {}

    def began(self, prompt: Sequence[int], page_tokens: int) -> None:
        """A generation begins."""
        began = time.perf_counter()
        self._before = dict(self.loaded())
        self.recorder.began(prompt, page_tokens)
        self.seconds = time.perf_counter() - began

    def restored(self, page: int, key: PageKey, rows: Sequence[Bytes]) -> None:
        """A page has come back."""
        began = time.perf_counter()
        if self._spoil is not None and self._source(page) is self._spoil:
            for row in rows:
                row[...] = 0
        self.recorder.restored(page, key, rows)
        self.seconds += time.perf_counter() - began

    def called(self, start: int, end: int, token: int) -> None:
        """A forward call has returned."""
        self.recorder.called(start, end, token)

    def offered(self, page: int, key: PageKey, rows: Sequence[Bytes]) -> None:
        """A page is given to the cache."""
        self.recorder.offered(page, key, rows)

    def _source(self, page: int) -> Where:
        """Where a page came from: what a tier holds of a prompt is a beginning of it, and a higher tier comes first."""
        now = self.loaded()
        for where in WHERE.values():
            page -= now.get(where, 0) - self._before.get(where, 0)
            if page < 0:
                return where
        return Where.STORE
