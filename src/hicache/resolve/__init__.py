"""Resolution: from what is asked, on this machine, with these pieces, to what can really run, or to a refusal.

``decide`` holds the one function; ``request`` what may be asked, ``aliases`` SGLang's words for it, ``relaxation``
what giving way costs, ``sizing`` the memory budget, ``catalog`` the declared pieces, ``choose`` the way from settings,
``compatibility`` the tables of the documentation.
"""

from hicache.resolve.decide import Candidate, Chosen, Resolution, Step, attach, resolve
from hicache.resolve.request import Request

__all__ = ["Candidate", "Chosen", "Request", "Resolution", "Step", "attach", "resolve"]
