"""The project's own tools: the size budget and the set-up's judgement of what it finds (no network needed)."""

import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sizes = load("check_sizes")
setup = load("setup")


# ---------------------------------------------------------------------------------------------- sizes


def function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


@pytest.fixture
def tree(tmp_path):
    """A small source tree outside git, with a file of each size that matters."""
    src = tmp_path / "src"
    src.mkdir()
    (src / "short.py").write_text(function("fits", 60))
    (src / "full.py").write_text("x = 1\n" * 400)
    return tmp_path


def exempt(tree: Path, **reasons: str) -> None:
    lines = [f'"{key}" = "{reason}"' for key, reason in reasons.items()]
    (tree / "pyproject.toml").write_text("[tool.hicache.sizes]\n" + "\n".join(lines) + "\n")


def test_a_tree_within_its_limits_passes(tree, capsys):
    assert sizes.main([str(tree)]) == 0
    assert "2 files within" in capsys.readouterr().out


def test_a_file_one_line_too_long_is_named(tree):
    (tree / "src" / "long.py").write_text("x = 1\n" * 401)
    assert sizes.problems(tree)[0] == ["src/long.py: 401 lines, at most 400"]


def test_c_files_have_the_same_limit(tree):
    (tree / "src" / "host.c").write_text("int x;\n" * 401)
    assert sizes.problems(tree)[0] == ["src/host.c: 401 lines, at most 400"]


def test_functions_methods_and_nested_ones_are_measured(tree):
    method = "class Big:\n" + "".join(f"    {line}\n" for line in function("run", 61).splitlines())
    nested = "async def outer():\n" + "".join(f"    {line}\n" for line in function("inner", 61).splitlines())
    (tree / "src" / "long.py").write_text(function("plain", 61) + method + nested)
    found = "\n".join(sizes.problems(tree)[0])
    for name, lines in [("plain", 61), ("Big.run", 61), ("outer", 62), ("outer.inner", 61)]:
        assert f"{name} has {lines} lines, at most 60" in found


def test_an_exemption_with_a_reason_is_honoured(tree):
    (tree / "src" / "long.py").write_text(function("plain", 61))
    exempt(tree, **{"src/long.py:plain": "one table, read from top to bottom"})
    assert sizes.problems(tree)[0] == []


def test_an_exemption_covers_only_what_it_names(tree):
    (tree / "src" / "long.py").write_text(function("plain", 61) + "x = 1\n" * 400)
    exempt(tree, **{"src/long.py:plain": "one table"})
    assert sizes.problems(tree)[0] == ["src/long.py: 461 lines, at most 400"]


def test_an_unused_exemption_is_an_error(tree):
    exempt(tree, **{"src/short.py:fits": "was longer once"})
    assert sizes.problems(tree)[0] == ["pyproject.toml: exemption 'src/short.py:fits' is not needed any more"]
    assert sizes.main([str(tree)]) == 1


def test_an_exemption_without_a_reason_is_an_error(tree):
    (tree / "src" / "long.py").write_text(function("plain", 61))
    exempt(tree, **{"src/long.py:plain": " "})
    assert sizes.problems(tree)[0] == ["pyproject.toml: exemption 'src/long.py:plain' gives no reason"]


def test_git_decides_which_files_count(tree):
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    (tree / ".gitignore").write_text("made/\n")
    (tree / "made").mkdir()
    (tree / "made" / "long.py").write_text("x = 1\n" * 401)
    assert sizes.problems(tree) == ([], 2)
    (tree / "untracked.py").write_text("x = 1\n" * 401)
    assert sizes.problems(tree)[0] == ["untracked.py: 401 lines, at most 400"]


# ---------------------------------------------------------------------------------------------- set-up


@pytest.fixture
def place(tmp_path):
    """A checkout whose .venv is a real virtual environment without packages, in no time and without network."""
    for name in setup.INPUTS:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / name).read_text())
    return setup.Place(tmp_path)


