"""From settings to a resolution: the wishes, the pieces that are here and the memory there is, put together.

Ranks that share a machine agree first on one view of its memory and then on one number of pages, before any of
them allocates: each exchanges exactly twice, whatever comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hicache.capability import Capabilities, Declarations, Shards
from hicache.data.platform.base import Progress
from hicache.data.platform.memory import MemoryProbe
from hicache.data.pool import nbytes_for
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import Resolution, Step, resolve
from hicache.resolve.catalog import declarations, detect
from hicache.resolve.request import Request
from hicache.resolve.sizing import Budget, Peers, Snapshot, agree, agree_slots
from hicache.settings import OtherStoreSettings, Settings, StoreSettings
from hicache.spec import CacheSpec

_UNKNOWN = 1 << 62
"""What a rank says that cannot tell how much memory there is: it agrees to whatever the others saw."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is not ours to wish for.

    platform: where the engine's memory is; default: the CPU, as found. device_nbytes: the engine's own pages, for
    a ratio. reserve: bytes left to others (default: see :mod:`hicache.resolve.sizing`). progress: called with (bytes ready,
    bytes in all) while memory is prepared.
    """

    platform: Capabilities | None = None
    device_nbytes: int | None = None
    peers: Peers = field(default_factory=Peers)
    probe: MemoryProbe = field(default_factory=MemoryProbe)
    reserve: int | None = None
    progress: Progress | None = None


def store_name(settings: StoreSettings | None) -> str | None:
    """The store that is wished for, by its declared name."""
    if settings is None:
        return None
    return settings.type if isinstance(settings, OtherStoreSettings) else str(settings.__struct_config__.tag)


def request_for(settings: Settings, spec: CacheSpec, around: Surroundings, platform: str) -> Request:
    """What these settings ask for."""
    if spec.page_tokens != settings.page_tokens:
        raise ConfigError(
            "the spec has another page size than the settings",
            page_tokens=settings.page_tokens,
            spec_page_tokens=spec.page_tokens,
        )
    host, device = settings.host, settings.device
    own = None if device is None else device.nbytes
    return Request(
        spec,
        layout=settings.layout,
        io=settings.io,
        store=store_name(settings.store),
        into_host=settings.into_host,
        into_store=settings.into_store,
        host_mode="off" if host is None else None if host.mode == "cache" else host.mode,
        prefetch=settings.prefetch,
        strict=settings.strict,
        shards=Shards(tensor=spec.shards),
        device_nbytes=own or around.device_nbytes,
        own_device=device is not None,
        taken_nbytes=(own or 0) if platform == "cpu" else 0,
        **({} if host is None else {"size": host.size}),  # type: ignore[arg-type]
    )


def pieces(settings: Settings, around: Surroundings) -> Declarations:
    """What there is to choose from."""
    return declarations(around.platform or detect("cpu"), store_name(settings.store))


def budget_for(around: Surroundings) -> Budget | None:
    """What one of the co-located ranks may take, agreed with the others; None where nobody can tell."""
    seen, left = around.probe.available(), around.probe.headroom()
    known = [nbytes for nbytes in (seen, left) if nbytes is not None]
    agreed = agree(around.peers.exchange, Snapshot(min(known, default=_UNKNOWN)))
    return None if agreed.usable >= _UNKNOWN else Budget(agreed, around.peers.ranks, around.reserve)


def choose(settings: Settings, spec: CacheSpec, around: Surroundings | None = None) -> Resolution:
    """Resolve ``settings`` for ``spec``: what :func:`hicache.build.build` does first."""
    around = around or Surroundings()
    there = pieces(settings, around)
    request = request_for(settings, spec, around, there.platform.platform)
    found = resolve(request, there, budget_for(around))
    size = None if found.chosen is None else found.chosen.size
    slots = _UNKNOWN if size is None and found.chosen is not None else size.slots if size else 0
    least = agree_slots(around.peers.exchange, slots)
    if found.chosen is None or size is None or least == size.slots:
        return found
    if least == 0:
        reason = "another rank on this machine cannot have its host tier, and all ranks have the same"
        return replace(found, chosen=None, steps=(), refusals=(reason,))
    reason = "all ranks hold as many pages as the one that can hold least"
    step = Step("host_slots", str(size.slots), str(least), reason, warning=False)
    layout = LAYOUTS[found.chosen.layout]
    smaller = replace(size, slots=least, nbytes=nbytes_for(spec, layout, least), how=f"{size.how}; {reason}")
    return replace(found, chosen=replace(found.chosen, size=smaller), steps=(*found.steps, step))
