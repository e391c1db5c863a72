"""The package that docs/extending.md shows, installed beside us: one line of layout, one file of I/O back end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"
UNIT = Path(__file__).parent

RUN = """
import sys
sys.path.insert(0, {unit!r})
from test_build import Engine, SPACE, PAGES, load_all, make, publish
from hicache.records import Where

engine = Engine()
given = dict(layout="layer_last", io="banded", strict=True, host={{"bytes": "64KiB"}},
             store={{"type": "segment", "path": {path!r}, "cap": "8MiB"}})
cache = make(engine, **given)
assert (cache.chosen.layout, cache.chosen.io, cache.data.engine.name) == ("layer_last", "banded", "banded")
keys, before = publish(cache, engine)
cache.close()
engine.fill(9)
cache = make(engine, **given)
assert load_all(cache, engine, keys)[Where.STORE] == PAGES
assert engine.bytes() == before
cache.close()
engine.fill(9)
cache = make(engine, **{{**given, "layout": "page_first", "io": "kernel"}})  # another layout reads its records
assert load_all(cache, engine, keys)[Where.STORE] == PAGES
assert engine.bytes() == before
cache.close()
"""

CONTRACT = """
import pytest
from hicache_banded import BandedEngine
from hicache.testing.copies import CopyEngineContract


class TestBanded(CopyEngineContract):
    @pytest.fixture
    def engine(self):
        return BandedEngine()
"""


@pytest.fixture
def package(tmp_path):
    """The example as a package that is installed: its file, and what an installer writes beside it."""
    text = DOCS.read_text()
    found = re.search(r"<!-- example: (\S+) -->\n```python\n(.*?)```", text, re.DOTALL)
    entry = re.search(r'\[project\.entry-points\."(hicache\.engines)"\]\n(\w+) = "(\S+)"', text)
    (tmp_path / found[1]).write_text(found[2])
    info = tmp_path / "hicache_banded-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-banded\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2]} = {entry[3]}\n")
    return tmp_path


def python(package, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_resolved_beside_all_others(package):
    said = python(
        package,
        "-m",
        "hicache.cli",
        "resolve",
        "--layout",
        "layer_last",
        "--io",
        "banded",
        "--json",
        "--strict",
    )
    found = json.loads(said)
    assert (found["chosen"]["layout"], found["chosen"]["io"], found["chosen"]["engine"]) == (
        "layer_last",
        "banded",
        "banded",
    )
    assert len(found["candidates"]) == 5 * 3
    unasked = json.loads(python(package, "-m", "hicache.cli", "resolve", "--json"))
    assert (unasked["chosen"]["layout"], unasked["chosen"]["io"]) == ("page_first", "kernel")


def test_a_cache_runs_with_it_through_a_restart_and_others_read_what_it_stored(package):
    python(package, "-c", RUN.format(unit=str(UNIT), path=str(package / "kv")))


def test_it_passes_the_contract_of_copy_engines(package):
    file = package / "test_banded.py"
    file.write_text(CONTRACT)
    some = "not all_layout_pairs or scattered"
    said = python(
        package,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-k",
        some,
        "-c",
        os.devnull,
        str(file),
    )
    assert " passed" in said
    assert "failed" not in said
