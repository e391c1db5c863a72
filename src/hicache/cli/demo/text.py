"""What the demo talks about: chapters of Python's own reference, which come with every Python, and two conversations.

The two begin differently, so they share no page: what one leaves in a tier the other does not find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hicache.errors import ConfigError

CHAPTERS = ("execmodel", "try", "with", "import")
SOURCE = "chapters of the Python language reference, as this Python's help() has them (pydoc_data.topics)"


class Speech(Protocol):
    """Text to tokens and back, as the model wants it."""

    eos: int | None

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens."""
        ...

    def opening(self, system: str, user: str) -> list[int]:
        """The prompt of a first turn."""
        ...

    def following(self, user: str) -> list[int]:
        """What comes behind an answer, up to where the next answer begins."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """Who asks what. ``questions`` are asked in turn, over and over."""

    name: str
    system: str
    before: str
    questions: tuple[str, ...]

    def question(self, turn: int) -> str:
        """The question of turn 0, 1, 2 ..."""
        return self.questions[turn % len(self.questions)]

    def first(self, speech: Speech, document: str) -> list[int]:
        """The prompt of the first turn: the whole document and a question."""
        return speech.opening(self.system, f"{self.before}\n\n{document}\n\n{self.question(0)}")


CONVERSATIONS = (
    Conversation(
        "A",
        "You are a patient teacher. Answer in one short sentence.",
        "Please read this chapter of a manual.",
        (
            "What is a code block?",
            "Where are names looked up?",
            "What does an except clause do?",
            "When does a finally clause run?",
        ),
    ),
    Conversation(
        "B",
        "You edit technical manuals and answer with one precise sentence.",
        "Here is a draft that I have to review today.",
        (
            "What is the draft about?",
            "Which statement binds a name?",
            "What is a free variable?",
            "What happens when no handler is found?",
        ),
    ),
)


def whole_text() -> str:
    """All chapters; ConfigError in a Python without its help topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("this Python comes without its help topics", module="pydoc_data.topics") from None
    texts = [topics[name].strip() for name in CHAPTERS if name in topics]
    if not texts:
        raise ConfigError("this Python's help topics lack the demo's chapters", wanted=",".join(CHAPTERS))
    return "\n\n".join(texts)


def document(speech: Speech, tokens: int) -> str:
    """As many whole lines of the text as make about ``tokens`` tokens."""
    lines: list[str] = []
    left = tokens
    for line in whole_text().splitlines(keepends=True):
        left -= len(speech.encode(line))
        if left < 0:
            break
        lines.append(line)
    return "".join(lines).strip()


def figure_prompt(speech: Speech, tokens: int) -> list[int]:
    """The last ``tokens`` tokens of the text: a prompt that shares no beginning with any conversation."""
    ids = speech.encode(whole_text())
    if len(ids) < tokens:
        raise ConfigError("the demo's text is too short", tokens=len(ids), wanted=tokens)
    return ids[-tokens:]
