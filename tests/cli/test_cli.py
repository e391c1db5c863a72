"""The command line as a user meets it: help, refusals, and the demo on a tiny model, also when it has to fail."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.cli import COMMANDS, main
from hicache.cli.demo.engine import ENVIRONMENT
from hicache.cli.demo.plan import TIERS, Figure, Turn
from hicache.cli.demo.verdict import problems, ratios, warnings
from hicache.errors import ConfigError, InvariantError, UnavailableError

PAGE = 16


def hicache(
    *arguments: str, cache: Path | None = None, limit: float = 110
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-m", "hicache.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit, env=environment, check=False
    )


# ---- help and refusals


def test_help_says_what_it_is_which_commands_where_things_are_kept_and_what_exit_codes_mean(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    assert "KV cache" in said
    assert "~/.cache" in said
    assert "Exit codes" in said


def test_help_imports_neither_torch_nor_a_store_nor_the_demo():
    code = (
        "import sys; from hicache.cli import main; main(['--help']);"
        "print([name for name in ('torch', 'transformers', 'lmdb', 'numpy', 'rich', 'hicache.cli.demo')"
        " if name in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.splitlines()[-1] == "[]"


def test_help_of_the_demo_shows_every_option_but_the_hidden_ones_and_imports_no_torch(capsys):
    code = "import sys; from hicache.cli import main; main(['demo', '--help']); print('torch' in sys.modules)"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    for option in ("--store", "--delete", "--model-dtype", "--turns", "--quick", "--json", "--chart"):
        assert option in child.stdout
    assert "--inject" not in child.stdout
    assert "--resume" not in child.stdout
    assert child.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--nonsense"],
        ["demo", "--nonsense"],
        ["demo", "--turns", "1"],
        ["demo", "--model-dtype", "int3"],
        ["demo", "--chart", "/nowhere/at/all.png"],
        ["demo", "--json", "/nowhere/at/all.json"],
        ["demo", "--resume", os.devnull],
        ["resolve", "--page-size", "0"],
        [],
    ],
)
def test_wrong_use_is_refused_with_2(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    "error,status,words",
    [
        (ConfigError("no such thing", key="x"), 2, "no such thing [key=x]"),
        (UnavailableError("it is gone"), 1, "it is gone"),
        (InvariantError("two and two are five"), 1, "please report"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(monkeypatch, capsys, error, status, words):
    def raises() -> None:
        raise error

    monkeypatch.setattr("hicache.cli.version.versions", raises)
    assert main(["version"]) == status
    said = capsys.readouterr().err.strip()
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("arguments", [("version",), ("resolve",), ("resolve", "--json"), ("--help",)])
def test_output_that_cannot_be_written_is_one_line_and_a_failure(arguments):
    with Path("/dev/full").open("w") as full:
        child = subprocess.run(
            [sys.executable, "-m", "hicache.cli", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert child.returncode == 1
    assert child.stderr.splitlines() == [f"hicache: stopped: {os.strerror(errno.ENOSPC)}"]


def test_version_is_one_json_object_when_asked(capsys):
    assert main(["version", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["hicache"]
    assert said["python"]


def test_a_store_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    child = hicache("demo", "--model", "tiny", "--store", str(tmp_path / "file" / "store"))
    assert child.returncode == 2
    assert "cannot be written" in child.stderr
    assert "Traceback" not in child.stderr


def test_a_store_with_something_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "record.json").write_text("mine")
    child = hicache("demo", "--model", "tiny", "--store", str(tmp_path))
    assert child.returncode == 2
    assert "not empty" in child.stderr
    assert (tmp_path / "record.json").read_text() == "mine"
    assert (tmp_path / "pages").is_dir()


# ---- the verdict


def turn(**changes: object) -> Turn:
    facts = {
        "name": "A2",
        "restarted": False,
        "question": "?",
        "answer": "!",
        "tokens": [1],
        "prompt_tokens": 100,
        "device": 32,
        "host": 32,
        "storage": 32,
        "computed": 4,
        "seconds_with": 0.1,
        "seconds_without": 1.0,
        "load_bytes": 1,
        "save_bytes": 1,
        "restored_pages": 6,
        "wrong_pages": 0,
        "run": 0,
        "answer_same": True,
    }
    return Turn(**{**facts, **changes})


def figure(source: str, **changes: object) -> Figure:
    hit = source != "computed"
    facts = {
        "source": source,
        "restarted": False,
        "prompt_tokens": 100,
        "wanted": 96 if hit else 0,
        "hit_tokens": 96 if hit else 0,
        "seconds": [0.1] if hit else [1.0],
        "wrong_pages": 0,
        "tokens": [1] if hit else [],
        "runs": [3] if hit else [],
        "answer_same": True if hit else None,
    }
    return Figure(**{**facts, **changes})


RESTARTED = turn(name="A3", restarted=True, device=0, host=0, storage=96)
FIGURES = [
    figure("computed"),
    *(figure(tier) for tier in TIERS),
    figure("computed", restarted=True),
    figure("storage", restarted=True),
]


def test_nothing_wrong_is_no_problem():
    assert problems([turn(), RESTARTED], FIGURES, {}) == []
    assert warnings(FIGURES) == []
    assert set(ratios(FIGURES)) == {*TIERS, "storage after a restart"}


@pytest.mark.parametrize(
    "turns,figures,errors,words",
    [
        ([turn(wrong_pages=1), RESTARTED], FIGURES, {}, "wrong bytes"),
        ([turn(answer_same=False), RESTARTED], FIGURES, {}, "answer differs"),
        ([turn(answer_same=None), RESTARTED], FIGURES, {}, "answer differs"),
        ([turn(computed=5), RESTARTED], FIGURES, {}, "add up"),
        ([turn(device=0, host=64), RESTARTED], FIGURES, {}, "device never served"),
        ([turn(host=0, device=64), RESTARTED], FIGURES, {}, "host never served"),
        ([turn(storage=0, host=64), RESTARTED], FIGURES, {}, "storage never served"),
        ([turn()], FIGURES, {}, "in the new process"),
        ([turn(), RESTARTED], FIGURES[:-1], {}, "not measured"),
        ([turn(), RESTARTED], [*FIGURES, figure("host", hit_tokens=80)], {}, "served 80"),
        ([turn(), RESTARTED], [*FIGURES, figure("host", wrong_pages=2)], {}, "wrong bytes"),
        ([turn(), RESTARTED], [*FIGURES, figure("host", answer_same=False)], {}, "first token differs"),
        ([turn(), RESTARTED], FIGURES, {"DataError": 1}, "counted an error"),
    ],
)
def test_each_fault_is_a_problem(turns, figures, errors, words):
    found = problems(turns, figures, errors)
    assert len(found) == 1
    assert words in found[0]


def test_a_slow_tier_is_a_warning_and_no_problem():
    slow = [*FIGURES[:2], figure("host", seconds=[0.5, 0.4]), *FIGURES[3:]]
    assert problems([turn(), RESTARTED], slow, {}) == []
    (line,) = warnings(slow)
    assert "host" in line
    assert "2.5 times" in line


# ---- the demo, on a tiny model


@pytest.fixture(scope="module")
def needs_torch() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


def findings(child: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(child.stdout)


def test_the_demo_shows_hits_from_every_tier_and_after_a_restart(needs_torch, tmp_path):
    chart = tmp_path / "chart.png"
    arguments = ("demo", "--model", "tiny", "--turns", "2", "--json", "-", "--chart", str(chart))
    child = hicache(*arguments, cache=tmp_path)
    assert child.returncode == 0, child.stderr
    assert "PASSED" in child.stderr
    found = findings(child)
    assert found["passed"] is True
    assert found["problems"] == []
    assert [one["name"] for one in found["turns"]] == ["A1", "B1", "A2", "B2", "A3", "B3"]
    for one in found["turns"]:
        assert one["device"] + one["host"] + one["storage"] + one["computed"] == one["prompt_tokens"]
        assert one["restored_pages"] * PAGE == one["prompt_tokens"] - one["computed"]
        assert one["answer_same"] is True
        assert one["wrong_pages"] == 0
    for tier in TIERS:
        assert sum(one[tier] for one in found["turns"] if not one["restarted"]) > 0
    for one in found["turns"][-2:]:
        assert one["restarted"] is True
        assert one["storage"] > 600
    assert set(found["times_sooner"]) == {*TIERS, "storage after a restart"}
    store = Path(found["store"]["path"])
    assert store.parent == tmp_path / "hicache" / "demo"
    assert f"rm -r {store}" in child.stderr
    assert (store / "pages").is_dir()
    if importlib.util.find_spec("matplotlib"):
        assert chart.read_bytes().startswith(b"\x89PNG")
    else:
        assert "not drawn" in child.stderr


@pytest.fixture
def here(needs_torch, monkeypatch, tmp_path):
    """What the demo changes in its process is put back, and its default place is ours."""
    import torch

    threads = torch.get_num_threads()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("tier", TIERS)
def test_the_demo_fails_when_a_tier_gives_zeros(here, tmp_path, capsys, tier):
    store, report = tmp_path / "store", tmp_path / "report.json"
    arguments = ["demo", "--model", "tiny", "--turns", "2", "--inject", f"zeros:{tier}"]
    assert main([*arguments, "--store", str(store), "--delete", "--json", str(report)]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "PASSED" not in said
    found = json.loads(report.read_text())
    assert found["passed"] is False
    bad = [one for one in found["turns"] if one["wrong_pages"]]
    assert bad
    assert all(one["wrong_pages"] == one[tier] / PAGE for one in found["turns"])
    assert any(one["answer_same"] is False for one in bad)
    assert not store.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_with_the_real_model(needs_torch, tmp_path, dtype):
    store = tmp_path / "store"
    arguments = ("demo", "--quick", "--model-dtype", dtype, "--json", "-", "--store", str(store), "--delete")
    child = hicache(*arguments, limit=880)
    assert child.returncode == 0, child.stderr
    found = findings(child)
    assert found["passed"] is True
    assert all(one["answer"] for one in found["turns"])
