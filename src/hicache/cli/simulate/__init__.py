"""``hicache simulate``: what a cache of a given size would have done for a recorded workload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache.cli.console import COUNT, widen
from hicache.errors import ConfigError
from hicache.records import Where
from hicache.simulate.drive import TIERS, House, Rules, Simulator
from hicache.simulate.report import report
from hicache.simulate.trace import Arrival, Trace
from hicache.tables import parse_bytes

_SHOW_EVERY = 256  # requests between two updates of the progress line


@click.command("simulate")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--device", help="Device tier of our own, such as 40GiB. A tier that is not named does not exist."
)
@click.option("--host", help="Host tier, such as 256GiB.")
@click.option("--store", help="Store on disk, such as 2TiB.")
@click.option("--bytes-per-token", type=COUNT, required=True, help="KV bytes of one token, over all ranks.")
@click.option("--page-tokens", type=COUNT, help="Tokens a page. Default: the trace's block_size, else 512.")
@click.option("--policy", type=click.Choice(["lru"]), default="lru", show_default=True)
@click.option(
    "--rules",
    type=click.Choice(["engine", "reference"]),
    default="engine",
    show_default=True,
    help="reference: a partial tail page counts, and so does a prompt's last token.",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result to FILE."
)
def command(
    *,
    traces: tuple[Path, ...],
    json_file: Path | None,
    bytes_per_token: int,
    page_tokens: int | None,
    **options: str,
) -> int:
    """Replay TRACE through the cache's own controller and count what each tier would have served.

    TRACE is one request a line: JSON (plain or gzip) as Mooncake publishes it, or CSV with a header of the same
    names. Each TRACE is a run of its own, from an empty cache.
    """
    sizes = {
        tier: parse_bytes(options[name], key=name)
        for tier in TIERS
        if options[name := tier.name.lower()] is not None
    }
    if not sizes:
        raise ConfigError("nothing to simulate: name a tier", nearest="--host 64GiB")
    opened = [Trace(path, page_tokens or 0) for path in traces]
    runs = []
    for trace in opened:
        house = place(trace, sizes, bytes_per_token, cast("Rules", options["rules"]))
        simulator = Simulator(house)
        with progress(trace.path.name) as step:
            outcome = simulator.run(trace, step)
        facts = {
            "trace": str(trace.path),
            "policy": options["policy"],
            "rules": house.rules,
            "page_tokens": house.page_tokens,
            "bytes_per_token": bytes_per_token,
            "capacity_bytes": {tier.name.lower(): size for tier, size in sizes.items()},
        }
        runs.append({**facts, **report(outcome, simulator, house.page_tokens * bytes_per_token)})
    show(runs, Console(highlight=False))
    if json_file is not None:
        result = runs[0] if len(runs) == 1 else {"runs": runs}
        try:
            json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                "the result cannot be written", path=json_file, because=error.strerror
            ) from None
    return 0


def place(trace: Trace, sizes: dict[Where, int], bytes_per_token: int, rules: Rules) -> House:
    """Sizes in pages; ConfigError for a tier that holds not even one."""
    page_nbytes = trace.page_tokens * bytes_per_token
    pages = {tier: size // page_nbytes for tier, size in sizes.items()}
    for tier, count in pages.items():
        if not count:
            raise ConfigError(
                "this tier does not hold one page",
                tier=tier.name.lower(),
                bytes=sizes[tier],
                page_bytes=page_nbytes,
                nearest=page_nbytes,
            )
    return House(
        trace.page_tokens,
        device=pages.get(Where.DEVICE, 0),
        host=pages.get(Where.HOST, 0),
        store=pages.get(Where.STORE, 0),
        rules=rules,
    )


@contextmanager
def progress(name: str) -> Iterator[Callable[[Arrival], None]]:
    """A line on the terminal's error stream with the requests done; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    done = 0

    def step(arrival: Arrival) -> None:
        nonlocal done
        done += 1
        if done % _SHOW_EVERY == 0:
            bar.update(task, description=f"{name}: {done} requests, {arrival.at:.0f} s of the trace")

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name)
        yield step


def show(runs: list[dict[str, Any]], console: Console) -> None:
    """The results as a table, one row a trace."""
    widen(console)
    table = Table(box=box.SIMPLE_HEAD, title="hits, % of the prompts' tokens", title_justify="left")
    for name in ("trace", "requests", *(tier.name.lower() for tier in TIERS), "all", "last half"):
        table.add_column(name, justify="left" if name == "trace" else "right", overflow="fold")
    for run in runs:
        table.add_row(
            Path(run["trace"]).name,
            str(run["requests"]),
            *(f"{100 * rate:.2f}" for rate in run["hit_rate_by_tier"].values()),
            f"{100 * run['hit_rate']:.2f}",
            f"{100 * run['hit_rate_last_half']:.2f}",
        )
    console.print(table)
    for run in runs:
        if run["store_bytes_written_a_day"] is not None and "store" in run["capacity_bytes"]:
            console.print(f"disk writes a day: {run['store_bytes_written_a_day'] / 1e9:.1f} GB")
