"""``hicache resolve`` and ``hicache doctor`` as a user and a program meet them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.cli import main
from hicache.data.store.segment import SegmentStore
from hicache.errors import ConfigError
from hicache.resolve.compatibility import page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HICACHE_CONFIG", raising=False)


def resolve(capsys, *arguments):
    status = main(["resolve", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments,layout,io",
    [
        (["--platform", "cuda"], "page_first", "kernel"),
        (["--platform", "cpu", "--layout", "page_head", "--io", "direct"], "page_head", "direct"),
        (["--platform", "rocm", "--without", "staged-writeback", "--layout", "page_first"], "layer_first", "kernel"),
        (["--platform", "rocm", "--without", "triton,pinning"], "page_first_direct", "direct"),
        (
            ["--platform", "rocm", "--without", "staged-writeback", "--hicache-mem-layout", "layer_first",
             "--hicache-io-backend", "kernel", "--hicache-storage-backend", "mooncake", "--hicache-ratio", "2",
             "--device-bytes", "1GiB", "--hicache-write-policy", "write_through_selective"],
            "page_first_direct", "direct",
        ),
    ],
)  # fmt: skip
def test_json_says_what_was_asked_chosen_and_why(capsys, arguments, layout, io):
    status, found = resolve(capsys, *arguments)
    assert status == 0
    assert (found["chosen"]["layout"], found["chosen"]["io"]) == (layout, io)
    assert set(found["requested"]) >= {"layout", "io", "store", "into_host", "strict"}
    for step in found["steps"]:
        assert set(step) >= {"field", "from", "to", "reason"}
    asked = found["requested"]
    assert asked["layout"] is None or "--layout" in arguments or "--hicache-mem-layout" in arguments
    assert {(c["layout"], c["io"]) for c in found["candidates"]} >= {(layout, io)}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--platform", "npu"],
        ["--platform", "cuda", "--layout", "page_first", "--io", "direct", "--strict"],
        ["--platform", "cuda", "--host-mode", "staging"],
        ["--platform", "cuda", "--write-policy", "back", "--engine-evicts"],
        ["--platform", "cuda", "--host-ratio", "2"],
    ],
)
def test_what_is_refused_ends_with_2_and_reasons(capsys, arguments):
    status, found = resolve(capsys, *arguments)
    assert (status, found["chosen"]) == (2, None)
    assert found["refusals"]
    assert (found["nearest"] is not None) == ("--strict" in arguments), "a pair helps where the pair is wrong"


def test_sglangs_size_goes_before_its_ratio(capsys):
    _, found = resolve(capsys, "--hicache-size", "3", "--hicache-ratio", "2", "--device-bytes", "1GiB")
    assert found["requested"]["host_bytes"] == 3 * 10**9
    assert found["requested"]["host_ratio"] is None


@pytest.mark.parametrize(
    "arguments,nearest",
    [
        (["--layout", "pagefirst"], "page_first"),
        (["--platform", "cdua"], "cuda"),
        (["--platform", "cuda", "--without", "tritn"], "triton"),
        (["--attention", "mla2"], "mla"),
        (["--store", "monncake"], "mooncake"),
        (["--write-policy", "thru"], "through"),
    ],
)
def test_a_word_that_nobody_knows_ends_with_2_and_the_nearest(capsys, arguments, nearest):
    assert main(["resolve", *arguments]) == 2
    assert f"nearest={nearest}" in capsys.readouterr().err


def test_a_person_sees_outcome_reasons_and_candidates(capsys):
    assert (
        main(["resolve", "--platform", "rocm", "--without", "staged-writeback", "--layout", "page_first"])
        == 0
    )
    said = capsys.readouterr().out
    for part in (
        "layer_first",
        "warning: layout page_first -> layer_first",
        "needs staged-writeback",
        "candidates",
    ):
        assert part in said
    assert main(["resolve", "--platform", "cuda", "--attention", "mla", "--layout", "page_head"]) == 0
    assert "page_head equals page_first" in capsys.readouterr().out


# -- doctor


def test_the_doctor_shows_everything_and_a_verdict(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HICACHE_STORE_TYPE", "segment")
    monkeypatch.setenv("HICACHE_STORE_PATH", str(tmp_path / "kv"))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["platforms"]["cpu"]["state"] == "here"
    assert found["settings"]["store.path"] == {"value": str(tmp_path / "kv"), "origin": "environment"}
    assert found["settings"]["page_tokens"]["origin"] == "default"
    assert found["memory"]["budget_bytes"] > 0
    assert found["disk"]["writable"]
    assert found["disk"]["write_and_fsync_bytes_per_s"] > 0
    assert {"device -> host", "host -> device", "host -> store", "store -> host"} == set(
        found["trial"]["bytes_per_s"]
    )
    assert found["trial"]["self_test"]["failure"] is None
    assert found["trial"]["self_test"]["store_failure"] is None
    assert found["verdict"]["level"] in ("ok", "slow")
    assert not (tmp_path / "kv").exists(), "nothing is left behind"
    assert not list(tmp_path.glob(".hicache-doctor-*"))


def test_the_doctor_tries_the_cap_that_is_configured(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HICACHE_STORE_PATH", str(tmp_path / "kv"))
    monkeypatch.setenv("HICACHE_STORE_CAP", "8KiB")
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "self-test of the store" in said
    assert "store.cap beside the bytes of a page" in said


def test_the_doctor_finds_a_damaged_index_and_leaves_it_alone(capsys, monkeypatch, tmp_path):
    place = tmp_path / "kv"
    place.mkdir(mode=0o700)
    (place / "index.mdb").write_bytes(b"garbage" * 9000)
    monkeypatch.setenv("HICACHE_STORE_PATH", str(place))
    assert main(["doctor"]) == 1
    assert "the index is damaged" in " ".join(capsys.readouterr().out.split())
    assert [path.name for path in tmp_path.rglob("*")] == ["kv", "index.mdb"]


@pytest.mark.parametrize("mode", [0o500, 0o750, 0o1700])
def test_the_doctor_refuses_what_the_store_would_refuse(capsys, monkeypatch, tmp_path, mode):
    place = tmp_path / "kv"
    place.mkdir()
    place.chmod(mode)
    monkeypatch.setenv("HICACHE_STORE_PATH", str(place))
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "must be ours alone" in said
    assert f"mode={oct(mode)}" in said
    with pytest.raises(ConfigError, match="must be ours alone"):
        SegmentStore(place, 1 << 20)
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    "name,said",
    [("segment-00000001", "1 segments of"), ("index.mdb", "not a file"), ("index.mdb-lock", "not a file")],
)
def test_the_doctor_names_what_stands_in_a_files_place(capsys, monkeypatch, tmp_path, name, said):
    place = tmp_path / "kv"
    place.mkdir(mode=0o700)
    os.mkfifo(place / name)
    monkeypatch.setenv("HICACHE_STORE_PATH", str(place))
    assert main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    assert name in shown
    assert [path.name for path in place.iterdir()] == [name]


def test_the_doctor_says_what_to_change(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HICACHE_LAYOUT", "page_frist")
    assert main(["doctor"]) == 2
    said = capsys.readouterr().out
    assert "the settings are refused" in said
    assert "nearest that works: page_first" in said
    monkeypatch.setenv("HICACHE_LAYOUT", "page_first")
    monkeypatch.setenv("HICACHE_HOST_BYTES", "900TiB")
    assert main(["doctor"]) == 2
    assert "989560464998400" in capsys.readouterr().out
    monkeypatch.delenv("HICACHE_HOST_BYTES")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HICACHE_STORE_TYPE", "segment")
    monkeypatch.setenv("HICACHE_STORE_PATH", "/proc/nowhere")
    assert main(["doctor"]) == 1
    assert "give store.path a directory that you own" in capsys.readouterr().out


def test_the_doctor_finds_a_wrong_byte(capsys, monkeypatch):
    from hicache.data.copy.host import HostEngine

    submit = HostEngine.submit

    def wrong(self, source, source_slots, target, target_slots, *, layers=None):
        ticket = submit(self, source, source_slots, target, target_slots, layers=layers)
        target.views[-1][-1][target_slots[-1], 0, 0, 0] ^= 1
        return ticket

    if HostEngine.available() is not None:
        pytest.skip("no native engine here")
    monkeypatch.setattr(HostEngine, "submit", wrong)
    assert main(["doctor"]) == 1
    assert "leg=device -> host plane=kv/v" in capsys.readouterr().out


# -- the page


def test_the_compatibility_page_is_what_the_declarations_give():
    template = (DOCS / "compatibility.in.md").read_text(encoding="utf-8")
    written = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    assert page(template) == written, "stale: run tools/compatibility.py"
    with pytest.raises(ConfigError, match="no place for a part"):
        page(template.replace("{{ costs }}", ""))


def test_doctor_says_that_a_store_directory_open_to_others_will_be_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    environment = {**os.environ, "HICACHE_STORE_TYPE": "segment", "HICACHE_STORE_PATH": str(shared)}
    command = [sys.executable, "-m", "hicache.cli", "doctor"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "must be ours alone" in ended.stdout
    assert list(shared.iterdir()) == []
