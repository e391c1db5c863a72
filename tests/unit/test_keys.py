"""Keys: the same in every process, different for everything that changes the bytes."""

from __future__ import annotations

import array
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.keys import KeyMemo, Namespace, RecordKey, engine_keys, page_keys

FIELDS = {"weights": "sha256:00ff", "layers": 32, "dtype": "bfloat16", "salt": b"\x01\x02", "adapter": None}
TOKENS = list(range(1024))
PAGE = 64

# Computed with hashlib and struct alone. Storage written by any earlier version is found by these: never change them.
ROOT = "c6c3e082ff36f8f7f157db68d28951fe4ee4419d2489e62991a2169022d6ab6f"
GOLDEN = [
    "f906f7ac05ba678535c4851a90f13021887535cc2c35d954c8d1dd47e68082dd",
    "9affc1b21314f6db660cf858e6e1999b9280ee8ba0736f8c17bd44b344b258a2",
    "7f04c7ac8cfd41e949c114c2f5f0fca518819b5e2df72e2557f914e87b23e82b",
    "ab8e0f2bb7e9d27aae59ae2e95e4ddddd7febb1391c28ddcda27b49cc690a685",
    "437b183e798c48adfd0693ac5a6411c19b544d928cde73766359d22e45aba154",
    "95b4bd5fe951b2ae9ac8109eebc2fa0493ed2a20d5a8a45345fe0fa3b3f58471",
    "9cb1b1cd5d9133274b374d8bbb95845492e4e06fdfa839a92f75de94701908ff",
    "f32c4b12b43a200ef678a225819642c3a46dea57a20e6fd7badb2944b955bb4b",
    "a79474f234fbda55e9a225427d70f666727ea36b724d57964071d691a6f37efb",
    "47ac943b877a369ace106a640c81187b53855743ebbc928a371e74ed8d1276db",
    "774f7aa62089a04d7113d2f1f09cf915e0194de3c677fb81d08a7e91ffbabe0f",
    "9f4d437c9ccf782ae97404a153a1b651c68733ff110237f314a75dd3e16cfa17",
    "c6ac6b4e967fc5ad13cad505de160acab29938adbbf16c7090c5d5c11f636b8d",
    "28bdbe39a447615dcc9af4e3e4e1eec6ab227f2f8a3fa4765e4f872e834a5ee6",
    "244c4f7586765ab7509fef36802f1c3ff037406502d9b1a3aa9855719cf565f5",
    "0aa9e29412be12a9f30857373ad6d5a00e6601c2ac54f97c1701c4a41b139d48",
]

PROGRAM = """
from hicache.keys import Namespace, page_keys
ns = Namespace.of({"salt": bytes([1, 2]), "weights": "sha256:00ff", "dtype": "bfloat16", "layers": 32})
print(" ".join(key.hex() for key in page_keys(ns.root, list(range(1024)), 64)))
"""


def namespace() -> Namespace:
    return Namespace.of(FIELDS)


def hexed(keys) -> list[str]:
    return [key.hex() for key in keys]


def test_golden_keys():
    assert namespace().root.hex() == ROOT
    assert hexed(page_keys(namespace().root, TOKENS, PAGE)) == GOLDEN


def test_twenty_fresh_processes_agree():
    seeds = [None, "0", "123", "random", *(str(n) for n in range(1, 17))]
    running = []
    for seed in seeds:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
        if len(running) % 4 == 0:
            running[-1].wait()  # a few at a time
    for process in running:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert printed.split() == GOLDEN


