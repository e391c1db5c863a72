"""Settings: what a user may choose, checked once, frozen afterwards.

    settings = load(file="hicache.toml", host={"bytes": "4GiB"})

Four sources, the first that says something wins, key by key: keyword arguments, then the environment, then the
TOML file, then the defaults below. A key in a table is written with a dot (``store.path``); its environment
variable is the key in capitals with ``_`` for ``.`` (``HICACHE_STORE_PATH``), and ``HICACHE_CONFIG`` names the
file. An optional table (``device``, ``host``, ``store``) is switched off by the word ``off``. A table whose
``type`` differs from the one below it replaces it whole.

Nothing is clamped, guessed or ignored: an unknown key or variable, a wrong type or a bad size is a ConfigError
that names the key, the value, what was expected and the nearest valid name. This is the one module that reads
the environment.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from hicache.errors import ConfigError
from hicache.layout import LAYOUTS

PREFIX = "HICACHE_"
CONFIG_VARIABLE = "HICACHE_CONFIG"
OFF = "off"
OPTIONAL = ("device", "host", "store")
SECONDS_MAX = 86_400.0

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s?(B|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE_EXPECTED = "a whole number of bytes, or text such as 64MiB or 1.5GiB (B, KiB, MiB, GiB, TiB)"

LayoutName = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
WriteName = Literal["through", "selective", "back"]
assert set(get_args(LayoutName)) == set(LAYOUTS), "settings and layouts name the same layouts"


def parse_bytes(value: int | str, *, key: str = "bytes") -> int:
    """The number of bytes a size means; at least 1. ConfigError for anything that is not exactly a size."""
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes: float = value
    else:
        found = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if found is not None:
            nbytes = (
                float(found[1]) * _UNITS[found[2]] if "." in found[1] else int(found[1]) * _UNITS[found[2]]
            )
        elif isinstance(value, str) and value.isascii() and value.isdigit():
            nbytes = int(value)
        else:
            raise ConfigError("not a size", key=key, value=repr(value), expected=_SIZE_EXPECTED)
    if nbytes != int(nbytes):
        raise ConfigError("a size is a whole number of bytes", key=key, value=repr(value), bytes=nbytes)
    if not 1 <= nbytes < 1 << 63:
        raise ConfigError("a size is at least 1 byte and fits in 63 bits", key=key, value=repr(value))
    return int(nbytes)


def _names(kind: type[Table]) -> list[str]:
    tagged = kind.__struct_config__.tag is not None
    return [*kind.__struct_fields__, *(["type"] if tagged else [])]


@cache
def _kinds(kind: type[Table]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _tables(kind: type[Table], name: str) -> tuple[type[Table], ...]:
    """The tables a field may hold; none when it holds plain values."""
    hint = _kinds(kind).get(name)
    kinds = get_args(hint) or (hint,)
    return tuple(k for k in kinds if isinstance(k, type) and issubclass(k, Table))


def _fits(value: object, kind: object) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _words(kind: object) -> str:
    """A type as a person would say it."""
    parts = get_args(kind)
    if parts and all(isinstance(part, str) for part in parts):
        return "one of " + ",".join(parts)
    return " or ".join(_words(part) for part in parts) if parts else getattr(kind, "__name__", str(kind))


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all tables have in common: every value has the type it is declared with, however it was made."""

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value, tables = getattr(self, name), _tables(type(self), name)
            if tables:
                fits = isinstance(value, tables) or (value is None and name in OPTIONAL)
            else:
                fits = _fits(value, kind)
            if not fits:
                raise ConfigError("wrong type or value", key=name, value=repr(value), expected=_words(kind))
        self.check()

    def check(self) -> None:
        """Whatever a type cannot say. ConfigError names the key."""


class TierSettings(Table, frozen=True, kw_only=True):
    """One memory tier. ``bytes``: its budget, all planes and padding included."""

    bytes: int | str

    def check(self) -> None:
        """The size is one."""
        _ = self.nbytes

    @property
    def nbytes(self) -> int:
        """The budget in bytes."""
        return parse_bytes(self.bytes)


class MemoryStoreSettings(Table, frozen=True, kw_only=True, tag="memory"):
    """A store in this process's memory, lost at its end: for tests, and as a third tier without a disk."""

    cap: int | str

    def check(self) -> None:
        """The cap is a size."""
        parse_bytes(self.cap, key="cap")

    def options(self) -> dict[str, object]:
        """What the store is made from."""
        return {"cap_bytes": parse_bytes(self.cap, key="cap")}


class SegmentStoreSettings(Table, frozen=True, kw_only=True, tag="segment"):
    """Pages on a local disk that outlive the process. ``cap``: bytes on disk; default: a tenth of what is free."""

    path: str
    cap: int | str | None = None

    def check(self) -> None:
        """There is a path, and the cap is a size."""
        if not self.path:
            raise ConfigError("an empty path", key="path", value=repr(self.path), expected="a directory")
        if self.cap is not None:
            parse_bytes(self.cap, key="cap")

    def options(self) -> dict[str, object]:
        """What the store is made from."""
        return {
            "path": self.path,
            "cap_bytes": None if self.cap is None else parse_bytes(self.cap, key="cap"),
        }


