"""What a piece (platform, copy engine, layout, store) declares about itself: pure records, no heavy imports.

A declaration never guesses: an ability is there, or it is absent with the reason. Every piece answers
``refuses(...) -> str | None``: why it cannot serve what is asked, or None.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.layout import Layout, undefined
from hicache.spec import CacheSpec


class Direction(enum.Enum):
    """Which way bytes travel, seen from the tier we own."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a platform can do. ``missing`` maps each ability it lacks to the reason."""

    platform: str
    abilities: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, ability: str) -> str | None:
        """Why ``ability`` is not there, or None when it is."""
        if ability in self.abilities:
            return None
        return self.missing.get(ability, f"{self.platform} does not declare {ability}")


def layout_refuses(spec: CacheSpec, layout: Layout) -> str | None:
    """Why ``layout`` cannot hold every group of ``spec``, or None."""
    for group in spec.groups:
        reason = undefined(group, layout)
        if reason:
            return f"group {group.name!r}: {reason}"
    return None
