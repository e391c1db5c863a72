"""What a piece (platform, copy engine, layout, store, shards) declares about itself: pure records, no heavy imports.

A declaration never guesses: an ability is there, or it is absent with the reason. Every piece answers
``refuses(...) -> str | None``: why it cannot serve what is asked, or None. The same records describe the machine
we run on and a simulated one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hicache.errors import ConfigError
from hicache.layout import Layout, undefined
from hicache.spec import CacheSpec, positive


class Direction(enum.Enum):
    """Which way bytes travel, seen from the tier we own."""

    LOAD = "load"
    SAVE = "save"


class Place(enum.Enum):
    """Where a list of slots must lie for a kernel to read it."""

    HOST = "host"
    DEVICE = "device"


STREAMS = "streams"
TRITON = "triton"
STAGED = "staged-writeback"
PINNING = "pinning"
HOST_ACCESS = "host-access"
SAME_ADDRESS = "same-address"

ABILITIES: Mapping[str, str] = {
    STREAMS: "copies run asynchronously, in the order of a stream, and say when they have ended",
    TRITON: "Triton can compile and run kernels",
    STAGED: "page-major write-back passes through a staging ring in device memory, so that the host sees long runs",
    PINNING: "host memory can be page-locked",
    HOST_ACCESS: "kernels can read and write page-locked host memory, at an address that the platform tells",
    SAME_ADDRESS: "that address is the host's own",
}
"""Every ability a platform may have, and what it means."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a platform can do. ``missing`` maps each ability it lacks to the reason.

    refused: why nothing at all runs on a platform that is known by name only. absent: why it is not here; a
    simulated platform is one that is planned for, so nothing has to be here.
    """

    platform: str
    abilities: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None
    absent: str | None = None
    simulated: bool = False

    def lacks(self, ability: str) -> str | None:
        """Why ``ability`` is not there, or None when it is."""
        if ability in self.abilities:
            return None
        return self.missing.get(ability, f"{self.platform} does not declare {ability}")

    def without(self, abilities: Iterable[str], reason: str = "is left out on request") -> Capabilities:
        """The same platform without some abilities."""
        gone = {ability: f"{ability} on {self.platform} {reason}" for ability in abilities}
        return replace(self, abilities=self.abilities - set(gone), missing={**gone, **dict(self.missing)})

    def simulate(self) -> Capabilities:
        """The same platform, planned for instead of found."""
        return replace(self, simulated=True, absent=None)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way in which an engine moves pages. It alone says where its lists of slots lie: nobody else can choose."""

    name: str
    source_index: Place
    target_index: Place
    needs: tuple[str, ...] = ()


Limit = Callable[[CacheSpec, Layout], str | None]
"""Why an engine does not take a layout for this spec, from its axes and strides; None when it does."""


def no_limit(_spec: CacheSpec, _layout: Layout) -> str | None:
    """Any layout will do."""
    return None


@dataclass(frozen=True, slots=True)
class EngineDeclaration:
    """A copy engine before it is imported: one of the I/O back ends (``io``) of some platforms.

    factory: ``module:attribute`` of what makes the engine, without arguments. imports: packages it needs. load,
    save: its kernels; save_pages: the one for page-major layouts, where that is another. rank: of two engines
    that can do the same, the higher. absent: why it cannot be built here.
    """

    name: str
    io: str
    platforms: frozenset[str]
    factory: str
    load: Kernel
    save: Kernel
    save_pages: Kernel | None = None
    limit: Limit = no_limit
    imports: tuple[str, ...] = ()
    rank: int = 0
    absent: str | None = None

    def kernel(self, layout: Layout, direction: Direction) -> Kernel:
        """What moves pages of ``layout`` in that direction."""
        if direction is Direction.LOAD:
            return self.load
        return self.save_pages if self.save_pages is not None and layout.page_major else self.save

    def refuses(
        self, spec: CacheSpec, layout: Layout, direction: Direction, capabilities: Capabilities
    ) -> str | None:
        """Why this engine cannot serve that layout in that direction on that platform; None when it can."""
        if capabilities.platform not in self.platforms:
            return f"{self.name} runs on {', '.join(sorted(self.platforms))}, not on {capabilities.platform}"
        if self.absent and not capabilities.simulated:
            return f"{self.name} is not here: {self.absent}"
        reason = layout_refuses(spec, layout)
        if reason:
            return reason
        kernel = self.kernel(layout, direction)
        what = "page-major layouts" if kernel is self.save_pages else "pages"
        for ability in kernel.needs:
            why = capabilities.lacks(ability)
            if why:
                return f"the {self.name} engine needs {ability} to {direction.value} {what}: {why}"
        return self.limit(spec, layout)


