"""What the built-in stores declare, apart from them so that asking does not import a database."""

from __future__ import annotations

from hicache.capability import StoreDeclaration

MEMORY = StoreDeclaration(name="memory")
SEGMENT = StoreDeclaration(name="segment", imports=("lmdb",))
