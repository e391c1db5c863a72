"""Lanes: one daemon thread each, running tasks in the order of their rank."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count

_LOG = logging.getLogger(__name__)

Rank = tuple[int, int]
Task = Callable[[], None]


class Lane:
    """A queue and the thread that empties it, lowest rank first, then first come. It starts on its first task.

    A task is expected to keep its errors to itself; one that does not is logged, and the lane goes on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._ready = threading.Condition()
        self._tasks: list[tuple[Rank, int, Task]] = []
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def put(self, rank: Rank, task: Task) -> None:
        """Queue a task; dropped when the lane has been stopped."""
        with self._ready:
            if self._stopped:
                return
            heapq.heappush(self._tasks, (rank, next(self._numbers), task))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"hicache-{self.name}", daemon=True)
                self._thread.start()
            self._ready.notify()

    def stop(self) -> None:
        """Take no more tasks, drop those that have not started; the one that runs is left to end."""
        with self._ready:
            self._stopped = True
            self._tasks.clear()
            self._ready.notify()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False when it still hangs in its task."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._tasks and not self._stopped:
                    self._ready.wait()
                if self._stopped:
                    return
                _, _, task = heapq.heappop(self._tasks)
            try:
                task()
            except BaseException:  # noqa: BLE001  (the lane outlives whatever it runs)
                _LOG.exception("a task of lane %s raised", self.name)
            del task  # keep nothing alive while waiting for the next one
