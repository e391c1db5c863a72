"""Content keys: which bytes of KV these are, the same in every process that ever computes them.

A :class:`Namespace` is a digest over named fields that change the bytes; its ``root`` is the parent of every
first page. A page's key is ``sha256(parent key || its tokens as u32 little endian)``, so it names the whole
prefix up to its end; only full pages have keys. Nothing here reads the environment, the clock, an address or
Python's ``hash()``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError
from hicache.spec import positive

PageKey = bytes
"""32 bytes."""

KEY_NBYTES = 32
_TOKEN_MAX = 0xFFFFFFFF
RECORD_KEY_NBYTES = KEY_NBYTES + 2 + 6

TokenIds = Sequence[int] | npt.NDArray[np.integer]
FieldValue = str | bytes | int | None

_TAGS = {str: b"s", bytes: b"b", int: b"i", type(None): b"n"}


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _is_text(value: object) -> bool:
    """False for what is no text, and for text with half a surrogate pair in it, which no encoding has bytes for."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for two pages of the same tokens to hold the same bytes.

    ``root`` is the digest over the fields in name order, each name and value length-prefixed and typed, so that
    no two different sets of fields can meet: adapter ``X`` is not salt ``X``, ``"1"`` is not ``1``. An absent
    field, ``None`` and the empty string are one thing: not set. ``durable`` says whether the pages may go to
    storage; it is False when the weights are unknown.
    """

    root: PageKey
    fields: tuple[tuple[str, FieldValue], ...]
    durable: bool = True

    @classmethod
    def of(cls, fields: Mapping[str, FieldValue], *, durable: bool = True) -> Namespace:
        """Build a namespace from named fields; a value must be str, bytes, int or None."""
        kept: list[tuple[str, FieldValue]] = []
        digest = hashlib.sha256(b"hicache.namespace.1\0")
        for name in fields:
            if not _is_text(name):
                raise ConfigError("the name of a namespace field must be text", field=repr(name))
        for name in sorted(fields):
            value = fields[name]
            if type(value) not in _TAGS:
                raise ConfigError(
                    "a namespace field must be str, bytes, int or None", field=name, type=type(value).__name__
                )
            if value is None or value in ("", b""):
                continue
            if isinstance(value, str) and not _is_text(value):
                raise ConfigError(
                    "a namespace field is not text that UTF-8 can hold", field=name, value=repr(value)
                )
            raw = value if isinstance(value, bytes) else str(value).encode()
            digest.update(_framed(name.encode()) + _TAGS[type(value)] + _framed(raw))
            kept.append((name, value))
        return cls(digest.digest(), tuple(kept), durable)

    def derive(self, **fields: FieldValue) -> Namespace:
        """The same namespace with more fields, for example an adapter's digest or a tenant's salt."""
        known = dict(self.fields)
        for name in fields:
            if name in known:
                raise ConfigError("a namespace field is already set", field=name)
        return Namespace.of({**known, **fields}, durable=self.durable)


def _token_bytes(tokens: TokenIds) -> memoryview:
    """The tokens as u32 little endian; ConfigError when one is not an integer of 0 .. 2^32 - 1."""
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:  # rows of different lengths, or what is no number
        raise ConfigError("token ids must be one row of integers", type=type(tokens).__name__) from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError("token ids must be one row of integers", shape=array.shape, dtype=array.dtype)
    if array.size and (int(array.min()) < 0 or int(array.max()) > _TOKEN_MAX):
        raise ConfigError("a token id must fit in 32 bits", lowest=array.min(), highest=array.max())
    return np.ascontiguousarray(array, dtype="<u4").data.cast("B")


def page_keys(
    parent: PageKey, tokens: TokenIds, page_tokens: int, *, known: Sequence[PageKey] = ()
) -> list[PageKey]:
    """Keys of all full pages of ``tokens``, chained from ``parent`` (a namespace's root, for a whole prompt).

    ``known`` are keys of the first pages, already computed; only the pages after them are hashed. The tail that
    does not fill a page has no key.
    """
    positive("page_tokens", page_tokens)
    _key(parent)
    raw, step = _token_bytes(tokens), 4 * page_tokens
    keys = list(known)
    if len(keys) > len(raw) // step:
        raise ConfigError(
            "more keys are known than there are full pages", known=len(keys), pages=len(raw) // step
        )
    key = keys[-1] if keys else parent
    sha256 = hashlib.sha256
    for start in range(step * len(keys), len(raw) - step + 1, step):
        key = sha256(key + raw[start : start + step]).digest()
        keys.append(key)
    return keys


def _key(key: object) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_NBYTES:
        raise ConfigError("a key is 32 bytes", key=repr(key))


def engine_keys(root: PageKey, block_hashes: Sequence[bytes], blocks_a_page: int = 1) -> list[PageKey]:
    """Keys from an engine's own chained block hashes: ``sha256(root || hash of the page's last block)``."""
    positive("blocks_a_page", blocks_a_page)
    last = block_hashes[blocks_a_page - 1 :: blocks_a_page]
    return [hashlib.sha256(root + block).digest() for block in last]


class KeyMemo:
    """Remembers the keys of recent prompts, so that a prompt that extends one hashes only its new pages.

    Holds the latest prompt for each of ``prompts`` different first pages, about 6 bytes a token at page 16. Not
    thread-safe: it belongs to one adapter, under its lock. ``hashed`` counts pages hashed so far.
    """

    def __init__(self, page_tokens: int, *, prompts: int = 64) -> None:
        self._page_tokens = positive("page_tokens", page_tokens)
        self._prompts = positive("prompts", prompts)
        self._memo: OrderedDict[bytes, tuple[npt.NDArray[np.uint32], list[PageKey]]] = OrderedDict()
        self.hashed = 0

    def keys(self, namespace: Namespace, tokens: TokenIds) -> list[PageKey]:
        """Keys of all full pages of ``tokens`` in ``namespace``; equal to :func:`page_keys` from its root."""
        row = np.frombuffer(_token_bytes(tokens), dtype="<u4")
        page = self._page_tokens
        first = namespace.root + row[:page].tobytes()
        old, old_keys = self._memo.get(first, (row[:0], []))
        both = min(len(row), len(old))
        differs = np.flatnonzero(row[:both] != old[:both])
        shared = int(differs[0]) if differs.size else both
        keys = page_keys(namespace.root, row, page, known=old_keys[: shared // page])
        self.hashed += len(keys) - min(shared // page, len(old_keys))
        if keys:
            if shared == len(row):  # the remembered prompt says all this one does
                self._memo[first] = (old, old_keys)
            else:
                self._memo[first] = (row.copy(), keys)
            self._memo.move_to_end(first)
            if len(self._memo) > self._prompts:
                self._memo.popitem(last=False)
        return list(keys)


@dataclass(frozen=True, slots=True)
class RecordKey:
    """What storage files a record under: a page's key, the group, and the shard (rank coordinate) that wrote it.

    A page is present only when the records of all its groups and shards are. Group 0 carries the chain: the
    parent of its record is group 0 of the page before, same shard; a record of another group has group 0 of the
    same page as parent.
    """

    page: PageKey
    group: int = 0
    shard: int = 0

    def __bytes__(self) -> bytes:
        """40 bytes: key, group (u16 big endian), shard (u48 big endian)."""
        return self.page + self.group.to_bytes(2, "big") + self.shard.to_bytes(6, "big")
