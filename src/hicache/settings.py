"""Settings: what a user may choose, checked once, frozen afterwards.

    settings = load("hicache.toml", host={"bytes": "4GiB"})

Four sources, the first that says something wins, key by key: keyword arguments, then the environment, then the
TOML file, then the defaults below. A key in a table is written with a dot (``store.path``); its environment
variable is the key in capitals with ``_`` for ``.`` (``HICACHE_STORE_PATH``), and ``HICACHE_CONFIG`` names the
file. SGLang's option names are taken as keywords and in a file, for the keys they mean. An optional table
(``device``, ``host``, ``store``) is switched off by the word ``off``. A table whose ``type`` differs from the one
below it replaces it whole.

Nothing is clamped, guessed or ignored: an unknown key or variable, a wrong type or a bad size is a ConfigError
that names the key, the value, what was expected and the nearest valid name. This is the one module that reads
the environment.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from hicache.deadlines import Deadlines
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve.aliases import into_tables
from hicache.resolve.relaxation import DIRECT, KERNEL
from hicache.resolve.sizing import HostSize, fraction, ratio
from hicache.tables import (
    OFF,
    Table,
    as_table,
    from_table,
    kinds_of,
    names_of,
    nearest,
    optional,
    parse_bytes,
    tables_in,
)

PREFIX = "HICACHE_"
CONFIG_VARIABLE = "HICACHE_CONFIG"

WriteName = Literal["through", "selective", "back"]


class TierSettings(Table, frozen=True, kw_only=True):
    """One memory tier. ``bytes``: its budget, all planes and padding included."""

    bytes: int | str

    def check(self) -> None:
        """The size is one."""
        parse_bytes(self.bytes)

    @property
    def nbytes(self) -> int:
        """The budget in bytes."""
        return parse_bytes(self.bytes)


class HostSettings(Table, frozen=True, kw_only=True):
    """The host tier: its size in one of three ways, or chosen to fit where none is said; see :mod:`hicache.resolve.sizing`.

    bytes: all planes and padding included. ratio: of the device's pages. fraction: of the memory budget. mode:
    ``staging`` keeps nothing, pages only pass through on their way to the store and back.
    """

    bytes: int | str | None = None
    ratio: float | None = None
    fraction: float | None = None
    mode: Literal["cache", "staging"] = "cache"

    def check(self) -> None:
        """The sizes are some, and only one is given."""
        given = [name for name in ("bytes", "ratio", "fraction") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                "the size of the host tier is given twice",
                key=given[1],
                value=getattr(self, given[1]),
                also=given[0],
            )
        if self.bytes is not None:
            parse_bytes(self.bytes)
        if self.ratio is not None:
            ratio(self.ratio, "ratio")
        if self.fraction is not None:
            fraction(self.fraction, "fraction")

    @property
    def size(self) -> HostSize:
        """What is wished."""
        nbytes = None if self.bytes is None else parse_bytes(self.bytes)
        return HostSize(nbytes, self.ratio, self.fraction)

    @property
    def nbytes(self) -> int | None:
        """The bytes that were said, if they were."""
        return self.size.nbytes


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
    """Pages on a local disk that outlive the process; a ``path`` alone means this store.

    cap: bytes on disk; default: a tenth of what is free. direct: past the page cache, where the file system can.
    """

    path: str
    cap: int | str | None = None
    direct: bool = True

    def check(self) -> None:
        """There is a path, and the cap is a size."""
        if not self.path or "\0" in self.path:
            raise ConfigError("not a path", key="path", value=repr(self.path), expected="a directory")
        if self.cap is not None:
            parse_bytes(self.cap, key="cap")

    def options(self) -> dict[str, object]:
        """What the store is made from."""
        cap = None if self.cap is None else parse_bytes(self.cap, key="cap")
        return {"path": self.path, "cap_bytes": cap, "direct": self.direct}


class OtherStoreSettings(Table, frozen=True, kw_only=True):
    """A store from another package, by the name of its entry point; ``table`` is passed on as it is."""

    type: str
    table: dict[str, Any] = msgspec.field(default_factory=dict)

    def options(self) -> dict[str, object]:
        """What the store is made from."""
        return dict(self.table)


StoreSettings: TypeAlias = MemoryStoreSettings | SegmentStoreSettings | OtherStoreSettings


class Settings(Table, frozen=True, kw_only=True):
    """All settings. See the module for where they come from.

    page_tokens: tokens a page. device, host, store: the tiers; at least one of the first two. layout: of the host
    tier. io: the I/O back end. into_host, into_store: when pages are written down each leg. What is not said of
    these is a default that gives way; what is said is a wish, relaxed with a warning where it cannot be had, or an
    error where ``strict``. fetch_at: whether pages found in the store are fetched when the look-up answers, or when
    they are loaded (the default). prefetch: how long a fetch is waited for: until its deadline (``timeout``), without
    one (``wait_complete``), or not at all (``best_effort``: a load takes what has come; fetched at look-up).
    load_when: pages of the store are loaded where that is ``faster`` than computing them, as learned, or ``always``.
    prefetch_min_tokens: fewer are not fetched ahead. prefetch_max_tokens: as many may be on their way ahead of loads
    at a time (0: as many as there is room for); the others wait for their turn.
    """

    page_tokens: int = 16
    layout: str | None = None
    io: str | None = None
    into_host: WriteName | None = None
    into_store: WriteName | None = None
    strict: bool = False
    fetch_at: Literal["load", "lookup"] | None = None
    prefetch: Literal["best_effort", "timeout", "wait_complete"] | None = None
    load_when: Literal["faster", "always"] = "faster"
    prefetch_min_tokens: int = 0
    prefetch_max_tokens: int = 0
    device: TierSettings | None = None
    host: HostSettings | None = HostSettings()
    store: StoreSettings | None = None
    deadlines: Deadlines = Deadlines()

    def check(self) -> None:
        """At least one memory tier, and a page of at least one token, in a layout that there is."""
        _known("layout", self.layout, LAYOUTS)
        _known("io", self.io, (KERNEL, DIRECT))
        if self.page_tokens < 1:
            raise ConfigError("a page has at least one token", key="page_tokens", value=self.page_tokens)
        for key in ("prefetch_min_tokens", "prefetch_max_tokens"):
            if getattr(self, key) < 0:
                raise ConfigError("a number of tokens is 0 or more", key=key, value=getattr(self, key))
        if 0 < self.prefetch_max_tokens < self.page_tokens:
            raise ConfigError(
                "less than a page could never be fetched",
                key="prefetch_max_tokens",
                value=self.prefetch_max_tokens,
                page_tokens=self.page_tokens,
                nearest=self.page_tokens,
            )
        if self.prefetch == "best_effort" and self.fetch_at == "load":
            raise ConfigError(
                "best_effort takes what has come by the time of the load, so nothing would ever be fetched",
                key="fetch_at",
                value="load",
                nearest="lookup",
            )
        if self.device is None and self.host is None:
            raise ConfigError("at least one memory tier is needed", key="host", value=OFF, device=OFF)


def _known(key: str, name: str | None, ours: Collection[str]) -> None:
    """ConfigError for a layout or a back end that nobody has; other packages are asked only for what is not ours."""
    if name is None or name in ours:
        return
    from hicache.resolve.catalog import engines  # importing what others offer may bring a layout along

    ios = {engine.io for engine in engines()}
    known = list(LAYOUTS if key == "layout" else sorted(ios))
    if name not in known:
        raise ConfigError(
            "wrong type or value",
            key=key,
            value=repr(name),
            expected="one of " + ",".join(known),
            nearest=nearest(name, known),
        )


# ---- sources


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
    own. A keyword may be a value, a mapping or one of the classes above; None means off for a table, and nothing
    asked for a value.
    """
    variables = dict(os.environ if environ is None else environ)
    _refuse_strangers(variables)
    rows: dict[str, tuple[object, str]] = {}
    named = file if file is not None else variables.get(CONFIG_VARIABLE)
    if named is not None:
        _merge(rows, _flat(into_tables(_parsed_file(Path(named)))), f"file {named}")
    environment = {
        key: _from_text(key, variables[name]) for key, name in variable_names().items() if name in variables
    }
    _merge(rows, environment, "environment")
    _merge(rows, _flat(into_tables(keywords)), "keyword")
    table = _nested({key: value for key, (value, _) in rows.items()})
    return Reading(from_table(Settings, table), {key: source for key, (_, source) in rows.items()})


