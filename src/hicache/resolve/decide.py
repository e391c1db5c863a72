"""Resolution: a request meets what the pieces declare, and becomes a configuration that can run, or a refusal.

    resolution = resolve(request, declarations, budget)
    chosen = resolution.require()      ConfigError with all values where nothing can be chosen

Total: every request is resolved or refused. Idempotent: what was chosen, asked for, is chosen. Order-free: the
order of the declarations means nothing. Derived: every pair of layout and I/O back end is put to every piece;
those that a piece refuses are dropped, and of the others the one is taken that departs least from what was asked
(see :mod:`hicache.resolve.relaxation`). There is no rule here about any platform, layout, back end or store.

Start, attaching a store at run time, the commands and the documentation all ask this one function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hicache.capability import (
    HOST_ACCESS,
    PINNING,
    SAME_ADDRESS,
    Declarations,
    Direction,
    EngineDeclaration,
    Kernel,
    StoreDeclaration,
)
from hicache.errors import ConfigError
from hicache.layout import Layout, place, undefined
from hicache.resolve.relaxation import io_cost, layout_cost
from hicache.resolve.request import DEFAULTS, NONE, Request, known_values, one_of
from hicache.resolve.sizing import Budget, Facts, HostSize, Sized, size
from hicache.spec import Group

Cost = tuple[int, int]
"""Whether a candidate departs from any wish (1) or from none (0); then what all it departs from costs.

