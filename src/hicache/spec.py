"""What one page of KV is made of, and which prefix a set of present pages makes.

A :class:`Plane` is one tensor family of a page (``k``, ``v``, ``latent``, ...); a :class:`Group` is the planes
that live and die together under one rule; a :class:`CacheSpec` is all groups of a model as one engine holds
them. Sizes are read from the engine's real tensors, never from a model configuration.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.errors import ConfigError


def positive(name: str, value: object, *, minimum: int = 1) -> int:
    """Return ``value`` if it is an int of at least ``minimum``; else ConfigError naming the number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}", **{name: repr(value)})
    return value


def _check_name(of: str, name: object) -> None:
    """ConfigError unless ``name`` can stand in :meth:`CacheSpec.describe`, where signs of its own part the fields."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ConfigError(f"the name of a {of} must be letters, digits, _ . or -", name=ascii(name))


def _check_kinds(what: str, values: object, kind: type) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        raise ConfigError(f"{what} must be a tuple of {kind.__name__}", given=repr(values))


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor family of a page.

    layers: layers that hold it. tokens: rows a page (1 for opaque pages and states). heads: KV heads this shard
    holds. item_nbytes: bytes of one head of one row, for example ``head_dim * itemsize``; K and V may differ.
    """

    name: str
    layers: int
    tokens: int
    heads: int
    item_nbytes: int

    def __post_init__(self) -> None:
        _check_name("plane", self.name)
        for name in ("layers", "tokens", "heads", "item_nbytes"):
            positive(f"plane {self.name!r}: {name}", getattr(self, name))

    @property
    def nbytes(self) -> int:
        """Bytes of this plane in one page, without any padding."""
        return self.layers * self.tokens * self.heads * self.item_nbytes


@dataclass(frozen=True, slots=True)
class Full:
    """Every page from the root must be present: attention reads the whole prefix."""


@dataclass(frozen=True, slots=True)
class Window:
    """Attention reads at most ``tokens`` tokens before the next one: the pages that cover them must be present."""

    tokens: int

    def __post_init__(self) -> None:
        positive("window tokens", self.tokens)


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state: the snapshot taken at the end of the last page must be present, and nothing else."""


Rule = Full | Window | State


@dataclass(frozen=True, slots=True)
class Group:
    """Planes that live and die together, and the rule that says which of their pages a prefix needs."""

    name: str
    planes: tuple[Plane, ...]
    rule: Rule = field(default_factory=Full)

    def __post_init__(self) -> None:
        _check_name("group", self.name)
        _check_kinds(f"planes of group {self.name}", self.planes, Plane)
        if not self.planes:
            raise ConfigError("a group needs at least one plane", group=self.name)
        if not isinstance(self.rule, Rule):
            raise ConfigError(
                "the rule of a group is Full, Window or State", group=self.name, rule=repr(self.rule)
            )
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names):
            raise ConfigError("plane names repeat in a group", group=self.name, planes=names)

    @property
    def nbytes(self) -> int:
        """Bytes of this group in one page, without any padding."""
        return sum(plane.nbytes for plane in self.planes)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All groups of a model as one engine holds them, cut into pages of ``page_tokens``, over ``shards`` ranks.

    Group 0 carries the chain of pages in storage; see :class:`hicache.keys.RecordKey`.
    """

    groups: tuple[Group, ...]
    page_tokens: int
    shards: int = 1

    def __post_init__(self) -> None:
        positive("page_tokens", self.page_tokens)
        positive("shards", self.shards)
        _check_kinds("groups", self.groups, Group)
        if not self.groups:
            raise ConfigError("a cache spec needs at least one group")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError("group names repeat in a cache spec", groups=names)
        for group in self.groups:
            for plane in group.planes:
                if plane.tokens > 1 and self.page_tokens % plane.tokens:
                    every = dict.fromkeys(p.tokens for other in self.groups for p in other.planes)
                    raise ConfigError(
                        "rows of a plane must divide the page",
                        group=group.name,
                        plane=plane.name,
                        rows=plane.tokens,
                        page_tokens=self.page_tokens,
                        all_rows=",".join(map(str, every)),
                    )

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all groups of one shard, without padding."""
        return sum(group.nbytes for group in self.groups)

    def describe(self) -> str:
        """The plane table in one canonical line: the input of the fingerprint, readable in a dump."""
        parts = [f"page_tokens={self.page_tokens}", f"shards={self.shards}"]
        for group in self.groups:
            rule = group.rule
            window = f"({rule.tokens})" if isinstance(rule, Window) else ""
            planes = ",".join(
                f"{p.name}:{p.layers}x{p.tokens}x{p.heads}x{p.item_nbytes}" for p in group.planes
            )
            parts.append(f"{group.name}/{type(rule).__name__.lower()}{window}[{planes}]")
        return ";".join(parts)

    def fingerprint(self) -> bytes:
        """32 bytes that differ when the plane table, the page size or the shard count differ."""
        return hashlib.sha256(b"hicache.spec.1\0" + self.describe().encode()).digest()


def usable(spec: CacheSpec, present: Sequence[Sequence[bool]]) -> int:
    """How many leading pages can be used, given which pages of each group are present.

    ``present[g][i]`` says whether page i of group g is there with all its shards; rows may differ in length, a
    page past the end of a row is absent. The answer is the largest n such that every group can serve the
    boundary after page n - 1: Full needs pages 0..n-1, Window the last ``ceil(tokens / page_tokens)`` of them
    (all, if there are fewer), State only page n - 1. 0 when there is no such boundary.
    """
    if len(present) != len(spec.groups):
        raise ConfigError("one row of pages for each group", rows=len(present), groups=len(spec.groups))
    best = max((len(row) for row in present), default=0)
    good = bytearray(b"\1" * (best + 1))  # good[n]: every group seen so far can serve n pages
    for group, row in zip(spec.groups, present, strict=True):
        rule, run = group.rule, 0  # run: present pages directly before the boundary
        need = -(-rule.tokens // spec.page_tokens) if isinstance(rule, Window) else best
        for n in range(1, best + 1):
            run = run + 1 if n <= len(row) and row[n - 1] else 0
            if isinstance(rule, State):
                good[n] &= run > 0
            else:
                good[n] &= run >= min(need, n)
    return max(n for n in range(best + 1) if n == 0 or good[n])
