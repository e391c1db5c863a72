"""What a directory tells of its namespaces to whoever inspects it."""

from __future__ import annotations

import json

from hicache.keys import Namespace

WHO_MAX = 10_000
"""Namespaces that are described: with a salt for each user there can be any number, and each takes some 200 bytes."""

SHOWN = ("engine", "architecture", "model", "weights", "adapter", "dtypes", "attention", "page_tokens")
"""Fields of a namespace that may be told; of all others only the name."""


def about(namespace: Namespace) -> str:
    """What a namespace is, as JSON: the fields of :data:`SHOWN`, and the names of the others (a salt is a secret)."""
    fields = dict(namespace.fields)
    said = {name: str(fields[name])[:200] for name in SHOWN if name in fields}
    return json.dumps({**said, "other_fields": sorted(fields.keys() - said.keys())})
