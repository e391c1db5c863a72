"""A guard before any store: a store that is down costs its callers next to nothing, and what it lost is not promised.

* **Circuit breaker.** Calls that raise, or answer that nothing works, are counted; after ``failures`` in a row, or
  while a call hangs, the breaker is *open*: every call is answered at once, as a miss. After a pause one call is let
  through (*half open*): if it works the breaker is *closed* again, else the pause doubles. Reads and writes have a
  breaker each, because what is full, read-only or locked can be read all the same.
* **Retries.** A call that raises is made once more, unless it took long.
* **Record check.** The hits of a store that does not check its records itself are checked here
  (:mod:`hicache.data.store.checked`).
* **Negative memory.** What was promised and could not be read is not promised again for a while, or until it is
  written.

A guard never waits and has no thread. It does not interrupt a call that hangs: that is the business of whoever waits
for the call's result, by a deadline.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from hicache.data.store.base import (
    Corrupt,
    Delete,
    Hit,
    Iovec,
    Miss,
    ReadOutcome,
    Record,
    Store,
    Touch,
    Trouble,
    Usage,
    WriteOutcome,
)
from hicache.data.store.checked import Checked
from hicache.keys import Namespace, RecordKey

CLOSED, HALF_OPEN, OPEN = 0, 1, 2
"""States of a breaker, as the gauges ``read_breaker`` and ``write_breaker`` show them."""

DOWN = ("unavailable", "gone")
"""Reasons of a Miss that speak of the store and not of the record."""
PASSING = ("not_now", "closed", "forked", "not_durable")
"""Reasons of a Miss that speak of neither."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """When a guard acts; times in seconds.

    failures: in a row, until the breaker opens. pause_s: how long it stays open, doubled up to pause_max_s by each
    trial that fails. hang_s: a call that has run so long counts as failed while it runs. retries: of a call that
    raised within retry_s. negative_s: how long a record that could not be read is not promised; negative_max: how
    many such records are remembered.
    """

    failures: int = 3
    pause_s: float = 1.0
    pause_max_s: float = 60.0
    hang_s: float = 5.0
    retries: int = 1
    retry_s: float = 0.5
    negative_s: float = 10.0
    negative_max: int = 65_536


class Breaker:
    """Decides which calls are made. Thread-safe; never blocks."""

    def __init__(self, clock: Callable[[], float], limits: Limits) -> None:
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._running: dict[int, float] = {}  # call -> when it began
        self._calls = 0
        self._trial = 0  # the call that decides whether it closes again
        self._row = 0  # failures in a row
        self._pause = limits.pause_s
        self._until = 0.0
        self._open = False
        self.why = ""
        self.opened = self.refused = 0

    @property
    def state(self) -> int:
        """CLOSED, HALF_OPEN (a trial runs, or may) or OPEN."""
        with self._lock:
            self._look()
            if not self._open:
                return CLOSED
            return HALF_OPEN if self._trial or self._clock() >= self._until else OPEN

    def enter(self) -> int:
        """The number of a call that may be made, for :meth:`leave`; 0 when it may not."""
        with self._lock:
            self._look()
            if self._open and (self._trial or self._hangs() or self._clock() < self._until):
                self.refused += 1
                return 0
            self._calls += 1
            if self._open:
                self._trial = self._calls
            self._running[self._calls] = self._clock()
            return self._calls

    def leave(self, call: int, failed: str) -> None:
        """A call has ended; ``failed`` says how it failed, if it did."""
        with self._lock:
            del self._running[call]
            trial = self._trial == call
            if trial:
                self._trial = 0
            if failed:
                self._row += 1
                self.why = failed
                if trial:
                    self._trip(min(2 * self._pause, self._limits.pause_max_s))
                elif not self._open and self._row >= self._limits.failures:
                    self._trip(self._limits.pause_s)
            elif trial or not self._open:
                self._row, self._open, self._pause = 0, False, self._limits.pause_s

    @property
    def hanging(self) -> int:
        """Calls that have run longer than they may."""
        with self._lock:
            return self._hangs()

    # -- below the lock is held

    def _hangs(self) -> int:
        before = self._clock() - self._limits.hang_s
        return sum(began <= before for began in self._running.values())

    def _look(self) -> None:
        if not self._open and self._hangs():
            self.why = f"a call has not come back for {self._limits.hang_s:g} s"
            self._trip(self._limits.pause_s)

    def _trip(self, pause: float) -> None:
        self._open, self._pause, self._until = True, pause, self._clock() + pause
        self.opened += 1


class Guard:
    """A :class:`Store` and all optional abilities, before ``inner``; what ``inner`` cannot do does nothing.

    fingerprint: of the pages' :class:`CacheSpec`.
    """

    def __init__(
        self, inner: Store, fingerprint: bytes, clock: Callable[[], float], limits: Limits | None = None
    ) -> None:
        self.inner = inner
        self._records = inner if getattr(inner, "verifies", False) else Checked(inner, fingerprint)
        self.name = inner.name
        self.limits = limits or Limits()
        self.reads, self.writes = Breaker(clock, self.limits), Breaker(clock, self.limits)
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()  # until when it is not promised
        self._retries = 0

    # -- the contract

    def read(
        self, namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]
    ) -> list[ReadOutcome]:
        """As the store; every outcome is a Miss while reads are let be."""
        with _call(self.reads) as call:
            if not call:
                return [Miss("breaker") for _ in keys]
            outcomes = self._tried(call, lambda: self._records.read(namespace, keys, into))
            if outcomes and all(isinstance(one, Miss) and one.reason in DOWN for one in outcomes):
                call.failed = "nothing can be read"
            self._remember(namespace, keys, outcomes)
            return outcomes

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """As the store; every outcome is FAILED while writes are let be."""
        with _call(self.writes) as call:
            if not call:
                return [WriteOutcome.FAILED for _ in records]
            outcomes = self._tried(call, lambda: self._records.write(namespace, records))
            if outcomes and all(one is WriteOutcome.FAILED for one in outcomes):
                call.failed = "nothing can be written"
            with self._lock:
                for record, outcome in zip(records, outcomes, strict=False):
                    if outcome.ok:
                        self._lost.pop((namespace.root, bytes(record.key)), None)
            return outcomes

    def contains(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[bool]:
        """As the store, less what it could not read of late; nothing while reads are let be."""
        with _call(self.reads) as call:
            if not call:
                return [False for _ in keys]
            there = self._tried(call, lambda: self.inner.contains(namespace, keys))
            if not self._lost:
                return there
            now, root = self._clock(), namespace.root
            with self._lock:
                return [
                    found and self._lost.get((root, bytes(key)), now) <= now
                    for key, found in zip(keys, there, strict=False)
                ]

    def close(self) -> None:
        """Close the store, whatever the breakers say."""
        self.inner.close()

    # -- abilities

    def touch(self, keys: Sequence[RecordKey]) -> None:
        """Mark records as used, if the store has recency."""
        store: object = self.inner
        with _call(self.writes) as call:
            if call and isinstance(store, Touch):
                self._tried(call, lambda: store.touch(keys))

    def delete(self, keys: Sequence[RecordKey]) -> int:
        """Forget records, if the store can; returns how many were there."""
        store: object = self.inner
        with _call(self.writes) as call:
            if not call or not isinstance(store, Delete):
                return 0
            return self._tried(call, lambda: store.delete(keys))

    def trouble(self) -> str | None:
        """Why not all is served: the store's own word, or that a breaker is open."""
        store: object = self.inner
        if isinstance(store, Trouble) and (said := store.trouble()) is not None:
            return said
        for what, breaker in (("read", self.reads), ("written", self.writes)):
            if breaker.state != CLOSED:
                return f"nothing is {what} for a while: {breaker.why}"
        return None

    def usage(self) -> dict[str, int]:
        """The store's gauges, if it has any, and the guard's; never raises."""
        store: object = self.inner
        gauges: dict[str, int] = {}
        with _call(self.reads) as call:
            if call and isinstance(store, Usage):
                try:
                    gauges = dict(store.usage())
                except Exception as error:  # noqa: BLE001  (whatever a store raises; the others are still told)
                    call.failed = repr(error)
        return {
            **gauges,
            "read_breaker": self.reads.state,
            "write_breaker": self.writes.state,
            "breaker_opened": self.reads.opened + self.writes.opened,
            "calls_refused": self.reads.refused + self.writes.refused,
            "calls_hanging": self.reads.hanging + self.writes.hanging,
            "calls_retried": self._retries,
            "records_not_promised": len(self._lost),
        }

    # -- calls

    def _tried(self, call: _Call, make: Callable[[], T]) -> T:
        began = self._clock()
        for _ in range(self.limits.retries):
            try:
                return make()
            except Exception:
                if self._clock() - began > self.limits.retry_s:
                    raise
                with self._lock:
                    self._retries += 1
        return make()

    def _remember(
        self, namespace: Namespace, keys: Sequence[RecordKey], outcomes: Sequence[ReadOutcome]
    ) -> None:
        until = self._clock() + self.limits.negative_s
        with self._lock:
            for key, outcome in zip(keys, outcomes, strict=False):
                name = (namespace.root, bytes(key))
                if isinstance(outcome, Hit):
                    self._lost.pop(name, None)
                elif isinstance(outcome, Corrupt) or outcome.reason not in (*DOWN, *PASSING):
                    self._lost[name] = until
                    self._lost.move_to_end(name)
            while len(self._lost) > self.limits.negative_max:
                self._lost.popitem(last=False)


@dataclass(slots=True)
class _Call:
    """A call of the store: falsy when it may not be made."""

    number: int
    failed: str = ""

    def __bool__(self) -> bool:
        return bool(self.number)


@contextmanager
def _call(breaker: Breaker) -> Iterator[_Call]:
    call = _Call(breaker.enter())
    try:
        yield call
    except BaseException as error:
        call.failed = repr(error)
        raise
    finally:
        if call:
            breaker.leave(call.number, call.failed)
