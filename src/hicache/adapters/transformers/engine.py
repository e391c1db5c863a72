"""The adapter for Transformers: ``attach`` a model, then ``generate`` as often as wanted.

    with attach(model, settings) as cached:
        result = cached.generate(ids, max_new_tokens=32)

First version: CPU, greedy, one sequence at a time; callers wait for one another. The last token of a prompt is
always computed. Nothing in the model is changed. What goes wrong costs a count in :attr:`TransformersCache.errors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

from hicache.adapters.transformers.identity import namespace, refuse_unsteady
from hicache.adapters.transformers.inputs import end_tokens, prompt_ids
from hicache.adapters.transformers.probe import forward, probe, refuse_by_configuration
from hicache.adapters.transformers.result import SOURCES, TAIL, Result, Witness
from hicache.adapters.transformers.rows import Rows
from hicache.build import Cache, Clock, build, process_clock
from hicache.control.request import Request
from hicache.errors import ConfigError, HiCacheError, InvariantError, UnavailableError
from hicache.keys import KeyMemo, PageKey
from hicache.records import EndpointFree, Load, Loaded, Where
from hicache.settings import Settings, load
from hicache.spec import positive

ROWS_S = 5.0
"""How long a sequence waits for copies between rows and memory, which take milliseconds; then it takes new rows."""

ROOM_TOKENS = 256
"""Rows made free beyond a prompt at once; more come when they are needed."""

ERROR = "error"
"""Why tokens were computed after something in the cache had failed."""

T = TypeVar("T")


class Options(TypedDict, total=False):
    """What :func:`attach` takes beside settings.

    prefill_chunk: most tokens a forward call over a prompt takes. adapter: digest of the files of the adapter
    (LoRA) in use. salt: the tenant's. witness: sees every page that comes back or is given. clock: seconds.
    progress: called with (bytes hashed, bytes in all) while the weights are read.
    """

    prefill_chunk: int | None
    adapter: bytes | None
    salt: bytes | None
    witness: Witness | None
    clock: Clock
    progress: Callable[[int, int], None] | None


def attach(model: Any, settings: Settings | None = None, **options: Unpack[Options]) -> TransformersCache:
    """A cache for ``model``, ready to generate; settings from :func:`hicache.settings.load` where none are given.

    ConfigError when the model keeps anything but rows of K and V, is in training mode or not on the CPU, or when
    the settings cannot hold its pages.
    """
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise ConfigError("unknown option", options=sorted(unknown), known=sorted(Options.__annotations__))
    chunk = options.get("prefill_chunk")
    if chunk is not None:
        positive("prefill_chunk", chunk)
    settings = load() if settings is None else settings
    refuse_by_configuration(model)
    refuse_unsteady(model)
    geometry = probe(model)
    spec = geometry.spec(settings.page_tokens)
    space = namespace(
        model,
        spec,
        geometry.dtypes,
        adapter=options.get("adapter"),
        salt=options.get("salt"),
        progress=options.get("progress"),
    )
    clock = options.get("clock", process_clock)
    rows = Rows(geometry, spec)
    cache = build(settings, spec, space, rows, clock=clock)
    return TransformersCache(model, cache, rows, chunk, options.get("witness"), clock)


@dataclass(slots=True)
class _Run:
    """One generation while it runs. ``ids`` grows; rows before ``hit`` pages were loaded, the others computed.

    resident: pages that were in memory when it began; what else is loaded has come from the store for it.
    """

    ids: list[int]
    prompt: int
    began: float
    request: Request | None = None
    resident: int = 0
    hit: int = 0
    offered: int = 0
    by_tier: Counter[Where] = field(default_factory=Counter)
    ends: str = ERROR
    load_s: float = 0.0
    ttft_s: float = 0.0
    calls: list[tuple[int, int]] = field(default_factory=list)


class TransformersCache:
    """A model with a cache. Use as a context manager, or call :meth:`close`.

    errors: how often which error cost a recomputation. Between calls nobody takes in what copies have done: the
    next call, :meth:`flush` or :meth:`close` does.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        rows: Rows,
        prefill_chunk: int | None,
        witness: Witness | None,
        clock: Clock,
    ) -> None:
        self.model = model
        self.cache = cache
        self.errors: Counter[str] = Counter()
        self._rows = rows
        self._chunk = prefill_chunk
        self._witness = witness
        self._clock = clock
        self._memo = KeyMemo(cache.spec.page_tokens)
        self._page = cache.spec.page_tokens
        self._runs = 0
        self._closing: list[Request] = []  # requests whose copies may still touch our rows
        self._lingering: list[Request] = []  # those whose copies hang, on rows that we have given up
        self._closed = False
        self._generating = False

    # ---- what callers use

    def generate(
        self, input_ids: Any, max_new_tokens: int, *, eos: int | Sequence[int] | None = None
    ) -> Result:
        """Greedy continuation of one prompt: a list of token ids, or a tensor of one row.

        Ends after ``max_new_tokens``, or with the first token of ``eos``, which is part of the result.
        """
        ids = prompt_ids(input_ids)
        positive("max_new_tokens", max_new_tokens)
        ends = end_tokens(eos)
        self.cache.refuse_fork()
        with self.cache.lock:
            if self._closed:
                raise ConfigError("this cache is closed")
            if self._generating:
                raise ConfigError("generate was called from inside generate of the same cache")
            self._generating = True
            try:
                return self._generate(ids, max_new_tokens, ends)
            finally:
                self._generating = False

    def _generate(self, ids: list[int], max_new_tokens: int, ends: frozenset[int]) -> Result:
        run = _Run(ids, len(ids), self._clock())
        saved = self.cache.controller.stats.saved
        try:
            self._prepare(run, max_new_tokens)
            tokens = self._compute(run, max_new_tokens, ends)
        except BaseException:
            self._leave(run, abort=True)
            raise
        self._leave(run)
        saved = self.cache.controller.stats.saved - saved
        return self._result(run, tokens, saved)

    def flush(self, timeout: float) -> int:
        """Write all pages down to the lowest tier; returns how many could not be within ``timeout``."""
        return self.cache.flush(timeout)

    def close(self, timeout: float | None = None) -> list[str]:
        """Finish what is under way within ``timeout`` and let go; the model is as it was. See :meth:`Cache.close`."""
        if self.cache.forked:
            return []
        with self.cache.lock:
            self._closed = True
            return self.cache.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- one generation

    def _prepare(self, run: _Run, max_new_tokens: int) -> None:
        """Rows that nobody else uses, an open request, and in the rows what the cache has of the prompt."""
        self._await_rows()
        self._rows.reserve(run.prompt + min(max_new_tokens, ROOM_TOKENS))
        if self._witness is not None:
            self._witness.began(run.ids, self._page)
        limit = loadable_pages(run.prompt, self._page)
        self._guarded(run, lambda: self._open(run, limit))
        self._guarded(run, lambda: self._load(run, limit))
        run.offered = run.hit
        run.load_s = self._clock() - run.began

    def _open(self, run: _Run, limit: int) -> None:
        self._runs += 1
        keys = self._memo.keys(self.cache.namespace, run.ids)
        run.request = self.cache.open(self._runs, keys[:limit])
        self._rows.bind(run.request.handle)
        run.resident = run.request.match().memory

    def _load(self, run: _Run, limit: int) -> None:
        """Load page after page until nothing more comes; each round brings at least one page, or is the last."""
        request = run.request
        if request is None:
            return
        times = self.cache.settings.deadlines
        self.cache.run_until(lambda: not request.match().pending, times.lookup_s + times.fetch_s)
        lost = ""  # why the round before brought less than it promised
        while run.hit < limit:
            asked = request.load(request.match(run.hit), range(run.hit, limit))
            if not asked.pages:
                run.ends = lost or asked.ends.value
                break
            ended = self._loaded(request, asked, times.fetch_s + ROWS_S)
            if ended is None:
                raise UnavailableError("a load did not end", pages=asked.pages)
            run.by_tier += _arrived(asked, ended.good, run.resident)
            run.hit += ended.good
            run.ends = lost = ended.reason.value if ended.good < asked.pages else ""
            if not ended.good:
                break
        if self._witness is not None:
            for page in range(run.hit):
                self._witness.restored(page, request.keys[page], self._rows.page(page))

    def _loaded(self, request: Request, asked: Load, timeout: float) -> Loaded | None:
        def answer() -> Loaded | None:
            events = self.cache.events(request)
            return next((e for e in events if isinstance(e, Loaded) and e.start == asked.start), None)

        self.cache.run_until(lambda: answer() is not None, timeout)
        return answer()

    def _compute(self, run: _Run, max_new_tokens: int, ends: frozenset[int]) -> list[int]:
        """Forward calls over what is not in the rows, then one a token."""
        at = run.hit * self._page
        cache = self._rows.cache(at)
        token = 0
        while at < run.prompt:
            end = min(run.prompt, at + (self._chunk or run.prompt))
            token = self._forward(run, cache, at, end)
            at = end
            if at == run.prompt:
                run.ttft_s = self._clock() - run.began
            self._publish(run)
        tokens = [token]
        while len(tokens) < max_new_tokens and token not in ends:
            run.ids.append(token)
            token = self._forward(run, cache, len(run.ids) - 1, len(run.ids))
            tokens.append(token)
            self._publish(run)
        return tokens

    def _forward(self, run: _Run, cache: Any, start: int, end: int) -> int:
        token = forward(self.model, run.ids[start:end], cache)
        run.calls.append((start, end))
        if self._witness is not None:
            self._witness.called(start, end, token)
        return token

    def _publish(self, run: _Run) -> None:
        """Offer the pages that are full by now: every row of them has been written by a forward call or a load."""
        full = run.calls[-1][1] // self._page
        if full > run.offered and run.request is not None:
            self._guarded(run, lambda: self._offer(run, full))

    def _offer(self, run: _Run, full: int) -> None:
        request = run.request
        assert request is not None, "only an open request publishes"
        keys: list[PageKey] = self._memo.keys(self.cache.namespace, run.ids[: full * self._page])
        request.extend(keys[len(request.keys) :])
        if self._witness is not None:
            for page in range(run.offered, full):
                self._witness.offered(page, keys[page], self._rows.page(page))
        run.offered = full
        request.publish(full, range(full))
        self.cache.step()

    def _offer_again(self, run: _Run) -> None:
        """What found no room may find some now that copies have ended."""
        request = run.request
        assert request is not None, "only an open request publishes"
        self.cache.step()
        request.publish(run.offered, range(run.offered))

    def _leave(self, run: _Run, *, abort: bool = False) -> None:
        """The sequence is over; its copies may still run."""
        if run.request is not None and not abort and run.request.cursor < run.offered:
            self._guarded(run, lambda: self._offer_again(run))
        request, run.request = run.request, None
        if request is None:
            return
        self._closing.append(request)
        request.close(abort=abort)
        self.cache.step()

    def _result(self, run: _Run, tokens: list[int], saved: int) -> Result:
        sources = dict.fromkeys(SOURCES, 0)
        for where, pages in run.by_tier.items():
            sources[where.name.lower()] = pages * self._page
        computed = run.prompt - run.hit * self._page
        sources["computed"] = computed
        missed = max(0, (run.prompt - 1) // self._page - run.hit) * self._page
        reasons = {TAIL: computed - missed}
        if missed:
            reasons[run.ends] = missed
        size = self.cache.spec.page_nbytes
        return Result(
            tokens=tokens,
            prompt_tokens=run.prompt,
            sources=sources,
            reasons=reasons,
            ttft_s=run.ttft_s,
            load_s=run.load_s,
            load_bytes=run.hit * size,
            save_bytes=saved * size,
            calls=tuple(run.calls),
        )

    # ---- errors, and rows that copies still use

    def _guarded(self, run: _Run, step: Callable[[], T]) -> T | None:
        """Do it; an error of the cache is counted and the sequence goes on without one."""
        try:
            return step()
        except InvariantError:
            raise
        except HiCacheError as error:
            self.errors[type(error).__name__] += 1
            self._abandon(run)
            return None

    def _abandon(self, run: _Run) -> None:
        """Go on without the cache: nothing that is loaded counts, and no copy of this request may touch our rows."""
        handle = run.request
        self._leave(run, abort=True)
        if not run.calls:  # later, the rows are ours: a load has ended before the first forward call
            if handle is not None and not self._is_free(handle):
                self._rows.renew()
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
