"""Traces: one request a line, with the page ids of its prompt; read as a stream, errors with their line number.

JSON lines (plain or gzip) as Mooncake publishes them and vLLM's timed traces use them, or CSV with a header of the
same names, ids separated by spaces:

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...], "block_size": tokens}

An id stands for a page and everything before it. ``block_size`` is optional and the same in all lines.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO, cast

from hicache.errors import ConfigError

MOONCAKE_PAGE_TOKENS = 512
"""Tokens a page where neither the trace nor the user says: what the published Mooncake traces were hashed with."""

_GZIP = b"\x1f\x8b"
_FIELDS = ("timestamp", "input_length", "hash_ids")
_ID_LIMIT = 1 << 127
_COUNTS = ("input_length", "output_length", "block_size")


def _csv_value(name: str, text: str) -> object:
    """A field as JSON would have it. ValueError where it is not a number; what is no count stays a float."""
    if name == "hash_ids":
        return [int(one) for one in text.split()]
    number = float(text)
    return int(number) if name in _COUNTS and number.is_integer() else number


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes (seconds), its prompt's and its answer's tokens, and the ids of the prompt's pages."""

    at: float
    tokens: int
    output_tokens: int
    ids: tuple[int, ...]


class Trace:
    """A trace file. Iterating reads it anew, one line at a time, so its length costs no memory.

    page_tokens: tokens a page; 0 = what the first line's ``block_size`` says, else Mooncake's 512.
    """

    def __init__(self, path: Path, page_tokens: int = 0) -> None:
        self.path = path
        self._asked = page_tokens
        self.page_tokens = page_tokens
        try:
            with self._open() as file:
                _, first = next(self._rows(file), (0, None))
        except FileNotFoundError:
            raise ConfigError("there is no such trace", path=path) from None
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise ConfigError("this trace cannot be read", path=path, because=error) from None
        if first is None:
            raise ConfigError("a trace needs at least one request", path=path)
        if not page_tokens:
            size = first.get("block_size", MOONCAKE_PAGE_TOKENS)
            self.page_tokens = self._count(1, "block_size", size, minimum=1)

    def __iter__(self) -> Iterator[Arrival]:
        """The requests, in the order of the file, which has to be the order of time."""
        before = float("-inf")
        line = 0
        try:
            with self._open() as file:
                for line, row in self._rows(file):
                    arrival = self._arrival(line, row)
                    if arrival.at < before:
                        self._wrong(
                            line, "a request comes before the one above it", timestamp=arrival.at * 1000
                        )
                    before = arrival.at
                    yield arrival
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            self._wrong(line + 1, "the file ends in the middle or is damaged", because=error)

    def _open(self) -> TextIO:
        with self.path.open("rb") as probe:
            packed = probe.read(2) == _GZIP
        opener = gzip.open if packed else open
        return cast("TextIO", opener(self.path, "rt", encoding="utf-8", newline=""))

    def _rows(self, file: TextIO) -> Iterator[tuple[int, Mapping[str, object]]]:
        if any(suffix == ".csv" for suffix in self.path.suffixes):
            yield from self._csv_rows(file)
            return
        for line, text in enumerate(file, 1):
            if text.isspace():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                self._wrong(line, "not a JSON object", because=error)
            if not isinstance(row, dict):
                self._wrong(line, "not a JSON object", value=text[:40].strip())
            yield line, row

    def _csv_rows(self, file: TextIO) -> Iterator[tuple[int, Mapping[str, object]]]:
        table = csv.DictReader(file, strict=True)
        try:
            for row in table:
                line = table.line_num
                if None in row or None in row.values():
                    self._wrong(
                        line, "not as many fields as the header", header=",".join(table.fieldnames or [])
                    )
                fields: dict[str, object] = {}
                for name, text in row.items():
                    try:
                        fields[name] = _csv_value(name, text)
                    except ValueError:
                        self._wrong(line, "not a number", **{name: text[:40]})
                yield line, fields
        except csv.Error as error:
            self._wrong(table.line_num, "not a line of CSV", because=error)

    def _arrival(self, line: int, row: Mapping[str, object]) -> Arrival:
        for name in _FIELDS:
            if name not in row:
                self._wrong(line, "a field is missing", field=name, present=",".join(map(str, row)))
        at, ids = row["timestamp"], row["hash_ids"]
        if type(at) not in (int, float) or not 0 <= at < float("inf"):  # type: ignore[operator]
            self._wrong(line, "timestamp must be milliseconds", timestamp=repr(at))
        tokens = self._count(line, "input_length", row["input_length"])
        output = self._count(line, "output_length", row.get("output_length", 0))
        if not isinstance(ids, list) or any(
            type(one) is not int or not -_ID_LIMIT <= one < _ID_LIMIT for one in ids
        ):
            self._wrong(
                line, "hash_ids must be a list of integers of at most 128 bits", hash_ids=repr(ids)[:40]
            )
        size = row.get("block_size", self.page_tokens)
        if size != self.page_tokens:
            self._wrong(line, "another block_size than before", block_size=size, before=self.page_tokens)
        pages = -(-tokens // self.page_tokens)
        if len(ids) != pages and len(ids) != tokens // self.page_tokens:
            self._wrong(
                line,
                "the number of hash_ids does not fit input_length and the tokens a page",
                hash_ids=len(ids),
                input_length=tokens,
                page_tokens=self.page_tokens,
                expected=pages,
            )
        return Arrival(at / 1000, tokens, output, tuple(ids))  # type: ignore[operator]

    def _count(self, line: int, name: str, value: object, minimum: int = 0) -> int:
        if type(value) is not int or value < minimum:
            self._wrong(line, f"{name} must be an integer of at least {minimum}", **{name: repr(value)})
        return value

    def _wrong(self, line: int, what: str, **values: object) -> NoReturn:
        raise ConfigError(what, path=self.path, line=line, **values)
