"""HiCache under Transformers, on the CPU, one sequence at a time: ``attach(model).generate(ids, 32)``."""

from hicache.adapters.transformers.engine import TransformersCache, attach
from hicache.adapters.transformers.result import Result

__all__ = ["Result", "TransformersCache", "attach"]
