"""Finds or builds the shared library of ``host.c``: one C file, a plain C compiler, no Python headers.

The library's name carries a digest of its source, flags and machine, so one that does not fit is never loaded. It
lies beside this file when the package was built where a compiler is, else it is built on first use in the user's
cache directory. Standard library only: the build hook runs this file before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("host.c")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread")
"""Baseline code for any machine of its kind; wider instructions are chosen at run time."""

COMPILERS = ("cc", "gcc", "clang")
COMPILE_S_MAX = 120.0


class NotNativeError(Exception):
    """There is no library, and none can be built; the text says why, for a person."""


def library_name(source: Path = SOURCE) -> str:
    """The name of the library that fits ``source`` on this machine."""
    try:
        text = source.read_bytes()
    except OSError as error:
        raise NotNativeError(f"the source of the native copy engine is missing: {error}") from error
    told = "\0".join((*FLAGS, platform.system(), platform.machine()))
    return f"host-{hashlib.sha256(text + told.encode()).hexdigest()[:16]}.so"


def compiler() -> str:
    """The first C compiler on the path."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NotNativeError(f"no C compiler on the path (looked for {', '.join(COMPILERS)})")


def build(target: Path, source: Path = SOURCE, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile ``source`` to ``target``, which appears whole or not at all."""
    half = target.with_name(f".{target.name}.{os.getpid()}")
    command = [compiler(), *flags, "-o", str(half), str(source)]
    try:
        done = subprocess.run(  # noqa: S603  (a compiler from the path, on our own source)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_S_MAX,
            check=False,
        )
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise NotNativeError(f"{command[0]} could not compile {source.name}: {first.strip()}")
        half.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotNativeError(f"{command[0]} did not compile {source.name}: {error}") from error
    finally:
        half.unlink(missing_ok=True)


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/hicache/native``, or below ``~/.cache``; a relative variable is ignored, as the rule is."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hicache" / "native"


def _private(folder: Path) -> None:
    """Make ``folder``, or see that it is ours alone: what lies in it is loaded into the process."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = folder.stat()
    if there.st_uid != os.getuid() or there.st_mode & 0o022:
        raise NotNativeError(f"{folder} can be written by others; no library is loaded from it")


def library() -> Path:
    """The library, built now where it has to be; NotNativeError when it cannot be had."""
    name = library_name(SOURCE)
    packaged = SOURCE.with_name(name)
    if packaged.exists():
        return packaged
    try:
        folder = cache_directory()
        _private(folder)
        cached = folder / name
        if cached.exists():
            return cached
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes start at once: one compiles, the others wait
            if not cached.exists():
                build(cached, SOURCE)
        return cached
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise NotNativeError(f"no place to build the native copy engine in: {error}") from error
