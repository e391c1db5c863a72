"""The eviction policy's protocol: an order over pages, expressed as one number."""

from __future__ import annotations

from typing import Protocol

NO_HINT = bytes(8)


class EvictionPolicy(Protocol):
    """Gives each page an order key when it is inserted and when it is used; the lowest is evicted first.

    Only leaves are ever evicted, and a parent whose last child goes takes the larger key of the two: so touching
    the deepest page of a request is enough, and order keys may live in an index on disk, outlive a restart and
    span processes.
    """

    name: str

    def rank(self, now: int, hint: bytes) -> int:
        """The order key (0 .. 2^64 - 1) of a page used at tick ``now``; ``hint`` is 8 opaque bytes kept with it."""
        ...