@dataclass(frozen=True, slots=True)
class Shards:
    """How ranks share a page: ``tensor`` ranks hold its heads, ``pipeline`` stages its layers."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        positive("tensor", self.tensor)
        positive("pipeline", self.pipeline)

    @property
    def count(self) -> int:
        """Shards in all."""
        return self.tensor * self.pipeline

    def refuses(self, spec: CacheSpec) -> str | None:
        """Why these are not the shards of ``spec``, or None."""
        if spec.shards == self.count:
            return None
        return f"{self.tensor} tensor x {self.pipeline} pipeline ranks are {self.count} shards, the spec has {spec.shards}"


GROUP, TENSOR, PIPELINE = "group", "tensor rank", "pipeline stage"
COORDINATES = frozenset({GROUP, TENSOR, PIPELINE})
"""Whatever tells two records of one page apart; a store whose names lack one would mix them up."""


@dataclass(frozen=True, slots=True)
class StoreDeclaration:
    """A store before it is imported.

    coordinates: which of :data:`COORDINATES` its record names carry. whole_pages: it reads and writes the host
    pool's memory itself, so a page of a group has to be one run there. absent: why it cannot be built here.
    """

    name: str
    coordinates: frozenset[str] = COORDINATES
    whole_pages: bool = False
    imports: tuple[str, ...] = ()
    absent: str | None = None

    def refuses(
        self, spec: CacheSpec, layout: Layout, capabilities: Capabilities, shards: Shards
    ) -> str | None:
        """Why this store cannot keep pages of that layout from these shards; None when it can."""
        if self.absent and not capabilities.simulated:
            return f"{self.name} is not here: {self.absent}"
        counts = {GROUP: len(spec.groups), TENSOR: shards.tensor, PIPELINE: shards.pipeline}
        for coordinate in sorted(counts):
            if counts[coordinate] > 1 and coordinate not in self.coordinates:
                return f"{self.name} does not honour the {coordinate}: {counts[coordinate]} of them would share one name"
        if self.whole_pages and not layout.page_major:
            return (
                f"{self.name} needs whole pages in one run, and {layout.name} scatters a page over its layers"
            )
        return None


@dataclass(frozen=True, slots=True)
class Declarations:
    """Everything there is to choose from. The order of the rows means nothing."""

    platform: Capabilities
    engines: tuple[EngineDeclaration, ...]
    layouts: tuple[Layout, ...]
    stores: tuple[StoreDeclaration, ...]

    def __post_init__(self) -> None:
        for kind, names in (
            ("engine", [engine.name for engine in self.engines]),
            ("layout", [layout.name for layout in self.layouts]),
            ("layout code", [str(layout.code) for layout in self.layouts]),
            ("store", [store.name for store in self.stores]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"a {kind} is declared twice", name=",".join(twice))

    def layout(self, name: str) -> Layout:
        """The layout called ``name``; ConfigError lists those declared."""
        for layout in self.layouts:
            if layout.name == name:
                return layout
        raise ConfigError("unknown layout", layout=name, known=",".join(one.name for one in self.layouts))


def layout_refuses(spec: CacheSpec, layout: Layout) -> str | None:
    """Why ``layout`` cannot hold every group of ``spec``, or None."""
    for group in spec.groups:
        reason = undefined(group, layout)
        if reason:
            return f"group {group.name!r}: {reason}"
    return None
