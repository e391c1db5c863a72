"""``hicache gc``: remove records by namespace, layout, age or size."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hicache.cli.storage.common import Filter, directory_of, opened, said_bytes, with_filters
from hicache.data.store.segment.survey import survey
from hicache.data.store.segment.tidy import Picture, give_back, remove
from hicache.errors import ConfigError
from hicache.tables import parse_bytes


@click.command("gc")
@with_filters
@click.option("--size", help="Then the coldest records, until the rest takes at most so much, such as 20GiB.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
def command(*, path: Path | None, wanted: Filter, size: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove records from a store's directory, and the segment files that are empty then.

    PATH is the directory; left out, it is the configured one. A server may be running on it. What is removed must
    be said: --namespace, --layout and --older-than together name records, --size a limit. A record stays as long as
    one that continues it stays, so what is left are whole prefixes.
    """
    if wanted.empty and size is None:
        raise ConfigError("gc removes nothing unasked: give --namespace, --layout, --older-than or --size")
    limit = None if size is None else parse_bytes(size, key="size")
    place = directory_of(path)
    with survey(place) as seen:
        picture = Picture.of(seen.rows())
    named = [] if wanted.empty else picture.going(wanted)
    keys = named if limit is None else picture.coldest(limit, first=named)
    count = len(keys)
    nbytes = picture.nbytes(keys)
    freed = 0
    if not dry_run:
        with opened(place) as (directory, _):
            count, nbytes = remove(directory, keys, picture)
            freed = give_back(directory)
    facts = {
        "path": str(place),
        "dry_run": dry_run,
        "chosen": len(keys),
        "removed": 0 if dry_run else count,
        "bytes": nbytes,
        "file_bytes_removed": freed,
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    elif dry_run:
        click.echo(f"{place}: {count:,} records would go, {said_bytes(nbytes)}")
    else:
        click.echo(
            f"{place}: {count:,} records removed, {said_bytes(nbytes)}; files: {said_bytes(freed)} less"
        )
        if count < len(keys):
            click.echo(f"{len(keys) - count:,} were used, continued or evicted meanwhile and were left alone")
