"""A store that misbehaves on purpose, for tests of whoever has to live with a bad one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence

from hicache.data.store.base import Hit, Iovec, ReadOutcome, Record, Store, WriteOutcome
from hicache.errors import UnavailableError
from hicache.keys import Namespace, RecordKey


class FaultyStore:
    """A store whose answers are wrong on purpose, for tests of whoever calls one. Seeded; one draw a key and toxic.

    ``plan`` maps a toxic to its probability: ``late`` (calls ``late`` before the call goes through), ``short`` (a
    hit that delivered half and says so), ``torn`` (the second half is old bytes), ``flipped`` (one bit), ``swapped``
    (a valid record of another key, from those written through this wrapper), ``full`` (a write answers NO_ROOM),
    ``raising`` (the call raises OSError) and ``dead`` (this call and all later ones raise UnavailableError).
    """

    def __init__(
        self, store: Store, plan: Mapping[str, float], seed: int, *, late: Callable[[], None] | None = None
    ) -> None:
        self.name = f"faulty-{store.name}"
        self.seen: dict[str, int] = {}
        self._store = store
        self._plan = plan
        self._rng = random.Random(seed)  # noqa: S311  (faults that can be repeated, not secrets)
        self._late = late
        self._dead = False
        self._written: list[bytes] = []
        self._lock = threading.Lock()

    def read(
        self, namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]
    ) -> list[ReadOutcome]:
        """As the store, then the toxics that spoil a hit."""
        self._before()
        outcomes = self._store.read(namespace, keys, into)
        return [self._spoil(outcome, views) for outcome, views in zip(outcomes, into, strict=True)]

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """As the store, or ``full``."""
        self._before()
        if self._draw("full"):
            return [WriteOutcome.NO_ROOM] * len(records)
        with self._lock:
            self._written += [b"".join(record.payload) for record in records]
            del self._written[:-64]
        return self._store.write(namespace, records)

    def contains(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[bool]:
        """As the store."""
        self._before()
        return self._store.contains(namespace, keys)

    def close(self) -> None:
        """As the store, dead or not."""
        self._store.close()

    def _draw(self, toxic: str) -> bool:
        with self._lock:
            hit = self._rng.random() < self._plan.get(toxic, 0.0)
            if hit:
                self.seen[toxic] = self.seen.get(toxic, 0) + 1
            return hit

    def _before(self) -> None:
        if self._draw("late") and self._late is not None:
            self._late()
        self._dead = self._dead or self._draw("dead")
        if self._dead:
            raise UnavailableError("the store is dead", store=self.name)
        if self._draw("raising"):
            raise OSError(5, "injected")

    def _spoil(self, outcome: ReadOutcome, into: Iovec) -> ReadOutcome:
        if not isinstance(outcome, Hit):
            return outcome
        half = outcome.nbytes // 2
        if self._draw("flipped"):
            self._edit(into, lambda data: data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :])
        if self._draw("torn"):
            self._edit(into, lambda data: data[:half] + b"\xaa" * (len(data) - half))
        if self._draw("swapped"):
            self._edit(into, self._other)
        if self._draw("short"):
            self._edit(into, lambda data: data[:half] + b"\xaa" * (len(data) - half))
            return Hit(outcome.layout, half)
        return outcome

    def _other(self, data: bytes) -> bytes:
        with self._lock:
            others = [
                other for other in self._written if len(other) <= len(data) and other != data[: len(other)]
            ]
            other = self._rng.choice(others) if others else b""
        return other + data[len(other) :]

    @staticmethod
    def _edit(into: Iovec, change: Callable[[bytes], bytes]) -> None:
        """Replace what the buffers hold by ``change`` of it."""
        data, at = change(b"".join(into)), 0
        for view in into:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
