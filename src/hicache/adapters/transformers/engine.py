"""The adapter for Transformers: ``attach`` a model, and its ``generate`` computes only what is in no tier.

    with attach(model, settings) as cached:
        out = model.generate(ids, max_new_tokens=32)

Models on the CPU. Calls from any thread; they wait for one another. While a cache is attached, ``model.generate`` is
ours; nothing else in the model is changed, and closing gives it back as it was found. A call that cannot be served
from pages runs as if there were no cache and counts in :attr:`TransformersCache.uncacheable`, by the name of what
stood against it. An error inside the cache costs a recomputation and a count, in
:attr:`TransformersCache.errors`. The last token of a prompt is always computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from hicache.adapters.transformers import hook
from hicache.adapters.transformers.calls import Call, judge
from hicache.adapters.transformers.identity import Identity, refuse_unsteady
from hicache.adapters.transformers.inputs import end_tokens, prompt_ids, prompt_rows, refuse_placeholders
from hicache.adapters.transformers.probe import cache_argument, forward, probe, refuse_by_configuration
from hicache.adapters.transformers.result import Result, Served, Witness
from hicache.adapters.transformers.rows import Rows, joined_cache, kept_rows
from hicache.adapters.transformers.runs import ROOM_TOKENS, Run, Runs
from hicache.adapters.transformers.sequences import Sequences
from hicache.build import Cache, Clock, build, process_clock
from hicache.errors import ConfigError, InvariantError
from hicache.settings import Settings, load
from hicache.spec import positive


class Options(TypedDict, total=False):
    """What :func:`attach` takes beside settings.

    prefill_chunk: most tokens that a forward call of :meth:`TransformersCache.generate` takes of a prompt. adapter:
    digest of the files of the adapter (LoRA) in use. salt: the tenant's. witness: sees every page that comes back or
    is given. clock: seconds. progress: called with (bytes hashed, bytes in all) while the weights are read.
    """

    prefill_chunk: int | None
    adapter: bytes | None
    salt: bytes | None
    witness: Witness | None
    clock: Clock
    progress: Callable[[int, int], None] | None


def attach(model: Any, settings: Settings | None = None, **options: Unpack[Options]) -> TransformersCache:
    """A cache for ``model``, ready to generate; settings from :func:`hicache.settings.load` where none are given.

    ConfigError when the model keeps anything but rows of K and V, is in training mode or not on the CPU, when it has
    a cache attached already, or when the settings cannot hold its pages.
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
    hook.refuse_attached(model)
    geometry = probe(model)
    spec = geometry.spec(settings.page_tokens)
    identity = Identity(
        model,
        geometry,
        spec,
        adapter=options.get("adapter"),
        salt=options.get("salt"),
        progress=options.get("progress"),
    )
    clock = options.get("clock", process_clock)
    rows = Rows(geometry, spec)
    cache = build(settings, spec, identity.namespace(), rows, clock=clock)
    return TransformersCache(identity, cache, rows, chunk, options.get("witness"), clock)


