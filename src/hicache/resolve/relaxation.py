"""What it costs to give something else than what was asked for: one small table, a sentence each.

Costs are compared, never added to anything else. Everything follows from axes and from the back ends' names, so a
new layout has its costs without a line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from hicache.layout import Layout

KERNEL, DIRECT = "kernel", "direct"

COSTS: Mapping[str, tuple[int, str]] = {
    "heads": (1, "heads outermost is of use to those who asked for it, and to nobody else"),
    "kernel to direct": (3, "both move the same bytes on every platform; only the speed differs"),
    "reorder": (4, "a page stays what it was, one run or none; its inside is ordered otherwise"),
    "page run": (6, "pages become one run or stop being one: storage then works otherwise, too"),
    "leave": (16, "whoever asks for another back end than kernel has a reason, such as busy compute units"),
    "uninvited": (64, "a back end of another package is never chosen unasked while one of ours will do"),
}


def _heads_outermost(layout: Layout) -> bool:
    return layout.axes.index("head") < layout.axes.index("plane")


def layout_cost(asked: Layout, given: Layout) -> int:
    """What it costs to give ``given`` where ``asked`` was wanted."""
    if asked.axes == given.axes:
        return 0
    cost = COSTS["reorder" if asked.page_major == given.page_major else "page run"][0]
    return cost + (COSTS["heads"][0] if _heads_outermost(asked) != _heads_outermost(given) else 0)


def io_cost(asked: str, given: str) -> int:
    """What it costs to give the I/O back end ``given`` where ``asked`` was wanted."""
    if asked == given:
        return 0
    if (asked, given) == (KERNEL, DIRECT):
        return COSTS["kernel to direct"][0]
    return COSTS["leave"][0] + (0 if given in (KERNEL, DIRECT) else COSTS["uninvited"][0])