def variable_names() -> dict[str, str]:
    """Every key that an environment variable can set, and the variable's name."""
    return {key: PREFIX + key.replace(".", "_").upper() for key in _leaves()}


@cache
def _leaves() -> dict[str, Any]:
    """Every key that holds a plain value, and its type; an optional table is one too, because of ``off``."""
    rows: dict[str, Any] = {}
    for name, kind in kinds_of(Settings).items():
        tables = tables_in(kind)
        if not tables or optional(kind):
            rows[name] = str if tables else kind
        for table in tables:
            rows |= {f"{name}.{inner}": kinds_of(table).get(inner, str) for inner in names_of(table)}
    del rows["store.table"]  # another package's; its shape is not ours to know
    return rows


def _parsed_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # also: not TOML, not UTF-8, a path that cannot be one
        raise ConfigError("the settings file cannot be read", path=repr(str(path)), cause=error) from error


def _refuse_strangers(variables: Mapping[str, str]) -> None:
    """ConfigError for a variable that is ours, or is meant to be, and that nobody reads."""
    known = sorted({CONFIG_VARIABLE, *variable_names().values()})
    for name in variables:
        if name in known:
            continue
        meant = name.upper().replace("HI_CACHE", "HICACHE")
        if meant.startswith(PREFIX) or any(_one_slip(meant, ours) for ours in known):
            raise ConfigError(
                "unknown environment variable", key=name, nearest=nearest(meant, known), known=",".join(known)
            )


