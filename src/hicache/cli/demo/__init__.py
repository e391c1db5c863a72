"""``hicache demo``: two conversations with a small real model, with and without the cache, and a restart.

This module holds the command line alone; torch and all else is imported when the demo runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypedDict, Unpack

import click

from hicache import __version__

if TYPE_CHECKING:
    from hicache.cli.demo.plan import Plan
    from hicache.cli.demo.report import Report
    from hicache.cli.demo.show import Show

HELP = """\
A small real model holds two interleaved conversations about a long document. Memory tiers are too small for
both, so pages move down to storage and come back; then a new process goes on from storage alone.

For every turn it shows where the prompt's tokens were found, the time to the first token with the cache and
without it, and whether every byte that came back and every answer is right. For one prompt it then measures each
tier: device, host, storage, storage after a restart.

\b
Exit code 1: a byte or an answer is wrong, a tier never served a hit, or something failed.
Exit code 0: none of these. A tier that is less than 8 times faster than computing is reported loudly
             but is no failure, because a busy machine looks the same; the machine's load is printed.
"""


class Options(TypedDict):
    """What the command line gives."""

    store: Path | None
    delete: bool
    dtype: str
    turns: int | None
    quick: bool
    json_file: TextIO | None
    chart: Path | None
    model: str
    inject: str | None
    resume: Path | None


def _path(**kinds: bool) -> click.Path:
    return click.Path(path_type=Path, **kinds)


@click.command("demo", help=HELP)
@click.option(
    "--store",
    type=_path(),
    help="A new or empty directory for what is stored. Default: a fresh one in the user's cache directory.",
)
@click.option(
    "--delete",
    is_flag=True,
    help="Delete what was stored when the demo ends. Else it stays, and how to delete it is printed.",
)
@click.option(
    "--model-dtype",
    "dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of weights and KV.",
)
@click.option(
    "--turns",
    type=click.IntRange(2, 8),
    help="Turns of each conversation before the restart. Default: 3, and 2 with --quick.",
)
@click.option("--quick", is_flag=True, help="A shorter document, fewer turns, each tier measured once.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.File("w", lazy=False),
    help="Write all findings to FILE; with - to standard output, and the rest to standard error.",
)
@click.option(
    "--chart",
    metavar="FILE.png",
    type=_path(dir_okay=False),
    help="Draw the time to the first token by source (needs matplotlib).",
)
@click.option("--model", type=click.Choice(["smollm2", "tiny"]), default="smollm2", hidden=True)
@click.option("--inject", type=click.Choice(["zeros:device", "zeros:host", "zeros:storage"]), hidden=True)
@click.option("--resume", type=_path(exists=True, dir_okay=False), hidden=True)
def command(**options: Unpack[Options]) -> int:
    """See HELP."""
    if options["resume"] is not None:
        from hicache.cli.demo.restart import resume

        return resume(options["resume"])
    chart = options["chart"]
    if chart is not None and not chart.absolute().parent.is_dir():
        raise click.BadParameter(f"no such directory: {chart.parent}", param_hint="--chart")
    return _run(options)


def _plan(options: Options) -> Plan:
    from msgspec.structs import replace

    from hicache.cli.demo.plan import FULL, QUICK, TINY

    plan = TINY if options["model"] == "tiny" else QUICK if options["quick"] else FULL
    return replace(
        plan,
        dtype="float32" if plan is TINY else options["dtype"],
        turns=options["turns"] or plan.turns,
        inject=(options["inject"] or "").removeprefix("zeros:"),
    )


def _run(options: Options) -> int:
    from hicache.cli.demo.engine import prepare
    from hicache.cli.demo.place import Place
    from hicache.cli.demo.show import Show

    json_file = options["json_file"]
    place = Place(options["store"])
    with Show(stderr=json_file is not None and json_file.name == "<stdout>") as show:
        place.open()
        try:
            show.note(f"HiCache {__version__}: a prompt's KV cache is kept, pushed out, and found again.")
            show.note(f"Store:    {place.path}")
            prepare(show.step)
            from hicache.cli.demo.run import Demo

            report = Demo(_plan(options), place, show).run()
            show.end(report.turns, report.figures)
            if options["delete"]:
                place.delete()
            if json_file is not None:
                json_file.write(json.dumps(report.as_dict(place), indent=1) + "\n")
                json_file.flush()
            if options["chart"] is not None:
                _draw(report, options["chart"], show)
            show.place(place)
        except BaseException:  # also: nobody reads any more. Nobody was told yet where the store is.
            place.delete()
            raise
        show.verdict(report)
    return 1 if report.problems else 0


def _draw(report: Report, path: Path, show: Show) -> None:
    from hicache.cli.demo.chart import draw

    title = f"First token of a prompt of {report.plan.figure_tokens:,} tokens"
    if draw(report.figures, title, path):
        show.note(f"Chart: {path}")
    else:
        show.note("Chart: not drawn, matplotlib is not installed (pip install hicache[plot])")
