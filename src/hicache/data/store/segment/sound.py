"""Whether an LMDB file is whole, found out before LMDB opens it.

LMDB trusts its file: a wrong page number or length in it is read where no file is (SIGBUS), or ends the process in
an assertion. A file that is cut while it is open cannot be guarded against.

The last committed tree is walked from its meta page: every page says its own number, no page is used twice, every
node lies inside its page, keys and values are as long as our tables pack them, counts add up. Byte order and sizes
are LMDB's on 64-bit little-endian machines (data version 1). Nothing is written or locked; a file that a running
process changes meanwhile is looked at again. Of a table with very many leaves (a million pages: 200 MiB) only the
leaves' heads are looked at, so that it opens in tens of milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hicache.data.store.segment.tables import LENGTHS
from hicache.errors import DataError, UnavailableError

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_META = np.dtype(
    [
        ("pgno", "<u8"),
        ("pad", "<u2"),
        ("flags", "<u2"),
        ("span", "<u4"),
        ("magic", "<u4"),
        ("version", "<u4"),
        ("address", "<u8"),
        ("mapsize", "<u8"),
        ("dbs", "V48", 2),
        ("last_page", "<u8"),
        ("txnid", "<u8"),
    ]
)
_DB = np.dtype(
    [
        ("page_nbytes", "<u4"),
        ("flags", "<u2"),
        ("depth", "<u2"),
        ("branches", "<u8"),
        ("leaves", "<u8"),
        ("overflows", "<u8"),
        ("entries", "<u8"),
        ("root", "<u8"),
    ]
)
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _IS_META = 1, 2, 4, 8
_BIG, _SUB = 1, 2
_KINDS, _INTEGER_KEYS = 0x7F, 8
"""Flags of a table; the table of free pages also keeps the environment's, above them."""

_EMPTY = 2**64 - 1
_HEAD = 16
_DEPTH_MAX = 32
_CHUNK = 4096
"""Pages looked at together: 16 MiB."""
_DEEP = 16384
"""A table with more leaves than this (64 MiB) is looked at by the heads of its leaves only."""
_LOOKS = 8
"""A file that changes so often while it is looked at is in the hands of a running process."""


@dataclass(slots=True)
class _Nodes:
    """Nodes of some leaf pages: where each begins in ``pages``, its flags, and the lengths of its key and value."""

    pages: Bytes
    at: Numbers
    flags: Numbers
    key: Numbers
    value: Numbers

    def item(self, index: int) -> tuple[bytes, bytes]:
        """The key of one node and what is stored in the page for its value."""
        start = int(self.at[index]) + 8
        middle = start + int(self.key[index])
        stored = 8 if self.flags[index] & _BIG else int(self.value[index])
        return self.pages[start:middle].tobytes(), self.pages[middle : middle + stored].tobytes()


@dataclass(slots=True)
class _Found:
    """What was met on a walk of one table."""

    branches: int = 0
    leaves: int = 0
    overflows: int = 0
    entries: int = 0
    pages: list[Numbers] = field(default_factory=list)


def check_whole(path: Path) -> None:
    """DataError says what is damaged in the index at ``path``; no file, or an empty one, is fine.

    UnavailableError when the file cannot be read.
    """
    try:
        for _ in range(_LOOKS):
            try:
                _Walk(path).check()
            except _MovedError:
                continue
            return
    except _NoFileError:
        return
    except OSError as error:
        raise UnavailableError("the index cannot be read", path=path, reason=error) from error


class _NoFileError(Exception):
    pass


class _MovedError(Exception):
    """Something did not fit, and a commit came in between."""


def _damaged(what: str, **values: object) -> DataError:
    return DataError(f"the index is damaged: {what}", **values)


