"""What stands in the model's place of ``generate`` while a cache is attached, and how it goes away again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Self

from hicache.errors import ConfigError

NAME = "generate"

Serve = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with the model's own ``generate`` and the arguments of a call."""


class Generate:
    """``model.generate`` while a cache is attached. A copy of the model, or one that is unpickled, has its own again."""

    def __init__(self, model: Any, serve: Serve) -> None:
        functools.update_wrapper(self, model.generate)
        self._model = model
        self._serve = serve
        self._own = model.generate
        self._found = vars(model).get(NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, with what the cache has."""
        return self._serve(self._own, args, kwargs)

    def remove(self) -> None:
        """Leave the model as it was found; where somebody has wrapped this since, theirs stays and this passes on."""
        if vars(self._model).get(NAME) is not self:
            return
        if self._found is None:
            delattr(self._model, NAME)
        else:
            setattr(self._model, NAME, self._found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = memo.get(id(self._model))
        return self if model is None else _own(model)

    def __reduce__(self) -> Any:
        return _own, (self._model,)


def _own(model: Any) -> Any:
    return types.MethodType(type(model).generate, model)


def refuse_attached(model: Any) -> None:
    """ConfigError where a cache stands in the model's ``generate`` already."""
    if isinstance(vars(model).get(NAME), Generate):
        raise ConfigError("this model has a cache attached; close that one first", model=type(model).__name__)


def put(model: Any, serve: Serve) -> Generate | None:
    """Take the place of the model's ``generate``; None where it has none. ConfigError where a cache has it already."""
    if not callable(getattr(model, NAME, None)):
        return None
    refuse_attached(model)
    hook = Generate(model, serve)
    setattr(model, NAME, hook)
    return hook


class FirstCall:
    """Watches the first forward call over our cache object: what is held already is not computed again.

    Most of ``generate`` leaves it out by itself; assisted generation does not. ``ended`` is called after it. A
    context manager.
    """

    def __init__(self, model: Any, cache: Any, width: int, ended: Callable[[], None]) -> None:
        self._cache = cache
        self._width = width
        self._ended = ended
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _is_ours(self, kwargs: dict[str, Any]) -> bool:
        return any(kwargs.get(name) is self._cache for name in ("cache", "past_key_values"))

    def _before(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held, ids = self._cache.get_seq_length(), kwargs.get("input_ids")
        if not self._is_ours(kwargs) or not held or ids is None or ids.shape[1] < self._width:
            return None
        cut = {"input_ids": ids[:, held:]}
        positions = kwargs.get("position_ids")
        if positions is not None and positions.shape[-1] == ids.shape[1]:
            cut["position_ids"] = positions[..., held:]
        return args, {**kwargs, **cut}

    def _after(self, _model: Any, _args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
        if self._is_ours(kwargs):
            self._ended()
            self.remove()

    def remove(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.remove()
