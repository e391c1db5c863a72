"""The XPU platform: known by name, and refused with the reason."""

from __future__ import annotations

from hicache.capability import Capabilities

DECLARED = Capabilities(
    platform="xpu",
    refused="xpu is known by name only: no copy engine has been written for it, or tested on it",
)


def detect() -> Capabilities:
    """Nothing is looked for: there would be nothing to use it."""
    return DECLARED
