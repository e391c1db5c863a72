"""The errors HiCache raises, named by what the caller should do about each.

Values come last in a message, as ``key=value``, and stay readable as :attr:`HiCacheError.context`. Hot paths
return values instead; an adapter turns everything but :class:`InvariantError` into a miss and a counter.
"""

from __future__ import annotations


class HiCacheError(Exception):
    """Base of all; ``context`` holds the values involved and is printed at the end of the message."""

    retryable = False

    def __init__(self, message: str, **context: object) -> None:
        self.context = context
        values = " ".join(f"{name}={value}" for name, value in context.items())
        super().__init__(f"{message} [{values}]" if values else message)


class ConfigError(HiCacheError, ValueError):
    """A setting or an argument cannot work: change it. Raised at the edge, before anything is allocated."""


class IncompatibleError(HiCacheError):
    """Two things that must agree do not (fingerprints, format versions): use another namespace or directory."""


class CapacityError(HiCacheError):
    """Something does not fit: wait, or go on without the cache."""


class UnavailableError(HiCacheError):
    """A tier does not answer: try again later; whoever guards the tier opens its breaker."""

    retryable = True


class DataError(HiCacheError):
    """Stored bytes are not what they claim to be: the record is dropped and counts as a miss."""


class InvariantError(HiCacheError):
    """A bug in HiCache, never the caller's fault. The context carries a dump; please report it."""
