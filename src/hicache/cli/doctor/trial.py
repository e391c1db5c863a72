"""A small cache made from the settings: its self-test, and how fast each leg is beside a plain copy."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hicache.cache import close_quietly, make_store
from hicache.cli.doctor.machine import Finding, existing
from hicache.data.copy.base import Bytes
from hicache.data.moves import DataPlane
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool
from hicache.data.store.base import Store
from hicache.data.store.segment.place import INDEX, check_entries, check_ours
from hicache.data.store.segment.survey import survey
from hicache.errors import ConfigError, HiCacheError
from hicache.layout import LAYOUTS
from hicache.records import Where
from hicache.resolve import Chosen
from hicache.resolve.catalog import make_engine
from hicache.resolve.compatibility import attention
from hicache.selftest import Report, self_test
from hicache.settings import SegmentStoreSettings, Settings
from hicache.spec import CacheSpec

TRIAL_NBYTES = 32 << 20
STORE_NBYTES = 256 << 20
SLOW_PART = 4
"""A leg through memory that is so many times slower than a plain copy is worth a word."""


class _NoEndpoint:
    def surface(self, handle: int | None, group: int) -> object:
        """The trial brings its own rows."""
        raise NotImplementedError


def example(settings: Settings, kind: str) -> CacheSpec:
    """Planes to try: an example, in the page size of the settings."""
    return attention(kind, page_tokens=settings.page_tokens)


def memcpy_speed() -> float:
    """Bytes a second of the best of five plain copies."""
    source = np.ones(TRIAL_NBYTES, np.uint8)
    target = np.zeros_like(source)
    best = min(_seconds(source, target) for _ in range(5))
    return TRIAL_NBYTES / max(best, 1e-9)


def _seconds(source: Bytes, target: Bytes) -> float:
    began = time.monotonic()
    np.copyto(target, source)
    return time.monotonic() - began


def directory_findings(path: Path) -> list[Finding]:
    """What the store would meet in a directory that is there: an error for what it refuses. Nothing is changed."""
    if not os.path.lexists(path):
        return []
    try:
        check_ours(path)
    except OSError as error:
        raise ConfigError("the store's directory cannot be looked at", path=path, reason=error) from error
    alien = check_entries(path)
    if (path / INDEX).exists():
        with survey(path):
            pass
    if not alien:
        return []
    what = f"{len(alien)} segments of {path} are not files and cannot be used: {alien[0]}"
    return [Finding("wrong", what, "remove what stands in their place")]


@contextmanager
def trial_store(settings: Settings, spec: CacheSpec) -> Iterator[Store | None]:
    """The store of the settings; a segment store in a directory of its own beside the path, removed afterwards."""
    wanted = settings.store
    folder = None
    if isinstance(wanted, SegmentStoreSettings):
        there = existing(Path(wanted.path).expanduser().absolute())
        folder = tempfile.mkdtemp(prefix=".hicache-doctor-", dir=there)
        cap = wanted.options()["cap_bytes"]
        wanted = SegmentStoreSettings(
            path=folder, cap=min(cap, STORE_NBYTES) if isinstance(cap, int) else STORE_NBYTES
        )
    store = None
    try:
        store = None if wanted is None else make_store(wanted, spec, time.monotonic)
        yield store
    finally:
        if store is not None:
            close_quietly(store)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def run(settings: Settings, spec: CacheSpec, chosen: Chosen) -> tuple[dict[str, object], list[Finding]]:
    """The trial: the self-test's report, bytes a second of each leg, and what they say."""
    pages = max(1, TRIAL_NBYTES // spec.page_nbytes)
    platform = CpuPlatform()
    tiers = {Where.DEVICE: "layer_first" if settings.device is not None else None}
    tiers[Where.HOST] = chosen.layout if settings.host is not None else None
    pools = {
        w: Pool(spec, LAYOUTS[name], pages, platform, w) for w, name in tiers.items() if name is not None
    }
    found: list[Finding] = []
    try:
        if isinstance(settings.store, SegmentStoreSettings):
            found = directory_findings(Path(settings.store.path).expanduser())
        with trial_store(settings, spec) as store:
            data = DataPlane(spec, pools, _NoEndpoint(), make_engine(chosen.engine), store)  # type: ignore[arg-type]
            self_test(data, platform, time.monotonic, secrets.randbits(64))  # warm: threads, memory, files
            report = self_test(data, platform, time.monotonic, secrets.randbits(64), pages=pages)
    except (HiCacheError, OSError) as error:
        return {}, [
            Finding(
                "wrong", f"the store cannot be opened: {error}", "see store.path, and who may write there"
            )
        ]
    finally:
        for pool in pools.values():
            pool.close()
    facts, more = _judged(report, memcpy_speed())
    return facts, found + more


def _judged(report: Report, plain: float) -> tuple[dict[str, object], list[Finding]]:
    speeds = {
        leg: report.nbytes / max(s, 1e-9) for leg, s in report.seconds.items() if leg != "device -> staging"
    }
    found: list[Finding] = []
    if report.failure is not None:
        found.append(
            Finding(
                "wrong", f"self-test: {report.failure}", "this is a bug in a copy engine: please report it"
            )
        )
    if report.store is not None:
        found.append(
            Finding(
                "wrong",
                f"self-test of the store: {report.store}",
                "the store would be off: see its disk, and store.cap beside the bytes of a page",
            )
        )
    for leg, speed in speeds.items():
        if "store" not in leg and speed * SLOW_PART < plain:
            found.append(
                Finding(
                    "slow",
                    f"{leg} is {plain / speed:.0f} times slower than a plain copy",
                    "see native copies above",
                )
            )
    facts: dict[str, object] = {
        "self_test": report.as_dict(),
        "plain_copy_bytes_per_s": int(plain),
        "bytes_per_s": {leg: int(speed) for leg, speed in speeds.items()},
    }
    return facts, found
