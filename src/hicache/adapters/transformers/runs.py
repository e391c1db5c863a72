"""Sequences while they run: opened, loaded into the working rows, offered page by page, left.

Whoever calls holds the cache's lock. An error of the cache costs a recomputation and a count in
:attr:`Runs.errors`, never the generation; an :class:`InvariantError` is our own bug and is not hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hicache.adapters.transformers.result import BATCH, SOURCES, TAIL, Witness
from hicache.adapters.transformers.rows import Rows
from hicache.build import Cache, Clock
from hicache.control.request import Request
from hicache.errors import InvariantError, UnavailableError
from hicache.keys import KeyMemo, PageKey
from hicache.records import EndpointFree, Load, Loaded, Where

ROWS_S = 5.0
"""How long a sequence waits for copies between rows and memory, which take milliseconds; then it takes new rows."""

ROOM_TOKENS = 256
"""Rows made free beyond a prompt at once; more come when they are needed."""

ERROR = "error"
"""Why tokens were computed after something in the cache had failed."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Run:
    """One sequence while it runs: ``offset`` rows of padding, then ``ids``, which grows.

    resident: pages that were in memory when it began; what else is loaded has come from the store for it.
    limit: pages that may be loaded. hit: pages that were. used: tokens of them that are not computed again.
    started: loading is over, and forward calls own the rows.
    """

    ids: list[int]
    prompt: int
    row: int = 0
    offset: int = 0
    request: Request | None = None
    resident: int = 0
    limit: int = 0
    hit: int = 0
    used: int = 0
    offered: int = 0
    by_tier: Counter[Where] = field(default_factory=Counter)
    ends: str = ERROR
    started: bool = False
    calls: list[tuple[int, int]] = field(default_factory=list)


