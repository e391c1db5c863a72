"""HiCache under Transformers, on the CPU: ``with attach(model):`` around ordinary ``model.generate`` calls."""

from hicache.adapters.transformers.engine import TransformersCache, attach
from hicache.adapters.transformers.result import Result

__all__ = ["Result", "TransformersCache", "attach"]
