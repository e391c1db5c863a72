"""What the commands on a directory share: which directory, which of its records, and how sizes and ages are said."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.files import Files
from hicache.data.store.segment.sharing import close_directory, open_directory
from hicache.data.store.segment.survey import Survey, survey
from hicache.data.store.segment.tables import Row
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.policy import Lru
from hicache.resolve.request import one_of
from hicache.settings import SegmentStoreSettings, load

ROOT_HEX = 16
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_STEPS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def directory_of(path: Path | None) -> Path:
    """The directory that is named, else the one of the settings; ConfigError when there is neither."""
    if path is not None:
        return path.expanduser().absolute()
    store = load().store
    if not isinstance(store, SegmentStoreSettings):
        raise ConfigError("which directory? give one, or set HICACHE_STORE_PATH", configured=repr(store))
    return Path(store.path).expanduser().absolute()


def parse_age(text: str, *, key: str) -> float:
    """Seconds of an age such as 90s, 15m, 12h or 7d; ConfigError for anything else."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise ConfigError("not an age", key=key, value=repr(text), expected="a number and s, m, h or d: 7d")
    return float(found[1]) * _SECONDS[found[2]]


def said_bytes(nbytes: int) -> str:
    """Bytes for a person."""
    for unit, size in _STEPS:
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def said_age(seconds: float) -> str:
    """An age for a person, in its largest whole unit."""
    for unit in "dhm":
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.1f} {unit}"
    return f"{max(0, seconds):.0f} s"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records are meant: all, less what is excluded. ``now`` is seconds since 1970."""

    now: float
    namespace: bytes = b""
    layout: int | None = None
    older_than: float | None = None

    @classmethod
    def of(cls, namespace: str | None, layout: str | None, older_than: str | None) -> Filter:
        """From options as typed; ConfigError names what is none."""
        try:
            root = bytes.fromhex(namespace or "")
        except ValueError:
            root = b"-" * 9
        if len(root) > ROOT_HEX // 2:
            raise ConfigError(
                "a namespace is said by its first 2 to 16 hexadecimal digits, an even number of them",
                namespace=repr(namespace),
            )
        if layout is not None:
            one_of("layout", layout, list(LAYOUTS))
        age = None if older_than is None else parse_age(older_than, key="older-than")
        return cls(time.time(), root, None if layout is None else LAYOUTS[layout].code, age)

    @property
    def empty(self) -> bool:
        """True when no option was given: every record is meant."""
        return not self.namespace and self.layout is None and self.older_than is None

    def __call__(self, row: Row) -> bool:
        """True for a record that is meant."""
        return (
            row.namespace.startswith(self.namespace)
            and self.layout in (None, row.layout)
            and (self.older_than is None or self.now - row.used >= self.older_than)
        )


@contextmanager
def opened(path: Path) -> Iterator[tuple[Directory, Survey]]:
    """A directory to change, under its own cap, and the view of it from outside."""
    with survey(path) as seen:
        cap = seen.cap_bytes
    directory = open_directory(path, cap, Lru(), Files())
    try:
        yield directory, Survey(path, directory.env)
    finally:
        close_directory(directory)


def with_filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the argument ``path`` and three options, which reach it as one :class:`Filter`, ``wanted``."""

    @functools.wraps(command)
    def inner(
        *, namespace: str | None, layout: str | None, older_than: str | None, **others: object
    ) -> object:
        return command(wanted=Filter.of(namespace, layout, older_than), **others)

    for wrap in (
        click.option("--older-than", help="Only records not used for so long, such as 12h or 7d."),
        click.option("--layout", help=f"Only records of this layout: {', '.join(LAYOUTS)}."),
        click.option("--namespace", help="Only records of this namespace: the first digits of its root."),
        click.argument("path", required=False, type=click.Path(path_type=Path)),
    ):
        inner = wrap(inner)
    return inner
