"""``hicache verify``: read every record of a directory, check it, and drop what is damaged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hicache.cli.storage.common import directory_of, opened, said_bytes
from hicache.data.store.segment.check import check
from hicache.data.store.segment.verify import verify
from hicache.errors import InvariantError

SHOWN = 20


@click.command("verify")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only look: leave damaged records in the index.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
def command(*, path: Path | None, dry_run: bool, as_json: bool) -> int:
    """Read and check every record of a store's directory; a damaged one is dropped, as a read would drop it.

    PATH is the directory; left out, it is the configured one. A server may be running on it. Exit code 1 when
    something was damaged.
    """
    place = directory_of(path)
    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with opened(place) as (directory, seen), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=seen.count())
        found = verify(
            directory, seen.rows(), mend=not dry_run, progress=lambda rows: progress.advance(task, rows)
        )
        try:
            check(directory)
            index = "ok"
        except InvariantError as error:
            index = str(error)
    reasons = Counter(reason for _, reason in found.damaged)
    facts = {
        "path": str(place),
        "records": found.records,
        "payload_bytes": found.nbytes,
        "holes": found.holes,
        "damaged": len(found.damaged),
        "dropped": 0 if dry_run else len(found.damaged),
        "reasons": dict(reasons),
        "damaged_keys": [key.hex() for key, _ in found.damaged],
        "index": index,
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo(f"{place}: {found.records:,} records are sound ({said_bytes(found.nbytes)})")
        for key, reason in found.damaged[:SHOWN]:
            click.echo(f"damaged: {key.hex()} ({reason})" + ("" if dry_run else ": dropped"))
        if len(found.damaged) > SHOWN:
            click.echo(f"and {len(found.damaged) - SHOWN:,} more; --json lists them")
        click.echo(f"index: {index}")
    return int(bool(found.damaged) or index != "ok")
