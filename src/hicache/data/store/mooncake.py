"""Mooncake Store, as far as it is declared; the store itself is not written yet.

It moves pages between machines without a copy of its own: it reads and writes the host pool's memory, so a page
has to be one run there.
"""

from __future__ import annotations

from hicache.capability import StoreDeclaration

DECLARATION = StoreDeclaration(name="mooncake", whole_pages=True, imports=("mooncake",))
