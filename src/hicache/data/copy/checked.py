"""What copy engines of the CPU share: the checks of a call, made before any byte moves, and the finished ticket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hicache.capability import Capabilities, Direction, layout_refuses
from hicache.data.copy.base import Bytes, Surface, Ticket
from hicache.errors import ConfigError
from hicache.layout import Layout
from hicache.spec import CacheSpec

Slots = npt.NDArray[np.intp]


class Finished:
    """The ticket of a copy that ended before it was handed out."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


def checked_slots(side: str, slots: Sequence[int], surface: Surface) -> Slots:
    """The slots as an array; ConfigError when one is not a page of ``surface``."""
    array = np.asarray(slots)
    if array.size == 0:
        return np.zeros(0, np.intp)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            "slots must be one row of integers", side=side, shape=array.shape, dtype=array.dtype
        )
    if int(array.min()) < 0 or int(array.max()) >= surface.slots:
        raise ConfigError(
            "a slot is out of range", side=side, lowest=array.min(), highest=array.max(), slots=surface.slots
        )
    return array.astype(np.intp)


def checked_layers(surface: Surface, layers: range | None) -> range:
    """The layers to copy; ConfigError when they reach past the deepest plane."""
    deepest = max(len(plane) for plane in surface.views)
    if layers is None:
        return range(deepest)
    if len(layers) and (min(layers) < 0 or max(layers) >= deepest):
        raise ConfigError("layers are out of range", layers=layers, deepest=deepest)
    return layers


def pairs(source: Surface, target: Surface) -> Iterator[tuple[int, int, Bytes, Bytes]]:
    """(plane, layer, source view, target view), of every plane and layer."""
    for number, (ours, theirs) in enumerate(zip(source.views, target.views, strict=True)):
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield number, layer, a, b


def check(source: Surface, source_slots: Slots, target: Surface, target_slots: Slots) -> None:
    """ConfigError when a copy cannot be meant: unequal planes, repeated or read-only targets, overlapping bytes."""
    if len(source_slots) != len(target_slots):
        raise ConfigError("as many sources as targets", sources=len(source_slots), targets=len(target_slots))
    if [len(plane) for plane in source.views] != [len(plane) for plane in target.views]:
        raise ConfigError(
            "source and target have other planes or layers",
            source=[len(plane) for plane in source.views],
            target=[len(plane) for plane in target.views],
        )
    ordered = np.sort(target_slots)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        raise ConfigError("a target slot repeats", slot=repeated[0])
    for number, layer, a, b in pairs(source, target):
        if a.shape[1:] != b.shape[1:]:
            raise ConfigError(
                "source and target disagree about a page",
                plane=number,
                layer=layer,
                source=a.shape[1:],
                target=b.shape[1:],
            )
        if not b.flags.writeable:
            raise ConfigError("the target cannot be written", plane=number, layer=layer)
        if not np.may_share_memory(a, b):
            continue
        same = a.ctypes.data == b.ctypes.data and a.strides == b.strides
        if not same or np.intersect1d(source_slots, target_slots).size:
            raise ConfigError("source and target overlap in memory", plane=number, layer=layer)


class CheckedEngine(ABC):
    """An engine that has copied everything when :meth:`submit` returns; a subclass supplies :meth:`_move`."""

    name: str

    def refuses(
        self, spec: CacheSpec, layout: Layout, direction: Direction, capabilities: Capabilities
    ) -> str | None:
        """Why this engine cannot serve that layout; None when it can. It takes any strides, of any platform."""
        return layout_refuses(spec, layout)

    def submit(
        self,
        source: Surface,
        source_slots: Sequence[int],
        target: Surface,
        target_slots: Sequence[int],
        *,
        layers: range | None = None,
    ) -> Ticket:
        """Copy page ``source_slots[i]`` to ``target_slots[i]`` for each i; ``layers`` limits it to some layers."""
        sources = checked_slots("source", source_slots, source)
        targets = checked_slots("target", target_slots, target)
        wanted = checked_layers(source, layers)
        self._check(source, sources, target, targets)
        if len(sources):
            self._move((source, sources), (target, targets), wanted)
        return Finished()

    def _check(self, source: Surface, sources: Slots, target: Surface, targets: Slots) -> None:
        """Refuse a copy that cannot be meant."""
        check(source, sources, target, targets)

    @abstractmethod
    def _move(self, source: Side, target: Side, layers: range) -> None:
        """Copy the pages; everything has been checked, and there is at least one."""


Side = tuple[Surface, Slots]
"""One end of a copy: the surface, and its pages in order."""
