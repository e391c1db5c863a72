"""Compiles the one C file into the package, where there is a compiler; without one the wheel is pure Python."""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "hicache/data/copy"


def _native(folder: Path) -> ModuleType:
    """The package's own rules of how the library is built and called, loaded without the package."""
    spec = importlib.util.spec_from_file_location("hicache_native", folder / "native.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder / 'native.py'} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CustomBuildHook(BuildHookInterface):
    """Adds the library to a wheel, or puts it beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel that holds the library is for this platform, but for any Python."""
        folder = Path(self.root) / "src" / PACKAGE
        native = _native(folder)
        name = native.library_name(folder / "host.c")
        editable = version == "editable"
        self._made: Path | None = None if editable else Path(tempfile.mkdtemp(prefix="hicache-build-"))
        library = (self._made or folder) / name
        try:
            native.build(library, folder / "host.c")
        except native.NotNativeError as error:
            self.app.display_warning(f"building without the native copy engine: {error}")
            return
        if editable:
            for old in folder.glob("host-*.so"):
                if old != library:
                    old.unlink()
            return
        build_data["force_include"][str(library)] = f"{PACKAGE}/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: it is in the wheel now."""
        if self._made is not None:
            for file in self._made.iterdir():
                file.unlink()
            self._made.rmdir()
