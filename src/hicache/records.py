"""The messages between the planes: immutable, small, and the same for every driver.

The control plane emits :class:`Job`; the data plane answers each with one :class:`Done` a shard; applying a Done
gives :class:`Event`. An in-process worker, an engine's step metadata, virtual time and the explorer are drivers
of the same messages.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hicache.keys import Namespace, PageKey


class Where(enum.IntEnum):
    """A place bytes can be. ENDPOINT is the engine's own memory and never a tier; tiers are in order."""

    ENDPOINT = 0
    DEVICE = 1
    HOST = 2
    STORE = 3


class JobKind(enum.Enum):
    """What a Job does."""

    LOOKUP = "lookup"  # ask the store how many leading pages it holds
    FETCH = "fetch"  # store -> the lowest memory tier
    LOAD = "load"  # memory tiers -> endpoint
    SAVE = "save"  # endpoint -> the highest memory tier
    DOWN = "down"  # memory tier -> the next lower memory tier
    WRITE = "write"  # the lowest memory tier -> store


TOUCHES_ENDPOINT = frozenset({JobKind.LOAD, JobKind.SAVE})
"""Jobs that read or write the engine's memory: always waited for, never given up."""


class Reason(enum.Enum):
    """Why a page of a Job did not arrive, or why a run of pages ends. A closed list."""

    MISS = "miss"  # not in the store (any more)
    CORRUPT = "corrupt"  # bytes are not what the record claims
    FAILED = "failed"  # the copy or the I/O raised
    UPSTREAM = "upstream"  # a Job it follows failed this page, or its parent
    CANCELLED = "cancelled"  # withdrawn before it started
    DEADLINE = "deadline"  # its time was up
    PARENT_ABSENT = "parent_absent"  # a store write whose parent record is not there
    REFUSED = "refused"  # the store has no room, or does not take it now
    ABSENT = "absent"  # in no tier
    SLOWER = "slower"  # in the store, and sooner computed than loaded
    NO_ROOM = "no_room"  # no slot could be had
    TARGET_FULL = "target_full"  # the adapter gave no further endpoint places
    END = "end"  # nothing is missing: the keys end here


@dataclass(frozen=True, slots=True)
class Span:
    """Pages that travel between the same two places: three rows of equal length.

    ``sources`` and ``targets`` are slots of a tier, or the adapter's own endpoint ids; empty on the STORE side,
    where the key is the place.
    """

    source: Where
    target: Where
    keys: tuple[PageKey, ...]
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work for the data plane, answered by one Done from each shard.

    A page runs only if no Job in ``after`` failed its key (a store write: nor its parent's); else it is answered
    UPSTREAM. ``parents`` runs beside the keys of a WRITE (the namespace's root for a first page). ``deadline`` is
    on the controller's clock; None = waited for. ``priority``: lower first. ``namespace`` is set where the store
    is touched, ``keys`` on a LOOKUP only.
    """

    id: int
    kind: JobKind
    handle: int | None
    spans: tuple[Span, ...] = ()
    after: tuple[int, ...] = ()
    parents: tuple[PageKey, ...] = ()
    keys: tuple[PageKey, ...] = ()
    namespace: Namespace | None = None
    deadline: float | None = None
    priority: int = 0

    @property
    def pages(self) -> int:
        """How many pages travel."""
        return sum(len(span.keys) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Batch:
    """What :meth:`Controller.take_jobs` hands out.

    applied: ids of Jobs whose end has been applied; the worker may forget which of their keys failed.
    touched: deepest pages of requests served since the last batch; a store with recency marks them used.
    """

    jobs: tuple[Job, ...] = ()
    applied: tuple[int, ...] = ()
    touched: tuple[PageKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """One shard's answer to a Job. An empty ``bad`` means every page arrived.

    found: for a LOOKUP, how many leading keys are usable. stuck: the deadline passed and a call has not returned;
    ``bad`` and ``found`` say how far it has come, what is not bad is there for good, and a real Done follows, perhaps
    never.
    """

    job: int
    shard: int = 0
    bad: Mapping[PageKey, Reason] = field(default_factory=dict)
    found: int = 0
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a request's prompt could be loaded: a hint that pins nothing and touches nothing.

    Pages ``start .. start + memory`` are in our memory tiers (the first ``ready`` of them with all their bytes,
    the others arriving); ``store`` further pages are in the store as far as its answer goes. ``pending``: the
    look-up or the request's own fetch still runs, so asking again may give more. ``ends``: why it ends there.
    """

    start: int
    memory: int
    ready: int
    store: int
    pending: bool
    ends: Reason

    @property
    def pages(self) -> int:
        """Pages promised, from all tiers."""
        return self.memory + self.store


@dataclass(frozen=True, slots=True)
class Load:
    """What :meth:`Request.load` started: ``pages`` from ``start``, how many come from each tier, why no more."""

    start: int
    pages: int
    by_tier: Mapping[Where, int]
    ends: Reason


@dataclass(frozen=True, slots=True)
class Loaded:
    """Event: a load has ended. Pages ``start .. start + good`` are in the endpoint; ``reason`` says why not all."""

    handle: int
    start: int
    pages: int
    good: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class EndpointFree:
    """Event: no Job reads (SAVE) or writes (LOAD) the engine's memory of this handle any more.

    Follows every ``release_endpoint`` and ``close``, once for each kind; not before it may the adapter reuse the ids.
    Releases that come before the event is heard share one.
    """

    handle: int
    kind: JobKind


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Event: the store has answered (or was given up) for this handle; ``match`` will not be pending for it."""

    handle: int
    found: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Event: pages became complete in a tier; parents come before their children."""

    tier: Where
    keys: Sequence[PageKey]
    parents: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Event: pages left a tier because they turned out to be bad, not because room was needed."""

    tier: Where
    keys: Sequence[PageKey]


Event = Loaded | EndpointFree | LookedUp | Stored | Dropped


@dataclass(slots=True)
class Stats:
    """Counters of one controller since it was made, in pages where not said otherwise. They only grow."""

    requests: int = 0
    loaded: dict[Where, int] = field(default_factory=lambda: dict.fromkeys(Where, 0))
    bad: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    saved: int = 0
    duplicates: int = 0
    not_saved: int = 0
    stored: dict[Where, int] = field(default_factory=lambda: dict.fromkeys(Where, 0))
    not_stored: int = 0
    evicted: dict[Where, int] = field(default_factory=lambda: dict.fromkeys(Where, 0))
    dropped: dict[Where, int] = field(default_factory=lambda: dict.fromkeys(Where, 0))
    deferred: int = 0  # prefetches that had to wait for their turn
    expired: int = 0  # prefetches that waited too long
    slower: int = 0  # pages left in the store because computing them is faster
    withdrawn_jobs: int = 0
    stuck_jobs: int = 0