class _Walk:
    """One look at one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise _NoFileError from None
        if not size:
            raise _NoFileError
        self._meta = _last_meta(path, size)
        db = self._db(self._meta["dbs"][0].tobytes())
        page_nbytes = int(db["page_nbytes"])
        if page_nbytes & (page_nbytes - 1) or not 512 <= page_nbytes <= 65536:
            raise _damaged("its page size", page_bytes=page_nbytes)
        self._page_nbytes = page_nbytes
        self._count = min(size // page_nbytes, int(self._meta["last_page"]) + 1)
        if self._count < 2:
            raise _damaged("it is shorter than its first pages", size=size)
        mapped = np.memmap(path, np.uint8, mode="r", shape=(self._count, page_nbytes))
        self._pages: Bytes = np.asarray(mapped)

    def check(self) -> None:
        try:
            self._look()
        except DataError:
            if _last_meta(self._path, self._path.stat().st_size)["txnid"] != self._meta["txnid"]:
                raise _MovedError from None
            raise

    def _look(self) -> None:
        used: list[Numbers] = [np.array([0, 1], np.int64)]
        free = self._db(self._meta["dbs"][0].tobytes())
        for nodes in self._walk(free, used, "free", (8, 0)):
            used.extend(self._free_pages(nodes))
        main = self._db(self._meta["dbs"][1].tobytes())
        for nodes in self._walk(main, used, "main", (0, 48)):
            for index in range(nodes.at.size):
                name, packed = nodes.item(index)
                if nodes.flags[index] != _SUB:
                    raise _damaged("an entry that is no table", entry=name.hex())
                table = self._db(packed)
                for _ in self._walk(table, used, name.decode("ascii", "replace"), LENGTHS.get(name, (0, 0))):
                    pass
        numbers = np.concatenate(used)
        if np.bincount(numbers, minlength=1).max() > 1:
            raise _damaged("a page is used twice")

    def _db(self, packed: bytes) -> np.void:
        db: np.void = np.frombuffer(packed, _DB)[0]
        return db

    # -- one table ---------------------------------------------------------------------------------------------

    def _walk(
        self, db: np.void, used: list[Numbers], name: str, lengths: tuple[int, int]
    ) -> Iterator[_Nodes]:
        """The leaf nodes of a table, in chunks, everything above and beside them looked at."""
        found = _Found()
        if int(db["flags"]) & _KINDS != (_INTEGER_KEYS if name == "free" else 0):
            raise _damaged("a table is of another kind", table=name, flags=int(db["flags"]))
        depth = int(db["depth"])
        if int(db["root"]) == _EMPTY:
            if depth or db["entries"]:
                raise _damaged("a table without pages has entries", table=name)
            return
        if not 1 <= depth <= _DEPTH_MAX:
            raise _damaged("a table's depth", table=name, depth=depth)
        level = np.array([min(int(db["root"]), 2**62)], np.int64)
        for _ in range(depth - 1):
            found.branches += level.size
            level = np.concatenate([self._children(chunk, name) for chunk in self._chunks(level, found)])
        for chunk in self._chunks(level, found):
            found.leaves += chunk.size
            if level.size > _DEEP:
                found.entries += int(self._bounds(self._heads(chunk, _LEAF, name), name, 1).sum())
                continue
            nodes = self._leaf_nodes(chunk, name, lengths)
            found.entries += nodes.at.size
            found.overflows += sum(spans.size for spans in self._overflows(nodes, found, name))
            yield nodes
        counted = (found.branches, found.leaves, found.overflows, found.entries)
        if counted != tuple(int(db[n]) for n in ("branches", "leaves", "overflows", "entries")):
            raise _damaged("a table is miscounted", table=name, found=counted)
        used += found.pages

    def _chunks(self, level: Numbers, found: _Found) -> Iterator[Numbers]:
        if level.size > self._count:
            raise _damaged("more pages than the file has", pages=level.size)
        found.pages.append(level)
        for start in range(0, level.size, _CHUNK):
            yield level[start : start + _CHUNK]

    def _heads(self, numbers: Numbers, flags: int, name: str) -> Bytes:
        """The heads of these pages, each of this kind and saying its own number."""
        if ((numbers < 2) | (numbers >= self._count)).any():
            raise _damaged("a page that the file does not have", table=name, pages=self._count)
        heads: Bytes = self._pages[numbers, :_HEAD]
        wrong = (heads.view("<u8")[:, 0] != numbers.astype(np.uint64)) | (heads.view("<u2")[:, 5] != flags)
        if wrong.any():
            raise _damaged("a page is not what it should be", table=name, page=int(numbers[wrong][0]))
        return heads

    def _bounds(self, pages: Bytes, name: str, least: int) -> Numbers:
        """How many nodes each of these pages (or their heads) has."""
        words = pages.view("<u2")
        lower, upper = words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
        if ((lower < _HEAD + 2 * least) | (lower & 1) | (lower > upper) | (upper > self._page_nbytes)).any():
            raise _damaged("a page's bounds", table=name)
        return (lower - _HEAD) // 2

    def _nodes(self, pages: Bytes, name: str, least: int) -> tuple[Numbers, Numbers, Numbers]:
        """Of all nodes of these pages: the page's row, where the node begins (flat), and where its page's end is."""
        size = self._page_nbytes
        counts = self._bounds(pages, name, least)
        words = pages.view("<u2")
        row, column = np.nonzero(np.arange(counts.max()) < counts[:, None])
        inside = words[row, _HEAD // 2 + column].astype(np.int64)
        if ((inside < words[row, 7]) | (inside & 1) | (inside > size - 8)).any():
            raise _damaged("a node lies outside its page", table=name)
        return row, row * size + inside, (row + 1) * size

    def _children(self, numbers: Numbers, name: str) -> Numbers:
        self._heads(numbers, _BRANCH, name)
        pages: Bytes = self._pages[numbers]
        row, at, end = self._nodes(pages, name, 1 if name == "free" else 2)
        low, high, top, key = self._words(pages, at)
        self._fits(pages, row, at, end, 8 + key, name)
        return low | high << 16 | top << 32

    def _leaf_nodes(self, numbers: Numbers, name: str, lengths: tuple[int, int]) -> _Nodes:
        self._heads(numbers, _LEAF, name)
        pages: Bytes = self._pages[numbers]
        row, at, end = self._nodes(pages, name, 1)
        low, high, flags, key = self._words(pages, at)
        value = low | high << 16
        self._fits(pages, row, at, end, 8 + key + np.where(flags & _BIG, 8, value), name)
        if (flags & ~(_BIG | _SUB)).any() or (name != "main" and (flags & _SUB).any()):
            raise _damaged("a node of another kind", table=name)
        for wanted, got in zip(lengths, (key, value), strict=True):
            if wanted and (got != wanted).any():
                raise _damaged("a key or a value has another length", table=name, wanted=wanted)
        return _Nodes(pages.reshape(-1), at, flags, key, value)

    def _words(self, pages: Bytes, at: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        words, half = pages.reshape(-1).view("<u2"), at // 2
        low, high, flags, key = (words[half + i].astype(np.int64) for i in range(4))
        return low, high, flags, key

    def _fits(
        self, pages: Bytes, row: Numbers, at: Numbers, end: Numbers, length: Numbers, name: str
    ) -> None:
        """Nodes lie inside their page and fill it from its upper bound to its end."""
        if (at + length > end).any():
            raise _damaged("a node is longer than its page", table=name)
        filled = np.bincount(row, weights=length + (length & 1), minlength=pages.shape[0]).astype(np.int64)
        if (filled != self._page_nbytes - pages.view("<u2")[:, 7].astype(np.int64)).any():
            raise _damaged("nodes lie over each other", table=name)

    # -- values on pages of their own, and free pages ---------------------------------------------------------

    def _overflows(self, nodes: _Nodes, found: _Found, name: str) -> Iterator[Numbers]:
        """The page numbers of each value that is too long for a leaf."""
        for index in np.flatnonzero(nodes.flags & _BIG):
            start = int.from_bytes(nodes.item(int(index))[1], "little")
            need = (_HEAD + int(nodes.value[index]) + self._page_nbytes - 1) // self._page_nbytes
            head = self._heads(np.array([min(start, 2**62)], np.int64), _OVERFLOW, name)[0]
            span = int(head[12:16].view("<u4")[0])
            if span < need or start + span > self._count:
                raise _damaged("a long value is cut", table=name, page=start)
            numbers = np.arange(start, start + span, dtype=np.int64)
            found.pages.append(numbers)
            yield numbers

    def _free_pages(self, nodes: _Nodes) -> Iterator[Numbers]:
        last = int(self._meta["last_page"])
        for index in range(nodes.at.size):
            packed = nodes.item(index)[1]
            if nodes.flags[index] & _BIG:
                start = int.from_bytes(packed, "little") * self._page_nbytes + _HEAD
                packed = self._pages.reshape(-1)[start : start + int(nodes.value[index])].tobytes()
            numbers = np.frombuffer(packed[: len(packed) // 8 * 8], "<u8")
            if not numbers.size or numbers[0] >= numbers.size:
                raise _damaged("a list of free pages is cut")
            listed = numbers[1 : 1 + int(numbers[0])]
            if listed.size and (listed.min() < 2 or listed.max() > last or (listed[1:] >= listed[:-1]).any()):
                raise _damaged("a list of free pages names what is none")
            yield listed.astype(np.int64)


def _last_meta(path: Path, size: int) -> np.void:
    """The meta page of the last commit; DataError unless both meta pages are LMDB's."""
    with path.open("rb") as file:
        first = file.read(_META.itemsize)
        if len(first) < _META.itemsize:
            raise _damaged("it is shorter than one page", size=size)
        metas = [np.frombuffer(first, _META)[0]]
        page_nbytes = int(np.frombuffer(metas[0]["dbs"][0].tobytes(), _DB)[0]["page_nbytes"])
        second = os.pread(file.fileno(), _META.itemsize, page_nbytes)
    if len(second) < _META.itemsize:
        raise _damaged("it is shorter than two pages", size=size)
    metas.append(np.frombuffer(second, _META)[0])
    for meta in metas:
        if not meta["flags"] & _IS_META or meta["magic"] != _MAGIC or meta["version"] != _VERSION:
            raise _damaged("it does not begin as an LMDB file does", magic=hex(int(meta["magic"])))
    last: np.void = max(metas, key=lambda meta: int(meta["txnid"]))
    return last
