"""The tables of ``docs/compatibility.md``, from the declarations themselves; ``tools/compatibility.py`` writes it.

Also the example specs and machines that the tables, the commands and the tests share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hicache.capability import ABILITIES, PINNING, SAME_ADDRESS, STAGED, TRITON, Capabilities, Declarations
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import Resolution, resolve
from hicache.resolve.aliases import NAMES, OPTIONS, VALUES
from hicache.resolve.catalog import declarations, simulate
from hicache.resolve.relaxation import COSTS
from hicache.resolve.request import DEFAULTS, Request, known_values
from hicache.spec import CacheSpec, Group, Plane

PAGE_TOKENS = 64
LAYERS = 32


def attention(
    name: str, *, page_tokens: int = PAGE_TOKENS, layers: int = LAYERS, shards: int = 1
) -> CacheSpec:
    """An example of each kind of attention."""
    rows = {
        "mha": (Plane("k", layers, page_tokens, 8, 256), Plane("v", layers, page_tokens, 8, 256)),
        "mla": (Plane("latent", layers, page_tokens, 1, 1152),),
        "asymmetric": (Plane("k", layers, page_tokens, 8, 256), Plane("v", layers, page_tokens, 8, 128)),
        "opaque": (Plane("block", layers, 1, 1, 512 * page_tokens),),
    }
    if name not in rows:
        raise ConfigError("unknown attention", key="attention", value=name, known=",".join(rows))
    return CacheSpec((Group("kv", rows[name]),), page_tokens, shards)


ATTENTIONS = ("mha", "mla", "asymmetric", "opaque")

MACHINES: Mapping[str, Capabilities] = {
    "CPU": simulate("cpu"),
    "CUDA": simulate("cuda"),
    "CUDA without staged write-back": simulate("cuda", [STAGED]),
    "CUDA without Triton": simulate("cuda", [TRITON]),
    "CUDA, pinning refused": simulate("cuda", [PINNING]),
    "CUDA, other device addresses": simulate("cuda", [SAME_ADDRESS]),
    "ROCm": simulate("rocm"),
    "ROCm without staged write-back": simulate("rocm", [STAGED]),
    "ROCm without Triton": simulate("rocm", [TRITON]),
    "ROCm, pinning refused": simulate("rocm", [PINNING]),
    "XPU": simulate("xpu"),
    "NPU": simulate("npu"),
}
"""Platforms as they are declared, and what they are without one ability or another."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _outcome(resolution: Resolution, layout: str | None, io: str | None) -> str:
    chosen = resolution.chosen
    if chosen is None:
        return "refused"
    pair = f"`{chosen.layout}` + `{chosen.io}`"
    if (chosen.layout, chosen.io) == (layout or DEFAULTS["layout"], io or DEFAULTS["io"]):
        return "as asked" if layout else pair
    return f"{pair}, warns" if resolution.warnings else pair


def pairs_table(spec: CacheSpec, store: str | None) -> str:
    """What becomes of every pair on every machine."""
    known = known_values(declarations(MACHINES["CPU"]))
    asked: list[tuple[str | None, str | None]] = [(None, None)]
    asked += [(layout, io) for layout in known["layout"] for io in reversed(known["io"])]
    columns: dict[tuple[str, ...], list[str]] = {}  # machines with the same outcomes stand together
    for name, machine in MACHINES.items():
        if not machine.refused:
            there = declarations(machine)
            cells = tuple(
                _outcome(resolve(Request(spec, layout=layout, io=io, store=store), there), layout, io)
                for layout, io in asked
            )
            columns.setdefault(cells, []).append(name)
    wishes = ["nothing" if layout is None else f"`{layout}` + `{io}`" for layout, io in asked]
    rows = [[wish, *(cells[number] for cells in columns)] for number, wish in enumerate(wishes)]
    return table(["asked for", *("; ".join(names) for names in columns.values())], rows)


def abilities_table() -> str:
    """What each platform declares."""
    rows = []
    for ability, meaning in ABILITIES.items():
        cells = [
            "yes" if ability in machine.abilities else f"no: {machine.lacks(ability)}" for machine in _plain()
        ]
        rows.append([f"`{ability}`", meaning, *cells])
    return table(["ability", "meaning", *(machine.platform for machine in _plain())], rows)


