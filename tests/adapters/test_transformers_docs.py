"""The examples of docs/transformers.md run, in order, and what they print is what the page says."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch

from hicache.adapters.transformers.result import BATCH, SOURCES, TAIL
from hicache.adapters.transformers.runs import ERROR
from hicache.records import Reason

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")


def test_every_example_runs_and_prints_what_the_page_says(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("HICACHE_CONFIG", "HICACHE_STORE_PATH"):
        monkeypatch.delenv(name, raising=False)
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(examples) == 7
    ids = torch.tensor([[token * 7 % 450 + 3 for token in range(100)]])
    space = {"model": copy.deepcopy(tiny), "input_ids": ids}
    for number, example in enumerate(examples):
        exec(compile(example, f"example {number}", "exec"), space)
    said = capsys.readouterr().out
    for text in re.findall(r"print\(.*\)  # (.*)", PAGE):
        assert text in said


def test_every_reason_that_the_page_names_is_one():
    named = set(re.findall(r"`([a-z_]+)`", PAGE.split("| reason |")[1].split("\n\n")[0])) - {"load_when"}
    known = {reason.value for reason in Reason} | {TAIL, BATCH, ERROR}
    assert named <= known
    assert {"device", "host", "store", "computed"} == set(SOURCES)