def _one_slip(said: str, meant: str) -> bool:
    """True when one letter too many, too few, wrong, or swapped with the next, is all that parts two names."""
    if abs(len(said) - len(meant)) > 1:
        return False
    at = next(
        (i for i, (a, b) in enumerate(zip(said, meant, strict=False)) if a != b), min(len(said), len(meant))
    )
    a, b = said[at:], meant[at:]
    return a[1:] == b[1:] or a == b[1:] or a[1:] == b or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _from_text(key: str, text: str) -> object:
    """An environment variable's text as the type its key has; left as text where that fails, for the error."""
    kind = _leaves()[key]
    if str in (kind, *get_args(kind)) or (kind is int and not text.isdecimal()):
        return text
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        return text


# ---- nested tables as one row a key, and back


def _flat(table: Mapping[str, object]) -> dict[str, object]:
    rows: dict[str, object] = {}
    for name, given in table.items():
        value = as_table(given) if isinstance(given, Table) else given
        if isinstance(value, Mapping) and value and name in Settings.__struct_fields__:
            rows |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            rows[name] = OFF if value is None and tables_in(kinds_of(Settings).get(name)) else value
    return rows


def _merge(into: dict[str, tuple[object, str]], rows: Mapping[str, object], source: str) -> None:
    for key, value in rows.items():
        head, dot, inner = key.partition(".")
        if dot and head in rows:
            raise ConfigError(
                "a table is given twice", key=head, value=repr(rows[head]), also=key, source=source
            )
        if not dot or (inner == "type" and into.get(key, (value, ""))[0] != value):
            for known in [k for k in into if k.startswith(head + ".") and k not in rows]:
                del into[known]  # "host = off", or a store of another type: what was said of it below is void
        if dot:
            into.pop(head, None)
        into[key] = (value, source)


def _nested(rows: Mapping[str, object]) -> dict[str, object]:
    table: dict[str, object] = {}
    for key, value in rows.items():
        head, dot, inner = key.partition(".")
        if not dot:
            table[head] = value
            continue
        below = table.setdefault(head, {})
        assert isinstance(below, dict), "a key is a table or a value, never both"
        below[inner] = value
    return table
