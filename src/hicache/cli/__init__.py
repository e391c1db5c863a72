"""The command ``hicache``: a group whose commands are imported when they are asked for.

``main`` is the one place where an error becomes a message and an exit code: 0 done, 1 it failed, 2 refused or used
wrongly, 130 interrupted. Nothing here imports torch, lmdb or an engine, so help is there at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

import click

from hicache import __version__
from hicache.errors import ConfigError, HiCacheError, InvariantError

COMMANDS = {
    "demo": (
        "hicache.cli.demo",
        "A small real model with and without its cache: what a hit saves, and that it is right.",
    ),
    "doctor": (
        "hicache.cli.doctor",
        "What this machine can do, what was configured, and whether it works: with a verdict.",
    ),
    "gc": (
        "hicache.cli.storage.gc",
        "Remove stored pages by namespace, age or size, beside a running server.",
    ),
    "inspect": (
        "hicache.cli.storage.inspect",
        "What a store's directory holds: models, bytes, ages, uses.",
    ),
    "resolve": (
        "hicache.cli.resolve",
        "What becomes of a layout and an I/O back end, here or on another machine, and why.",
    ),
    "simulate": (
        "hicache.cli.simulate",
        "What a cache of a given size would have done for a recorded workload.",
    ),
    "verify": (
        "hicache.cli.storage.verify",
        "Read and check every stored page, and drop what is damaged.",
    ),
    "version": ("hicache.cli.version", "Which version this is, and of what it works with."),
}
"""name: (the module, whose attribute ``command`` is the click command; one line for the list of commands)."""

HELP = """\
HiCache keeps the KV cache of a large language model, so that a prompt, or the beginning that many prompts
share, is computed once and then loaded: from device memory, host memory, or storage that survives a restart.

\b
Begin with
  hicache demo            two to five minutes on two cores, nothing is downloaded
  hicache demo --quick    shorter: one to three minutes

\b
Where things are kept ($XDG_CACHE_HOME where that is set, else ~/.cache)
  .../hicache/models      the demo's model, converted once
  .../hicache/demo        what demos have stored; every run prints how to delete it
  Pages are stored nowhere else, unless you configure a path (store.path or HICACHE_STORE_PATH).

\b
Exit codes
  0    it worked
  1    it ran and failed: a wrong byte, a missing hit, an error
  2    refused, or used wrongly: the message says what to change
  130  interrupted
"""


class LazyGroup(click.Group):
    """Commands by name from :data:`COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None for a name that nobody has."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(
    cls=LazyGroup,
    help=HELP,
    epilog="hicache COMMAND --help says more about one command.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def group() -> None:
    """See HELP."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    try:
        status = group.main(args, prog_name="hicache", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        return _said("interrupted", 130)
    except click.ClickException as error:
        error.show()
        return 2
    except ConfigError as error:
        return _said(str(error), 2)
    except InvariantError as error:
        return _said(f"this is a bug in HiCache, please report it: {error}", 1)
    except HiCacheError as error:
        return _said(str(error), 1)
    except OSError as error:  # the output is full, or whoever read it has gone
        _drop_output()
        return _said(f"stopped: {error.strerror or error}", 1)
    return status if isinstance(status, int) else 0


def _drop_output() -> None:
    """What is still to be written goes nowhere, or the interpreter would try once more at its end and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _said(message: str, status: int) -> int:
    click.echo(f"hicache: {message}", err=True)
    return status