def make_venv(place) -> None:
    """As venv and pip leave it, with a pip that only says that it is there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place.venv)], check=True)
    site = site_packages(place)
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    package(place, "pip-1", installer=True)
    (place.venv / "bin" / "pip").write_text(f"#!{place.python}\n")


def site_packages(place) -> Path:
    return next(place.venv.glob("lib/python*/site-packages"))


def package(place, name: str, *, installer: bool) -> Path:
    info = site_packages(place) / f"{name}.dist-info"
    info.mkdir()
    (info / "METADATA").touch()
    if installer:
        (info / "INSTALLER").write_text("pip\n")
    return info


def test_a_finished_setup_is_done_until_an_input_changes(place):
    make_venv(place)
    assert not place.is_done("")
    place.finish("")
    assert place.is_done("")
    for name in setup.INPUTS:
        before = (place.root / name).read_text()
        added = before + "\n[project.urls]\n" if name == "pyproject.toml" else before + "\n"
        (place.root / name).write_text(added)
        assert not place.is_done(""), name
        (place.root / name).write_text(before)
    assert place.is_done("")


def test_a_changed_lint_rule_is_no_reason_to_set_up_again(place):
    make_venv(place)
    place.finish("")
    pyproject = place.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("line-length = 110", "line-length = 99"))
    assert place.is_done("")
    pyproject.write_text(pyproject.read_text().replace('"gguf>=', '"gguf>'))
    assert not place.is_done("")


def test_another_python_is_not_done(place, monkeypatch):
    make_venv(place)
    place.finish("")
    monkeypatch.setattr(setup.sys, "version_info", (3, 99, 0))
    assert not place.is_done("")


def test_a_stamp_without_an_interpreter_is_not_done(place):
    make_venv(place)
    place.finish("")
    place.python.unlink()
    assert not place.is_done("")


def test_a_damaged_stamp_counts_as_none(place):
    make_venv(place)
    for damage in (b"", b"{", b"[]", b"\xff\xfe"):
        place.stamp.write_bytes(damage)
        assert place.stamped() == {}
        assert not place.is_done("")


def test_torch_from_another_index_is_not_done_but_asking_for_none_is(place):
    make_venv(place)
    place.finish("https://one.invalid")
    assert place.is_done("https://one.invalid")
    assert not place.is_done("https://two.invalid")
    assert place.is_done("")


def test_no_venv_is_made_without_a_word(place, capsys):
    assert setup.prepare(place)
    assert capsys.readouterr().out == ""


def test_a_half_made_venv_is_said_swept_and_continued(place, capsys):
    make_venv(place)
    whole = package(place, "numpy-1", installer=True)
    half = package(place, "rich-1", installer=False)
    leftover = site_packages(place) / "~umpy"
    leftover.mkdir()
    assert not setup.prepare(place)
    said = capsys.readouterr().out
    assert "half made; continuing" in said
    assert "rich-1.dist-info" in said
    assert whole.exists()
    assert not half.exists()
    assert not leftover.exists()


def test_changed_requirements_keep_the_venv(place, capsys):
    make_venv(place)
    place.finish("")
    (place.root / "constraints.txt").write_text("torch==2.13.0\n")
    assert not setup.prepare(place)
    assert "requirements changed" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["no bin", "dead link", "no pip", "killed early"])
def test_a_broken_venv_is_removed_and_made_anew(place, capsys, damage):
    if damage == "killed early":
        (place.venv / "lib").mkdir(parents=True)
    else:
        make_venv(place)
    if damage == "no bin":
        place.python.unlink()
    elif damage == "dead link":
        place.python.unlink()
        place.python.symlink_to("/nowhere/python3")
    elif damage == "no pip":
        (site_packages(place) / "pip" / "__init__.py").unlink()
        (site_packages(place) / "pip").rmdir()
    assert setup.prepare(place)
    assert "cannot be used" in capsys.readouterr().out
    assert not place.venv.exists()


def test_a_copied_venv_is_made_anew(place, tmp_path):
    make_venv(place)
    (place.venv / "bin" / "pip").write_text("#!/somewhere/else/.venv/bin/python\n")
    assert "another directory's" in setup.venv_fault(place)


def test_a_broken_venv_with_strangers_files_is_left_alone(place):
    place.venv.mkdir()
    (place.venv / "thesis.tex").write_text("years of work")
    with pytest.raises(setup.SetupError, match=r"thesis\.tex"):
        setup.prepare(place)
    assert (place.venv / "thesis.tex").exists()


def test_an_old_python_is_told_which_it_needs(monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 2))
    with pytest.raises(setup.SetupError, match=r"3\.11 or newer; .* is 3\.9\.2"):
        setup.check_interpreter()


def test_a_missing_venv_module_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(setup.SetupError, match="apt install python3-venv"):
        setup.check_interpreter()


def test_an_unreachable_index_is_explained_without_pips_traceback(tmp_path):
    log = tmp_path / "setup.log"
    log.write_text(
        "old\nWARNING: Retrying ... NewConnectionError(...): Temporary failure in name resolution\n"
    )
    said = setup.explain("torch==2.13.0", log, 4)
    assert "'torch==2.13.0' could not reach the package index" in said
    assert "Retrying" not in said


def test_another_failure_shows_the_end_of_its_own_log(tmp_path):
    log = tmp_path / "setup.log"
    log.write_text("of the step before\n" + "noise\n" * 50 + "ERROR: ResolutionImpossible\n")
    said = setup.explain("step", log, 19)
    assert "ERROR: ResolutionImpossible" in said
    assert str(log) in said
    assert "of the step before" not in said


def test_a_failing_step_names_itself_and_stops_the_setup(place, capsys):
    place.venv.mkdir()
    run = setup.Runner(place, setup.Progress(1), lock_fd=setup.take_lock(place))
    with pytest.raises(setup.SetupError, match="Step 'fails' failed"):
        run.step("fails", [sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    assert "[1/1] fails" in capsys.readouterr().out


def test_an_interrupt_leaves_no_child_behind(place, monkeypatch):
    place.venv.mkdir()
    run = setup.Runner(place, setup.Progress(1), lock_fd=setup.take_lock(place))

    def interrupt(news: str) -> None:
        if news.isdigit():
            raise KeyboardInterrupt

    monkeypatch.setattr(run.progress, "tick", interrupt)
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.step("sleeps", [sys.executable, "-c", program])
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(setup.last_line(place.log)), 0)


def test_a_second_setup_waits_for_the_first_and_says_so(place):
    held = setup.take_lock(place)
    program = (
        f"import importlib.util, pathlib\n"
        f"spec = importlib.util.spec_from_file_location('setup', {str(ROOT / 'tools' / 'setup.py')!r})\n"
        f"setup = importlib.util.module_from_spec(spec); spec.loader.exec_module(setup)\n"
        f"setup.take_lock(setup.Place(pathlib.Path({str(place.root)!r})))\n"
        f"print('mine now', flush=True)\n"
    )
    second = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert f"(process {os.getpid()}); waiting" in second.stdout.readline()
    fcntl.flock(held, fcntl.LOCK_UN)
    assert second.stdout.readline() == "mine now\n"
    second.stdout.close()
    assert second.wait(30) == 0
    os.close(held)


def test_ctrl_c_while_waiting_is_one_line_and_status_130(place):
    held = setup.take_lock(place)
    waiting = subprocess.Popen(
        [
            sys.executable,
            str(place.root / "tools" / "setup.py"),
        ],  # a copy: it works on the copy's own directory
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "waiting" in waiting.stdout.readline()
    waiting.send_signal(signal.SIGINT)
    _, errors = waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert errors == "Set-up interrupted; the next run goes on from here.\n"
    os.close(held)


def test_torch_is_pinned_once(place):
    assert setup.torch_version(ROOT).startswith("2.")
    (place.root / "constraints.txt").write_text("numpy==2\n")
    with pytest.raises(setup.SetupError, match="does not pin torch"):
        setup.torch_version(place.root)
