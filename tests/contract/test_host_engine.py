"""The native engine equals the reference: real models' shapes, random copies, other builds, sanitizers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.data.copy import host, native
from hicache.data.copy.base import Surface
from hicache.data.copy.host import HostEngine, Library
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.copy.strided import NumpyEngine
from hicache.data.pool import rows_surface, surface_of
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS, place, undefined
from hicache.spec import Group, Plane
from hicache.testing.copies import PLANE_SETS, pool_side
from hicache.testing.copycases import check_case, check_random

pytestmark = pytest.mark.skipif(HostEngine.available() is not None, reason=str(HostEngine.available()))

GUARD = 4096
SLOTS = 4
SOURCES, TARGETS = (3, 0, 1), (0, 3, 2)


def model_groups(tokens: int) -> dict[str, Group]:
    return {
        "smollm2": Group("main", (Plane("k", 30, tokens, 3, 128), Plane("v", 30, tokens, 3, 128))),
        "llama_8b": Group("main", (Plane("k", 32, tokens, 8, 256), Plane("v", 32, tokens, 8, 256))),
        "mla": Group("main", (Plane("latent", 61, tokens, 1, 1152),)),
        "mla_two": Group("main", (Plane("latent", 27, tokens, 1, 1024), Plane("rope", 27, tokens, 1, 128))),
        "asymmetric": Group("main", (Plane("k", 24, tokens, 4, 384), Plane("v", 24, tokens, 4, 256))),
        "opaque": Group("blob", (Plane("block", 1, 1, 1, 30 * tokens * 771),)),
        "odd": Group("main", (Plane("k", 5, tokens, 3, 66), Plane("v", 5, tokens, 3, 33))),
    }


CELLS = [
    (model, tokens, layout)
    for tokens in (1, 16, 64)
    for model, group in model_groups(tokens).items()
    for layout in LAYOUTS
    if undefined(group, LAYOUTS[layout]) is None
]
NOISE = np.random.default_rng(5).integers(0, 256, 80 << 20, dtype=np.uint8)


def memory(nbytes: int, *, filled: bool) -> tuple[np.ndarray, np.ndarray]:
    whole = NOISE[: nbytes + 2 * GUARD].copy() if filled else np.full(nbytes + 2 * GUARD, 0xA5, np.uint8)
    return whole, whole[GUARD : GUARD + nbytes]


def pool(group: Group, layout: str, *, filled: bool) -> tuple[list[np.ndarray], Surface]:
    placement = place(group, LAYOUTS[layout], SLOTS)
    whole, inner = memory(placement.nbytes, filled=filled)
    return [whole], surface_of(placement, inner)


def engine_tensors(group: Group, *, filled: bool) -> tuple[list[np.ndarray], Surface]:
    """As engines hold it: a tensor of its own for each layer of each plane."""
    wholes, rows = [], []
    for plane in group.planes:
        tensors = []
        for _ in range(plane.layers):
            count = SLOTS * plane.tokens
            whole, inner = memory(count * plane.heads * plane.item_nbytes, filled=filled)
            wholes.append(whole)
            tensors.append(inner.reshape(count, plane.heads, plane.item_nbytes))
        rows.append(tensors)
    return wholes, rows_surface(group, rows, SLOTS)


@pytest.mark.parametrize("model,tokens,layout", CELLS)
def test_real_shapes_both_ways(model, tokens, layout):
    group = model_groups(tokens)[model]
    for source_of, target_of in (
        (
            lambda filled: engine_tensors(group, filled=filled),
            lambda filled: pool(group, layout, filled=filled),
        ),
        (
            lambda filled: pool(group, layout, filled=filled),
            lambda filled: engine_tensors(group, filled=filled),
        ),
    ):
        whole, source = source_of(True)
        before = [part.copy() for part in whole]
        got, target = target_of(False)
        expected, wanted = target_of(False)
        HostEngine().submit(source, SOURCES, target, TARGETS).wait()
        ReferenceEngine().submit(source, SOURCES, wanted, TARGETS)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(whole, before, strict=True))


@pytest.mark.parametrize("small", [0, host.SMALL_NBYTES])
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_random_copies(part, small, monkeypatch):
    monkeypatch.setattr(host, "SMALL_NBYTES", small)
    seed = random.getrandbits(40)
    print(f"cases {seed} to {seed + 1249}")
    check_random(HostEngine(), seed, 1250)


@pytest.mark.slow
def test_many_more_random_copies(monkeypatch):
    monkeypatch.setattr(host, "SMALL_NBYTES", 1 << 14)
    seed = random.getrandbits(40)
    print(f"cases {seed} to {seed + 99_999}")
    check_random(HostEngine(), seed, 100_000)


def test_random_copies_with_numpy():
    seed = random.getrandbits(40)
    print(f"cases {seed} to {seed + 999}")
    check_random(NumpyEngine(), seed, 1000)


BUILDS = {
    "portable": ("-DHICACHE_PORTABLE",),
    "sse2": ("-D__builtin_cpu_supports(what)=0",),
    "short_lead": ("-DLEAD=100",),
    "strict": ("-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_other_builds_of_the_source(name, tmp_path, monkeypatch):
    """Paths that this machine would not take, and pages cut into far more units than they ever are."""
    monkeypatch.setattr(host, "SMALL_NBYTES", 0)
    monkeypatch.setattr(host, "UNIT_NBYTES_MAX", 1000)
    native.build(tmp_path / "other.so", flags=(*native.FLAGS, *BUILDS[name]))
    check_random(HostEngine(Library(tmp_path / "other.so")), 1000, 500)


# -- what the reference catches by itself, a C engine must be kept from


def test_views_of_unequal_length_are_refused_before_any_byte():
    side, other = (
        pool_side(PLANE_SETS["equal"], "page_first", 1),
        pool_side(PLANE_SETS["equal"], "page_first", None),
    )
    first, *rest = other.surface.views[0]
    short = Surface(((first, *(view[:2] for view in rest)), other.surface.views[1]))
    before = other.whole.copy()
    with pytest.raises(ConfigError, match="a view must be bytes"):
        HostEngine().submit(side.surface, (0,), short, (6,))
    assert other.untouched_since(before)


def test_other_types_than_bytes_are_refused():
    side = pool_side(PLANE_SETS["equal"], "page_first", 1)
    wide = Surface(tuple(tuple(view.view(np.uint32) for view in views) for views in side.surface.views))
    with pytest.raises(ConfigError, match="a view must be bytes"):
        HostEngine().submit(wide, (0,), wide, (1,))


def test_no_compiler_is_a_reason_and_numpy_copies(monkeypatch):
    def absent():
        raise native.NotNativeError("no C compiler on the path")

    monkeypatch.setattr(native, "library", absent)
    host._shared.cache_clear()
    try:
        assert HostEngine.available() == "no C compiler on the path"
        engine = host.host_engine()
        assert engine.name == "numpy"
        check_case(engine, 1)
    finally:
        host._shared.cache_clear()


# -- sanitizers

SANITIZED = """
import sys
from pathlib import Path
from hicache.data.copy import host
from hicache.testing.copycases import check_random
host.SMALL_NBYTES = int(sys.argv[2])
host.UNIT_NBYTES_MAX = 3000
check_random(host.HostEngine(host.Library(Path(sys.argv[1]), cpus=frozenset({0, 1}))), int(sys.argv[3]), 300)
print("clean")
"""


def runtime(name: str) -> str | None:
    """The sanitizer's library as the compiler finds it; None when it has none."""
    ask = [native.compiler(), f"-print-file-name={name}"]
    path = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return path if Path(path).is_absolute() and Path(path).exists() else None


@pytest.mark.parametrize("small", [0, host.SMALL_NBYTES])
@pytest.mark.parametrize(
    "sanitizer,library", [("address,undefined", "libasan.so"), ("thread", "libtsan.so")], ids=["asan", "tsan"]
)
def test_under_sanitizers(sanitizer, library, small, tmp_path):
    preload = runtime(library)
    if preload is None:
        pytest.skip(f"{native.compiler()} has no {library}")
    flags = (*native.FLAGS, "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    native.build(tmp_path / "checked.so", flags=flags)
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66",
    }
    seed = random.getrandbits(40)
    command = [sys.executable, "-c", SANITIZED, str(tmp_path / "checked.so"), str(small), str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), f"seed {seed}\n{done.stderr[-3000:]}"
