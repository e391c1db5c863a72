"""Other systems' words for our options, so that what a user has can be pasted.

An option is known by our name, by SGLang's (``hicache_mem_layout``) and by SGLang's flag
(``--hicache-mem-layout``). :func:`canonical` turns any mix into our names and values; an unknown option is a
ConfigError that names the nearest one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress

from hicache.errors import ConfigError
from hicache.tables import nearest, parse_bytes

OPTIONS: Mapping[str, str] = {
    "layout": "order of the axes in the host tier",
    "io": "I/O back end: kernel or direct",
    "store": "storage, or none",
    "into_host": "when pages are written from the device down to the host",
    "into_store": "when pages are written from the host down to the store",
    "host_mode": "what host memory is for: cache, staging (nothing stays) or off",
    "prefetch": "how long a prefetch is waited for",
    "host_bytes": "size of the host tier",
    "host_ratio": "size of the host tier as a multiple of the device's pages",
    "host_fraction": "size of the host tier as a part of the memory budget",
    "page_tokens": "tokens a page",
    "strict": "a wish that cannot be granted is an error",
}
"""Our options."""

NAMES: Mapping[str, str] = {
    "write_policy": "into_host",
    "page_size": "page_tokens",
    "hicache_mem_layout": "layout",
    "hicache_io_backend": "io",
    "hicache_write_policy": "into_host",
    "hicache_ratio": "host_ratio",
    "hicache_size": "host_bytes",
    "hicache_host_memory_fraction": "host_fraction",
    "hicache_host_memory_mode": "host_mode",
    "hicache_storage_backend": "store",
    "hicache_storage_prefetch_policy": "prefetch",
}
"""Other names, each for one of ours."""

SWITCH = "enable_hierarchical_cache"
"""SGLang's switch for the whole of it: taken, and without a meaning here, as a cache that is off is not asked."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "into_host": {
        "write_through": "through",
        "write_through_selective": "selective",
        "write_back": "back",
    },
    "into_store": {"write_through": "through", "write_through_selective": "selective", "write_back": "back"},
    "host_mode": {"buffer_only": "staging"},
    "store": {"file": "segment", "off": "none"},
}
"""Other values, each for one of ours."""

GB = 10**9
"""SGLang's sizes count in these."""


def canonical(options: Mapping[str, object]) -> dict[str, object]:
    """The same options under our names, with our values; None means that one is not given."""
    found: dict[str, tuple[str, object]] = {}
    for said, value in options.items():
        name = _spelt(said)
        if name == SWITCH:
            if value not in (True, "", "true", "True"):
                raise ConfigError("the cache is switched off", key=said, value=_short(value), nearest="true")
            continue
        key = name if name in OPTIONS else NAMES.get(name)
        if key is None:
            known = [*OPTIONS, *NAMES, SWITCH]
            raise ConfigError(
                "unknown option", key=said, value=_short(value), nearest=nearest(name[:100], known)
            )
        meant = _gigabytes(said, value) if name == "hicache_size" else _value(key, value)
        if meant is None:
            continue
        if key in found and found[key][1] != meant:
            raise ConfigError(
                "an option is given twice",
                key=key,
                value=_short(meant),
                first=f"{found[key][0]}={_short(found[key][1])}",
                second=f"{said}={_short(value)}",
            )
        found[key] = (name, meant)
    if (
        found.get("host_bytes", ("",))[0] == "hicache_size"
        and found.get("host_ratio", ("",))[0] == "hicache_ratio"
    ):
        del found["host_ratio"]  # SGLang's ratio has a default, and its size goes before it
    return {key: value for key, (_, value) in found.items()}


def is_alias(name: object) -> bool:
    """True for another system's name of an option."""
    spelt = _spelt(name)
    return spelt == SWITCH or (spelt in NAMES and spelt not in OPTIONS)


def _spelt(said: object) -> str:
    """A name or a flag as a name."""
    return said.strip().lstrip("-").replace("-", "_") if isinstance(said, str) else repr(said)


_KEYS = {
    "store": "store.type",
    "host_bytes": "host.bytes",
    "host_ratio": "host.ratio",
    "host_fraction": "host.fraction",
    "host_mode": "host.mode",
}
"""Where an option lies in the settings, where that is not under its own name."""


def into_tables(table: Mapping[str, object]) -> dict[str, object]:
    """Settings with other systems' options under the keys of our tables; everything else is left as it is."""
    theirs = {name: value for name, value in table.items() if is_alias(name)}
    rows: dict[str, object] = {name: value for name, value in table.items() if name not in theirs}
    for option, meant in canonical(theirs).items():
        off = (option, meant) == ("store", "none")
        key, value = ("store", "off") if off else (_KEYS.get(option, option), meant)
        head, dot, inner = key.partition(".")
        if key in rows or (not dot and head in rows):
            raise ConfigError("an option is given twice", key=key, value=repr(value), also=repr(rows[key]))
        if not dot:
            rows[head] = _numbered(option, value)
            continue
        below = rows.get(head, {})
        if not isinstance(below, Mapping) or inner in below:
            raise ConfigError("an option is given twice", key=key, value=repr(value), also=repr(below))
        rows[head] = {**below, inner: _numbered(option, value)}
    return rows


def _numbered(option: str, value: object) -> object:
    """A number that was pasted as text, as a number."""
    if isinstance(value, str) and option in ("host_ratio", "host_fraction", "page_tokens"):
        with suppress(ValueError):
            return int(value) if option == "page_tokens" else float(value)
    return value


def from_flags(line: str) -> dict[str, object]:
    """The options of a pasted command line such as ``--hicache-ratio 2 --hicache-io-backend=direct``."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError("not a command line", key="flags", value=_short(line), cause=error) from error
    options: dict[str, object] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            options[name] = value if equals else ""
        elif name is None or options[name] != "":
            raise ConfigError("a value without an option", key=name or "flags", value=_short(word))
        else:
            options[name] = word
    return options


def _value(key: str, value: object) -> object:
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def _gigabytes(said: str, value: object) -> int | None:
    """SGLang's size in bytes; its 0 means that none is given."""
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(
            "not a size", key=said, value=_short(value), expected="whole gigabytes, 10^9 bytes each"
        )
    return parse_bytes(number * GB, key=said) if number else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
