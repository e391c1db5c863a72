"""How the native library comes to be: at install, on first use, or not at all, and then with a reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hicache.data.copy import native

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in native.COMPILERS), reason="no C compiler on the path"
)


@pytest.fixture(name="cache")
def _cache(tmp_path, monkeypatch):
    """A cache directory of our own, and a source without a library beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "host.c"
    shutil.copy(native.SOURCE, source)
    monkeypatch.setattr(native, "SOURCE", source)
    return tmp_path / "cache" / "hicache" / "native"


def compiler_says(folder: Path, text: str) -> None:
    """A compiler that does what ``text`` says, first on the path."""
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "cc").chmod(0o755)


def test_a_library_is_built_once_and_found_again(cache, monkeypatch, tmp_path):
    built = native.library()
    assert built.parent == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in cache.iterdir()) == [built.name, f"{built.name}.lock"]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert native.library() == built


def test_another_source_has_another_library(cache):
    first = native.library_name(native.SOURCE)
    native.SOURCE.write_text(native.SOURCE.read_text() + "\n")
    assert native.library_name(native.SOURCE) != first


def test_a_library_beside_the_source_comes_first(cache):
    beside = native.SOURCE.with_name(native.library_name(native.SOURCE))
    native.build(beside, native.SOURCE)
    assert native.library() == beside
    assert not cache.exists()


def test_no_compiler_is_a_reason(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(native.NotNativeError, match="no C compiler on the path"):
        native.library()


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(cache, monkeypatch, tmp_path):
    compiler_says(tmp_path / "bin", 'echo "host.c:1: error: no" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(native.NotNativeError, match=r"could not compile host\.c: host\.c:1: error: no"):
        native.library()
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_a_directory_that_others_can_write_to_is_a_reason(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(native.NotNativeError, match="can be written by others"):
        native.library()


def test_a_missing_source_is_a_reason(cache):
    native.SOURCE.unlink()
    with pytest.raises(native.NotNativeError, match="is missing"):
        native.library()


# -- the build back end


@pytest.fixture(name="tree")
def _tree(tmp_path):
    """What a distribution is built from, small."""
    tree = tmp_path / "tree"
    folder = tree / "src" / "hicache" / "data" / "copy"
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("host.c", "native.py"):
        shutil.copy(ROOT / "src" / "hicache" / "data" / "copy" / name, folder / name)
    (tree / "src" / "hicache" / "__init__.py").touch()
    return tree


def hatch(tree: Path, call: str, path: str | None = None) -> tuple[str, list[str]]:
    """Run one call of the back end; the wheel's name and what it holds below ``copy``."""
    pytest.importorskip("hatchling")
    code = f"import hatchling.build as b; print(b.{call}('dist'))"
    (tree / "dist").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=os.environ | ({"PATH": path} if path else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    name = done.stdout.split()[-1]
    names = zipfile.ZipFile(tree / "dist" / name).namelist() if name.endswith(".whl") else []
    return name, sorted(Path(entry).name for entry in names if "/copy/" in entry)


def test_a_wheel_holds_the_library_and_suits_any_python_of_its_platform(tree):
    name, held = hatch(tree, "build_wheel")
    assert name.split("-")[2:4] == ["py3", "none"]
    assert "linux" in name
    assert held == sorted([native.library_name(), "host.c", "native.py"])


def test_a_wheel_without_a_compiler_is_pure(tree):
    name, held = hatch(tree, "build_wheel", path="/nowhere")
    assert name.endswith("-py3-none-any.whl")
    assert held == ["host.c", "native.py"]


def test_an_editable_install_has_the_library_beside_its_source_and_no_older_one(tree):
    folder = tree / "src" / "hicache" / "data" / "copy"
    (folder / "host-0123456789abcdef.so").touch()
    hatch(tree, "build_editable")
    assert [file.name for file in folder.glob("*.so")] == [native.library_name()]


def test_a_source_distribution_carries_the_source_alone(tree):
    (tree / "src" / "hicache" / "data" / "copy" / "host-0123456789abcdef.so").touch()
    name, _ = hatch(tree, "build_sdist")
    with tarfile.open(tree / "dist" / name) as archive:
        names = [Path(entry).name for entry in archive.getnames()]
    assert {"host.c", "native.py", "hatch_build.py"} <= set(names)
    assert not [entry for entry in names if entry.endswith(".so")]
