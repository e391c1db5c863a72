"""Which pages are known: a row number for each, its key, its parent, and columns of numbers beside them.

A page has a row while it is in a memory tier, or while a child of it is. Looking up changes nothing.

The key table is cut into many small dictionaries, so that growing one never stalls a call; the columns are made
for as many rows as there are slots and hold no objects that the garbage collector would have to visit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain

import numpy as np

from hicache.keys import PageKey

ROOT = -1
"""The parent of a first page; also the answer to a look-up that finds nothing."""

UNKNOWN = -2
"""The parent of a row that only stands for an absent parent."""

STORED = 1
"""Flag: the store has confirmed the page since it came into memory."""

KEPT = 2
"""Flag: writing it down failed, so that under ``back`` it may be dropped instead."""

_SHARD_ROWS = 1024
_SHARDS_MAX = 256


class PageIndex:
    """Rows of pages. Tiers keep their columns (``at``: slot or -1, ``kids``: children in the tier) through :meth:`columns`.

    ``shards[key[0] & mask]`` maps a key to its row; keys are digests, so their first byte spreads them evenly.
    """

    __slots__ = (
        "_columns",
        "_free",
        "_fresh",
        "clock",
        "flags",
        "keys",
        "mask",
        "parents",
        "shards",
        "since",
        "spaces",
    )

    def __init__(self, rows: int) -> None:
        shards = 1
        while shards < _SHARDS_MAX and shards * _SHARD_ROWS < rows:
            shards *= 2
        self.mask = shards - 1
        self.shards: list[dict[PageKey, int]] = [{} for _ in range(shards)]
        self.keys = np.full(
            rows + 1, None, dtype=object
        )  # one more, so that `row + 1` can always be looked at
        self.parents = array("i", bytes(4 * rows))
        self.flags = bytearray(rows)
        self.spaces = array("H", bytes(2 * rows))  # number of the namespace
        self.since = array("Q", bytes(8 * rows))  # clock when the page came, or last left all memory
        self.clock = 0
        self._free: list[int] = []
        self._fresh = 0  # rows from here on have never been used
        self._columns: list[tuple[array[int], array[int]]] = []

    def columns(self) -> tuple[array[int], array[int]]:
        """A new pair of columns (at, kids)."""
        rows = len(self.parents)
        pair = (array("i", b"\xff" * (4 * rows)), array("i", bytes(4 * rows)))
        self._columns.append(pair)
        return pair

    def find(self, key: PageKey) -> int:
        """The row of ``key``, or -1."""
        return self.shards[key[0] & self.mask].get(key, ROOT)

    def row(self, key: PageKey, space: int, parent: int = UNKNOWN) -> int:
        """The row of ``key`` in namespace number ``space``, made if there is none; ``parent`` is set when given."""
        shard = self.shards[key[0] & self.mask]
        row = shard.get(key, ROOT)
        if row >= 0:
            if parent != UNKNOWN:
                self.parents[row] = parent
            return row
        if self._free:
            row = self._free.pop()
        else:
            row = self._fresh
            if row == len(self.parents):
                self._grow()
            self._fresh += 1
        self.keys[row] = key
        self.parents[row] = parent
        self.spaces[row] = space
        self._mark(row)
        shard[key] = row
        return row

    def _mark(self, row: int) -> None:
        """What was remembered of the row until now does not hold any more."""
        self.clock += 1
        self.since[row] = self.clock

    def _grow(self) -> None:
        """More rows than slots: only orphans' parents can make that happen."""
        more = len(self.parents) // 8 + 64
        self.keys = np.concatenate([self.keys, np.full(more, None, dtype=object)])
        self.parents.frombytes(bytes(4 * more))
        self.flags.extend(bytes(more))
        self.spaces.frombytes(bytes(2 * more))
        self.since.frombytes(bytes(8 * more))
        for at, kids in self._columns:
            at.frombytes(b"\xff" * (4 * more))
            kids.frombytes(bytes(4 * more))

    def resident(self, row: int) -> bool:
        """True when some memory tier holds the page."""
        return any(at[row] >= 0 for at, _ in self._columns)

    def children(self, row: int) -> int:
        """Children of the page, counted once for each memory tier that holds them."""
        return sum([kids[row] for _, kids in self._columns])

    def forget(self, row: int) -> None:
        """Give the row back if neither the page nor a child is in memory; its parent's too, if it stood for it only."""
        while row >= 0:
            for at, _ in self._columns:
                if at[row] >= 0:
                    return
            parent = self.parents[row]
            self.parents[row] = UNKNOWN
            self.flags[row] = 0
            self._mark(row)
            if not self.children(row):
                key = self.keys[row]
                del self.shards[key[0] & self.mask][key]
                self.keys[row] = None
                self._free.append(row)
            row = parent

    def ancestors(self, row: int) -> Iterator[int]:
        """The rows above ``row``, nearest first, as far as they are known."""
        while (row := self.parents[row]) >= 0:
            yield row

    def root_first(self) -> list[int]:
        """All rows, parents before their children; O(pages)."""
        order: dict[int, None] = {}
        for _, row in self.pages():
            chain = [row]
            while (row := self.parents[row]) >= 0 and row not in order:
                chain.append(row)
            order.update(dict.fromkeys(reversed(chain)))
        return list(order)

    def pages(self) -> Iterator[tuple[PageKey, int]]:
        """All (key, row) pairs; O(pages)."""
        return chain.from_iterable(shard.items() for shard in self.shards)
