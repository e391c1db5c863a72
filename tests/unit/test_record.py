"""The record's header: any bytes give a header or a reason, and no flipped bit goes unseen."""

from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache.data.store.record import (
    CORE_NBYTES,
    HEADER_NBYTES,
    MAGIC,
    NO_PARENT,
    Header,
    differs,
    pack_header,
    parse_header,
    payload_nbytes,
    payload_sum,
    payload_wrong,
    trim,
)
from hicache.layout import LAYOUTS

REASONS = {"short", "magic", "header_sum", "version", "layout", "reserved", "length"}

headers = st.builds(
    Header,
    namespace=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=40, max_size=40),
    parent=st.one_of(st.just(NO_PARENT), st.binary(min_size=40, max_size=40)),
    fingerprint=st.binary(min_size=32, max_size=32),
    layout=st.sampled_from([layout.code for layout in LAYOUTS.values()]),
    nbytes=st.integers(1, 2**64 - 1),
    sum=st.integers(0, 2**64 - 1),
)
SAMPLE = Header(
    namespace=bytes(range(32)),
    key=bytes(range(100, 140)),
    parent=bytes(range(200, 240)),
    fingerprint=bytes(range(32, 64)),
    layout=2,
    nbytes=0x0102030405060708,
    sum=0x1112131415161718,
)


def sealed(core: bytes) -> bytes:
    """The first 504 bytes with a correct header sum behind them."""
    return core[:504] + xxhash.xxh3_64_intdigest(core[:504]).to_bytes(8, "little")


@given(headers)
def test_a_header_survives_packing(header):
    packed = pack_header(header)
    assert len(packed) == CORE_NBYTES
    assert parse_header(packed) == header
    assert parse_header(packed + bytes(HEADER_NBYTES - CORE_NBYTES)) == header


@given(st.binary(max_size=1200))
def test_any_bytes_give_a_reason(data):
    assert parse_header(data) in REASONS


@given(st.binary(min_size=504, max_size=504))
def test_any_bytes_behind_a_true_magic_and_sum_give_a_header_or_a_reason(core):
    parsed = parse_header(sealed(MAGIC + core[8:]))
    assert isinstance(parsed, Header) or parsed in REASONS


@given(headers, st.integers(0, HEADER_NBYTES * 8 - 1))
def test_a_flipped_bit_is_detected_or_harmless(header, bit):
    block = bytearray(pack_header(header) + bytes(HEADER_NBYTES - CORE_NBYTES))
    block[bit // 8] ^= 1 << bit % 8
    parsed = parse_header(block)
    if bit < CORE_NBYTES * 8:
        assert parsed in {"magic", "header_sum"}
    else:
        assert parsed == header


def test_every_single_bit_of_one_header_is_guarded():
    packed = pack_header(SAMPLE)
    for bit in range(CORE_NBYTES * 8):
        bent = bytearray(packed)
        bent[bit // 8] ^= 1 << bit % 8
        assert isinstance(parse_header(bent), str), bit


@given(headers, headers, st.integers(0, CORE_NBYTES))
def test_two_headers_torn_together_are_never_a_third(one, other, cut):
    parsed = parse_header(pack_header(one)[:cut] + pack_header(other)[cut:])
    assert isinstance(parsed, str) or parsed in (one, other)


@pytest.mark.parametrize(
    "at,value,reason",
    [
        (8, 2, "version"),
        (9, 1, "version"),
        (10, 200, "layout"),
        (11, 1, "reserved"),
        (12, 1, "reserved"),
        (300, 1, "reserved"),
    ],
)
def test_a_sound_header_that_we_do_not_understand_says_why(at, value, reason):
    core = bytearray(pack_header(SAMPLE))
    core[at] = value
    assert parse_header(sealed(bytes(core))) == reason


def test_an_empty_payload_is_refused():
    core = pack_header(SAMPLE)
    assert parse_header(sealed(core[:16] + bytes(8) + core[24:])) == "length"


def test_the_documented_table_is_the_code():
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    table = [(int(row[0]), int(row[1]), row[2]) for row in cells if row[0].isdigit()]
    assert [offset for offset, _, _ in table] == [
        sum(nbytes for _, nbytes, _ in table[:i]) for i in range(len(table))
    ]
    assert sum(nbytes for _, nbytes, _ in table) == CORE_NBYTES
    packed = pack_header(SAMPLE)
    found = {name: packed[offset : offset + nbytes] for offset, nbytes, name in table}
    assert found.pop("magic") == MAGIC
    assert found.pop("header_sum") == xxhash.xxh3_64_intdigest(packed[:504]).to_bytes(8, "little")
    assert found == {
        "version": b"\1\0",
        "layout": b"\2",
        "codec": b"\0",
        "zero": bytes(4),
        "nbytes": SAMPLE.nbytes.to_bytes(8, "little"),
        "sum": SAMPLE.sum.to_bytes(8, "little"),
        "namespace": SAMPLE.namespace,
        "key": SAMPLE.key,
        "parent": SAMPLE.parent,
        "fingerprint": SAMPLE.fingerprint,
        "reserved": bytes(328),
    }


def test_the_documented_layout_codes_are_the_code():
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    for layout in LAYOUTS.values():
        assert f"{layout.code} `{layout.name}`" in text


def test_what_is_asked_for_is_compared_in_order():
    asked = {"namespace": SAMPLE.namespace, "key": SAMPLE.key, "fingerprint": SAMPLE.fingerprint}
    assert differs(SAMPLE, **asked) is None
    assert differs(SAMPLE, **{**asked, "fingerprint": bytes(32)}) == "spec"
    assert differs(SAMPLE, **{**asked, "fingerprint": bytes(32), "namespace": bytes(32)}) == "namespace"
    assert differs(SAMPLE, namespace=bytes(32), key=bytes(40), fingerprint=bytes(32)) == "key"


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 300), max_size=5), st.integers(0, 2399))
def test_a_flipped_bit_of_the_payload_changes_its_sum_however_it_is_cut(payload, cuts, bit):
    marks = sorted({0, len(payload), *(cut for cut in cuts if cut < len(payload))})
    pieces = [memoryview(payload)[a:b] for a, b in pairwise(marks)]
    header = Header(bytes(32), bytes(40), NO_PARENT, bytes(32), 1, len(payload), payload_sum(pieces))
    assert header.sum == xxhash.xxh3_64_intdigest(payload)
    assert payload_nbytes(pieces) == len(payload)
    assert payload_wrong(header, pieces) is None
    bent = bytearray(payload)
    bent[bit // 8 % len(bent)] ^= 1 << bit % 8
    assert payload_wrong(header, [memoryview(bent)]) == "sum"


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 130))
def test_trimming_gives_exactly_the_first_bytes_or_nothing(pieces, nbytes):
    whole = b"".join(pieces)
    views = trim([memoryview(piece) for piece in pieces], nbytes)
    assert (views is None) == (nbytes > len(whole))
    if views is not None:
        assert b"".join(views) == whole[:nbytes]
        assert all(view.nbytes for view in views) or not nbytes or not all(pieces)
