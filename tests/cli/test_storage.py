"""``hicache inspect``, ``verify`` and ``gc`` on a real directory, most of them beside a process that uses it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from hicache.cli import main
from hicache.data.store.segment import Files, SegmentStore
from hicache.data.store.segment.survey import Survey, survey
from hicache.data.store.segment.tidy import Picture, remove
from hicache.data.store.segment.verify import verify
from hicache.errors import UnavailableError
from hicache.keys import Namespace
from hicache.testing.stores import chain_of, read_back

SLOT = 3 * 4096
ONE = Namespace.of(
    {"engine": "transformers", "architecture": "LlamaForCausalLM", "weights": "aa", "salt": "hunter2"}
)
OTHER = Namespace.of({"architecture": "OtherForCausalLM", "weights": "bb"})
LONG, FORK, ALIEN = chain_of("long", 8), chain_of("fork", 3), chain_of("alien", 4)


@pytest.fixture
def place(tmp_path):
    """A directory with two namespaces, 8 + 3 and 4 records, of which the first chain was read twice."""
    path = tmp_path / "kv"
    store = SegmentStore(path, 32 * SLOT)
    store.write(ONE, LONG)
    store.write(OTHER, ALIEN)
    store.write(ONE, FORK)
    for _ in range(2):
        assert all(read_back(store, ONE, LONG))
        store.flush()
    store.close()
    return path


def told(capsys, *arguments):
    """What a command says in JSON, which must have gone well."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def beside(*arguments):
    """The command in a process of its own: (exit code, its JSON)."""
    command = [sys.executable, "-m", "hicache.cli", *map(str, arguments), "--json"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return child.returncode, json.loads(child.stdout)


def left(path):
    """How many records of each chain a fresh store still reads: (long, fork, alien). They must be whole prefixes."""
    store = SegmentStore(path, 32 * SLOT)
    store.check()
    counts = []
    for namespace, records in ((ONE, LONG), (ONE, FORK), (OTHER, ALIEN)):
        hits = read_back(store, namespace, records)
        assert hits == sorted(hits, reverse=True)
        counts.append(sum(hits))
    store.close()
    return tuple(counts)


def damage(path, records, index):
    """Flip a byte in the payload of one record."""
    store = SegmentStore(path, 32 * SLOT)
    row = store.directory.rows([bytes(records[index].key)])[0]
    file = store.directory.segments.path(row.segment)
    store.close()
    with file.open("r+b") as segment:
        segment.seek(row.offset * 4096 + 4096 + 77)
        byte = segment.read(1)[0]
        segment.seek(-1, os.SEEK_CUR)
        segment.write(bytes([byte ^ 1]))


def test_inspect_says_whose_records_they_are_how_many_and_how_often_used(place, capsys):
    facts = told(capsys, "inspect", place)
    one, other = facts["namespaces"]
    assert (one["records"], other["records"]) == (11, 4)
    assert one["payload_bytes"] == 11 * 6000
    assert (one["uses"], other["uses"]) == (2, 0)
    assert one["namespace"] == ONE.root[:8].hex()
    assert one["what"]["architecture"] == "LlamaForCausalLM"
    assert one["layouts"] == {"page_first": 11}
    assert 0 <= one["last_use_age_s"] <= one["oldest_write_age_s"] < 600
    assert facts["used_bytes"] == 15 * SLOT
    assert facts["cap_bytes"] == 32 * SLOT
    assert main(["inspect", str(place)]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM" in said
    assert "OtherForCausalLM" in said


def test_a_salt_is_nowhere_in_the_directory(place):
    for path in place.iterdir():
        assert b"hunter2" not in path.read_bytes()


def test_inspect_filters(place, capsys):
    only = told(capsys, "inspect", place, "--namespace", OTHER.root[:4].hex())
    assert [row["records"] for row in only["namespaces"]] == [4]
    assert told(capsys, "inspect", place, "--layout", "layer_first")["namespaces"] == []
    assert told(capsys, "inspect", place, "--older-than", "1h")["namespaces"] == []
    assert len(told(capsys, "inspect", place, "--older-than", "0s")["namespaces"]) == 2


def test_the_directory_of_the_settings_is_the_default(place, capsys, monkeypatch):
    monkeypatch.setenv("HICACHE_STORE_PATH", str(place))
    assert told(capsys, "inspect")["path"] == str(place)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["inspect", "{tmp}/nothing"], "no segment store here"),
        (["inspect", "{place}", "--namespace", "xyz"], "hexadecimal"),
        (["inspect", "{place}", "--layout", "page_frist"], "page_first"),
        (["inspect", "{place}", "--older-than", "soon"], "7d"),
        (["inspect"], "HICACHE_STORE_PATH"),
        (["gc", "{place}"], "unasked"),
        (["gc", "{place}", "--size", "many"], "not a size"),
        (["gc", "{place}", "--dry-runn"], "--dry-run"),
        (["verify", "{tmp}/nothing"], "no segment store here"),
    ],
)
def test_wrong_use_is_refused_and_changes_nothing(place, tmp_path, capsys, arguments, said):
    assert main([a.format(tmp=tmp_path, place=place) for a in arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
    assert left(place) == (8, 3, 4)


def test_verify_finds_nothing_wrong_with_a_sound_directory(place, capsys):
    facts = told(capsys, "verify", place)
    assert (facts["records"], facts["damaged"], facts["index"]) == (15, 0, "ok")


def test_verify_names_and_drops_what_is_damaged(place, capsys):
    damage(place, LONG, 5)
    assert main(["verify", str(place), "--dry-run", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["records"], facts["damaged"], facts["dropped"]) == (14, 1, 0)
    assert main(["verify", str(place)]) == 1
    assert f"damaged: {bytes(LONG[5].key).hex()} (payload): dropped" in capsys.readouterr().out
    facts = told(capsys, "verify", place)
    assert (facts["records"], facts["holes"], facts["damaged"]) == (14, 1, 0)


def test_gc_of_a_namespace_leaves_the_others(place, capsys):
    dry = told(capsys, "gc", place, "--namespace", ONE.root[:8].hex(), "--dry-run")
    assert (dry["chosen"], dry["removed"], dry["bytes"]) == (11, 0, 11 * SLOT)
    assert left(place) == (8, 3, 4)
    assert told(capsys, "gc", place, "--namespace", ONE.root[:8].hex())["removed"] == 11
    assert left(place) == (0, 0, 4)


def test_gc_to_a_size_removes_the_coldest_leaves_first(place, capsys):
    assert told(capsys, "gc", place, "--size", str(9 * SLOT))["removed"] == 6
    assert left(place) == (8, 1, 0)


def test_gc_by_age_and_then_to_a_size(place, capsys):
    assert told(capsys, "gc", place, "--older-than", "1h")["removed"] == 0
    facts = told(capsys, "gc", place, "--namespace", OTHER.root[:8].hex(), "--size", str(10 * SLOT))
    assert facts["removed"] == 5
    assert left(place) == (8, 2, 0)
    assert told(capsys, "gc", place, "--older-than", "0s")["removed"] == 10
    assert left(place) == (0, 0, 0)


def test_gc_gives_empty_segment_files_back(place, capsys):
    facts = told(capsys, "gc", place, "--older-than", "0s")
    assert facts["file_bytes_removed"] >= 15 * SLOT
    assert not list(place.glob("segment-*"))


def test_a_parent_that_is_read_keeps_its_age_from_its_children(place, capsys):
    """A chain whose end was used now is young as a whole, though only its end was marked."""
    dry = told(capsys, "gc", place, "--namespace", ONE.root[:8].hex(), "--older-than", "1h", "--dry-run")
    assert dry["chosen"] == 0


def test_the_commands_work_beside_a_process_that_uses_the_directory(place):
    store = SegmentStore(place, 32 * SLOT)
    assert read_back(store, ONE, LONG) == [True] * 8
    code, facts = beside("inspect", place)
    assert (code, sum(row["records"] for row in facts["namespaces"])) == (0, 15)
    code, facts = beside("verify", place)
    assert (code, facts["records"]) == (0, 15)
    code, facts = beside("gc", place, "--namespace", OTHER.root[:8].hex())
    assert (code, facts["removed"]) == (0, 4)
    assert read_back(store, OTHER, ALIEN) == [False] * 4
    assert read_back(store, ONE, LONG) == [True] * 8
    assert all(outcome.ok for outcome in store.write(OTHER, ALIEN))
    assert read_back(store, OTHER, ALIEN) == [True] * 4
    store.check()
    store.close()


def test_what_is_used_between_the_choice_and_the_removal_stays(place):
    with survey(place) as seen:
        picture = Picture.of(seen.rows())
    keys = picture.coldest(0)
    assert len(keys) == 15
    store = SegmentStore(place, 32 * SLOT)
    assert read_back(store, OTHER, ALIEN) == [True] * 4
    store.flush()
    assert remove(store.directory, keys, picture) == (11, 11 * SLOT)
    store.check()
    store.close()
    assert left(place) == (0, 0, 4)


def test_a_system_that_cannot_read_now_costs_no_record(place):
    class Exhausted(Files):
        def read(self, fd, views, offset):
            raise OSError(errno.EMFILE, "too many open files")

    store = SegmentStore(place, 32 * SLOT, files=Exhausted())
    rows = list(Survey(place, store.directory.env).rows())
    with pytest.raises(UnavailableError, match="cannot be read now"):
        verify(store.directory, rows)
    store.close()
    assert left(place) == (8, 3, 4)
