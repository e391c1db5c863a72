"""``hicache doctor``: what this machine can do, what was configured, whether it works; with a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from hicache.capability import ABILITIES, Capabilities
from hicache.cli.console import widen
from hicache.cli.doctor import machine, trial
from hicache.cli.doctor.machine import Finding
from hicache.data.platform import cuda, rocm
from hicache.errors import ConfigError
from hicache.resolve.catalog import PLATFORMS, detect, engines, stores
from hicache.resolve.choose import choose
from hicache.resolve.compatibility import ATTENTIONS
from hicache.resolve.request import one_of
from hicache.settings import Reading, SegmentStoreSettings, read
from hicache.tables import as_table

STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red"}
VERDICTS = {
    "ok": "everything works",
    "slow": "it works, and could be better",
    "wrong": "something does not work",
}


@click.command("doctor")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Settings file. Default: $HICACHE_CONFIG, if set."
)
@click.option(
    "--attention", "kind", default="mha", show_default=True, help="Planes to try: " + ", ".join(ATTENTIONS)
)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
def command(*, config: Path | None, kind: str, as_json: bool) -> int:
    """Look at this machine and these settings, try them, and say what to change.

    Takes some seconds and about 300 MiB of memory; writes a few MiB beside the store's path and removes them.
    Exit code 1 when something does not work, 2 when the settings are refused.
    """
    one_of("attention", kind, list(ATTENTIONS))
    facts, findings, status = examine(config, kind)
    level = max((f.level for f in findings), key=list(STYLES).index, default="ok")
    facts["findings"] = [asdict(finding) for finding in findings]
    facts["verdict"] = {"level": level, "text": VERDICTS[level]}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        show(facts, findings, level)
    return status or int(level == "wrong")


def examine(config: Path | None, kind: str) -> tuple[dict[str, object], list[Finding], int]:
    """Everything that can be found out, what of it matters, and 2 where the settings are refused."""
    cpu_facts, findings = machine.cpus()
    memory_facts, more = machine.memory()
    findings += more
    facts: dict[str, object] = {
        "platforms": {name: _platform(detect(name)) for name in PLATFORMS},
        "drivers": {"cuda": cuda.drivers(), "rocm": rocm.drivers()},
        "engines": {e.name: e.absent or "here" for e in engines()},
        "stores": {s.name: s.absent or "here" for s in stores()},
        "cpu": cpu_facts,
        "memory": memory_facts,
    }
    try:
        reading = read(config)
        facts["settings"] = _with_origins(reading)
        found = choose(reading.settings, trial.example(reading.settings, kind))
        facts["resolution"] = found.as_dict()
        chosen = found.require()
    except ConfigError as error:
        findings.append(Finding("wrong", f"the settings are refused: {error}", _nearest(error)))
        return facts, findings, 2
    findings += [Finding("slow", f"not as asked: {step}", f"ask for {step.after}") for step in found.warnings]
    store = reading.settings.store
    if isinstance(store, SegmentStoreSettings):
        facts["disk"], more = machine.disk(Path(store.path))
        findings += more
    elif store is None:
        findings.append(
            Finding("ok", "there is no store: what is cached ends with the process", "store.path keeps it")
        )
    if not any(finding.level == "wrong" for finding in findings):
        facts["trial"], more = trial.run(reading.settings, trial.example(reading.settings, kind), chosen)
        findings += more
    return facts, findings, 0


def _nearest(error: ConfigError) -> str:
    nearest = error.context.get("nearest")
    return f"nearest that works: {nearest}" if nearest else "see the values in the message"


def _platform(found: Capabilities) -> dict[str, object]:
    away = found.refused or found.absent
    if away:
        return {"state": away}
    return {"state": "here", "abilities": {ability: found.lacks(ability) or "yes" for ability in ABILITIES}}


def _with_origins(reading: Reading) -> dict[str, dict[str, object]]:
    """Every setting, its value and where it came from."""
    rows: dict[str, dict[str, object]] = {}
    table = as_table(reading.settings)
    names = [*table, *(n for n in reading.settings.__struct_fields__ if n not in table)]
    for name in names:
        value = table.get(name)
        inner = value if isinstance(value, Mapping) else {}
        for key, leaf in {f"{name}.{k}": v for k, v in inner.items()}.items() if inner else [(name, value)]:
            rows[key] = {"value": leaf, "origin": reading.origins.get(key, "default")}
    return rows


# ---- for a person


def show(facts: Mapping[str, object], findings: list[Finding], level: str) -> None:
    """Section by section; the verdict last, where one looks first."""
    console = Console(highlight=False)
    widen(console)
    for title, value in facts.items():
        if title not in ("findings", "verdict", "resolution"):
            console.rule(f"[bold]{title}", align="left")
            _show(console, value, 0)
    resolution = facts.get("resolution")
    if isinstance(resolution, Mapping):
        console.rule("[bold]resolved", align="left")
        _show(console, resolution["chosen"] or {"refused": resolution["refusals"]}, 0)
        for step in resolution["steps"]:
            console.print(escape(f"  {step['field']} {step['from']} -> {step['to']}: {step['reason']}"))
    console.rule("[bold]verdict", align="left")
    for finding in findings:
        change = f" -> {finding.change}" if finding.change else ""
        console.print(f"[{STYLES[finding.level]}]{finding.level:<6}[/] {escape(finding.what + change)}")
    console.print(f"[{STYLES[level]}]{VERDICTS[level]}[/]")


def _show(console: Console, value: object, depth: int) -> None:
    if not isinstance(value, Mapping):
        console.print("  " * depth + escape(_words(value)))
        return
    for name, inner in value.items():
        if isinstance(inner, Mapping) and set(inner) == {"value", "origin"}:
            console.print(escape(f"{'  ' * depth}{name} = {_words(inner['value'])}  ({inner['origin']})"))
        elif isinstance(inner, Mapping) and inner:
            console.print(escape(f"{'  ' * depth}{name}"))
            _show(console, inner, depth + 1)
        else:
            console.print(escape(f"{'  ' * depth}{name}: {_words(inner, name)}"))


def _words(value: object, name: str = "") -> str:
    if value is None or value == {}:
        return "-"
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and abs(value) >= 1 << 20
        and "slots" not in name
    ):
        return f"{value / (1 << 20):.0f} MiB{'/s' if 'per_s' in name or '->' in name else ''}"
    return str(value)
