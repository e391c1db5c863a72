"""What a person sees: a live table on a terminal, plain lines and one table at the end in a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hicache.cli.console import widen
from hicache.cli.demo.place import Place, demos_directory
from hicache.cli.demo.plan import FACTOR, TIERS, Figure, Turn
from hicache.cli.demo.report import Report
from hicache.cli.demo.verdict import ratios

LOG_WIDTH = 100
STYLES = {"PASSED": "bold green", "FAILED": "bold red", "BELOW": "bold yellow"}
LEGEND = """\
Tokens of each prompt by where their KV was found. Cache: seconds to the first
token with HiCache and without. Bytes: every page that came back, against a
digest of what was stored. Answer: against the same run without HiCache.
* after a restart, in a new process.\
"""
MEBIBYTE = 1 << 20

COLUMNS = (
    ("\nturn", "left"),
    ("\ntokens", "right"),
    ("from\ndevice", "right"),
    ("\nhost", "right"),
    ("\nstorage", "right"),
    ("\ncomputed", "right"),
    ("with\ncache", "right"),
    ("no\ncache", "right"),
    ("times\nsooner", "right"),
    ("MiB\nmoved", "right"),
    ("\nbytes", "left"),
    ("\nanswer", "left"),
)


class Show:
    """Tells what goes on. A context manager: the live part ends with it."""

    def __init__(self, *, stderr: bool = False) -> None:
        self.console = Console(stderr=stderr, highlight=False)
        widen(self.console, LOG_WIDTH)
        self.began = time.monotonic()
        self._turns: list[Turn] = []
        self._spinner = Spinner("dots", Text("starting"))
        self._live: Live | None = None
        self._said = ""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.transient = True
            self._live.stop()
            self._live = None

    def _render(self) -> Any:  # noqa: ANN401  (whatever rich can draw)
        text = Text(f"{self._elapsed()}  {self._said}")
        text.truncate(self.console.width - 3, overflow="ellipsis")
        self._spinner.update(text=text)
        return Group(turn_table(self._turns), self._spinner) if self._turns else self._spinner

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self.began:6.1f} s"

    # ---- what the demo calls

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(escape(text), soft_wrap=True)

    def step(self, text: str) -> None:
        """What is being done now; in a log, a line when that changes."""
        if self._live is None and text.partition(":")[0] != self._said.partition(":")[0]:
            self.console.print(Text(f"{self._elapsed()}  {text}"), soft_wrap=True)
        self._said = text

    def turn(self, turn: Turn) -> None:
        """A new row, or one whose answer has been compared."""
        if turn not in self._turns:
            self._turns.append(turn)
            if self._live is None:
                self.console.print(Text(f"{self._elapsed()}  {_line(turn)}"), soft_wrap=True)

    def end(self, turns: Sequence[Turn], figures: Sequence[Figure]) -> None:
        """Both tables."""
        self._stop()
        self.console.print()
        self.console.print(turn_table(turns))
        self.console.print(LEGEND, style="dim")
        self.console.print()
        for turn in turns:
            said = Text(f"{turn.name:<3} {turn.question} ", style="dim").append(turn.answer, style="default")
            said.truncate(self.console.width, overflow="ellipsis")
            self.console.print(said, no_wrap=True)
        self.console.print()
        self.console.print(figure_table(figures))

    def place(self, place: Place) -> None:
        """What is on the disk now, and how to be rid of it."""
        self.console.print()
        if place.deleted:
            self.note("Stored pages: deleted.")
            return
        self.note(
            f"Stored pages: {place.nbytes() / MEBIBYTE:.0f} MiB, kept. To delete them: rm -r {place.path}"
        )
        others = place.others()
        if others:
            self.note(
                f"Earlier demos have left {len(others)} more in {demos_directory()}; rm -r deletes them all."
            )

    def verdict(self, report: Report) -> None:
        """The last lines."""
        for line in report.verdict():
            style = next((style for word, style in STYLES.items() if line.startswith(word)), "")
            self.console.print(Text(line, style=style), soft_wrap=True)


def _line(turn: Turn) -> str:
    found = ", ".join(f"{name} {getattr(turn, name):,}" for name in (*TIERS, "computed"))
    return f"turn {turn.name}: first token after {turn.seconds_with:.2f} s, without {turn.seconds_without:.2f} s ({found})"


def turn_table(turns: Sequence[Turn]) -> Table:
    """A row a turn."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name, justify in COLUMNS:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    for turn in turns:
        if turn.restarted and not any(row.restarted for row in turns[: turns.index(turn)]):
            table.add_section()
        table.add_row(*_cells(turn))
    return table


def _cells(turn: Turn) -> list[str]:
    checked = "[red bold]WRONG[/]" if turn.wrong_pages else "[green]right[/]" if turn.restored_pages else "–"
    same = {None: "...", True: "[green]same[/]", False: "[red bold]DIFFERS[/]"}[turn.answer_same]
    return [
        turn.name + ("*" if turn.restarted else ""),
        f"{turn.prompt_tokens:,}",
        *(f"{count:,}" if count else "–" for count in (turn.device, turn.host, turn.storage)),
        f"{turn.computed:,}",
        f"{turn.seconds_with:.2f}",
        f"{turn.seconds_without:.2f}",
        f"{turn.ratio:.1f}",
        f"{(turn.load_bytes + turn.save_bytes) / MEBIBYTE:.0f}",
        checked,
        same,
    ]


def figure_table(figures: Sequence[Figure]) -> Table:
    """A row a source: what the same prompt costs from there."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        show_edge=False,
        title=f"Seconds to the first token of a prompt of {figures[0].prompt_tokens:,} tokens",
        title_justify="left",
        title_style="bold",
    )
    for name in ("KV from", "best", "all", "times sooner", "hit tokens"):
        table.add_column(name, justify="left" if name == "KV from" else "right")
    sooner = ratios(figures)
    for figure in figures:
        ratio = sooner.get(figure.label)
        color = "green" if ratio is not None and ratio >= FACTOR else "yellow bold"
        table.add_row(
            figure.label,
            f"{figure.best:.3f}",
            " ".join(f"{seconds:.2f}" for seconds in figure.seconds),
            "" if ratio is None else f"[{color}]{ratio:.1f}[/]",
            "" if ratio is None else f"{figure.hit_tokens:,}",
        )
    return table
