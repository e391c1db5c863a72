"""``hicache inspect``: what lies in a segment store's directory, whose it is, and how old."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache.cli.console import widen
from hicache.cli.storage.common import (
    Filter,
    directory_of,
    said_age,
    said_bytes,
    with_filters,
)
from hicache.data.store.record import LAYOUT_NAMES
from hicache.data.store.segment.survey import survey
from hicache.data.store.segment.tables import Row


@dataclass(slots=True)
class Part:
    """The records of one namespace."""

    records: int = 0
    payload_bytes: int = 0
    uses: int = 0
    oldest_write: int = 0
    last_use: int = 0
    layouts: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        """Count one record."""
        self.oldest_write = min(self.oldest_write, row.written) if self.records else row.written
        self.last_use = max(self.last_use, row.used)
        self.records += 1
        self.payload_bytes += row.nbytes
        self.uses += row.uses
        self.layouts[LAYOUT_NAMES.get(row.layout, f"code {row.layout}")] += 1


@click.command("inspect")
@with_filters
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
def command(*, path: Path | None, wanted: Filter, as_json: bool) -> None:
    """Show which namespaces a store's directory holds: models, records, bytes, ages, uses, layouts.

    PATH is the directory; left out, it is the configured one. Nothing is changed, and a server may be running on it.
    """
    place = directory_of(path)
    parts: dict[bytes, Part] = {}
    holes = 0
    with survey(place) as seen:
        for _, row in seen.rows():
            if row.hole:
                holes += 1
            elif wanted(row):
                parts.setdefault(row.namespace, Part()).add(row)
        who, space, policy = seen.namespaces(), seen.space(), seen.policy
    rows = [
        {
            "namespace": root.hex(),
            "what": dict(who.get(root, {})),
            "records": part.records,
            "payload_bytes": part.payload_bytes,
            "uses": part.uses,
            "oldest_write_age_s": max(0, int(wanted.now) - part.oldest_write),
            "last_use_age_s": max(0, int(wanted.now) - part.last_use),
            "layouts": dict(part.layouts),
        }
        for root, part in sorted(parts.items(), key=lambda item: -item[1].payload_bytes)
    ]
    facts: dict[str, Any] = {
        "path": str(place),
        "policy": policy,
        **space,
        "holes": holes,
        "namespaces": rows,
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        show(facts, Console(highlight=False))


def show(facts: Mapping[str, Any], console: Console) -> None:
    """The directory for a person."""
    widen(console)
    console.print(f"{escape(facts['path'])}: evicts by {facts['policy']}")
    used, reserved, cap = (said_bytes(facts[name]) for name in ("used_bytes", "reserved_bytes", "cap_bytes"))
    console.print(
        f"{used} in use of {reserved} reserved, cap {cap}; index {said_bytes(facts['index_bytes'])}"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("namespace", "model", "records", "bytes", "uses", "written", "last used", "layouts"):
        table.add_column(name, overflow="fold")
    for row in facts["namespaces"]:
        what = row["what"]
        table.add_row(
            row["namespace"],
            escape(
                " ".join(str(what[n]) for n in ("engine", "architecture", "model", "dtypes") if n in what)
            ),
            f"{row['records']:,}",
            said_bytes(row["payload_bytes"]),
            f"{row['uses']:,}",
            said_age(row["oldest_write_age_s"]),
            said_age(row["last_use_age_s"]),
            ", ".join(f"{name} {count:,}" for name, count in row["layouts"].items()),
        )
    console.print(table if facts["namespaces"] else "no records")
