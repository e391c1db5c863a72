"""``hicache resolve``: what becomes of a wish, on this machine or on another, and why."""

from __future__ import annotations

import json
from typing import cast

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache.capability import ABILITIES, Shards
from hicache.cli.console import COUNT, widen
from hicache.resolve import Candidate, Resolution, resolve
from hicache.resolve.catalog import PLATFORMS, declarations, detect, simulate
from hicache.resolve.compatibility import ATTENTIONS, PAGE_TOKENS, attention
from hicache.resolve.request import DEFAULTS, one_of, wishes
from hicache.tables import parse_bytes


@click.command("resolve")
@click.option("--layout", "--hicache-mem-layout", help="Order of the axes in host memory.")
@click.option("--io", "--hicache-io-backend", help="I/O back end: kernel or direct.")
@click.option("--platform", help=f"Plan for {', '.join(PLATFORMS)}. Default: what is found here.")
@click.option("--without", help=f"Abilities to plan without, with commas: {', '.join(ABILITIES)}.")
@click.option("--attention", "kind", default="mha", help=f"Example of planes: {', '.join(ATTENTIONS)}.")
@click.option(
    "--store", "--hicache-storage-backend", help="none, segment, memory, mooncake, or another package's."
)
@click.option("--write-policy", "--hicache-write-policy", help="Device to host: through, selective or back.")
@click.option(
    "--host-mode", "--hicache-host-memory-mode", help="What host memory is for: cache, staging or off."
)
@click.option("--host-ratio", help="Host tier, as a multiple of the device's pages.")
@click.option("--host-bytes", help="Host tier, such as 64GiB.")
@click.option("--hicache-ratio", help="As --host-ratio; --hicache-size goes before it.")
@click.option("--hicache-size", help="Host tier in gigabytes (10^9 bytes).")
@click.option(
    "--prefetch", "--hicache-storage-prefetch-policy", help="best_effort, timeout or wait_complete."
)
@click.option(
    "--page-size", "page_tokens", type=COUNT, default=PAGE_TOKENS, show_default=True, help="Tokens a page."
)
@click.option("--device-bytes", help="The device's pages, for a ratio, such as 40GiB.")
@click.option("--tensor", type=COUNT, default=1, help="Tensor parallel ranks that share a page.")
@click.option("--pipeline", type=COUNT, default=1, help="Pipeline stages that share a page.")
@click.option(
    "--engine-evicts",
    is_flag=True,
    help="The device tier is the engine's, which does not say when it evicts.",
)
@click.option("--strict", is_flag=True, help="A wish that cannot be granted is an error.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
def command(
    *,
    platform: str | None,
    without: str | None,
    kind: str,
    page_tokens: int,
    device_bytes: str | None,
    as_json: bool,
    **options: object,
) -> int:
    """Show what a wish for a layout and an I/O back end becomes, every step and every reason.

    What is not given is a default, not a wish. With --platform or --without another machine is planned for, with
    pieces that need not be here. Exit code 2 when nothing can run.
    """
    shards = Shards(cast("int", options.pop("tensor")), cast("int", options.pop("pipeline")))
    own_device = not options.pop("engine_evicts")
    machine = detect() if platform is None and without is None else None
    if machine is None:
        machine = simulate(
            platform or detect().platform, [w.strip() for w in (without or "").split(",") if w.strip()]
        )
    one_of("attention", kind, list(ATTENTIONS))
    spec = attention(kind, page_tokens=page_tokens, shards=shards.count)
    store = options.get("store")
    there = declarations(machine, store if isinstance(store, str) else None)
    request = wishes(
        {name: value for name, value in options.items() if value is not None},
        spec,
        there,
        shards=shards,
        own_device=own_device,
        device_nbytes=None if device_bytes is None else parse_bytes(device_bytes, key="device_bytes"),
    )
    found = resolve(request, there)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        show(found, Console(highlight=False))
    return 0 if found.chosen is not None else 2


def show(found: Resolution, console: Console) -> None:
    """A resolution for a person: the outcome, each step, then every candidate."""
    widen(console)
    request, chosen = found.request, found.chosen
    table = Table(box=box.SIMPLE_HEAD, title=f"on {found.platform}", title_justify="left")
    for name in ("", "asked", "chosen", "because"):
        table.add_column(name, overflow="fold")
    reasons = {step.field: step for step in found.steps}
    for name in DEFAULTS:
        asked = getattr(request, name)
        step = reasons.get(name)
        table.add_row(
            name,
            asked or "-",
            "-" if chosen is None else getattr(chosen, name),
            "" if chosen is None else escape(step.reason) if step else found.origin(name),
            style="yellow" if step and step.warning else None,
        )
    console.print(table)
    if chosen is not None:
        for way, kernel in (("load", chosen.load), ("save", chosen.save)):
            console.print(
                f"{way}: {kernel.name} of the {chosen.engine} engine; slots of the source on the "
                f"{kernel.source_index.value}, of the target on the {kernel.target_index.value}"
            )
        console.print(f"host memory: {chosen.host_memory}, by the {chosen.host_address}'s address")
        if chosen.size is not None:
            console.print(
                f"host tier: {chosen.size.slots} pages, {chosen.size.nbytes} bytes ({chosen.size.how})"
            )
    for note in found.notes:
        console.print(f"note: {escape(note)}")
    for step in found.warnings:
        console.print(f"[yellow]warning:[/] {step.field} {step.before} -> {step.after}")
    console.print(candidates_table(found.candidates))
    for reason in found.refusals:
        console.print(f"[red]refused:[/] {escape(reason)}")
    if found.nearest is not None:
        console.print(f"nearest that works: {found.nearest.pair}")


def candidates_table(candidates: tuple[Candidate, ...]) -> Table:
    """Every pair and who refuses it."""
    table = Table(box=box.SIMPLE_HEAD, title="candidates", title_justify="left")
    for name in ("layout", "io", "engine", "refused because"):
        table.add_column(name, overflow="fold")
    for one in candidates:
        table.add_row(
            one.layout, one.io, one.engine or "-", escape("; ".join(one.refusals)) or "[green]works[/]"
        )
    return table