class OtherStoreSettings(Table, frozen=True, kw_only=True):
    """A store from another package, by the name of its entry point; ``table`` is passed on as it is."""

    type: str
    table: dict[str, Any] = msgspec.field(default_factory=dict)

    def options(self) -> dict[str, object]:
        """What the store is made from."""
        return dict(self.table)


StoreSettings: TypeAlias = MemoryStoreSettings | SegmentStoreSettings | OtherStoreSettings
_STORES: dict[str, type[Table]] = {"memory": MemoryStoreSettings, "segment": SegmentStoreSettings}


class Deadlines(Table, frozen=True, kw_only=True):
    """Seconds after which a step is given up and the prompt is computed instead; the engine never waits longer.

    ``close_s`` is how long closing may wait for pages that are still on their way down.
    """

    lookup_s: float = 1.0
    fetch_s: float = 5.0
    write_s: float = 60.0
    close_s: float = 30.0

    def check(self) -> None:
        """All are seconds."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or not 0 < value <= SECONDS_MAX:
                raise ConfigError(
                    "not a time limit",
                    key=name,
                    value=value,
                    expected=f"more than 0, at most {SECONDS_MAX:.0f}",
                )


class Settings(Table, frozen=True, kw_only=True):
    """All settings. See the module for where they come from.

    page_tokens: tokens a page. device, host, store: the tiers; at least one of the first two. layout: of the host
    tier. into_host, into_store: when pages are written down each leg. fetch_at: whether pages found in the store
    are fetched when the look-up answers, or when they are loaded.
    """

    page_tokens: int = 16
    layout: LayoutName = "page_first"
    into_host: WriteName = "through"
    into_store: WriteName = "through"
    fetch_at: Literal["load", "lookup"] = "load"
    device: TierSettings | None = None
    host: TierSettings | None = TierSettings(bytes="512MiB")
    store: StoreSettings | None = None
    deadlines: Deadlines = Deadlines()

    def check(self) -> None:
        """At least one memory tier, and a page of at least one token."""
        if self.page_tokens < 1:
            raise ConfigError("a page has at least one token", key="page_tokens", value=self.page_tokens)
        if self.device is None and self.host is None:
            raise ConfigError("at least one memory tier is needed", key="host", value=OFF, device=OFF)


# ---- reading


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings, and for each key that is not at its default where its value came from."""

    settings: Settings
    origins: Mapping[str, str]


def load(
    file: str | Path | None = None, *, environ: Mapping[str, str] | None = None, **keywords: object
) -> Settings:
    """The settings from all sources. See :func:`read`."""
    return read(file, environ=environ, **keywords).settings


def read(
    file: str | Path | None = None, *, environ: Mapping[str, str] | None = None, **keywords: object
) -> Reading:
    """Settings from keywords, environment, file and defaults, in this order, and where each key came from.

    ``file`` wins over ``HICACHE_CONFIG``; a file that is named must exist. ``environ`` stands for the process's
    own. A keyword may be a value, a table or one of the classes above.
    """
    variables = dict(os.environ if environ is None else environ)
    _refuse_strangers(variables)
    flat: dict[str, tuple[object, str]] = {}
    named = file if file is not None else variables.get(CONFIG_VARIABLE)
    if named is not None:
        _merge(flat, _flat(_parsed_file(Path(named))), f"file {named}")
    environment = {
        key: _from_text(key, variables[name]) for key, name in variable_names().items() if name in variables
    }
    _merge(flat, environment, "environment")
    _merge(flat, _flat(keywords), "keyword")
    origins = {key: source for key, (_, source) in flat.items()}
    return Reading(from_table(_nested({key: value for key, (value, _) in flat.items()})), origins)


def from_table(table: Mapping[str, object]) -> Settings:
    """Settings from one nested table and the defaults, strictly."""
    return _build(Settings, table, "")


def as_table(settings: Table) -> dict[str, Any]:
    """The nested table that :func:`from_table` turns into equal settings."""
    table: dict[str, Any] = {}
    tag = settings.__struct_config__.tag
    if isinstance(tag, str):
        table["type"] = tag
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, Table):
            value = as_table(value)
        elif value is None and name in OPTIONAL:
            value = OFF
        if value is not None:
            table[name] = value
    return table


def variable_names() -> dict[str, str]:
    """Every key that an environment variable can set, and the variable's name."""
    return {key: PREFIX + key.replace(".", "_").upper() for key in _all_keys()}


def _all_keys() -> list[str]:
    keys = []
    for name in Settings.__struct_fields__:
        tables = _tables(Settings, name)
        if not tables or name in OPTIONAL:
            keys.append(name)
        keys += sorted({f"{name}.{field}" for table in tables for field in _names(table) if field != "table"})
    return keys


