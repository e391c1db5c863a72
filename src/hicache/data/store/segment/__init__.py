"""The embedded store: segment files and an LMDB index in one local directory."""

from hicache.data.store.segment.files import Files
from hicache.data.store.segment.store import SegmentStore

__all__ = ["Files", "SegmentStore"]
