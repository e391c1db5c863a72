"""What the commands share of the terminal: how wide a log is, and numbers that count things."""

from __future__ import annotations

import click
from rich.console import Console

LOG_WIDTH = 110
COUNT = click.IntRange(min=1)


def widen(console: Console, width: int = LOG_WIDTH) -> None:
    """At least ``width`` columns where nobody watches: a log is not as narrow as the terminal that is not there."""
    if not console.is_terminal:
        console.width = max(console.width, width)
