"""The contract of a platform: what it can do, and memory to put pages in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.capability import Capabilities
from hicache.records import Where

Progress = Callable[[int, int], None]
"""Called with (bytes ready, bytes in all) while memory is being made ready."""


class Buffer(Protocol):
    """Zeroed memory of one tier, ours until it is closed."""

    nbytes: int

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The memory as one writable row of bytes; InvariantError once closed."""
        ...

    def close(self) -> None:
        """Give the memory back as soon as the last view of it is gone. Calling it again does nothing."""
        ...


class Platform(Protocol):
    """Where tiers get their memory."""

    name: str

    def capabilities(self) -> Capabilities:
        """What this platform can do here and now."""
        ...

    def alloc(self, nbytes: int, where: Where, *, progress: Progress | None = None) -> Buffer:
        """Exactly ``nbytes`` of zeroed memory for the tier ``where``; CapacityError when they cannot be had."""
        ...
