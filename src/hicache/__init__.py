"""HiCache keeps the KV cache of large language models across device memory, host memory and storage.

    import hicache

    with hicache.attach(model, hicache.load(store={"type": "segment", "path": "kv"})) as cached:
        result = cached.generate(ids, max_new_tokens=32)

The names below are the public ones; they are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hicache.errors import (
    CapacityError,
    ConfigError,
    DataError,
    HiCacheError,
    IncompatibleError,
    InvariantError,
    UnavailableError,
)

if TYPE_CHECKING:
    from hicache.adapters.transformers import attach
    from hicache.build import Cache
    from hicache.control import ControlConfig, Controller, Request
    from hicache.keys import Namespace, page_keys
    from hicache.settings import Settings, load
    from hicache.spec import CacheSpec, Full, Group, Plane, State, Window, usable

__version__ = "0.1.0"

_HOMES = {
    "hicache.adapters.transformers": ("attach",),
    "hicache.build": ("Cache",),
    "hicache.control": ("ControlConfig", "Controller", "Request"),
    "hicache.keys": ("Namespace", "page_keys"),
    "hicache.settings": ("Settings", "load"),
    "hicache.spec": ("CacheSpec", "Full", "Group", "Plane", "State", "Window", "usable"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cache",
    "CacheSpec",
    "CapacityError",
    "ConfigError",
    "ControlConfig",
    "Controller",
    "DataError",
    "Full",
    "Group",
    "HiCacheError",
    "IncompatibleError",
    "InvariantError",
    "Namespace",
    "Plane",
    "Request",
    "Settings",
    "State",
    "UnavailableError",
    "Window",
    "attach",
    "load",
    "page_keys",
    "usable",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hicache' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
