"""The demo's model: a small real one, or a tiny random one; loaded without asking any network."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hicache.cli.demo.plan import Plan
from hicache.cli.demo.text import Speech
from hicache.errors import ConfigError

Tell = Callable[[str], None]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin make a busy machine many times slower
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A model, and how to speak to it."""

    model: object
    speech: Speech


def prepare(tell: Tell) -> None:
    """Import torch and Transformers, offline: before anything else of the demo does, since both look only once.

    ConfigError where they are not installed.
    """
    os.environ.update(ENVIRONMENT)
    tell("importing torch and Transformers")
    try:
        with _no_interrupt():
            for name in ("torch", "transformers"):
                importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "the demo needs torch and Transformers",
            missing=error.name,
            install="pip install hicache[transformers]",
        ) from None


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Keep Ctrl-C for the end: torch, interrupted while it is imported, takes the process down with a dump."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def load_engine(plan: Plan, tell: Tell) -> Engine:
    """Load the plan's model."""
    import torch
    import transformers

    from hicache.testing.model import smollm2_dir, tiny_model

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if plan.model == "tiny":
        torch.set_num_threads(1)
        return Engine(tiny_model(), BytesSpeech())
    path = smollm2_dir(plan.dtype, tell)
    tell(f"loading SmolLM2-135M-Instruct as {plan.dtype}")
    dtype = getattr(torch, plan.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return Engine(model.eval(), ChatSpeech(tokenizer))


class ChatSpeech:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  (Transformers' object)
        self._tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens, on one line."""
        return " ".join(self._tokenizer.decode(list(tokens), skip_special_tokens=True).split())

    def opening(self, system: str, user: str) -> list[int]:
        """System prompt, first message, and the answer's beginning."""
        return self.encode(self._text([("system", system), ("user", user)]))

    def following(self, user: str) -> list[int]:
        """What the template puts behind an answer when ``user`` speaks next."""
        answer = "ANSWER"
        text = self._text([("system", ""), ("user", ""), ("assistant", answer), ("user", user)])
        return self.encode(text.partition(answer)[2])

    def _text(self, messages: Sequence[tuple[str, str]]) -> str:
        talk = [{"role": role, "content": content} for role, content in messages]
        return str(self._tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))


class BytesSpeech:
    """One token a byte, for a random model that says nothing anyway; 256 begins a message and 257 ends one."""

    eos: int | None = None

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The numbers: they mean nothing."""
        return " ".join(str(token) for token in tokens)

    def opening(self, system: str, user: str) -> list[int]:
        """System prompt, first message, and the answer's beginning."""
        return [256, *self.encode(system), 257, 256, *self.encode(user), 257, 256]

    def following(self, user: str) -> list[int]:
        """The end of the answer, the next message, and the next answer's beginning."""
        return [257, 256, *self.encode(user), 257, 256]
