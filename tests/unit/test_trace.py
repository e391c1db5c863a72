"""Traces: what is read, and which line is wrong."""

from __future__ import annotations

import gzip
import json

import pytest

from hicache.errors import ConfigError
from hicache.simulate.trace import Arrival, Trace

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_plain_gzip_and_csv_say_the_same(tmp_path):
    plain = write(tmp_path / "a.jsonl", GOOD, "\n", {**GOOD, "timestamp": 1500.5, "hash_ids": [7]})
    packed = tmp_path / "b"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    table = write(
        tmp_path / "c.csv",
        "timestamp,input_length,output_length,hash_ids\n1500,600,5,7 8\n1500.5,600,5,7\n",
    )
    expected = [Arrival(1.5, 600, 5, (7, 8)), Arrival(1.5005, 600, 5, (7,))]
    for path in (plain, packed, table):
        trace = Trace(path)
        assert (list(trace), trace.page_tokens) == (expected, 512), path


def test_the_page_size_is_the_traces_own_or_what_was_asked(tmp_path):
    path = write(tmp_path / "t", {**GOOD, "block_size": 300})
    assert Trace(path).page_tokens == 300
    other = write(tmp_path / "u", {**GOOD, "input_length": 128})
    assert [one.ids for one in Trace(other, 64)] == [(7, 8)]


@pytest.mark.parametrize(
    "bad,said",
    [
        ("{\n", "not a JSON object"),
        ("[1]\n", "not a JSON object"),
        ({"timestamp": 1}, "field=input_length"),
        ({**GOOD, "timestamp": 1}, "comes before"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp"),
        ({**GOOD, "timestamp": "1"}, "timestamp"),
        ({**GOOD, "input_length": -1}, "input_length"),
        ({**GOOD, "input_length": True}, "input_length"),
        ({**GOOD, "output_length": 1.5}, "output_length"),
        ({**GOOD, "hash_ids": [1, "2"]}, "hash_ids"),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "expected=2"),
        ({**GOOD, "hash_ids": [1 << 128, 2]}, "hash_ids"),
        ({**GOOD, "block_size": 300}, "block_size=300"),
    ],
)
def test_an_error_names_the_file_and_the_line(tmp_path, bad, said):
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, bad)
    with pytest.raises(ConfigError) as error:
        list(Trace(path))
    assert "line=3" in str(error.value)
    assert "t.jsonl" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "bad",
    [
        "1,600,5",
        "x,600,5,7 8",
        "1,600.5,5,7 8",
        "1,600,5,7 b",
        "1,600,5,7 8,9",
        "1,nan,5,7 8",
        "1,600,inf,7 8",
        "nan,600,5,7 8",
        "1,1e400,5,7 8",
    ],
)
def test_a_wrong_line_of_csv_is_named(tmp_path, bad):
    path = write(
        tmp_path / "t.csv", "timestamp,input_length,output_length,hash_ids\n0,600,5,7 8\n", bad + "\n"
    )
    with pytest.raises(ConfigError, match="line=3"):
        list(Trace(path))


def test_a_file_that_is_missing_empty_damaged_or_no_text_is_refused(tmp_path):
    packed = gzip.compress(
        "".join(json.dumps({**GOOD, "hash_ids": [i, i + 1]}) + "\n" for i in range(4000)).encode()
    )
    cut, text = tmp_path / "cut", tmp_path / "text"
    cut.write_bytes(packed[: len(packed) // 2])
    text.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    for path in (tmp_path / "none", tmp_path, write(tmp_path / "empty", ""), cut, text):
        with pytest.raises(ConfigError):
            list(Trace(path))
