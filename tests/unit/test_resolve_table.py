"""The outcomes that resolution must have, row by row, also through SGLang's names; and where its faults were."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from resolve_rig import ATTENTIONS, machines, spec_of

from hicache.capability import Direction, EngineDeclaration, Kernel, Place
from hicache.data.platform import cuda, rocm
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import attach, resolve
from hicache.resolve.aliases import from_flags
from hicache.resolve.catalog import declarations, detect, make_engine, simulate
from hicache.resolve.request import Request, wishes

LF, PF, PFD, PH = "layer_first", "page_first", "page_first_direct", "page_head"
K, D = "kernel", "direct"
BOTH = ("cuda", "rocm")

# (machine, layout asked, I/O asked, store) -> (layout, I/O, warns)
TABLE = [
    *((m, None, None, None, PF, K, False) for m in ("cuda", "rocm", "cpu")),
    *((m, PFD, K, None, PFD, D, True) for m in BOTH),
    *((m, PF, D, None, PFD, D, True) for m in BOTH),
    ("rocm-staged-writeback", PF, K, None, LF, K, True),
    *((f"{m}-triton", PF, K, None, PFD, D, True) for m in BOTH),
    *((m, PF, K, None, PF, K, False) for m in BOTH),
    ("cuda", LF, K, "mooncake", PF, K, True),
    *(("rocm-staged-writeback", asked, K, "mooncake", PFD, D, True) for asked in (PF, LF)),
    *((m, LF, D, "mooncake", PFD, D, True) for m in BOTH),
    *(("cpu", asked, io, None, asked, io, False) for asked in (LF, PF, PFD, PH) for io in (K, D)),
    # asking for one half of the default pair is asking for the pair
    ("rocm-staged-writeback", PF, None, None, LF, K, True),
    ("rocm-staged-writeback", None, K, None, LF, K, False),
    ("rocm-triton", PF, None, None, PFD, D, True),
    ("cuda", LF, None, "mooncake", PF, K, True),
    # what is not given is a default, not a wish: no warning
    ("cuda", PFD, None, None, PFD, D, False),
    ("cuda", None, D, None, PFD, D, False),
    ("rocm-staged-writeback", None, None, None, LF, K, False),
    ("rocm-triton", None, None, None, PFD, D, False),
    ("cuda-pinning", None, None, None, PFD, D, False),
    ("cuda-host-access", None, None, None, PFD, D, False),
    ("cuda-same-address", None, None, None, PF, K, False),
]


def asked(layout, io, store) -> dict[str, str]:
    given = {"layout": layout, "io": io, "store": store}
    return {name: value for name, value in given.items() if value is not None}


@pytest.mark.parametrize("attention", ["mha", "mla"])
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_row(row, attention):
    machine, layout, io, store, to_layout, to_io, warns = row
    if (layout, attention) == (PH, "mla"):
        pytest.skip("page_head of one head has a test of its own")
    there, spec = machines()[machine], spec_of(attention)
    found = resolve(wishes(asked(layout, io, store), spec, there), there)
    assert (found.chosen.layout, found.chosen.io) == (to_layout, to_io)
    assert bool(found.warnings) == warns
    for step in found.steps:
        assert step.reason
        assert step.before != step.after
    for name, before, after in (("layout", layout or PF, to_layout), ("io", io or K, to_io)):
        assert [(s.before, s.after) for s in found.steps if s.field == name] == (
            [] if before == after else [(before, after)]
        )
    strict = resolve(wishes({**asked(layout, io, store), "strict": True}, spec, there), there)
    if warns:
        assert strict.chosen is None
        with pytest.raises(ConfigError) as error:
            strict.require()
        text = str(error.value)
        for value in (
            there.platform.platform,
            f"layout={layout or PF}",
            f"io={io or K}",
            f"nearest={to_layout}+{to_io}",
        ):
            assert value in text
    else:
        assert strict.chosen == found.chosen


@pytest.mark.parametrize("flags", [False, True], ids=["names", "flags"])
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_row_in_sglangs_words(row, flags):
    machine, layout, io, store, to_layout, to_io, _ = row
    there = machines()[machine]
    theirs = {
        "hicache_mem_layout": layout,
        "hicache_io_backend": io,
        "hicache_storage_backend": store,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_ratio": 2.0,
    }
    theirs = {name: value for name, value in theirs.items() if value is not None}
    if flags:
        line = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in theirs.items())
        theirs = from_flags(f"--enable-hierarchical-cache {line}")
    request = wishes(theirs, spec_of("mha"), there, device_nbytes=1 << 20)
    chosen = resolve(request, there).chosen
    assert (chosen.layout, chosen.io) == (to_layout, to_io)
    assert (chosen.into_host, chosen.prefetch, chosen.size.asked) == ("through", "wait_complete", 2 << 20)


@pytest.mark.parametrize("machine", ["cuda", "rocm", "cpu"])
def test_page_head_of_one_head_is_page_first_and_says_so(machine):
    there = machines()[machine]
    found = resolve(wishes({"layout": PH}, spec_of("mla"), there), there)
    assert (found.chosen.layout, found.chosen.io, found.steps) == (PH, K, ())
    assert any("page_head equals page_first" in note for note in found.notes)
    assert not resolve(wishes({"layout": PH}, spec_of("mha"), there), there).notes


def test_the_order_of_the_declarations_cannot_put_a_refused_pair_back():
    """The fault this system grew from: a fallback for the platform, undone by a rule for the store."""
    there, rng = machines()["rocm-staged-writeback"], random.Random(7)
    for _ in range(50):
        rows = {name: list(getattr(there, name)) for name in ("engines", "layouts", "stores")}
        for row in rows.values():
            rng.shuffle(row)
        shuffled = replace(there, **{name: tuple(row) for name, row in rows.items()})
        options = list(
            {"hicache_mem_layout": PF, "hicache_io_backend": K, "hicache_storage_backend": "mooncake"}.items()
        )
        rng.shuffle(options)
        chosen = resolve(wishes(dict(options), spec_of("mha"), shuffled), shuffled).chosen
        assert (chosen.layout, chosen.io) == (PFD, D)


# -- where lists of slots lie


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_slots_lie_where_the_chosen_engine_reads_them(machine, attention):
    there = machines()[machine]
    for layout in LAYOUTS:
        for io in (K, D):
            chosen = resolve(Request(spec_of(attention), layout=layout, io=io), there).chosen
            if chosen is None:
                assert there.platform.refused
                continue
            engine = next(e for e in there.engines if e.name == chosen.engine)
            assert chosen.load is engine.kernel(LAYOUTS[chosen.layout], Direction.LOAD)
            assert chosen.save is engine.kernel(LAYOUTS[chosen.layout], Direction.SAVE)
            if chosen.engine == "triton":
                assert chosen.load.source_index is chosen.load.target_index is Place.DEVICE
                on = Place.HOST if LAYOUTS[chosen.layout].page_major else Place.DEVICE
                assert (chosen.save.source_index, chosen.save.target_index) == (Place.DEVICE, on)
            else:
                places = {
                    k
                    for kernel in (chosen.load, chosen.save)
                    for k in (kernel.source_index, kernel.target_index)
                }
                assert places == {Place.HOST}


def test_a_kernel_that_reads_slots_on_the_device_cannot_be_handed_others():
    """Nothing beside a kernel says where slots lie: no field, no argument, so no second opinion can be expressed."""
    fields = {name for record in (EngineDeclaration, Request) for name in record.__dataclass_fields__}
    assert not [name for name in fields if "index" in name]
    with pytest.raises(TypeError):
        EngineDeclaration(
            "x",
            "kernel",
            frozenset({"cuda"}),
            "m:f",
            Kernel("k", Place.DEVICE, Place.DEVICE),
            index=Place.HOST,
        )


# -- what is not here


def test_a_piece_that_is_not_here_is_planned_with_and_not_built():
    for name in ("triton", "runtime"):
        with pytest.raises(ConfigError, match="not"):
            make_engine(name)
    assert make_engine("memcpy").name == "memcpy"
    here = declarations(detect("cpu"), "mooncake")
    found = resolve(wishes({"store": "mooncake"}, spec_of("mha"), here), here)
    assert found.chosen is None
    with pytest.raises(ConfigError, match="mooncake is not here"):
        found.require()


@pytest.mark.parametrize("module", [cuda, rocm])
def test_on_a_machine_that_is_here_a_piece_that_is_not_is_a_refusal(module):
    there = declarations(module.DECLARED)  # as found, with everything, but our engines for it are not written
    assert not there.platform.simulated
    found = resolve(wishes({}, spec_of("mha"), there), there)
    with pytest.raises(ConfigError, match="is not here"):
        found.require()
    assert all("is not here" in c.refusals[0] for c in found.candidates)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_platform_that_is_not_found_is_refused_with_the_reason(platform):
    found = detect(platform)
    if found.absent is None:
        pytest.skip(f"there is {platform} here")
    there = declarations(found)
    with pytest.raises(ConfigError, match="torch"):
        resolve(wishes({}, spec_of("mha"), there), there).require()


@pytest.mark.parametrize("platform", ["xpu", "npu"])
def test_platforms_known_by_name_are_refused_with_the_reason(platform):
    for there in (declarations(simulate(platform)), declarations(detect(platform))):
        found = resolve(wishes({"layout": PF}, spec_of("mha"), there), there)
        assert found.chosen is None
        assert all(c.refusals for c in found.candidates)
        with pytest.raises(ConfigError, match=f"{platform} is known by name only"):
            found.require()


@pytest.mark.parametrize("name,nearest", [("cdua", "cuda"), ("rocmm", "rocm")])
def test_an_unknown_platform_names_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=f"nearest={nearest}"):
        simulate(name)
    with pytest.raises(ConfigError, match="nearest=triton"):
        simulate("cuda", ["tritonn"])


# -- write policies and what host memory is for


def test_staging_turns_back_into_through_with_a_warning():
    there = machines()["cuda"]
    words = {"hicache_host_memory_mode": "buffer_only", "hicache_write_policy": "write_back", "store": "file"}
    found = resolve(wishes(words, spec_of("mha"), there), there)
    assert (found.chosen.into_host, found.chosen.host_mode, found.chosen.store) == (
        "through",
        "staging",
        "segment",
    )
    assert [(s.field, s.before, s.after) for s in found.warnings] == [("into_host", "back", "through")]
    assert resolve(wishes({**words, "strict": True}, spec_of("mha"), there), there).chosen is None


def test_staging_needs_a_store():
    there = machines()["cpu"]
    with pytest.raises(ConfigError, match="needs a store"):
        resolve(wishes({"host_mode": "staging"}, spec_of("mha"), there), there).require()


def test_back_is_refused_where_the_device_tier_is_not_ours():
    there = machines()["cuda"]
    with pytest.raises(ConfigError, match="device tier of our own"):
        resolve(wishes({"write_policy": "back"}, spec_of("mha"), there, own_device=False), there).require()
    assert resolve(wishes({"write_policy": "back"}, spec_of("mha"), there), there).chosen.into_host == "back"


# -- attaching and detaching while the cache runs


def test_attaching_asks_the_same_question():
    there = machines()["cuda"]
    running = resolve(wishes({"layout": LF, "io": K}, spec_of("mha"), there), there)
    answer = attach(running, "mooncake", there)
    assert answer.chosen is None
    with pytest.raises(ConfigError, match="mooncake needs whole pages") as error:
        answer.require()
    assert f"nearest={PF}+{K}" in str(error.value)
    attached = attach(running, "memory", there)
    assert attached.chosen == replace(running.chosen, store="memory")
    assert attach(attached, "none", there).chosen == running.chosen
    for machine in ("cuda", "rocm", "cpu"):
        there = machines()[machine]
        start = resolve(wishes({"store": "mooncake"}, spec_of("mha"), there), there)
        later = attach(resolve(wishes({}, spec_of("mha"), there), there), "mooncake", there)
        assert later.chosen == start.chosen


def test_detaching_is_refused_where_the_host_keeps_nothing():
    there = machines()["cpu"]
    running = resolve(wishes({"host_mode": "staging", "store": "memory"}, spec_of("mha"), there), there)
    with pytest.raises(ConfigError, match="needs a store"):
        attach(running, "none", there).require()
