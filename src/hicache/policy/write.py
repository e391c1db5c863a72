"""When a page is written down a leg: to the host tier, or to the store."""

from __future__ import annotations

import enum


class WritePolicy(enum.Enum):
    """One choice a leg.

    THROUGH: as soon as the page exists. SELECTIVE: once a second request has wanted it. BACK: only when it is
    evicted from the tier above.
    """

    THROUGH = "through"
    SELECTIVE = "selective"
    BACK = "back"

    @property
    def hits(self) -> int:
        """How many requests must have wanted a page before it is written on their way (0: never that way)."""
        return {WritePolicy.THROUGH: 1, WritePolicy.SELECTIVE: 2, WritePolicy.BACK: 0}[self]