def _parsed_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("the settings file cannot be read", path=path, cause=error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("the settings file is not TOML", path=path, cause=error) from error


def _refuse_strangers(variables: Mapping[str, str]) -> None:
    """ConfigError for a variable that is ours, or is meant to be, and that nobody reads."""
    known = {CONFIG_VARIABLE, *variable_names().values()}
    for name in variables:
        if name in known or not name:
            continue
        upper = name.upper().replace("HI_CACHE", "HICACHE").replace("HI-CACHE", "HICACHE")
        head = upper.split("_")[0]
        near = head[:1] == "H" and difflib.SequenceMatcher(None, head, "HICACHE").ratio() > 0.85
        if "_" in upper and near:
            nearest = difflib.get_close_matches(upper, sorted(known), 1, 0.0)
            raise ConfigError(
                "unknown environment variable", key=name, nearest=nearest[0], known=",".join(sorted(known))
            )


def _from_text(key: str, text: str) -> object:
    """An environment variable's text as the type its key has; left as text where that fails, for the error."""
    kinds = _kinds_of_key(key)
    for kind in (int, float):
        if kind in kinds and str not in kinds:
            try:
                return kind(text) if text == text.strip() and "_" not in text else text
            except ValueError:
                continue
    return text


def _kinds_of_key(key: str) -> tuple[object, ...]:
    head, _, tail = key.partition(".")
    tables = _tables(Settings, head) if tail else (Settings,)
    found: list[object] = []
    for table in tables:
        kind = _kinds(table).get(tail or head)
        found += get_args(kind) or (kind,)
    return tuple(found)


# ---- nested tables, one line a key, and back


def _flat(table: Mapping[str, object]) -> dict[str, object]:
    rows: dict[str, object] = {}
    for name, given in table.items():
        value = as_table(given) if isinstance(given, Table) else given
        if isinstance(value, Mapping) and value:
            rows.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            rows[name] = OFF if value is None and name in OPTIONAL else value
    return rows


def _merge(into: dict[str, tuple[object, str]], rows: Mapping[str, object], source: str) -> None:
    for key, value in rows.items():
        head, _, tail = key.partition(".")
        other_type = tail == "type" and into.get(key, (value, ""))[0] != value
        if (
            not tail or other_type
        ):  # "host = off" or another type of store: what was said about it below is void
            for known in [k for k in into if k.startswith(head + ".") and k not in rows]:
                del into[known]
        if tail:
            into.pop(head, None)
        into[key] = (value, source)


def _nested(rows: Mapping[str, object]) -> dict[str, object]:
    table: dict[str, object] = {}
    for key, value in rows.items():
        head, _, tail = key.partition(".")
        if tail:
            inner = table.setdefault(head, {})
            assert isinstance(inner, dict), "a key is a table or a value, never both"
            inner[tail] = value
        else:
            table[head] = value
    return table


# ---- one table, strictly

T = TypeVar("T", bound=Table)


def _build(kind: type[T], table: Mapping[str, object], path: str) -> T:
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{path}{name}"
        if name not in _names(kind) or name == "type" and kind is not OtherStoreSettings:
            nearest = difflib.get_close_matches(str(name), _names(kind), 1, 0.0)
            raise ConfigError("unknown key", key=key, value=repr(value), nearest=path + nearest[0])
        tables = _tables(kind, name)
        values[name] = _inner(tables, name, value, key) if tables else value
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            raise ConfigError("a key is missing", key=path + field.name, expected=_words(field.type))
    try:
        return kind(**values)
    except ConfigError as error:
        if path and "." not in str(error.context.get("key", ".")):
            context = {**error.context, "key": f"{path}{error.context['key']}"}
            raise ConfigError(str(error).split(" [")[0], **context) from None
        raise


def _inner(tables: tuple[type[Table], ...], name: str, value: object, key: str) -> Table | None:
    if isinstance(value, tables):
        return value
    if name in OPTIONAL and value in (None, OFF):
        return None
    if not isinstance(value, Mapping):
        expected = "a table" + (f", or {OFF!r}" if name in OPTIONAL else "")
        raise ConfigError("wrong type", key=key, value=repr(value), expected=expected)
    if name != "store":
        return _build(tables[0], value, key + ".")
    kind = value.get("type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(
            "a store needs a type", key=f"{key}.type", value=repr(kind), expected=",".join(_STORES)
        )
    if kind in _STORES:
        rest = {inner: said for inner, said in value.items() if inner != "type"}
        return _build(_STORES[kind], rest, key + ".")
    strange = set(value) - {"type", "table"}
    if strange:  # not the shape of a store from another package: a misspelt type, most likely
        nearest = difflib.get_close_matches(kind, list(_STORES), 1, 0.0)
        raise ConfigError(
            "unknown store type",
            key=f"{key}.type",
            value=repr(kind),
            nearest=nearest[0],
            known=",".join(_STORES),
        )
    return _build(OtherStoreSettings, value, key + ".")
