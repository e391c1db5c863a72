"""How much host memory a rank may take: one budget over all planes and groups, from one agreed snapshot.

    snapshot = agree(exchange, probe.snapshot())     every rank of the machine, before any of them allocates
    budget = Budget(snapshot, ranks=4)
    sized = size(HostSize(ratio=2.0), facts, budget)

Nothing is clamped: what does not fit is refused with both numbers. Only a size that nobody asked for is chosen to
fit, and it says how. All functions here are pure; the probe is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.data.pool import nbytes_for, slots_for
from hicache.errors import ConfigError
from hicache.layout import Layout
from hicache.spec import CacheSpec, positive

GIB = 1 << 30
RESERVE_MAX = 10 * GIB
RESERVE_PART = 10
"""Left for everything else on the machine: a tenth of what is there, at most :data:`RESERVE_MAX`."""

AUTO_NBYTES = 512 << 20
AUTO_RATIO = 2
AUTO_PART, AUTO_WHOLE = 8, 10
"""Where nothing is asked: twice the device's pages (512 MiB if unknown), at most eight tenths of the budget."""

Exchange = Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]]
"""Gives every rank what every co-located rank gave, and returns only when all have: an all-gather."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory at one moment.

    available: what the machine can still give. headroom: what our control group still lets us take; None = it sets
    no limit.
    """

    available: int
    headroom: int | None = None

    @property
    def usable(self) -> int:
        """The smaller of the two."""
        return self.available if self.headroom is None else min(self.available, self.headroom)


def alone(row: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
    """The exchange of a rank without peers."""
    return [row]


def agree(exchange: Exchange, mine: Snapshot) -> Snapshot:
    """The snapshot that all co-located ranks go by: the least any of them saw."""
    rows = exchange((mine.usable,))
    return Snapshot(min(row[0] for row in rows))


def agree_slots(exchange: Exchange, slots: int) -> int:
    """The number of pages that every rank can hold: the least of all."""
    return min(row[0] for row in exchange((slots,)))


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that share this machine, ourselves included: all of them size their host tiers together."""

    ranks: int = 1
    exchange: Exchange = alone


@dataclass(frozen=True, slots=True)
class Budget:
    """What one of ``ranks`` co-located ranks may take of a snapshot, ``reserve`` bytes being left alone."""

    snapshot: Snapshot
    ranks: int = 1
    reserve: int | None = None

    def __post_init__(self) -> None:
        positive("ranks", self.ranks)
        if self.reserve is not None:
            positive("reserve", self.reserve, minimum=0)

    @property
    def kept(self) -> int:
        """Bytes left alone."""
        if self.reserve is not None:
            return self.reserve
        return min(RESERVE_MAX, self.snapshot.usable // RESERVE_PART)

    @property
    def nbytes(self) -> int:
        """Bytes a rank may take."""
        return max(0, self.snapshot.usable - self.kept) // self.ranks


def fraction(value: object, key: str = "host_fraction") -> float:
    """``value`` as a part of the budget: more than 0, at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError("not a fraction", key=key, value=repr(value), expected="more than 0, at most 1")
    return float(value)


def ratio(value: object, key: str = "host_ratio") -> float:
    """``value`` as a multiple of the device's pages: more than 0; less than 1 is a host tier smaller than the device."""
    good = not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf
    if not good:
        raise ConfigError("not a ratio", key=key, value=repr(value), expected="a number more than 0")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class HostSize:
    """How large the host tier is wished to be: one of three ways, or none."""

    nbytes: int | None = None
    ratio: float | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if len(given) > 1:
            raise ConfigError("the size of the host tier is given twice", **given)
        if self.nbytes is not None:
            positive("host_bytes", self.nbytes)
        if self.ratio is not None:
            ratio(self.ratio)
        if self.fraction is not None:
            fraction(self.fraction)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a size is worked out from.

    device_nbytes: the device's pages, without padding, or None if not known. taken_nbytes: host memory that other
    tiers of this rank take (a device tier in host memory).
    """

    spec: CacheSpec
    layout: Layout
    device_nbytes: int | None = None
    taken_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Sized:
    """A host tier that fits: ``slots`` pages in ``nbytes`` bytes, padding and all, of ``asked`` bytes; and why."""

    slots: int
    nbytes: int
    asked: int
    how: str


def size(wish: HostSize, facts: Facts, budget: Budget | None) -> Sized | str:
    """The host tier, or why there cannot be one. Without a budget (nothing known of memory) nothing is compared."""
    room = None if budget is None else budget.nbytes - facts.taken_nbytes
    if budget is not None and room is not None and room <= 0:
        return (
            f"the device tier, in host memory, is to have {facts.taken_nbytes} bytes, and {budget.nbytes} are there "
            f"for it and the host tier: {_explained(budget)}"
        )
    asked, how = _asked(wish, facts, budget, room)
    if asked is None:
        return how
    if budget is not None and room is not None and asked > room:
        taken = f", {facts.taken_nbytes} taken by other tiers" if facts.taken_nbytes else ""
        return f"the host tier is to have {asked} bytes ({how}) and {room} are there: {_explained(budget)}{taken}"
    one = nbytes_for(facts.spec, facts.layout, 1)
    if asked < one:
        return (
            f"{asked} bytes of host memory ({how}) do not hold one page of {one} bytes in {facts.layout.name}"
        )
    slots = slots_for(facts.spec, facts.layout, asked)
    return Sized(slots, nbytes_for(facts.spec, facts.layout, slots), asked, how)


def _asked(wish: HostSize, facts: Facts, budget: Budget | None, room: int | None) -> tuple[int | None, str]:
    """(bytes, how they came about), or (None, why that cannot be told)."""
    if wish.nbytes is not None:
        return wish.nbytes, "as asked"
    if wish.ratio is not None:
        if facts.device_nbytes is None:
            return None, f"a ratio of {wish.ratio} needs the size of the device's pages, which is not known"
        return int(wish.ratio * facts.device_nbytes), f"{wish.ratio} x {facts.device_nbytes} bytes of device"
    if wish.fraction is not None:
        if budget is None:
            return None, f"a fraction of {wish.fraction} needs the memory of this machine, which is not known"
        return int(wish.fraction * budget.nbytes), f"{wish.fraction} of a budget of {budget.nbytes} bytes"
    if facts.device_nbytes is None:
        asked, how = AUTO_NBYTES, "nothing was asked"
    else:
        asked, how = AUTO_RATIO * facts.device_nbytes, f"nothing was asked: {AUTO_RATIO} x the device's pages"
    most = asked if room is None else room * AUTO_PART // AUTO_WHOLE
    if asked > most:
        return max(0, most), f"{how}, less to leave {AUTO_WHOLE - AUTO_PART} tenths of what is there free"
    return asked, how


def _explained(budget: Budget) -> str:
    return f"{budget.snapshot.usable} usable, {budget.kept} left alone, shared by {budget.ranks} ranks"