def test_no_environment_variable_is_read(monkeypatch):
    def refuse(*_):
        raise AssertionError("the environment was read")

    for name in ("get", "__getitem__", "__contains__"):
        monkeypatch.setattr(type(os.environ), name, refuse, raising=False)
    keys = hexed(page_keys(namespace().root, TOKENS, PAGE))
    monkeypatch.undo()
    assert keys == GOLDEN


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        range(1024),
        np.arange(1024, dtype=np.int32),
        np.arange(1024, dtype=np.int64),
        np.arange(1024, dtype=np.uint16),
        np.arange(1024, dtype=">i8"),
        np.arange(2048, dtype=np.int64)[::2] // 2,
        array.array("I", TOKENS),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_equal_ids_have_equal_keys_whatever_holds_them(tokens):
    assert hexed(page_keys(namespace().root, tokens, PAGE)) == GOLDEN


@pytest.mark.parametrize("token", [0, 2**31 - 1, 2**31, 2**32 - 1])
def test_ids_at_the_edges(token):
    (key,) = page_keys(namespace().root, [token], 1)
    assert key == page_keys(namespace().root, np.array([token], np.int64), 1)[0]
    assert key != page_keys(namespace().root, [token ^ 1], 1)[0]


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [2**64],
        [2**70],
        [1.5],
        np.array([1.0]),
        ["1"],
        [[1, 2]],
        [[1], [2, 3]],
        [True],
        [None],
        "abc",
        np.array(3),
    ],
    ids=str,
)
def test_ids_that_are_none(tokens):
    with pytest.raises(ConfigError):
        page_keys(namespace().root, tokens, 1)


@pytest.mark.parametrize("page_tokens", [0, -4, True, 2.0])
def test_a_page_has_tokens(page_tokens):
    with pytest.raises(ConfigError):
        page_keys(namespace().root, TOKENS, page_tokens)


@pytest.mark.parametrize("parent", [None, "x" * 32, b"", b"x", b"x" * 33, bytearray(32)], ids=repr)
def test_a_parent_that_is_no_key_is_refused(parent):
    with pytest.raises(ConfigError, match="32 bytes"):
        page_keys(parent, TOKENS, PAGE)


def test_more_known_keys_than_pages_are_refused():
    root = namespace().root
    with pytest.raises(ConfigError, match="known=2 pages=1"):
        page_keys(root, TOKENS[: 2 * PAGE - 1], PAGE, known=page_keys(root, TOKENS[: 2 * PAGE], PAGE))


def test_only_full_pages_have_keys():
    root = namespace().root
    assert [len(page_keys(root, TOKENS[:n], PAGE)) for n in (0, 1, 63, 64, 127, 128)] == [0, 0, 0, 1, 1, 2]


def test_a_key_names_its_whole_prefix():
    changed = page_keys(namespace().root, [7, *TOKENS[1:]], PAGE)
    assert not set(hexed(changed)) & set(GOLDEN)
    changed = page_keys(namespace().root, [*TOKENS[:-1], 7], PAGE)
    assert hexed(changed)[:-1] == GOLDEN[:-1]
    assert hexed(changed)[-1] != GOLDEN[-1]


def test_keys_go_on_from_known_ones():
    root = namespace().root
    known = [bytes.fromhex(key) for key in GOLDEN[:5]]
    assert hexed(page_keys(root, TOKENS, PAGE, known=known)) == GOLDEN
    assert hexed(page_keys(known[-1], TOKENS[5 * PAGE :], PAGE)) == GOLDEN[5:]


# -- namespaces


@pytest.mark.parametrize(
    "one,other",
    [
        ({"adapter": "X"}, {"salt": "X"}),
        ({"a": "1"}, {"a": 1}),
        ({"a": "1"}, {"a": b"1"}),
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "b", "c": "d"}, {"a": "bcd"}),
        ({"a": "x", "b": "y"}, {"a": "y", "b": "x"}),
        ({"a": "x\0"}, {"a": "x"}),
        ({"a": 0}, {}),
        ({"a": -1}, {"a": 1}),
    ],
)
def test_different_fields_never_meet(one, other):
    assert Namespace.of(one).root != Namespace.of(other).root


def test_one_field_framed_like_two_is_not_two():
    two = Namespace.of({"a": "1", "b": "2"})
    tail = "1" + (1).to_bytes(8, "little").decode() + "b" + "s" + (1).to_bytes(8, "little").decode() + "2"
    assert Namespace.of({"a": tail}).root != two.root


