"""The package's front door: few names, all of them there, none of them costly before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hicache


@pytest.mark.parametrize("name", sorted(set(hicache.__all__) - {"attach"}))
def test_a_public_name_is_there(name):
    assert getattr(hicache, name).__module__.startswith("hicache")


def test_there_are_at_most_25_of_them_and_no_other():
    assert len(hicache.__all__) <= 25
    with pytest.raises(AttributeError, match="nothing"):
        _ = hicache.nothing


def test_importing_the_package_imports_nothing_heavy():
    program = "import sys, hicache; print(*[m for m in ('torch', 'numpy', 'lmdb', 'transformers') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
