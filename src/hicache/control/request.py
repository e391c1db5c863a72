"""A request: the handle an adapter holds from ``open`` to ``close``, and what the control plane knows about it.

A request owns nothing but the pin on its deepest prefetched page and its endpoint ids: a FILLING slot belongs to
the Job that fills it, sources belong to the Jobs that read them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache.control.lease import Lease
from hicache.errors import InvariantError
from hicache.keys import Namespace, PageKey
from hicache.records import JobKind, Load, Match, Reason


class Verbs(Protocol):
    """What a request asks of the controller that made it."""

    def match(self, request: Request, computed: int) -> Match:
        """See :meth:`Request.match`."""
        ...

    def load(self, request: Request, match: Match, target: Sequence[int], *, arriving: bool) -> Load:
        """See :meth:`Request.load`."""
        ...

    def extend(self, request: Request, keys: Sequence[PageKey]) -> None:
        """See :meth:`Request.extend`."""
        ...

    def publish(self, request: Request, upto: int, source: Sequence[int]) -> int:
        """See :meth:`Request.publish`."""
        ...

    def release_endpoint(self, request: Request) -> None:
        """See :meth:`Request.release_endpoint`."""
        ...

    def close(self, request: Request, *, abort: bool) -> None:
        """See :meth:`Request.close`."""
        ...


@dataclass(slots=True)
class Memo:
    """Where the last look at the index ended: pages ``start .. end`` were resident, those before ``ready`` READY.

    ``clock``: the index's, at that look; a row that was marked later may hold a page that has left and come again.
    """

    start: int = 0
    end: int = 0
    ready: int = 0
    breaks: int = -1
    clock: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One generation of one request id. All methods are the controller's: one caller at a time."""

    controller: Verbs
    id: object
    handle: int
    namespace: Namespace
    keys: list[PageKey]
    cursor: int = 0  # pages before it have been published
    counted: int = 0  # pages before it have been counted as wanted by this request
    stored: int = 0  # leading pages the store has, as far as its answer goes
    lookup: int = 0  # id of the running look-up, else 0
    fetch: int = 0  # id of the running prefetch, else 0
    waits: bool = False  # its prefetch has been deferred
    lost: dict[PageKey, Reason] = field(default_factory=dict)  # pages its fetches did not bring, and why
    hold: Lease | None = None
    closed: bool = False
    jobs: set[int] = field(default_factory=set)  # live Jobs emitted for it
    due: set[JobKind] = field(default_factory=set)  # EndpointFree events it still owes
    ignored: set[int] = field(default_factory=set)  # live loads whose result nobody waits for
    memo: Memo = field(default_factory=Memo)
    rows: array[int] = field(init=False)  # the index row of each page when last seen: a hint, checked by key

    def __post_init__(self) -> None:
        self.rows = array("i", b"\xff" * (4 * len(self.keys)))

    def match(self, computed: int = 0) -> Match:
        """How much could be loaded behind the ``computed`` leading pages that the engine already has.

        Pins nothing, touches nothing; asking again costs O(1) plus what became known since.
        """
        return self.controller.match(self, computed)

    def load(self, match: Match, target: Sequence[int], *, arriving: bool = True) -> Load:
        """Start copying pages from ``match.start`` on to the endpoint ids in ``target``, one a page.

        Resolves every page again, so it may give less than promised. With ``arriving=False`` it stops at the
        first page that is not READY in memory. The end is announced by one Loaded event; none follows when
        ``pages`` is 0.
        """
        return self.controller.load(self, match, target, arriving=arriving)

    def extend(self, keys: Sequence[PageKey]) -> None:
        """Add the keys of pages that were generated since."""
        self.controller.extend(self, keys)

    def publish(self, upto: int, source: Sequence[int]) -> int:
        """Offer pages 0 .. ``upto``, whose bytes are complete at endpoint ids ``source[page]``; returns the cursor.

        Called as often as pages fill up. Pages already held are duplicates and stay private. Where no room can
        be made it stops, and the next call tries again from there.
        """
        return self.controller.publish(self, upto, source)

    def release_endpoint(self) -> None:
        """The engine wants its memory back (preemption): untaken loads are withdrawn, EndpointFree follows.

        It speaks of all memory used for this handle until then; a second release before it is heard is answered
        together with the first.
        """
        self.controller.release_endpoint(self)

    def close(self, *, abort: bool = False) -> None:
        """The request is over. Finished: untaken saves still go. Aborted: they are withdrawn unless followed."""
        self.controller.close(self, abort=abort)

    def add_keys(self, keys: Sequence[PageKey]) -> None:
        """Append keys, and their place for hints."""
        self.keys.extend(keys)
        self.rows.frombytes(b"\xff" * (4 * len(keys)))

    def must_be_open(self, verb: str) -> None:
        """Raise InvariantError when the adapter uses a closed request."""
        if self.closed:
            raise InvariantError(f"{verb} on a closed request", id=self.id, handle=self.handle)

    def release_hold(self) -> None:
        """Let go of the deepest prefetched page."""
        if self.hold is not None:
            self.hold.close()
            self.hold = None
