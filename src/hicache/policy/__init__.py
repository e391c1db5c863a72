"""Policies: pure decisions shared by both planes. One protocol each, no state beyond what a decision needs."""

from hicache.policy.base import EvictionPolicy
from hicache.policy.lru import Lru
from hicache.policy.worth import Worth
from hicache.policy.write import WritePolicy

__all__ = ["EvictionPolicy", "Lru", "Worth", "WritePolicy"]