def _plain() -> list[Capabilities]:
    return [MACHINES[name] for name in ("CPU", "CUDA", "ROCm")]


def engines_table(there: Declarations) -> str:
    """Every copy engine: where it runs, and where its lists of slots lie."""
    rows = []
    for engine in sorted(there.engines, key=lambda one: (one.io, one.name)):
        kernels = {"load": engine.load, "save": engine.save, "save page-major": engine.save_pages}
        for way, kernel in kernels.items():
            if kernel is not None:
                rows.append(
                    [
                        f"`{engine.name}`",
                        f"`{engine.io}`",
                        ", ".join(sorted(engine.platforms)),
                        way,
                        kernel.name,
                        kernel.source_index.value,
                        kernel.target_index.value,
                        ", ".join(f"`{need}`" for need in kernel.needs) or "nothing",
                    ]
                )
    head = [
        "engine",
        "I/O back end",
        "platforms",
        "way",
        "kernel",
        "source slots on",
        "target slots on",
        "needs",
    ]
    return table(head, rows)


def stores_table(there: Declarations) -> str:
    """Every store: what it needs and what its names carry."""
    rows = [
        [
            f"`{store.name}`",
            "one run a page" if store.whole_pages else "any layout",
            ", ".join(sorted(store.coordinates)),
        ]
        for store in there.stores
    ]
    return table(["store", "needs", "record names carry"], rows)


def aliases_table() -> str:
    """Other names and values for our options."""
    rows = []
    for name, meaning in OPTIONS.items():
        names = [f"`{other}`" for other, ours in NAMES.items() if ours == name]
        values = [f"`{other}` = `{ours}`" for other, ours in VALUES.get(name, {}).items()]
        rows.append(
            [
                f"`{name}`",
                meaning,
                f"`{DEFAULTS[name]}`" if name in DEFAULTS else "",
                ", ".join(names),
                ", ".join(values),
            ]
        )
    return table(["option", "meaning", "default", "also called", "values also called"], rows)


def costs_table() -> str:
    """What a departure costs."""
    return table(
        ["departure", "cost", "why"], [[name, str(cost), why] for name, (cost, why) in COSTS.items()]
    )


def layouts_table() -> str:
    """Every layout."""
    rows = [
        [f"`{one.name}`", ", ".join(one.axes), "yes" if one.page_major else "no"] for one in LAYOUTS.values()
    ]
    return table(["layout", "axes, outermost first", "a page is one run"], rows)


def refused_table() -> str:
    """Platforms that are known by name only."""
    return table(
        ["platform", "refused because"],
        [[f"`{m.platform}`", m.refused or ""] for m in MACHINES.values() if m.refused],
    )


def story() -> str:
    """The example of the page: how a pair that works nowhere could be chosen, and what is chosen instead."""
    there = declarations(MACHINES["ROCm without staged write-back"])
    spec = attention("mha")
    lines = []
    for store in (None, "mooncake"):
        found = resolve(Request(spec, layout="page_first", io="kernel", store=store), there)
        lines.append(f"asked: page_first + kernel, store {store or 'none'}")
        lines += [f"  {step}" for step in found.steps]
        chosen = found.require()
        lines.append(f"  -> {chosen.layout} + {chosen.io}")
    return "\n".join(lines)


def page(template: str) -> str:
    """The page, its template's places filled."""
    there = declarations(MACHINES["CUDA"])
    mha, mla = attention("mha"), attention("mla")
    parts = {
        "pairs": pairs_table(mha, None),
        "pairs with whole pages": pairs_table(mha, "mooncake"),
        "pairs of one head": pairs_table(mla, None),
        "layouts": layouts_table(),
        "abilities": abilities_table(),
        "engines": engines_table(there),
        "stores": stores_table(there),
        "costs": costs_table(),
        "aliases": aliases_table(),
        "refused": refused_table(),
        "story": f"```text\n{story()}\n```",
    }
    for name, text in parts.items():
        place = "{{ " + name + " }}"
        if place not in template:
            raise ConfigError("the template of the page has no place for a part", part=name)
        template = template.replace(place, text)
    return template