A default that nobody asked for counts as much as a wish in the sum, so that asking for it changes nothing; but no
wish is given up for a default's sake where all of them can be had.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One departure from what was asked (``warning``) or from a default, and why."""

    field: str
    before: str
    after: str
    reason: str
    warning: bool

    def __str__(self) -> str:
        return f"{self.field} {self.before} -> {self.after}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pair that was looked at: who refuses it and why; without refusals it can run, at this cost."""

    layout: str
    io: str
    engine: str | None
    refusals: tuple[str, ...]
    cost: Cost

    @property
    def pair(self) -> str:
        """How a pair is spelt."""
        return f"{self.layout}+{self.io}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A configuration that can run.

    load, save: the kernels, which say where lists of slots lie. host_memory: page-locked or pageable.
    host_address: whose address of host memory the engine works with.
    """

    platform: str
    layout: str
    io: str
    engine: str
    load: Kernel
    save: Kernel
    host_memory: str
    host_address: str
    store: str
    into_host: str
    into_store: str
    host_mode: str
    prefetch: str
    size: Sized | None

    def as_dict(self) -> dict[str, object]:
        """By name, flat."""
        rows: dict[str, object] = {
            name: getattr(self, name) for name in self.__slots__ if name not in ("load", "save", "size")
        }
        for way, kernel in (("load", self.load), ("save", self.save)):
            rows[f"{way}_kernel"] = kernel.name
            rows[f"{way}_source_index"] = kernel.source_index.value
            rows[f"{way}_target_index"] = kernel.target_index.value
        if self.size is not None:
            rows |= {
                "host_slots": self.size.slots,
                "host_bytes": self.size.nbytes,
                "host_size": self.size.how,
            }
        return rows


@dataclass(frozen=True, slots=True)
class Resolution:
    """The outcome. Either ``chosen`` is set, or ``refusals`` say why not.

    ``nearest`` is a pair that could run; None where something else than the pair is refused.
    """

    request: Request
    platform: str
    chosen: Chosen | None
    steps: tuple[Step, ...]
    candidates: tuple[Candidate, ...]
    refusals: tuple[str, ...] = ()
    nearest: Candidate | None = None
    notes: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[Step, ...]:
        """Steps away from something that was asked for."""
        return tuple(step for step in self.steps if step.warning)

    def origin(self, field: str) -> str:
        """Where the chosen value of a field comes from: ``user``, ``default`` or ``resolved``."""
        if any(step.field == field for step in self.steps):
            return "resolved"
        return "default" if getattr(self.request, field, None) is None else "user"

    def require(self) -> Chosen:
        """What was chosen; ConfigError with every value involved where nothing was."""
        if self.chosen is not None:
            return self.chosen
        request = self.request
        nearest = {"nearest": self.nearest.pair} if self.nearest else {}
        raise ConfigError(
            "; ".join(self.refusals),
            platform=self.platform,
            **{name: request.wish(name) for name in DEFAULTS},
            spec=request.spec.describe(),
            **nearest,
        )

    def as_request(self) -> Request:
        """The request that asks for exactly what was chosen."""
        chosen = self.require()
        fields = {name: getattr(chosen, name) for name in DEFAULTS}
        sized = self.request.size if chosen.size is None else HostSize(nbytes=chosen.size.nbytes)
        return replace(self.request, **fields, size=sized)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "platform": self.platform,
            "requested": self.request.as_dict(),
            "chosen": None if self.chosen is None else self.chosen.as_dict(),
            "origins": {name: self.origin(name) for name in DEFAULTS} if self.chosen else {},
            "steps": [
                {"field": s.field, "from": s.before, "to": s.after, "reason": s.reason, "warning": s.warning}
                for s in self.steps
            ],
            "candidates": [
                {
                    "layout": c.layout,
                    "io": c.io,
                    "engine": c.engine,
                    "refusals": list(c.refusals),
                    "cost": list(c.cost),
                }
                for c in self.candidates
            ],
            "refusals": list(self.refusals),
            "nearest": None
            if self.nearest is None
            else {"layout": self.nearest.layout, "io": self.nearest.io},
            "notes": list(self.notes),
        }


def resolve(request: Request, declarations: Declarations, budget: Budget | None = None) -> Resolution:
    """See the module. ``budget``: what host memory there is, where that is known; else sizes are not compared."""
    for field, known in known_values(declarations).items():
        one_of(field, request.wish(field), known)
    store, refusals = _fixed_refusals(request, declarations)
    candidates = _candidates(request, declarations, store)
    best = min((c for c in candidates if not c.refusals), key=lambda c: _order(c, declarations), default=None)
    policies, steps = _policies(request)
    if best is None:
        refusals = [*refusals, *_why_none(request, candidates)]
    else:
        steps = [*_pair_steps(request, candidates, best), *steps]
    outcome = Resolution(request, declarations.platform.platform, None, (), candidates, nearest=best)
    if refusals or best is None:
        return replace(outcome, refusals=tuple(refusals), nearest=None)
    layout = declarations.layout(best.layout)
    sized: Sized | str | None = None
    if policies["host_mode"] != "off":
        facts = Facts(request.spec, layout, request.device_nbytes, request.taken_nbytes)
        sized = size(request.size, facts, budget)
    if isinstance(sized, str):
        return replace(outcome, refusals=(sized,), nearest=None)
    warned = [step for step in steps if step.warning]
    if request.strict and warned:
        return replace(outcome, refusals=tuple(f"strict: {step}" for step in warned))
    engine = next(e for e in declarations.engines if e.name == best.engine)
    return replace(
        outcome,
        chosen=_chosen(declarations, engine, layout, policies, sized),
        steps=tuple(steps),
        notes=_notes(request, layout, policies, declarations),
    )


def attach(current: Resolution, store: str, declarations: Declarations) -> Resolution:
    """The same for a store put in place, replaced or taken away (``none``) while the cache runs.

    Only the memory's layout and the engine are settled by now.
    """
    chosen = current.require()
    request = replace(current.as_request(), store=store, size=HostSize())
    answer = resolve(replace(request, live=(chosen.layout, chosen.io)), declarations)
    if answer.chosen is None:
        return replace(answer, nearest=resolve(request, declarations).nearest)
    return replace(answer, chosen=replace(answer.chosen, size=chosen.size))


def _fixed_refusals(
    request: Request, declarations: Declarations
) -> tuple[StoreDeclaration | None, list[str]]:
    """The store, and why, whatever the pair, nothing can run."""
    refusals: list[str] = []
    if declarations.platform.refused:
        refusals.append(declarations.platform.refused)
    elif declarations.platform.absent:
        refusals.append(f"{declarations.platform.platform} is not here: {declarations.platform.absent}")
    reason = request.shards.refuses(request.spec)
    if reason:
        refusals.append(reason)
    name, mode = request.wish("store"), request.wish("host_mode")
    store = next((one for one in declarations.stores if one.name == name), None)
    if mode == "staging" and name == NONE:
        refusals.append("host memory for staging only needs a store: nothing would be kept anywhere")
    if mode != "staging" and request.wish("into_host") == "back" and not request.own_device:
        refusals.append(
            "write policy back into host needs a device tier of our own: an engine does not say when it evicts; "
            "through works"
        )
    return store, refusals


def _candidates(
    request: Request, declarations: Declarations, store: StoreDeclaration | None
) -> tuple[Candidate, ...]:
    """Every pair, put to every piece; sorted by name, so that no order of declarations shows."""
    asked = declarations.layout(request.wish("layout"))
    live = "" if request.live is None else "+".join(request.live)
    rows: list[Candidate] = []
    for layout in sorted(declarations.layouts, key=lambda one: one.code):
        for io in sorted({engine.io for engine in declarations.engines}):
            engine, refusals = _engine(request, declarations, layout, io)
            if store is not None:
                reason = store.refuses(request.spec, layout, declarations.platform, request.shards)
                refusals += [f"store: {reason}"] if reason else []
            if live not in ("", f"{layout.name}+{io}"):
                refusals.append(f"the cache runs: its memory is laid out for {live}")
            costs = {"layout": layout_cost(asked, layout), "io": io_cost(request.wish("io"), io)}
            wished = any(cost for field, cost in costs.items() if getattr(request, field) is not None)
            cost = (int(wished), sum(costs.values()))
            rows.append(Candidate(layout.name, io, engine.name if engine else None, tuple(refusals), cost))
    return tuple(rows)


def _engine(
    request: Request, declarations: Declarations, layout: Layout, io: str
) -> tuple[EngineDeclaration | None, list[str]]:
    """The engine that serves a pair; with refusals, the one that came nearest to it (or none is declared)."""
    platform = declarations.platform
    if platform.refused:
        return None, [f"platform: {platform.refused}"]
    here = [e for e in declarations.engines if e.io == io and platform.platform in e.platforms]
    if not here:
        return None, [f"engine: no copy engine declares {io} for {platform.platform}"]
    answers: list[tuple[bool, bool, int, str, EngineDeclaration, list[str]]] = []
    for engine in here:
        asked = (engine.refuses(request.spec, layout, direction, platform) for direction in Direction)
        reason = next((answer for answer in asked if answer), None)
        refusals = [f"engine: {reason}"] if reason else []
        answers.append(
            (bool(refusals), engine.absent is not None, -engine.rank, engine.name, engine, refusals)
        )
    best = min(answers, key=lambda row: row[:4])
    return best[4], best[5]


def _order(candidate: Candidate, declarations: Declarations) -> tuple[Cost, bool, int, str]:
    """Cheapest first; of two as cheap the default layout, then the lower code."""
    code = declarations.layout(candidate.layout).code
    return candidate.cost, candidate.layout != DEFAULTS["layout"], code, candidate.io


def _pair_steps(request: Request, candidates: tuple[Candidate, ...], best: Candidate) -> list[Step]:
    """What the pair that was taken departs from.

    The reason of a field is what refuses the pair that was asked for, and what refuses its asked value beside the
    other field's chosen one: since the cheapest was taken, something does.
    """
    by_pair = {(c.layout, c.io): c for c in candidates}
    layout, io = request.wish("layout"), request.wish("io")
    steps: list[Step] = []
    for field, before, after, pair in (
        ("layout", layout, best.layout, (layout, best.io)),
        ("io", io, best.io, (best.layout, io)),
    ):
        if before != after:
            reason = "; ".join(dict.fromkeys((*by_pair[layout, io].refusals, *by_pair[pair].refusals)))
            steps.append(Step(field, before, after, reason, warning=getattr(request, field) is not None))
    return steps


def _policies(request: Request) -> tuple[dict[str, str], list[Step]]:
    """The fields that stand beside the pair, and steps where one forces another."""
    rows = {
        name: request.wish(name) for name in ("store", "into_host", "into_store", "host_mode", "prefetch")
    }
    steps: list[Step] = []
    if rows["host_mode"] == "staging":
        for field in ("into_host", "into_store"):
            if rows[field] == "back":
                rows[field] = "through"
                reason = "host memory for staging only keeps nothing, so there is nothing to write back later"
                steps.append(Step(field, "back", "through", reason, warning=True))
    return rows, steps


def _why_none(request: Request, candidates: tuple[Candidate, ...]) -> list[str]:
    """Why the asked pair is refused, and that every other is."""
    wanted = (request.wish("layout"), request.wish("io"))
    asked = next((c for c in candidates if (c.layout, c.io) == wanted), None)
    reasons = asked.refusals if asked else ("it is not declared",)
    return [f"no layout and I/O back end can run here; {wanted[0]}+{wanted[1]}: {'; '.join(reasons)}"]


def _chosen(
    declarations: Declarations,
    engine: EngineDeclaration,
    layout: Layout,
    policies: dict[str, str],
    sized: Sized | None,
) -> Chosen:
    platform = declarations.platform
    load, save = engine.kernel(layout, Direction.LOAD), engine.kernel(layout, Direction.SAVE)
    reaches = HOST_ACCESS in load.needs or HOST_ACCESS in save.needs
    return Chosen(
        platform=platform.platform,
        layout=layout.name,
        io=engine.io,
        engine=engine.name,
        load=load,
        save=save,
        host_memory="pageable" if platform.lacks(PINNING) else "pinned",
        host_address="device" if reaches and platform.lacks(SAME_ADDRESS) else "host",
        size=sized,
        **policies,
    )


def _notes(
    request: Request, layout: Layout, policies: dict[str, str], declarations: Declarations
) -> tuple[str, ...]:
    """What a user should know although nothing was changed."""
    notes: list[str] = []
    groups = request.spec.groups
    for other in sorted(declarations.layouts, key=lambda one: one.code):
        if other.name == layout.name:
            continue
        if all(_same(group, layout, other) for group in groups):
            notes.append(f"{layout.name} equals {other.name} for these planes: every stride is the same")
    if policies["store"] == NONE and request.prefetch is not None:
        notes.append(f"prefetch {request.prefetch} has nothing to fetch from: there is no store")
    return tuple(notes)


def _same(group: Group, layout: Layout, other: Layout) -> bool:
    if undefined(group, layout) or undefined(group, other):
        return False
    return place(group, layout, 2).planes == place(group, other, 2).planes
