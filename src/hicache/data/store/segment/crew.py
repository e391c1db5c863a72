"""A few threads that share out the items of one call, so that a disk has several of them in hand at once.

The caller is one of them: nothing is handed over where there is one item, and a call ends when all its items have. A
thread that hangs in a system call holds up its own call and no other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

HELPERS = 3
"""Beside the caller; more than four transfers at a time bring no disk further."""

SHARE_NBYTES = 1 << 20
"""Less than this is done by the caller alone: waking a thread takes as long."""

_JOIN_S = 1.0


class _Call(Generic[T, R]):
    """The items of one call: whoever is free takes the next. After an error the rest is not begun."""

    def __init__(self, work: Callable[[T], R], items: Sequence[T]) -> None:
        self.results: list[Any] = [None] * len(items)
        self.errors: list[BaseException] = []
        self.ended = threading.Event()
        self._work, self._items = work, items
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._left = len(items)

    def join_in(self) -> None:
        """Work on items until none is left to begin."""
        while (number := next(self._numbers)) < len(self._items):
            try:
                if not self.errors:
                    self.results[number] = self._work(self._items[number])
            except BaseException as error:  # noqa: BLE001  (raised again in the thread that called)
                self.errors.append(error)
            with self._lock:
                self._left -= 1
                if not self._left:
                    self.ended.set()

    def end(self) -> list[R]:
        """Work on what is left, wait for the others, and give the results or raise the first error."""
        self.join_in()
        self.ended.wait()
        if self.errors:
            raise self.errors[0]
        return self.results


class Crew:
    """``helpers`` threads, started when they are first needed; calls from several threads share them."""

    def __init__(self, name: str, helpers: int = HELPERS) -> None:
        self._name = name
        self._helpers = helpers
        self._calls: SimpleQueue[_Call[Any, Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def each(self, work: Callable[[T], R], items: Sequence[T], nbytes: int) -> list[R]:
        """``work`` of every item, in order; ``nbytes`` is what they move together. Raises the first error, at the end."""
        if len(items) < 2 or nbytes < SHARE_NBYTES:
            return [work(item) for item in items]
        call = _Call(work, items)
        for _ in range(min(self._start(), len(items) - 1)):
            self._calls.put(call)
        return call.end()

    def begin(self, work: Callable[[], R]) -> Callable[[], R]:
        """Have ``work`` done beside the caller; what is returned waits for its end, and does it if nobody has begun."""
        call = _Call(lambda _: work(), [None])
        if self._start():
            self._calls.put(call)
        return lambda: call.end()[0]

    def close(self) -> None:
        """End the threads; one that hangs in its call ends with the process."""
        with self._lock:
            threads, self._threads, self._helpers = self._threads, [], 0
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join(_JOIN_S)

    def _start(self) -> int:
        with self._lock:
            while len(self._threads) < self._helpers:
                name = f"hicache-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._help, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system gives no more threads: fewer do the same
                    break
                self._threads.append(thread)
            return len(self._threads)

    def _help(self) -> None:
        while (call := self._calls.get()) is not None:
            call.join_in()
            del call  # keep no buffers alive while waiting for the next one
