"""``hicache simulate`` as a user and a program meet it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hicache.cli import main

TRACES = Path(__file__).parents[3] / "shared" / "traces"
REFERENCE = ["--rules", "reference", "--bytes-per-token", "131072"]


def simulate(tmp_path, *arguments):
    out = tmp_path / "out.json"
    status = main(["simulate", *map(str, arguments), "--json", str(out)])
    return status, json.loads(out.read_text()) if out.exists() else None


def small(path, *chains):
    rows = [
        {
            "timestamp": 1000 * i,
            "input_length": 4 * len(ids),
            "output_length": 1,
            "block_size": 4,
            "hash_ids": ids,
        }
        for i, ids in enumerate(chains)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("host,expected", [("64GiB", 13.1), ("512GiB", 54.8)])
def test_published_lru_hit_rates_are_met(tmp_path, host, expected):
    path = TRACES / "mooncake_synthetic_trace.jsonl"
    status, result = simulate(tmp_path, path, "--host", host, *REFERENCE)
    assert status == 0
    assert 100 * result["hit_rate_last_half"] == pytest.approx(expected, abs=0.3)


def test_the_last_token_of_a_prompt_is_computed_unless_the_reference_counts(tmp_path):
    path = small(tmp_path / "t", [1, 2], [1, 2])
    _, engine = simulate(tmp_path, path, "--host", "1KiB", "--bytes-per-token", 1)
    _, reference = simulate(tmp_path, path, "--host", "1KiB", "--bytes-per-token", 1, "--rules", "reference")
    assert (engine["hit_rate"], reference["hit_rate"]) == (4 / 16, 8 / 16)


def test_hits_come_from_the_tier_that_still_holds_the_page(tmp_path):
    path = small(tmp_path / "t", [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8])
    sizes = ["--host", "16", "--store", "1KiB", "--bytes-per-token", 1, "--rules", "reference"]
    _, result = simulate(tmp_path, path, *sizes)
    assert result["hit_tokens_by_tier"] == {"device": 0, "host": 16, "store": 32}
    assert result["store_bytes_written"] == 32
    _, alone = simulate(tmp_path, path, "--host", "16", "--bytes-per-token", 1, "--rules", "reference")
    assert alone["hit_tokens_by_tier"] == {"device": 0, "host": 16, "store": 0}


def test_several_traces_are_runs_of_their_own(tmp_path):
    one, two = small(tmp_path / "a", [1, 2]), small(tmp_path / "b", [1, 2])
    two.write_bytes(gzip.compress(two.read_bytes()))
    _, result = simulate(tmp_path, one, two, "--host", "1KiB", "--bytes-per-token", 1)
    assert [run["hit_rate"] for run in result["runs"]] == [0.0, 0.0]


@pytest.mark.parametrize(
    "arguments,said",
    [
        ([], "name a tier"),
        (["--host", "3"], "does not hold one page"),
        (["--host", "64 potatoes"], "not a size"),
        (["--store", "1KiB"], "memory tier"),
        (["--host", "1KiB", "--policy", "best"], "best"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path, capsys, arguments, said):
    status, result = simulate(tmp_path, small(tmp_path / "t", [1]), "--bytes-per-token", 1, *arguments)
    assert (status, result) == (2, None)
    assert said in capsys.readouterr().err


def test_a_wrong_line_is_named_and_the_exit_code_is_2(tmp_path, capsys):
    path = small(tmp_path / "t", [1], [2])
    path.write_text(path.read_text() + "{}\n")
    status, _ = simulate(tmp_path, path, "--host", "1KiB", "--bytes-per-token", 1)
    assert status == 2
    assert "line=3" in capsys.readouterr().err