class Runs:
    """What the sequences of one model share, and what is done to each.

    errors: how often which error cost a recomputation.
    """

    def __init__(self, model: Any, cache: Cache, rows: Rows, witness: Witness | None, clock: Clock) -> None:
        self.model = model
        self.cache = cache
        self.errors: Counter[str] = Counter()
        self._rows = rows
        self._witness = witness
        self._clock = clock
        self._memo = KeyMemo(cache.spec.page_tokens)
        self._page = cache.spec.page_tokens
        self._runs = 0
        self._closing: list[Request] = []  # requests whose copies may still touch our rows
        self._lingering: list[Request] = []  # those whose copies hang, on rows that we have given up

    def _begin(self, runs: Sequence[Run], room: int) -> int:
        """Rows that nobody else uses, open requests, and in the rows what the cache has of the prompts.

        Returns how many rows of every sequence are filled: padding, and tokens that all of them have.
        """
        self._await_rows()
        width = max(run.offset + run.prompt for run in runs)
        self._rows.reserve(width + min(room, ROOM_TOKENS), len(runs))
        self._rows.pad([run.offset for run in runs])
        for run in runs:
            run.limit = loadable_pages(run.prompt, self._page)
        if self._witness is not None and len(runs) == 1:
            self._witness.began(runs[0].ids, self._page)
        self._guarded(runs, lambda: self._open(runs))
        self._guarded(runs, lambda: self._load(runs))
        ends = [run.offset + run.hit * self._page for run in runs]
        filled = min(ends) if any(run.hit for run in runs) else 0
        for run in runs:
            run.used = max(0, filled - run.offset)
            run.offered = run.used // self._page
            run.started = True
        return filled

    def _open(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._runs += 1
            keys = self._memo.keys(self.cache.namespace, run.ids)
            run.request = self.cache.open(self._runs, keys[: run.limit])
            self._rows.bind(run.request.handle, run.row, run.offset)
        for run in runs:
            assert run.request is not None, "all have been opened"
            run.resident = run.request.match().memory

    def _load(self, runs: Sequence[Run]) -> None:
        requests = [run.request for run in runs if run.request is not None]
        if not requests:
            return
        wait_s = self.cache.settings.deadlines.lookup_s + max(self._wait_s(run) for run in runs)
        self.cache.run_until(lambda: not any(request.match().pending for request in requests), wait_s)
        self._share(runs)
        for run in runs:
            self._load_one(run)

    def _wait_s(self, run: Run) -> float:
        return self.cache.fetch_wait_s(run.limit * self._page)

    def _share(self, runs: Sequence[Run]) -> None:
        """Load no more of a sequence than what all the others can begin with."""
        if len(runs) == 1:
            return
        promised = [
            run.offset + min(run.limit, run.request.match().pages) * self._page
            for run in runs
            if run.request is not None
        ]
        for run in runs:
            pages = max(0, -(-(min(promised) - run.offset) // self._page))
            if pages < run.limit:
                run.limit, run.ends = pages, BATCH

    def _load_one(self, run: Run) -> None:
        """Load page after page until nothing more comes; each round brings at least one page, or is the last."""
        request = run.request
        assert request is not None, "only an open request loads"
        lost = ""  # why the round before brought less than it promised
        while run.hit < run.limit:
            asked = request.load(request.match(run.hit), range(run.hit, run.limit))
            if not asked.pages:
                run.ends = lost or asked.ends.value
                break
            ended = self._loaded(request, asked, self._wait_s(run) + ROWS_S)
            if ended is None:
                raise UnavailableError("a load did not end", pages=asked.pages)
            run.by_tier += _arrived(asked, ended.good, run.resident)
            run.hit += ended.good
            if ended.good < asked.pages:
                run.ends = lost = ended.reason.value
            if not ended.good:
                break
        if self._witness is not None and not run.row:
            for page in range(run.hit):
                self._witness.restored(page, request.keys[page], self._rows.page(page))

    def _loaded(self, request: Request, asked: Load, timeout: float) -> Loaded | None:
        def answer() -> Loaded | None:
            events = self.cache.events(request)
            return next((e for e in events if isinstance(e, Loaded) and e.start == asked.start), None)

        self.cache.run_until(lambda: answer() is not None, timeout)
        return answer()

    def _offer_up_to(self, run: Run, tokens: int) -> None:
        """Offer the pages that are full by now: every row of them has been written by a forward call or a load."""
        full = tokens // self._page
        if full > run.offered and run.request is not None:
            self._guarded([run], lambda: self._offer(run, full))

    def _offer(self, run: Run, full: int) -> None:
        request = run.request
        assert request is not None, "only an open request publishes"
        keys: list[PageKey] = self._memo.keys(self.cache.namespace, run.ids[: full * self._page])
        request.extend(keys[len(request.keys) :])
        if self._witness is not None and not run.row:
            for page in range(run.offered, full):
                self._witness.offered(page, keys[page], self._rows.page(page))
        run.offered = full
        request.publish(full, range(full))
        self.cache.step()

    def _offer_again(self, run: Run) -> None:
        """What found no room may find some now that copies have ended."""
        request = run.request
        assert request is not None, "only an open request publishes"
        self.cache.step()
        request.publish(run.offered, range(run.offered))

    def _leave(self, run: Run, *, abort: bool = False) -> None:
        """The sequence is over; its copies may still run."""
        if run.request is not None and not abort and run.request.cursor < run.offered:
            self._guarded([run], lambda: self._offer_again(run))
        request, run.request = run.request, None
        if request is None:
            return
        self._closing.append(request)
        self._guarded([], lambda: self._close(request, abort=abort))

    def _close(self, request: Request, *, abort: bool) -> None:
        request.close(abort=abort)
        self.cache.step()

    # ---- errors, and rows that copies still use

    def _guarded(self, runs: Sequence[Run], step: Callable[[], T]) -> T | None:
        """Do it; an error inside the cache is counted and the sequences go on without one."""
        try:
            return step()
        except (InvariantError, AssertionError):
            raise
        except Exception as error:  # noqa: BLE001  (whatever it is: a cache never fails a request)
            self.errors[type(error).__name__] += 1
            self._abandon(runs)
            return None

    def _abandon(self, runs: Sequence[Run]) -> None:
        """Go on without the cache: nothing that is loaded counts, and no copy of these may touch our rows."""
        requests = [run.request for run in runs if run.request is not None]
        for run in runs:
            self._leave(run, abort=True)
        if any(run.started for run in runs):
            return
        if not all(self._is_free(request) for request in requests):
            self._rows.renew()
        for run in runs:
            run.hit = 0
            run.by_tier.clear()
            run.ends = ERROR

    def _is_free(self, request: Request) -> bool:
        kinds = {event.kind for event in self.cache.events(request) if isinstance(event, EndpointFree)}
        return len(kinds) == 2

    def _await_rows(self) -> None:
        """Wait until no copy of an earlier sequence touches the rows; take new ones when one does not end."""
        self.cache.step()
        if self._closing:
            self.cache.run_until(lambda: all(self._is_free(request) for request in self._closing), ROWS_S)
        known = self._lingering + self._closing
        busy = [request for request in known if not self._is_free(request)]
        if any(request in busy for request in self._closing):
            self._rows.renew()
        for request in known:
            if request not in busy:
                self._rows.unbind(request.handle)
                self.cache.forget(request)
        self._closing, self._lingering = [], busy

    def _account(self, runs: Sequence[Run]) -> tuple[dict[str, int], dict[str, int]]:
        """Sources and reasons of these prompts, in tokens."""
        sources, reasons = dict.fromkeys(SOURCES, 0), Counter[str]()
        for run in runs:
            left = run.used  # pages of lower tiers lie deeper: of a load that is used in part, theirs are not
            for where in sorted(run.by_tier):
                tokens = min(left, run.by_tier[where] * self._page)
                sources[where.name.lower()] += tokens
                left -= tokens
            computed = run.prompt - run.used
            loadable = loadable_pages(run.prompt, self._page)
            missed = loadable * self._page - run.used
            absent = 0 if run.ends == BATCH else max(0, loadable - run.hit) * self._page
            sources["computed"] += computed
            reasons[TAIL] += computed - missed
            reasons[run.ends] += absent
            reasons[BATCH] += missed - absent
        return sources, {name: tokens for name, tokens in reasons.items() if tokens}


def loadable_pages(prompt_tokens: int, page_tokens: int) -> int:
    """How many pages of a prompt may be loaded: all full ones before its last token, which is always computed."""
    return (prompt_tokens - 1) // page_tokens


def _arrived(asked: Load, good: int, resident: int) -> Counter[Where]:
    """Where the good pages of a load came from.

    Pages that were not in memory when the request began came from the store, whenever they were fetched. Of a
    load that was cut short, the pages of lower tiers count as the lost ones.
    """
    left = max(0, min(good, resident - asked.start))
    arrived = Counter({Where.STORE: good - left})
    for where, pages in asked.by_tier.items():
        here = min(pages, left)
        arrived[where] += here
        left -= here
    return arrived
