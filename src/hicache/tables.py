"""Strict tables: frozen records whose every value has the type it is declared with, however they were made.

A field is a plain value, a table, or one of several tables told apart by ``type`` (their tag; at most one has
none and takes every other name), which may be left out where the other keys fit only one of them. A field that may be None is switched off by the word ``off``. Anything that does
not fit exactly is a ConfigError naming the key with its path, the value, what was expected and the nearest name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from hicache.errors import ConfigError

OFF = "off"

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)(?: ?(B|KiB|MiB|GiB|TiB))?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE_EXPECTED = "whole bytes: a number, or text such as 64MiB or 1.5GiB (B, KiB, MiB, GiB, TiB)"


def parse_bytes(value: int | str, *, key: str = "bytes") -> int:
    """The number of bytes a size means: at least 1, less than 2^63. ConfigError for anything that is not exactly one."""
    nbytes = Fraction(0)
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = Fraction(value)
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        nbytes = Fraction(found[1]) * _UNITS[found[2]]
    if nbytes.denominator != 1 or not 1 <= nbytes < 1 << 63:
        raise ConfigError("not a size", key=key, value=repr(value), expected=_SIZE_EXPECTED)
    return int(nbytes)


def nearest(name: str, known: list[str]) -> str:
    """The known name that looks most like ``name``."""
    return difflib.get_close_matches(name, known, 1, 0.0)[0]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of every table."""

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():
            value, tables = getattr(self, name), tables_in(kind)
            if tables:
                fits = isinstance(value, tables) or (value is None and optional(kind))
            else:
                fits = _fits(value, kind)
            if not fits:
                raise ConfigError("wrong type or value", key=name, value=repr(value), expected=words(kind))
        self.check()

    def check(self) -> None:
        """Whatever a type cannot say. ConfigError names the key."""


T = TypeVar("T", bound=Table)


@cache
def kinds_of(kind: type[Table]) -> dict[str, Any]:
    """The type of each field."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def names_of(kind: type[Table]) -> list[str]:
    """The keys a table may have, in a file."""
    return [*kind.__struct_fields__, *(["type"] if kind.__struct_config__.tag is not None else [])]


def tables_in(kind: object) -> tuple[type[Table], ...]:
    """The tables that a type allows; none when it is one of plain values."""
    parts = get_args(kind) or (kind,)
    return tuple(part for part in parts if isinstance(part, type) and issubclass(part, Table))


def optional(kind: object) -> bool:
    """True when a type allows None."""
    return NoneType in get_args(kind)


def words(kind: object) -> str:
    """A type as a person would say it."""
    if get_origin(kind) is dict:
        return "a table"
    parts = get_args(kind)
    if parts and all(isinstance(part, str) for part in parts):
        return "one of " + ",".join(parts)
    said = [words(part) for part in parts if part is not NoneType]
    return " or ".join(said) if said else getattr(kind, "__name__", str(kind))


def _fits(value: object, kind: object) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


# ---- from nested mappings, and back


def from_table(kind: type[T], table: Mapping[str, object], path: str = "") -> T:
    """A table of this kind from a mapping; ``path`` stands before its keys in errors."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{path}{name}"
        if name not in kind.__struct_fields__:
            raise ConfigError(
                "unknown key", key=key, value=repr(value), nearest=path + _meant(kind, str(name))
            )
        hint = kinds_of(kind)[name]
        values[name] = _inner(hint, value, key) if tables_in(hint) else value
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            raise ConfigError("a key is missing", key=path + field.name, expected=words(field.type))
    try:
        return kind(**values)
    except ConfigError as error:
        if path:
            context = {**error.context, "key": f"{path}{error.context['key']}"}
            raise ConfigError(str(error).split(" [")[0], **context) from None
        raise


def _meant(kind: type[Table], name: str) -> str:
    """The key that is most likely meant: one of this table's, or one of that very name in a table below."""
    below = [
        f"{outer}.{name}"
        for outer, hint in kinds_of(kind).items()
        if any(name in names_of(table) for table in tables_in(hint))
    ]
    return " or ".join(below) or nearest(name, names_of(kind))


def _inner(hint: object, value: object, key: str) -> Table | None:
    tables = tables_in(hint)
    if isinstance(value, tables):
        return value
    if optional(hint) and (value is None or value == OFF):
        return None
    if not isinstance(value, Mapping):
        expected = "a table" + (f", or {OFF!r}" if optional(hint) else "")
        raise ConfigError("wrong type", key=key, value=repr(value), expected=expected)
    tags = {str(table.__struct_config__.tag): table for table in tables if table.__struct_config__.tag}
    if not tags:
        return from_table(tables[0], value, key + ".")
    fitting = [tag for tag, table in tags.items() if value and set(value) <= set(table.__struct_fields__)]
    kind = value.get("type", fitting[0] if len(fitting) == 1 else None)
    if not isinstance(kind, str) or not kind:
        raise ConfigError("a type is missing", key=f"{key}.type", value=repr(kind), known=",".join(tags))
    if kind in tags:
        rest = {name: said for name, said in value.items() if name != "type"}
        return from_table(tags[kind], rest, key + ".")
    other = next((table for table in tables if not table.__struct_config__.tag), None)
    if other is None or not set(value) <= set(other.__struct_fields__):  # a misspelt type, most likely
        raise ConfigError(
            "unknown type",
            key=f"{key}.type",
            value=repr(kind),
            nearest=nearest(kind, list(tags)),
            known=",".join(tags),
        )
    return from_table(other, value, key + ".")


def as_table(table: Table) -> dict[str, Any]:
    """The mapping from which :func:`from_table` makes an equal table."""
    rows: dict[str, Any] = {}
    if table.__struct_config__.tag:
        rows["type"] = table.__struct_config__.tag
    for name, kind in kinds_of(type(table)).items():
        value = getattr(table, name)
        if isinstance(value, Table):
            rows[name] = as_table(value)
        elif value is None and tables_in(kind):
            rows[name] = OFF
        elif value is not None:
            rows[name] = value
    return rows
