"""Fail when a source file is longer than 400 lines or a function longer than 60.

A limit that nobody checks is a wish. Exemptions lie in ``pyproject.toml`` under ``[tool.hicache.sizes]`` and map
``path`` or ``path:function`` (methods as ``Class.method``) to the reason; one without a reason, or one that is no
longer needed, fails as well, so the list can only be as long as it has to be.

A function's lines run from its ``def`` to its last line, docstring included, decorators not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
SUFFIXES = {".py", ".c"}
ROOTS = ("src", "tests", "bench", "tools", "docs", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files(root: Path) -> list[Path]:
    """The files git tracks or would track; without git, all under the usual directories and at the top."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        found = {root / name for name in listing.stdout.split("\0") if name}
    else:
        found = set(root.glob("*.*")).union(*((root / name).rglob("*.*") for name in ROOTS))
    return sorted(path for path in found if path.suffix in SUFFIXES and path.is_file())


def functions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below ``node`` with its dotted name inside the file, nested ones included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            name = f"{owner}{child.name}"
            yield name, child
            yield from functions(child, f"{name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{owner}{child.name}.")
        else:
            yield from functions(child, owner)


def oversized(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """What in one file is too long: its exemption key and a line for a person."""
    text = path.read_text(encoding="utf-8")
    count = len(text.splitlines())
    if count > FILE_LINES:
        yield name, f"{name}: {count} lines, at most {FILE_LINES}"
    if path.suffix != ".py":
        return
    for function_name, function in functions(ast.parse(text, filename=name)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > FUNCTION_LINES:
            where = f"{name}:{function.lineno}"
            yield (
                f"{name}:{function_name}",
                f"{where}: {function_name} has {length} lines, at most {FUNCTION_LINES}",
            )


def exemptions(root: Path) -> dict[str, object]:
    """The table ``[tool.hicache.sizes]``; empty when there is none."""
    path = root / "pyproject.toml"
    settings = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table: dict[str, object] = settings.get("tool", {}).get("hicache", {}).get("sizes", {})
    return table


def problems(root: Path) -> tuple[list[str], int]:
    """All that is wrong under ``root``, one line each, and the number of files looked at."""
    exempt = exemptions(root)
    unused = set(exempt)
    found = []
    files = source_files(root)
    for path in files:
        for key, line in oversized(path, path.relative_to(root).as_posix()):
            unused.discard(key)
            if key not in exempt:
                found.append(line)
    found += [f"pyproject.toml: exemption {key!r} is not needed any more" for key in sorted(unused)]
    for key, reason in exempt.items():
        if not isinstance(reason, str) or not reason.strip():
            found.append(f"pyproject.toml: exemption {key!r} gives no reason")
    return found, len(files)


def main(arguments: list[str]) -> int:
    """Check the tree given, or the one this file lies in; the exit status."""
    root = Path(arguments[0] if arguments else Path(__file__).resolve().parent.parent)
    found, count = problems(root)
    for line in found:
        print(line)
    if found:
        print("Split it, or give a reason in [tool.hicache.sizes] of pyproject.toml.")
        return 1
    print(f"Sizes: {count} files within {FILE_LINES} lines a file and {FUNCTION_LINES} a function.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
