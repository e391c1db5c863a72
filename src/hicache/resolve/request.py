"""What is asked of resolution: wishes, and the facts they meet. What is not given is a default, not a wish.

    request = wishes({"hicache_mem_layout": "page_first", "io": "direct"}, spec, declarations)

Everything that a user can get wrong is a ConfigError here, naming the key, the value and the nearest valid one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from hicache.capability import Declarations, Shards
from hicache.errors import ConfigError
from hicache.resolve.aliases import canonical
from hicache.resolve.sizing import HostSize, fraction, ratio
from hicache.spec import CacheSpec
from hicache.tables import nearest, parse_bytes

NONE = "none"
WRITES = ("through", "selective", "back")
MODES = ("cache", "staging", "off")
PREFETCHES = ("best_effort", "timeout", "wait_complete")

DEFAULTS: Mapping[str, str] = {
    "layout": "page_first",
    "io": "kernel",
    "store": NONE,
    "into_host": "through",
    "into_store": "through",
    "host_mode": "cache",
    "prefetch": "timeout",
}
"""What is taken where nothing is asked, on every platform alike; a platform that lacks it departs from it."""


@dataclass(frozen=True, slots=True)
class Request:
    """Wishes (None: not given) and facts.

    device_nbytes: the device's pages, as far as known. own_device: the device tier is ours, so that we know when
    it evicts. taken_nbytes: host memory that our other tiers take. live: the (layout, I/O back end) of a cache
    that runs, whose memory cannot be laid out anew.
    """

    spec: CacheSpec
    layout: str | None = None
    io: str | None = None
    store: str | None = None
    into_host: str | None = None
    into_store: str | None = None
    host_mode: str | None = None
    prefetch: str | None = None
    size: HostSize = field(default_factory=HostSize)
    strict: bool = False
    shards: Shards = field(default_factory=Shards)
    device_nbytes: int | None = None
    own_device: bool = True
    taken_nbytes: int = 0
    live: tuple[str, str] | None = None

    def wish(self, name: str) -> str:
        """What is asked for in a field, or its default."""
        asked: str | None = getattr(self, name)
        return DEFAULTS[name] if asked is None else asked

    def as_dict(self) -> dict[str, object]:
        """The wishes by name, None where nothing is asked."""
        rows: dict[str, object] = {name: getattr(self, name) for name in DEFAULTS}
        rows |= {
            f"host_{'bytes' if f.name == 'nbytes' else f.name}": getattr(self.size, f.name)
            for f in fields(HostSize)
        }
        return {**rows, "page_tokens": self.spec.page_tokens, "strict": self.strict}


def wishes(
    options: Mapping[str, object], spec: CacheSpec, declarations: Declarations, **facts: object
) -> Request:
    """A request from options under any of their names; ``facts`` are further fields of :class:`Request`."""
    rows = canonical(options)
    page_tokens = rows.pop("page_tokens", spec.page_tokens)
    if _whole(page_tokens) != spec.page_tokens:
        raise ConfigError(
            "the spec has another page size",
            key="page_tokens",
            value=repr(page_tokens),
            nearest=spec.page_tokens,
        )
    size = HostSize(
        nbytes=_bytes(rows.pop("host_bytes", None)),
        ratio=_number(rows.pop("host_ratio", None), "host_ratio", ratio),
        fraction=_number(rows.pop("host_fraction", None), "host_fraction", fraction),
    )
    strict = _switch("strict", rows.pop("strict", False))
    known = known_values(declarations)
    asked = {key: one_of(key, value, known[key]) for key, value in rows.items()}
    return Request(spec, size=size, strict=strict, **asked, **facts)  # type: ignore[arg-type]


def known_values(declarations: Declarations) -> dict[str, list[str]]:
    """What each field may hold."""
    return {
        "layout": [layout.name for layout in declarations.layouts],
        "io": sorted({engine.io for engine in declarations.engines}),
        "store": [NONE, *sorted(store.name for store in declarations.stores)],
        "into_host": list(WRITES),
        "into_store": list(WRITES),
        "host_mode": list(MODES),
        "prefetch": list(PREFETCHES),
    }


def one_of(key: str, value: object, known: list[str]) -> str:
    """``value`` if it is one of the known names; else ConfigError with the nearest."""
    if isinstance(value, str) and value in known:
        return value
    text = value if isinstance(value, str) else repr(value)
    raise ConfigError(
        f"unknown {key}",
        key=key,
        value=repr(value)[:200],
        nearest=nearest(text[:100], known),
        known=",".join(known),
    )


def _whole(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _bytes(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int | str):
        raise ConfigError("not a size", key="host_bytes", value=repr(value)[:200], nearest="512MiB")
    return parse_bytes(value, key="host_bytes")


def _number(value: object, key: str, check: Callable[[object, str], float]) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return check(float(value), key)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
    return check(value, key)


def _switch(key: str, value: object) -> bool:
    words = {"true": True, "false": False, "": True}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ConfigError(
            "not a switch", key=key, value=repr(value)[:200], nearest="true", known="true,false"
        )
    return value
