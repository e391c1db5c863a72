"""Page keys are the same in every process, for every way of writing the same tokens, and name the whole prefix."""

from __future__ import annotations

import array
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

from hicache.data.store.segment import SegmentStore
from hicache.errors import ConfigError
from hicache.keys import Namespace, page_keys
from hicache.records import Where
from hicache.testing.house import SPEC, House

TOKENS = list(range(1024))
PAGE = 64
SPACE = Namespace.of({"weights": b"\x01" * 32, "dtype": "bfloat16", "page_tokens": PAGE})
GOLDEN_FIRST = "83ce7c09f6517529"
GOLDEN_LAST = "970591ad29414551"
PROGRAM = """
from hicache.keys import Namespace, page_keys
space = Namespace.of({"page_tokens": 64, "dtype": "bfloat16", "weights": bytes([1]) * 32})
print(*[key.hex() for key in page_keys(space.root, list(range(1024)), 64)])
"""
WRITER = """
import sys
from hicache.data.store.segment import SegmentStore
from hicache.testing.house import SPEC, House
store = SegmentStore(sys.argv[1], 64 << 20, SPEC.fingerprint())
house = House(store=store)
house.serve("a", house.keys(range(1024)))
house.close()
store.close()
"""


def keys(tokens=TOKENS, space=SPACE) -> list[bytes]:
    return page_keys(space.root, tokens, PAGE)


def run(program: str, *args: str, seed: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def forked(_number: int) -> list[bytes]:
    return keys()


def test_twenty_fresh_processes_make_the_same_sixteen_keys():
    want = " ".join(key.hex() for key in keys())
    for seed in (None, "0", "123", "random"):
        for _ in range(3):
            assert run(PROGRAM, seed=seed).strip() == want
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(forked, range(4)) == [keys()] * 4
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(forked, range(4)) == [keys()] * 4


def test_the_keys_equal_a_list_that_was_written_down():
    assert (keys()[0].hex()[:16], keys()[15].hex()[:16]) == (GOLDEN_FIRST, GOLDEN_LAST)


def test_a_field_that_is_absent_none_or_empty_is_the_same():
    fields = {"weights": "w", "dtype": "bf16"}
    assert len({Namespace.of({**fields, **more}).root for more in ({}, {"salt": None}, {"salt": ""})}) == 1


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        np.arange(1024, dtype=np.int32),
        np.arange(1024, dtype=np.int64),
        np.arange(1024, dtype=np.uint16),
        np.arange(2048, dtype=np.int64)[:1024],
        np.arange(0, 2048, 2)[::1] // 2,
        array.array("l", TOKENS),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_equal_tokens_give_equal_keys_however_they_are_held(tokens):
    assert keys(tokens) == keys()


@pytest.mark.parametrize("token", [0, 2**31 - 1, 2**31, 2**32 - 1])
def test_every_32_bit_id_has_a_key_of_its_own(token):
    changed = [token, *TOKENS[1:]]
    assert (keys(changed) == keys()) == (token == 0)
    assert keys(np.array(changed)) == keys(changed)


@pytest.mark.parametrize("token", [-1, 2**32, 2**63, 1.5, "7", None])
def test_an_id_out_of_range_is_refused(token):
    with pytest.raises(ConfigError):
        keys([token] * 64)


def test_another_process_with_another_seed_hits_what_the_first_one_stored(tmp_path):
    run(WRITER, str(tmp_path / "store"), seed="123")
    store = SegmentStore(tmp_path / "store", 64 << 20, SPEC.fingerprint())
    one = House(store=store)
    assert one.serve("b", one.keys(range(1024))).by_tier[Where.STORE] == 16
    one.close()
    store.close()


def test_a_key_depends_on_every_token_up_to_its_page_and_on_none_behind():
    first = keys([7, *TOKENS[1:]])
    assert all(a != b for a, b in zip(first, keys(), strict=True))
    last = keys([*TOKENS[:1023], 7])
    assert last[:15] == keys()[:15]
    assert last[15] != keys()[15]
