"""Stores by name: the two built in, and those that other packages offer as entry points of ``hicache.stores``.

An entry point is a callable ``(options: Mapping[str, object], spec: CacheSpec) -> Store``. Nothing is imported
before it is asked for by name; a name that two packages offer, or that is built in, is refused.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from hicache.data.store.base import Store
from hicache.errors import ConfigError
from hicache.spec import CacheSpec

GROUP = "hicache.stores"
FREE_SHARE = 10
"""A segment store without a cap takes one part in so many of what is free on its disk."""

StoreFactory = Callable[[Mapping[str, Any], CacheSpec], Store]


def _memory(options: Mapping[str, Any], spec: CacheSpec) -> Store:
    from hicache.data.store.memory import MemoryStore

    return MemoryStore(options["cap_bytes"], spec.fingerprint())


def _segment(options: Mapping[str, Any], spec: CacheSpec) -> Store:
    from hicache.data.store.segment import Files, SegmentStore

    path, cap = Path(options["path"]).expanduser(), options["cap_bytes"]
    if cap is None:
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        cap = shutil.disk_usage(there).free // FREE_SHARE
    return SegmentStore(path, cap, spec.fingerprint(), files=Files(direct=options.get("direct", True)))


BUILT_IN: Mapping[str, StoreFactory] = {"memory": _memory, "segment": _segment}


def store_factory(name: str) -> StoreFactory:
    """What makes a store called ``name``; ConfigError when nobody, or more than one, offers it."""
    offered: dict[str, EntryPoint] = {}
    if name not in BUILT_IN or entry_points(group=GROUP, name=name):
        for entry in entry_points(group=GROUP):
            other = offered.get(entry.name)
            if entry.name in BUILT_IN or (other is not None and other.value != entry.value):
                first = other.value if other is not None else "built in"
                raise ConfigError("two stores of one name", store=entry.name, first=first, second=entry.value)
            offered[entry.name] = entry
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name not in offered:
        known = [*BUILT_IN, *sorted(offered)]
        nearest = difflib.get_close_matches(name, known, 1, 0.0)[0]
        raise ConfigError("unknown store type", store=name, nearest=nearest, known=",".join(known))
    try:
        factory: StoreFactory = offered[name].load()
    except Exception as error:  # whatever a stranger's module raises while it is imported
        raise ConfigError(
            "a store cannot be imported", store=name, entry=offered[name].value, cause=repr(error)
        ) from error
    return factory
