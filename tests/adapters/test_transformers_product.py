"""The whole product: layouts x tiers x write policies x restart. A hit changes nothing that is said.

Each combination runs a workload over tiers so small that pages move down, are evicted and come back; then every
page that came back has the bytes that were given away under its key, and a replay without HiCache says the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hits import (
    AGAIN,
    FIRST,
    LOADABLE,
    PAGE,
    A,
    B,
    complaints,
    settings,
    settle,
    spoil_loads,
    work,
    zero_reads,
    zeros,
)

from hicache.adapters.transformers import attach
from hicache.layout import LAYOUTS
from hicache.records import Where
from hicache.testing.replay import Recorder

TIERS = {
    "device+host+store": {"device": 4, "host": 6, "store": True},
    "host+store": {"host": 6, "store": True},
    "device+store": {"device": 6, "store": True},
    "device+host": {"device": 4, "host": 9},
    "host": {"host": 9},
    "device": {"device": 9},
}


def combinations():
    for tiers, sizes in TIERS.items():
        layouts = LAYOUTS if "host" in sizes else ["page_first"]
        into_host = ["through", "selective"] if "host" in sizes else ["through"]
        if "host" in sizes and "device" in sizes:
            into_host.append("back")
        into_store = ["through", "selective", "back"] if "store" in sizes else ["through"]
        for layout in layouts:
            for host in into_host:
                for store in into_store:
                    yield pytest.param(tiers, layout, host, store, id=f"{tiers}-{layout}-{host}-{store}")


@pytest.mark.parametrize("tiers,layout,into_host,into_store", list(combinations()))
def test_every_combination_says_what_a_replay_says(tiny, tmp_path, tiers, layout, into_host, into_store):
    sizes = TIERS[tiers]
    folder = tmp_path / "store" if "store" in sizes else None
    chosen = settings(
        device=sizes.get("device", 0),
        host=sizes.get("host", 0),
        store=folder,
        layout=layout,
        into_host=into_host,
        into_store=into_store,
    )
    recorder = Recorder()
    said = []
    with attach(tiny, chosen, witness=recorder) as cached:
        results = work(cached, FIRST)
        said += [result.tokens for result in results]
        assert results[2].hit_tokens == LOADABLE  # the third time a prompt is asked, whatever the policy
        assert results[4].hit_tokens + results[5].hit_tokens > 0
        stats = cached.cache.controller.stats
        if folder is not None:
            settle(cached)
            assert sum(stats.evicted.values()) > 0, "the tiers are too large to show anything"
        if into_store == "through" and into_host != "back" and folder is not None:
            assert results[-1].hit_tokens == LOADABLE
    if folder is not None:
        with attach(tiny, chosen, witness=recorder) as cached:
            results = work(cached, AGAIN, settled=False)
            said += [result.tokens for result in results]
            # under "back", what finds no room above while victims are written down is not kept
            wanted = 1 if into_host == "back" else LOADABLE
            assert results[0].sources["store"] >= wanted, "too little came back after the restart"
    assert recorder.restored_pages > 0
    assert complaints(tiny, recorder, said) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tier", ["device", "host", "store"])
def test_zeros_instead_of_what_was_stored_are_found_out(tiny, tmp_path, tier, layout):
    """The negative control: the checks above can fail, on each tier and in each layout."""
    where = Where[tier.upper()]
    recorder = Recorder()
    sizes = {"device": 9} if tier == "device" else {"host": 9}
    chosen = settings(store=tmp_path / "store" if tier == "store" else None, layout=layout, **sizes)
    with attach(tiny, chosen, witness=recorder) as cached:
        spoiled = None if tier == "store" else spoil_loads(cached, where, zeros)
        results = work(cached, [A, A, B])
        assert (results[1].hit_tokens > 0) is True
    if tier == "store":
        assert complaints(tiny, recorder) == []
        with attach(tiny, chosen, witness=recorder) as cached:
            count = zero_reads(cached)
            assert work(cached, [A])[0].sources["store"] == LOADABLE
            assert len(count) == LOADABLE // PAGE
    else:
        assert spoiled.spoiled == LOADABLE // PAGE
    run = len(recorder.programs) - 1 if tier == "store" else 1
    found = complaints(tiny, recorder)
    assert f"tokens of run {run}" in found
    assert [text for text in found if text.startswith("bytes")] == [
        f"bytes of page {page} of run {run}" for page in range(LOADABLE // PAGE)
    ]


CHILD = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from hits import AGAIN, complaints, settings, work
from hicache.adapters.transformers import attach
from hicache.testing.model import tiny_model
from hicache.testing.replay import Recorder
model, report = tiny_model(), []
for store, layout, record in json.loads(sys.argv[2]):
    recorder = Recorder.load(Path(record))
    with attach(model, settings(host=6, store=Path(store), layout=layout), witness=recorder) as cached:
        results = work(cached, AGAIN)
        report.append({
            "root": cached.cache.namespace.root.hex(),
            "store": [result.sources["store"] for result in results],
            "wrong": complaints(model, recorder),
        })
print(json.dumps(report))
"""


def test_a_fresh_process_finds_what_an_older_one_stored_under_another_layout(tiny, tmp_path):
    jobs, roots = [], []
    for ours, theirs in (
        ("page_first", "page_first"),
        ("layer_first", "page_head"),
        ("page_head", "layer_first"),
    ):
        folder, recorder, record = tmp_path / ours, Recorder(), tmp_path / f"{ours}.json"
        with attach(tiny, settings(host=6, store=folder, layout=ours), witness=recorder) as cached:
            work(cached, FIRST)
            roots.append(cached.cache.namespace.root.hex())
        recorder.save(record)
        jobs.append((str(folder), theirs, str(record)))
    here = str(Path(__file__).parent)
    command = [sys.executable, "-W", "error", "-c", CHILD, here, json.dumps(jobs)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert child.returncode == 0, child.stderr
    for root, report in zip(roots, json.loads(child.stdout.splitlines()[-1]), strict=True):
        assert report["root"] == root
        assert report["store"][0] == LOADABLE
        assert report["wrong"] == []
