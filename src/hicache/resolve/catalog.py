"""Which pieces there are: platforms, copy engines, layouts and stores, ours and those of other packages.

    found = declarations()                                   this machine
    planned = declarations(simulate("rocm", ["triton"]))     another one

A copy engine of another package is an entry point of ``hicache.engines``: an
:class:`hicache.capability.EngineDeclaration` beside the engine it declares. A store is an entry point of
``hicache.stores`` (see :mod:`hicache.registry`), whose factory may carry a ``declaration``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from hicache.capability import (
    ABILITIES,
    Capabilities,
    Declarations,
    EngineDeclaration,
    StoreDeclaration,
)
from hicache.data.copy import direct, host, kernel, reference
from hicache.data.copy.base import CopyEngine
from hicache.data.platform import cpu, cuda, npu, rocm, xpu
from hicache.data.store import declared, mooncake
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.registry import BUILT_IN, GROUP, store_factory

ENGINE_GROUP = "hicache.engines"

PLATFORMS: Mapping[str, tuple[Capabilities, Callable[[], Capabilities]]] = {
    module.DECLARED.platform: (module.DECLARED, module.detect) for module in (cuda, rocm, cpu, xpu, npu)
}
"""What each platform declares, and how it is looked for; in the order in which they are taken when found."""

ENGINES = (
    kernel.DECLARATION,
    direct.RUNTIME_DECLARATION,
    direct.DECLARATION,
    host.DECLARATION,
    reference.DECLARATION,
)
STORES = (declared.MEMORY, declared.SEGMENT, mooncake.DECLARATION)


def _named(kind: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    if name not in names:
        raise ConfigError(
            f"unknown {kind}",
            **{kind: name},
            nearest=difflib.get_close_matches(name, names, 1, 0.0)[0],
            known=",".join(names),
        )
    return name


def simulate(platform: str, without: Iterable[str] = ()) -> Capabilities:
    """A platform as it is declared, less some abilities: for tests, and to plan for another machine."""
    declared_one, _ = PLATFORMS[_named("platform", platform, PLATFORMS)]
    return declared_one.simulate().without([_named("ability", one, ABILITIES) for one in without])


def detect(platform: str | None = None) -> Capabilities:
    """The platform as it is found here; without a name the first that is: CUDA, ROCm, CPU."""
    if platform is not None:
        return PLATFORMS[_named("platform", platform, PLATFORMS)][1]()
    found = (look() for _, look in PLATFORMS.values())
    return next(one for one in found if one.absent is None and one.refused is None)


def engines() -> tuple[EngineDeclaration, ...]:
    """Every copy engine, with the reason where one cannot be built here."""
    offered: list[EngineDeclaration] = list(ENGINES)
    for entry in sorted(entry_points(group=ENGINE_GROUP), key=lambda one: one.value):
        try:
            declaration = entry.load()
        except Exception as error:  # whatever a stranger's module raises while it is imported
            raise ConfigError(
                "a copy engine cannot be imported", engine=entry.name, entry=entry.value, cause=repr(error)
            ) from error
        if not isinstance(declaration, EngineDeclaration):
            raise ConfigError(
                "an entry point of copy engines gives an EngineDeclaration",
                engine=entry.name,
                entry=entry.value,
                got=type(declaration).__name__,
            )
        if declaration not in offered:
            offered.append(declaration)
    return tuple(replace(one, absent=one.absent or _absent(one.imports, one.factory)) for one in offered)


def stores(asked: str | None = None) -> tuple[StoreDeclaration, ...]:
    """Every store, with the reason where one cannot be built here; of other packages only ``asked`` is imported."""
    known = [replace(one, absent=_absent(one.imports) or _unmade(one.name)) for one in STORES]
    for name in sorted({entry.name for entry in entry_points(group=GROUP)} - {one.name for one in STORES}):
        declaration = StoreDeclaration(name)
        if name == asked:
            declaration = getattr(store_factory(name), "declaration", declaration)
        known.append(declaration)
    return tuple(known)


def declarations(platform: Capabilities | None = None, store: str | None = None) -> Declarations:
    """Everything there is to choose from on ``platform`` (default: the one found here)."""
    found = engines()  # first: another package may bring a layout along
    return Declarations(platform or detect(), found, tuple(LAYOUTS.values()), stores(store))


def make_engine(name: str) -> CopyEngine:
    """The copy engine called ``name``; ConfigError when it cannot be built here."""
    known = {one.name: one for one in engines()}
    declaration = known[_named("engine", name, known)]
    if declaration.absent:
        raise ConfigError("a copy engine is not here", engine=name, reason=declaration.absent)
    module, _, attribute = declaration.factory.partition(":")
    engine: CopyEngine = getattr(import_module(module), attribute)()
    return engine


def _absent(imports: Iterable[str], factory: str = "") -> str | None:
    """Why something cannot be built here: a package that is not installed, or code that does not exist yet."""
    for package in imports:
        if find_spec(package) is None:
            return f"the package {package} is not installed"
    module, _, attribute = factory.partition(":")
    if not factory:
        return None
    try:
        found = hasattr(import_module(module), attribute)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
    return None if found else f"{factory} is declared and not written yet"


def _unmade(name: str) -> str | None:
    return None if name in BUILT_IN else f"the store {name} is declared and not written yet"
