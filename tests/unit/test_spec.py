"""What a page is made of, and which prefix a set of present pages makes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.spec import CacheSpec, Full, Group, Plane, State, Window, usable

KV = (Plane("k", 2, 4, 2, 32), Plane("v", 2, 4, 2, 16))
PAGE = 4


def spec_of(*rules) -> CacheSpec:
    return CacheSpec(tuple(Group(f"g{i}", KV, rule) for i, rule in enumerate(rules)), PAGE)


def row(pages: int, present) -> list[bool]:
    present = set(present)
    return [i in present for i in range(pages)]


# The prompt has 10 pages; the window needs the last 4 before the boundary.
@pytest.mark.parametrize(
    "rules,present,pages",
    [
        ([Full(), Full()], [range(10), range(7)], 7),
        ([Full(), Window(16)], [range(10), (6, 7, 8)], 0),
        ([Full(), Window(16)], [range(10), range(3, 9)], 9),
        ([Full(), State()], [range(10), (3, 7)], 8),
        ([Full(), Full(), State()], [range(10), range(7), (3, 7)], 4),
        ([Full(), Full()], [range(10), range(6)], 6),
        ([Full()], [range(10)], 10),
        ([Full(), Full()], [range(10), ()], 0),
    ],
)
def test_all_components_or_a_shorter_prefix(rules, present, pages):
    assert usable(spec_of(*rules), [row(10, p) for p in present]) == pages


def test_rows_of_different_lengths():
    assert usable(spec_of(Full(), Full()), [[True] * 10, [True] * 3]) == 3
    assert usable(spec_of(Full(), State()), [[True] * 10, [True]]) == 1
    assert usable(spec_of(Full()), [[]]) == 0
    with pytest.raises(ConfigError):
        usable(spec_of(Full()), [])


@pytest.mark.parametrize("tokens,pages", [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_window_is_rounded_up_to_pages(tokens, pages):
    present = row(6, range(6 - pages, 6))
    assert usable(spec_of(Window(tokens)), [present]) == 6
    present[6 - pages] = False
    assert usable(spec_of(Window(tokens)), [present]) == 0


def test_a_window_longer_than_the_prefix_needs_all_of_it():
    assert usable(spec_of(Window(1000)), [row(5, range(3))]) == 3


def serves(rule, present, boundary: int) -> bool:
    """Whether a group can serve the boundary after ``boundary`` pages, from the definition."""
    tokens = range(boundary * PAGE)  # those before the next token
    if isinstance(rule, Window):
        tokens = tokens[-rule.tokens :]
    elif isinstance(rule, State):
        tokens = tokens[-1:]
    return all(token // PAGE in present for token in tokens)


@settings(max_examples=400)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(Full()), st.just(State()), st.integers(1, 30).map(Window)),
            st.lists(st.booleans(), max_size=9),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_usable_equals_its_definition(groups):
    rules, rows = [rule for rule, _ in groups], [present for _, present in groups]
    sets = [{i for i, there in enumerate(present) if there} for present in rows]
    longest = max(len(present) for present in rows)
    expected = max(
        n
        for n in range(longest + 1)
        if all(serves(rule, present, n) for rule, present in zip(rules, sets, strict=True))
    )
    assert usable(spec_of(*rules), rows) == expected


# -- validation and identity


@pytest.mark.parametrize("field", ["layers", "tokens", "heads", "item_nbytes"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3", None])
def test_sizes_are_positive_integers(field, value):
    good = {"name": "k", "layers": 1, "tokens": 1, "heads": 1, "item_nbytes": 1}
    with pytest.raises(ConfigError, match=field):
        Plane(**good | {field: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Group("g", ()),
        lambda: Group("g", (KV[0], KV[0])),
        lambda: CacheSpec((), 4),
        lambda: CacheSpec((Group("g", KV),), 6),
        lambda: CacheSpec((Group("g", KV),), 0),
        lambda: CacheSpec((Group("g", KV),), 4, shards=0),
        lambda: Window(0),
    ],
)
def test_a_spec_that_cannot_be(make):
    with pytest.raises(ConfigError):
        make()


def test_opaque_planes_fit_any_page():
    spec = CacheSpec((Group("blob", (Plane("block", 1, 1, 1, 8400),)),), 7)
    assert spec.page_nbytes == 8400


def test_sizes_cover_every_plane():
    spec = spec_of(Full(), State())
    assert spec.page_nbytes == 2 * (2 * 4 * 2 * 32 + 2 * 4 * 2 * 16)


def test_the_fingerprint_differs_with_everything_that_changes_a_page():
    base = CacheSpec((Group("g", KV),), 4)
    other_planes = [
        (Plane("k2", 2, 4, 2, 32), KV[1]),
        (Plane("k", 3, 4, 2, 32), KV[1]),
        (Plane("k", 2, 2, 2, 32), KV[1]),
        (Plane("k", 2, 4, 1, 32), KV[1]),
        (Plane("k", 2, 4, 2, 64), KV[1]),
        (KV[1], KV[0]),
    ]
    others = [
        CacheSpec((Group("g", KV),), 8),
        CacheSpec((Group("g", KV),), 4, shards=2),
        CacheSpec((Group("h", KV),), 4),
        CacheSpec((Group("g", KV, State()),), 4),
        CacheSpec((Group("g", KV, Window(4)),), 4),
        CacheSpec((Group("g", KV, Window(8)),), 4),
        CacheSpec((Group("g", KV), Group("h", KV)), 4),
        *(CacheSpec((Group("g", planes),), 4) for planes in other_planes),
    ]
    prints = {spec.fingerprint() for spec in [base, *others]}
    assert len(prints) == 1 + len(others)
    assert base.fingerprint() == CacheSpec((Group("g", KV),), 4).fingerprint()
    assert len(base.fingerprint()) == 32
