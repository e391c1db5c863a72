"""The whole product of inputs: resolved or refused, idempotent, order-free; and what was accepted then runs.

The plain run takes an even sample of each product; the slow one takes all of it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from resolve_rig import (
    ATTENTIONS,
    PAGES,
    SHARDS,
    Running,
    Slots,
    WrongPlaceError,
    machines,
    run_kernel,
    spec_of,
)

from hicache.capability import Direction, Place
from hicache.data.copy.direct import DirectEngine
from hicache.data.copy.reference import ReferenceEngine
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import Resolution, resolve
from hicache.resolve.request import WRITES, Request

STORES = (None, "memory", "segment", "mooncake")
SAMPLE = 11
"""Every so many rows of the product; prime to the length of each factor, so that every value of each comes up."""


def product(machine: str):
    """Every request for a machine."""
    rows = itertools.product(
        (None, *LAYOUTS),
        (None, "kernel", "direct"),
        ATTENTIONS,
        (None, *WRITES),
        STORES,
        SHARDS,
        (False, True),
    )
    for layout, io, attention, write, store, shards, strict in rows:
        yield Request(
            spec_of(attention, shards.count),
            layout=layout,
            io=io,
            into_host=write,
            store=store,
            shards=shards,
            strict=strict,
        )


def is_resolved_or_refused(found: Resolution) -> None:
    """Never neither, never both; a refusal says why with every value, a choice was refused by nobody."""
    request = found.request
    if found.chosen is None:
        assert found.refusals
        assert not found.steps
        with pytest.raises(ConfigError) as error:
            found.require()
        for name in ("layout", "io", "store", "into_host"):
            assert f"{name}={request.wish(name)}" in str(error.value)
        assert f"platform={found.platform}" in str(error.value)
        return
    assert not found.refusals
    chosen = found.chosen
    (pair,) = [c for c in found.candidates if (c.layout, c.io) == (chosen.layout, chosen.io)]
    assert not pair.refusals
    for other in found.candidates:
        assert other.refusals or other.cost >= pair.cost
    changed = {
        name for name in ("layout", "io", "store", "into_host") if getattr(chosen, name) != request.wish(name)
    }
    assert changed == {step.field for step in found.steps}
    for step in found.steps:
        assert step.warning == (getattr(request, step.field) is not None)
    assert not (request.strict and found.warnings)


def check_one(request: Request, machine: str, rng: random.Random) -> Resolution:
    there = machines()[machine]
    found = resolve(request, there)
    is_resolved_or_refused(found)
    rows = {name: list(getattr(there, name)) for name in ("engines", "layouts", "stores")}
    for row in rows.values():
        rng.shuffle(row)
    assert resolve(request, replace(there, **{name: tuple(row) for name, row in rows.items()})) == found
    if found.chosen is not None:
        again = resolve(replace(found.as_request(), strict=True), there)
        assert not again.steps
        assert again.chosen == replace(found.chosen, size=again.chosen.size)
        assert again.chosen.size.slots == found.chosen.size.slots
    elif not request.strict:
        assert there.platform.refused, "without strict, and on a platform that is one, there is always a way"
    return found


@pytest.mark.parametrize("machine", machines())
def test_a_sample_of_the_product(machine):
    rng = random.Random(machine)
    for request in itertools.islice(product(machine), rng.randrange(SAMPLE), None, SAMPLE):
        check_one(request, machine, rng)


@pytest.mark.slow
@pytest.mark.parametrize("machine", machines())
def test_the_whole_product(machine):
    rng = random.Random(machine)
    for request in product(machine):
        check_one(request, machine, rng)


# -- what was accepted runs


def accepted() -> list[tuple[str, Request, Resolution]]:
    """One request for each configuration that can come out, on the machines that have everything or lack staging."""
    found: dict[object, tuple[str, Request, Resolution]] = {}
    for machine in ("cpu", "cuda", "rocm", "cuda-staged-writeback", "rocm-staged-writeback", "rocm-triton"):
        for request in product(machine):
            if request.strict or request.shards.pipeline > 1:
                continue
            resolution = resolve(request, machines()[machine])
            if resolution.chosen is not None:
                found.setdefault((resolution.chosen, request.spec), (machine, request, resolution))
    return sorted(found.values(), key=repr)


def runs(resolution: Resolution, tmp_path) -> None:
    running = Running(resolution.chosen, resolution.request.spec, tmp_path)
    try:
        running.five_pages()
    finally:
        running.close()


@pytest.mark.timeout(300)
def test_a_sample_of_what_is_accepted_runs(tmp_path):
    pairs = set()
    rows = accepted()[:: SAMPLE - 4]
    for number, (machine, _, resolution) in enumerate(rows):
        runs(resolution, tmp_path / str(number))
        pairs.add((machine, resolution.chosen.layout, resolution.chosen.io))
    assert len(pairs) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_is_accepted_runs(tmp_path):
    for number, (_, _, resolution) in enumerate(accepted()):
        runs(resolution, tmp_path / str(number))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("engine", ["triton", "runtime", "memcpy", "reference"])
def test_a_kernel_refuses_slots_in_the_wrong_place(engine, direction):
    """The simulation can fail: it says what the real kernel said when it was handed slots on the host."""
    from hicache.data.platform.cpu import CpuPlatform
    from hicache.data.pool import Pool

    declaration = next(e for e in machines()["cuda"].engines if e.name == engine)
    kernel = declaration.kernel(LAYOUTS["layer_first"], direction)
    spec = spec_of("mha")
    a, b = (Pool(spec, LAYOUTS["layer_first"], PAGES, CpuPlatform()) for _ in range(2))
    inner = DirectEngine() if engine == "memcpy" else ReferenceEngine()
    right = (Slots.at(kernel.source_index, (0, 1)), Slots.at(kernel.target_index, (1, 2)))
    run_kernel(kernel, inner, a.surface(0), right[0], b.surface(0), right[1])
    wrong = Place.HOST if kernel.target_index is Place.DEVICE else Place.DEVICE
    with pytest.raises(WrongPlaceError, match="Destination indices must be a"):
        run_kernel(kernel, inner, a.surface(0), right[0], b.surface(0), Slots.at(wrong, (1, 2)))
