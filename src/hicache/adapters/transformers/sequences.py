"""Sequences that run together, for whoever drives the model: the way in that ``model.generate`` takes, too.

    with cached.sequences(ids) as held:
        out = model(input_ids=ids[:, held.length :], past_key_values=held.cache)
        held.wrote(ids)

What the cache has of the prompts lies in ``held.cache`` when the block begins. When it ends, the pages that are full
are offered: of the prompts, or of as many tokens as :meth:`Sequences.wrote` was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from hicache.adapters.transformers.result import Served
from hicache.adapters.transformers.runs import Run
from hicache.errors import ConfigError

Begin = Callable[[Sequence[Run]], tuple[Any, int]]
"""Opens the runs and loads what there is; returns the model's cache object and how many columns are filled."""

End = Callable[[Sequence[Run], int, bool], Served]
"""Offers the full pages of so many written columns, but of an aborted block, and leaves."""


class Sequences:
    """Prompts that run together in one batch, left-padded to one length; a context manager.

    cache: the object that the model's forward takes as its cache, while the block runs. length: how many columns of
    it are filled already; the model must compute the others. served: where the prompts' KV came from, at the end.
    """

    def __init__(self, begin: Begin, end: End, prompts: Sequence[list[int]], offsets: Sequence[int]) -> None:
        self._begin = begin
        self._end = end
        self.runs = [
            Run(list(prompt), len(prompt), row, offset)
            for row, (prompt, offset) in enumerate(zip(prompts, offsets, strict=True))
        ]
        self.width = max(offset + len(prompt) for prompt, offset in zip(prompts, offsets, strict=True))
        self.cache: Any = None
        self.length = 0
        self._told = False
        self.served: Served | None = None

    def begin(self) -> None:
        """Load what there is: the block's beginning, where it is wanted earlier."""
        self.cache, self.length = self._begin(self.runs)

    def __enter__(self) -> Self:
        if self.cache is None:
            self.begin()
        return self

    def wrote(self, ids: Any) -> None:
        """The tokens of every column so far, padding and prompts included: a tensor or list of rows."""
        rows = ids.tolist() if hasattr(ids, "tolist") else [list(row) for row in ids]
        if len(rows) != len(self.runs):
            raise ConfigError("one row for each sequence", rows=len(rows), sequences=len(self.runs))
        for run, row in zip(self.runs, rows, strict=True):
            tokens = row[run.offset :]
            if tokens[: run.prompt] != run.ids[: run.prompt]:
                raise ConfigError("these tokens do not begin with the sequence's prompt", row=run.row)
            run.ids = tokens
        self._told = True

    def _written(self) -> int:
        """Columns that hold the tokens we know: no others of a mix, and none that were written twice without a word."""
        written: int = min(layer.held for layer in self.cache.layers)
        if any(layer.is_mixed for layer in self.cache.layers):
            written = min(written, self.width)
        if not self._told:
            written = min(
                [written, *(layer.lowest for layer in self.cache.layers if layer.lowest is not None)]
            )
        return written

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        written = self._written()
        for layer in self.cache.layers:
            layer.end()
        abort = kind is not None and not issubclass(kind, Exception)
        self.served = self._end(self.runs, written, abort)
