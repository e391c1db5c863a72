"""What a demo is to do and what it has found: plain records, which two processes and a JSON file share."""

from __future__ import annotations

from typing import Literal

import msgspec

PAGE_TOKENS = 16
TIERS = ("device", "host", "storage")
FACTOR = 8.0
"""How many times sooner the first token should come with a hit, from every tier."""

DECIMALS = 6


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One demo. ``inject``: the tier whose pages come back as zeros, to show that this is found out."""

    model: Literal["smollm2", "tiny"]
    dtype: str
    document_tokens: int
    turns: int
    new_tokens: int
    figure_tokens: int
    repeats: int
    inject: str = ""


FULL = Plan(
    model="smollm2",
    dtype="float32",
    document_tokens=3000,
    turns=3,
    new_tokens=24,
    figure_tokens=2000,
    repeats=3,
)
QUICK = msgspec.structs.replace(FULL, document_tokens=1400, turns=2, new_tokens=8, repeats=1)
TINY = msgspec.structs.replace(FULL, model="tiny", document_tokens=600, new_tokens=8, figure_tokens=512)


class Turn(msgspec.Struct, kw_only=True):
    """One turn of a conversation. ``answer_same``: None until it is compared. Seconds are to the first token."""

    name: str
    restarted: bool
    question: str
    answer: str
    tokens: list[int]
    prompt_tokens: int
    device: int
    host: int
    storage: int
    computed: int
    seconds_with: float
    seconds_without: float
    load_bytes: int
    save_bytes: int
    restored_pages: int
    wrong_pages: int
    run: int
    answer_same: bool | None = None

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came."""
        return self.seconds_without / self.seconds_with


class Figure(msgspec.Struct, kw_only=True):
    """Time to the first token of one prompt from one source; the best of ``repeats`` is what counts.

    ``hit_tokens``: the fewest that this source served in any repetition; ``wanted``: all but the last page's.
    """

    source: str
    restarted: bool
    prompt_tokens: int
    wanted: int
    hit_tokens: int
    seconds: list[float]
    wrong_pages: int
    tokens: list[int]
    runs: list[int]
    answer_same: bool | None = None

    @property
    def best(self) -> float:
        """Seconds."""
        return min(self.seconds)

    @property
    def label(self) -> str:
        """Source and process, for people."""
        name = "no cache" if self.source == "computed" else self.source
        return f"{name} after a restart" if self.restarted else name


class Part(msgspec.Struct, frozen=True):
    """One turn that the new process has to do: its name, its question, its whole prompt."""

    name: str
    question: str
    ids: list[int]


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What the first process leaves for the new one. ``sizes``: bytes of the device tier, the host tier, storage."""

    plan: Plan
    store: str
    sizes: tuple[int, int, int]
    record: str
    parts: list[Part]
    figure: list[int]


class Step(msgspec.Struct, frozen=True, tag=True):
    """From the new process: what it is doing."""

    text: str


class TurnDone(msgspec.Struct, frozen=True, tag=True):
    """From the new process: a turn."""

    turn: Turn


class FiguresDone(msgspec.Struct, frozen=True, tag=True):
    """From the new process, its last message: its figures, and errors that the cache counted."""

    figures: list[Figure]
    errors: dict[str, int]


Message = Step | TurnDone | FiguresDone
