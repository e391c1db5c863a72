"""Records for stores that carry bytes and do not look at them: the header travels before the payload, and is checked.

A store that checks its records itself says so by an attribute ``verifies = True``; no other store's hit is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from hicache.data.store.base import (
    Corrupt,
    Delete,
    Hit,
    Iovec,
    Miss,
    ReadOutcome,
    Record,
    Store,
    WriteOutcome,
)
from hicache.data.store.record import (
    CORE_NBYTES,
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
from hicache.keys import Namespace, RecordKey
from hicache.layout import LAYOUTS


class Checked:
    """Reads and writes of ``store``, each record with its header. ``fingerprint``: :meth:`CacheSpec.fingerprint`."""

    def __init__(self, store: Store, fingerprint: bytes) -> None:
        self._store = store
        self._fingerprint = fingerprint

    def read(
        self, namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]
    ) -> list[ReadOutcome]:
        """As the store; a hit whose bytes are not what was asked for is Corrupt, and deleted where the store can."""
        heads = [memoryview(bytearray(CORE_NBYTES)) for _ in keys]
        framed = [[head, *views] for head, views in zip(heads, into, strict=True)]
        outcomes = self._store.read(namespace, keys, framed)
        found = [
            self._judge(namespace, key, outcome, head, views) if isinstance(outcome, Hit) else outcome
            for key, outcome, head, views in zip(keys, outcomes, heads, into, strict=False)
        ]
        bad = [key for key, outcome in zip(keys, found, strict=False) if isinstance(outcome, Corrupt)]
        store: object = self._store
        if bad and isinstance(store, Delete):
            with suppress(Exception):  # it has been found out; that it stays is the store's loss
                store.delete(bad)
        return found

    def _judge(
        self, namespace: Namespace, key: RecordKey, hit: Hit, head: memoryview, views: Iovec
    ) -> ReadOutcome:
        header = parse_header(head)
        if isinstance(header, str):
            return Miss(header) if header == "version" else Corrupt(header)
        wrong = differs(header, namespace=namespace.root, key=bytes(key), fingerprint=self._fingerprint)
        if wrong is not None:
            return Corrupt(wrong) if wrong == "key" else Miss(wrong)
        if hit.nbytes != CORE_NBYTES + header.nbytes:
            return Corrupt("length")
        payload = trim(views, header.nbytes)
        if payload is None:
            return Miss("length")
        wrong = payload_wrong(header, payload)
        return Hit(header.layout_name, header.nbytes) if wrong is None else Corrupt(wrong)

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """As the store."""
        return self._store.write(namespace, [self._framed(namespace, record) for record in records])

    def _framed(self, namespace: Namespace, record: Record) -> Record:
        header = Header(
            namespace=namespace.root,
            key=bytes(record.key),
            parent=bytes(record.parent) if record.parent else NO_PARENT,
            fingerprint=self._fingerprint,
            layout=LAYOUTS[record.layout].code,
            nbytes=payload_nbytes(record.payload),
            sum=payload_sum(record.payload),
        )
        return replace(record, payload=[memoryview(pack_header(header)), *record.payload])