class TransformersCache(Runs):
    """A model with a cache. Use as a context manager, or call :meth:`close`.

    last: where the prompts of the latest call of ``model.generate`` came from; None where it was not served.
    uncacheable: how often which name stood against serving a call. errors: how often which error cost a
    recomputation. Between calls nobody takes in what copies have done: the next call, :meth:`flush` or
    :meth:`close` does.
    """

    def __init__(
        self,
        identity: Identity,
        cache: Cache,
        rows: Rows,
        prefill_chunk: int | None,
        witness: Witness | None,
        clock: Clock,
    ) -> None:
        super().__init__(identity.model, cache, rows, witness, clock)
        self._identity = identity
        self.uncacheable: Counter[str] = Counter()
        self.last: Served | None = None
        self._chunk = prefill_chunk
        self._closed = False
        self._generating = False
        self._times = _Times(0.0, 0)
        self._hook = hook.put(self.model, self._serve)

    # ---- model.generate, and whoever drives the model

    def _serve(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of ``model.generate``."""
        if self.cache.forked or self._closed:
            return own(*args, **kwargs)
        with self.cache.lock:
            call = self._judged(args, kwargs)
            if not isinstance(call, str):
                return self._serve_call(own, call, args, kwargs)
            self.uncacheable[call] += 1
            self.last = None
        return own(*args, **kwargs)

    def _judged(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | str:
        if self._closed:
            return "closed"
        if self._generating:
            return "nested"
        try:
            return judge(self.model, args, kwargs)
        except Exception:  # noqa: BLE001  (whatever is wrong with the arguments, Transformers says it best)
            return "arguments"

    def _serve_call(
        self, own: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        held = Sequences(lambda runs: self._start(runs, call.room), self._end, call.prompts, call.offsets)
        try:
            held.begin()
        except (InvariantError, AssertionError):
            raise
        except Exception as error:  # noqa: BLE001  (no memory for rows, for one: a cache never fails a request)
            if isinstance(error, ConfigError):
                self.uncacheable["model"] += 1  # it keeps other KV by now, or has an adapter without a digest
            else:
                self.errors[type(error).__name__] += 1
            self.last = None
            return own(*args, **kwargs)
        with held:
            kind: Any = type(self.model)
            kwargs = {**kwargs, cache_argument(kind): held.cache}
            if call.mask is not None:
                kwargs["attention_mask"] = call.mask
            with hook.FirstCall(self.model, held.cache, held.width, self._first_token):
                out = own(*args, **kwargs)
            if call.aligned:
                self._guarded(held.runs, lambda: held.wrote(getattr(out, "sequences", out)))
            self._give_back(out, held.cache)
        self.last = held.served
        return out

    def _give_back(self, out: Any, ours: Any) -> None:
        """Who keeps the cache of a call gets Transformers' own: our rows are used again."""
        kept: Any = out if isinstance(out, dict) else {}
        for name in [name for name, value in kept.items() if value is ours]:
            kept[name] = joined_cache(self.model, [kept_rows(ours, 0, ours.get_seq_length())])

    def sequences(self, input_ids: Any, attention_mask: Any = None) -> Sequences:
        """Run prompts through the model yourself: see :mod:`hicache.adapters.transformers.sequences`.

        ``input_ids``: one row of tokens, or a tensor of several that are left-padded as ``attention_mask`` says.
        Other callers wait until the block ends; it has to end in the thread that began it.
        """
        prompts, offsets = prompt_rows(input_ids, attention_mask)
        return Sequences(lambda runs: self._start(runs, ROOM_TOKENS), self._end, prompts, offsets)

    # ---- a generation of our own

    def generate(
        self, input_ids: Any, max_new_tokens: int, *, eos: int | Sequence[int] | None = None
    ) -> Result:
        """Greedy continuation of one prompt: a list of token ids, or a tensor of one row.

        Ends after ``max_new_tokens``, or with the first token of ``eos``, which is part of the result.
        """
        ids = prompt_ids(input_ids)
        positive("max_new_tokens", max_new_tokens)
        ends = end_tokens(eos)
        run = Run(ids, len(ids))
        cache, at = self._start([run], max_new_tokens)
        abort = True
        try:
            tokens = self._compute(run, cache, at, max_new_tokens, ends)
            abort = False
        finally:
            served = self._end([run], 0, abort)
        parts = {part.name: getattr(served, part.name) for part in fields(served)}
        return Result(**parts, tokens=tokens, calls=tuple(run.calls))

    def _compute(self, run: Run, cache: Any, at: int, max_new_tokens: int, ends: frozenset[int]) -> list[int]:
        """Forward calls over what is not in the rows, then one a token."""
        token = 0
        while at < run.prompt:
            end = min(run.prompt, at + (self._chunk or run.prompt))
            token = self._forward(run, cache, at, end)
            at = end
            if at == run.prompt:
                self._first_token()
            self._publish(run)
        tokens = [token]
        while len(tokens) < max_new_tokens and token not in ends:
            run.ids.append(token)
            token = self._forward(run, cache, len(run.ids) - 1, len(run.ids))
            tokens.append(token)
            self._publish(run)
        return tokens

    def _forward(self, run: Run, cache: Any, start: int, end: int) -> int:
        token = forward(self.model, run.ids[start:end], cache)
        run.calls.append((start, end))
        if self._witness is not None:
            self._witness.called(start, end, token)
        return token

    def _publish(self, run: Run) -> None:
        self._offer_up_to(run, run.calls[-1][1])

    # ---- every generation: its beginning and its end

    def _start(self, runs: Sequence[Run], room: int) -> tuple[Any, int]:
        """Take the lock until :meth:`_end`; the model's cache object, and how many of its columns are filled."""
        self.cache.refuse_fork()
        self.cache.lock.acquire()
        try:
            if self._closed:
                raise ConfigError("this cache is closed")
            if self._generating:
                raise ConfigError("generate was called from inside generate of the same cache")
            self._generating = True
            self._times = _Times(self._clock(), self._saved)
            try:
                self.cache.namespace = self._identity.namespace()
                refuse_placeholders(self.model, [run.ids for run in runs])
                filled = self._begin(runs, room)
                self._times.load_s = self._clock() - self._times.began
                return self._rows.cache(filled), filled
            except BaseException:
                self._generating = False
                for run in runs:
                    self._leave(run, abort=True)
                raise
        except BaseException:
            self.cache.lock.release()
            raise

    @property
    def _saved(self) -> int:
        return self.cache.controller.books.stats.saved

    def _first_token(self) -> None:
        self._times.ttft_s = self._clock() - self._times.began

    def _end(self, runs: Sequence[Run], written: int, abort: bool) -> Served:  # noqa: FBT001
        """Offer what is full by now, unless it was aborted, and leave."""
        try:
            for run in runs:
                if not abort:
                    self._offer_up_to(run, min(len(run.ids), written - run.offset))
                self._leave(run, abort=abort)
            return self._served(runs)
        finally:
            self._generating = False
            self.cache.lock.release()

    def _served(self, runs: Sequence[Run]) -> Served:
        sources, reasons = self._account(runs)
        size, times = self.cache.spec.page_nbytes, self._times
        if times.ttft_s:
            self.cache.computed(sources["computed"], times.ttft_s - times.load_s)
        return Served(
            prompt_tokens=sum(run.prompt for run in runs),
            sources=sources,
            reasons=reasons,
            ttft_s=times.ttft_s,
            load_s=times.load_s,
            load_bytes=sum(run.hit for run in runs) * size,
            save_bytes=(self._saved - times.saved) * size,
        )

    # ---- the end

    def invalidate(self) -> bool:
        """Hash the weights again, as after a change that torch does not count; True when they are others now.

        Pages of the weights before leave memory at once; in a store they stay under their own name. ConfigError when
        the model as it is now cannot be served.
        """
        self.cache.refuse_fork()
        with self.cache.lock:
            self._identity.forget()
            before, self.cache.namespace = self.cache.namespace, self._identity.namespace()
            changed = self.cache.namespace != before
            if changed:
                self.cache.controller.invalidate(before)
            return changed

    def flush(self, timeout: float) -> int:
        """Write all pages down to the lowest tier; returns how many could not be within ``timeout``."""
        return self.cache.flush(timeout)

    def close(self, timeout: float | None = None) -> list[str]:
        """Finish what is under way within ``timeout`` and let go; the model is as it was. See :meth:`Cache.close`."""
        if self.cache.forked:
            return []
        with self.cache.lock:
            self._closed = True
            if self._hook is not None:
                self._hook.remove()
            return self.cache.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class _Times:
    """A generation's clock: when it began, what had been saved by then, and how long parts of it took."""

    began: float
    saved: int
    load_s: float = 0.0
    ttft_s: float = 0.0
