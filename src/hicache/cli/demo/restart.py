"""The restart: a new process that knows the demo only from a file, and finds the pages in storage.

The first process starts the same command with a hidden option and reads messages, one JSON line each, from its
standard output. What the new one says on standard error is shown only when it fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from hicache.cli.demo.engine import load_engine, prepare
from hicache.cli.demo.plan import FiguresDone, Handover, Message, Step, TurnDone
from hicache.errors import ConfigError, DataError, UnavailableError

LIMIT_S = 1800.0
"""The new process is ended when it has not finished by then."""


def messages(handover: Handover, folder: Path) -> Iterator[Message]:
    """Start the new process and give what it tells; UnavailableError, with its last words, when it fails."""
    path = folder / "handover.json"
    path.write_bytes(msgspec.json.encode(handover))
    command = [sys.executable, "-m", "hicache.cli", "demo", "--resume", str(path)]
    with tempfile.TemporaryFile() as words:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words)  # noqa: S603
        limit = threading.Timer(LIMIT_S, child.kill)
        limit.start()
        try:
            assert child.stdout is not None, "a pipe was asked for"
            for line in child.stdout:
                yield _decoded(line)
            status = child.wait()
        finally:
            limit.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if status:
            words.seek(0)
            said = words.read().decode(errors="replace").strip()
            raise UnavailableError(f"the new process failed: {said}", status=status)


def _decoded(line: bytes) -> Message:
    try:
        return msgspec.json.decode(line, type=Message)
    except msgspec.DecodeError as error:
        raise DataError("the new process said something else", line=line[:200], reason=error) from error


def resume(path: Path) -> int:
    """The new process: go on with every conversation and measure storage again; returns the exit code."""
    try:
        handover = msgspec.json.decode(path.read_bytes(), type=Handover)
    except msgspec.DecodeError as error:
        raise ConfigError("not what a demo hands over to its new process", path=path, cause=error) from error

    def tell(text: str) -> None:
        _send(Step(f"new process: {text}"))

    prepare(tell)
    from hicache.cli.demo.session import Session, settings_for
    from hicache.testing.replay import Recorder

    engine = load_engine(handover.plan, tell)
    recorder = Recorder.load(Path(handover.record))
    settings = settings_for(Path(handover.store), handover.sizes)
    with Session(engine, handover.plan, settings, recorder, tell) as session:
        for part in handover.parts:
            _send(TurnDone(session.turn(part.name, part.question, part.ids, tell, restarted=True)))
        figures = session.figures(handover.figure, tell, restarted=True)
        recorder.save(Path(handover.record))
        _send(FiguresDone(figures, session.errors))
    return 0


def _send(message: Message) -> None:
    click.echo(msgspec.json.encode(message))
