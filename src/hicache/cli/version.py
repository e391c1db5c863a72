"""``hicache version``: what is installed here, found without importing any of it."""

from __future__ import annotations

import importlib.metadata
import json
import platform

import click

from hicache import __version__

WORKS_WITH = ("torch", "transformers", "lmdb", "numpy")


def versions() -> dict[str, str | None]:
    """Version of everything that matters; None for what is not installed."""
    found: dict[str, str | None] = {"hicache": __version__, "python": platform.python_version()}
    for name in WORKS_WITH:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
def command(*, as_json: bool) -> None:
    """Print which version this is, and of what it works with."""
    found = versions()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, version in found.items():
        click.echo(f"{name:<13} {version or 'not installed'}")
