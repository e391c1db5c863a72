"""The oracle "same chunking, no cache": what a generation must say, and which bytes a page must bring back.

Floating point makes rows depend on how a prompt was cut into forward calls, so a cold run is no oracle for a hit.
A :class:`Recorder` watches an attached cache and keeps for every page that is offered its *program*: which pages
the generation that made it had been given, by which programs those were made, and its own forward calls; and a
digest of the page's bytes. Then

* a page that comes back must have the bytes of one that was offered under its key (``recorder.wrong``), seen
  right after the load and before any forward call could repair it;
* :func:`replay` runs the program of a generation on Transformers' own ``DynamicCache``, with forward calls and
  crops and none of HiCache, and must say the same tokens.

A recorder survives as JSON, so that a fresh process can check what an older one has stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from hicache.adapters.transformers.probe import forward
from hicache.adapters.transformers.rows import joined_cache, kept_rows
from hicache.data.copy.base import Bytes
from hicache.errors import InvariantError
from hicache.keys import PageKey


class Made(msgspec.Struct, frozen=True):
    """Which generation made a page, as which page of it."""

    run: int
    page: int


class Program(msgspec.Struct):
    """One generation: the pages it was given, then its forward calls (start, end, likeliest next token)."""

    prompt: list[int]
    page_tokens: int
    given: list[Made] = []
    calls: list[tuple[int, int, int]] = []

    @property
    def tokens(self) -> list[int]:
        """What it generated, as the recorded calls say it."""
        return [token for _, end, token in self.calls if end >= len(self.prompt)]


class Wrong(msgspec.Struct, frozen=True):
    """A page that came back with bytes that nobody offered under its key."""

    run: int
    page: int
    key: str
    digest: str
    offered: list[str]


class Recorder(msgspec.Struct):
    """Watches attached caches: pass it as ``witness``. ``made[key][digest]`` is who first offered those bytes."""

    programs: list[Program] = []
    made: dict[str, dict[str, Made]] = {}
    wrong: list[Wrong] = []
    restored_pages: int = 0

    # ---- Witness

    def began(self, prompt: Sequence[int], page_tokens: int) -> None:
        """A generation begins."""
        self.programs.append(Program(list(prompt), page_tokens))

    def restored(self, page: int, key: PageKey, rows: Sequence[Bytes]) -> None:
        """Find the program of a page that came back; without one, go on with the newest program of its key."""
        program, known, digest = self.programs[-1], self.made.get(key.hex(), {}), digest_of(rows)
        self.restored_pages += 1
        if page != len(program.given):
            raise InvariantError("pages come back in order", page=page, expected=len(program.given))
        if digest not in known:
            self.wrong.append(Wrong(len(self.programs) - 1, page, key.hex(), digest, list(known)))
            if not known:
                raise InvariantError("a page came back that was never offered", page=page, key=key.hex())
        program.given.append(known.get(digest) or list(known.values())[-1])

    def called(self, start: int, end: int, token: int) -> None:
        """A forward call has returned."""
        self.programs[-1].calls.append((start, end, token))

    def offered(self, page: int, key: PageKey, rows: Sequence[Bytes]) -> None:
        """Remember the digest of a page that forward calls filled, and who made it."""
        made = Made(len(self.programs) - 1, page)
        self.made.setdefault(key.hex(), {}).setdefault(digest_of(rows), made)

    # ---- keeping

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> Recorder:
        """Read what :meth:`save` has written."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def digest_of(rows: Sequence[Bytes]) -> str:
    """xxh3-128 over a page's bytes, plane by plane and layer by layer."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(np.ascontiguousarray(row).data)
    return digest.hexdigest()


class Replay:
    """Runs recorded programs on a plain ``DynamicCache``; remembers the rows each has left."""

    def __init__(self, model: object, recorder: Recorder) -> None:
        self._model = model
        self._programs = recorder.programs
        self._left: dict[int, tuple[list[int], Any]] = {}

    def tokens(self, run: int) -> list[int]:
        """What generation number ``run`` must have said."""
        return self._run(run)[0]

    def _run(self, run: int) -> tuple[list[int], Any]:
        """Tokens, and the cache after the last call. Generated tokens are fed back from here, not from the record."""
        if run in self._left:
            return self._left[run]
        program = self._programs[run]
        size = program.page_tokens
        pieces = [
            kept_rows(self._run(made.run)[1], made.page * size, (made.page + 1) * size)
            for made in program.given
        ]
        cache = joined_cache(self._model, pieces)
        ids, said = list(program.prompt), list[int]()
        for start, end, _ in program.calls:
            if end > len(ids):
                if not said:
                    raise InvariantError("a token was used before anything said it", run=run, start=start)
                ids.append(said[-1])
            token = forward(self._model, ids[start:end], cache)
            if end >= len(program.prompt):
                said.append(token)
        self._left[run] = (said, cache)
        return said, cache


def replay(model: object, recorder: Recorder, run: int = -1) -> list[int]:
    """The tokens that a recorded generation (default: the last) must have said."""
    return Replay(model, recorder).tokens(run % len(recorder.programs))