@settings(max_examples=200)
@given(*[st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.integers(-2, 2), max_size=3)] * 2)
def test_roots_are_equal_only_for_equal_fields(one, other):
    def is_set(fields):
        return {name: value for name, value in fields.items() if value != ""}

    assert (Namespace.of(one).root == Namespace.of(other).root) == (is_set(one) == is_set(other))


def test_absent_none_and_empty_are_one():
    roots = {Namespace.of({"w": "1", **more}).root for more in ({}, {"a": None}, {"a": ""}, {"a": b""})}
    assert len(roots) == 1


def test_order_of_fields_does_not_matter():
    assert Namespace.of(dict(reversed(FIELDS.items()))) == namespace()


@pytest.mark.parametrize("value", [1.5, True, ("a",), ["a"], object()])
def test_a_field_of_another_type_is_refused(value):
    with pytest.raises(ConfigError, match="weights"):
        Namespace.of({"weights": value})


@pytest.mark.parametrize(
    "fields", [{1: "a"}, {"a": "\ud800"}, {"\ud800": "a"}, {None: "a", "b": 1}], ids=ascii
)
def test_what_cannot_be_a_field_is_refused(fields):
    with pytest.raises(ConfigError, match="namespace field"):
        Namespace.of(fields)


def test_derived_namespaces():
    base = Namespace.of({"weights": "w"}, durable=False)
    derived = base.derive(adapter="a")
    assert derived == Namespace.of({"weights": "w", "adapter": "a"}, durable=False)
    assert derived.root != base.root
    with pytest.raises(ConfigError, match="weights"):
        base.derive(weights="other")


# -- engine hashes, records, memo


def test_engine_keys_take_the_last_block_of_a_page():
    root, blocks = namespace().root, [bytes([n]) * 32 for n in range(5)]
    assert hexed(engine_keys(root, blocks, 2)) == [
        "f5a2c81ba2ed50b0e2ff1aa4da35a3e2357405390eed498fa50a4102d5c333a5",
        "9c13ecc2172088603b1c2df95ed9e5df706dd956757146ca1e9b05cc0ad9ed79",
    ]
    assert len(engine_keys(root, blocks)) == 5
    assert engine_keys(root, blocks[:1], 2) == []


def test_record_keys_are_40_bytes():
    key = bytes(range(32))
    assert bytes(RecordKey(key)) == key + bytes(8)
    assert bytes(RecordKey(key, 258, (1 << 40) + 7)) == key + bytes.fromhex("0102" + "010000000007")
    assert sorted(bytes(RecordKey(key, g, s)) for g in (1, 0) for s in (300, 2)) == [
        bytes(RecordKey(key, g, s)) for g in (0, 1) for s in (2, 300)
    ]


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=12)), min_size=1, max_size=8
    ),
    st.integers(1, 3),
)
def test_the_memo_changes_nothing_but_the_work(prompts, remembered):
    memo = KeyMemo(2, prompts=remembered)
    for name, tokens in prompts:
        space = Namespace.of({"weights": name})
        assert memo.keys(space, tokens) == page_keys(space.root, tokens, 2)


def test_the_memo_hashes_only_what_is_new():
    memo, space = KeyMemo(PAGE), namespace()
    assert hexed(memo.keys(space, TOKENS[: 10 * PAGE])) == GOLDEN[:10]
    assert memo.hashed == 10
    assert hexed(memo.keys(space, TOKENS)) == GOLDEN
    assert memo.hashed == 16
    assert hexed(memo.keys(space, TOKENS[: 3 * PAGE + 5])) == GOLDEN[:3]
    assert hexed(memo.keys(space, TOKENS)) == GOLDEN
    assert memo.hashed == 16
    answer = memo.keys(space, TOKENS)
    answer.clear()
    assert hexed(memo.keys(space, TOKENS)) == GOLDEN
