"""What the adapter tests share: one tiny model a session, one thread, and the helper module ``hits``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def tiny():
    """A random Llama, always the same."""
    from hicache.testing.model import tiny_model

    return tiny_model()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second thread and loses much when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
