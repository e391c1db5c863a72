"""The demo from beginning to end: two conversations, the figures of each tier, and a restart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.cli.demo.engine import Engine, load_engine
from hicache.cli.demo.place import Place
from hicache.cli.demo.plan import Figure, FiguresDone, Handover, Part, Plan, Step, Turn, TurnDone
from hicache.cli.demo.report import Report
from hicache.cli.demo.restart import messages
from hicache.cli.demo.session import Session, Sizes, settings_for
from hicache.cli.demo.show import MEBIBYTE, Show
from hicache.cli.demo.text import CONVERSATIONS, SOURCE, Conversation, document, figure_prompt
from hicache.testing.replay import Recorder, Replay


@dataclass(slots=True)
class Talk:
    """A conversation as far as it has gone: ``ids`` is the prompt of the next turn."""

    conversation: Conversation
    ids: list[int]
    turn: int = 0

    @property
    def name(self) -> str:
        """A1, A2 ... B1 ..."""
        return f"{self.conversation.name}{self.turn + 1}"

    @property
    def question(self) -> str:
        """What the next turn asks."""
        return self.conversation.question(self.turn)

    def answered(self, engine: Engine, tokens: Sequence[int]) -> None:
        """Append the answer, as it was generated, and the next question."""
        self.turn += 1
        said = list(tokens[:-1]) if tokens[-1] == engine.speech.eos else list(tokens)
        self.ids = [*self.ids, *said, *engine.speech.following(self.question)]


class Demo:
    """One run. ``report`` grows while it goes on."""

    def __init__(self, plan: Plan, place: Place, show: Show) -> None:
        self.plan = plan
        self.place = place
        self.show = show
        self.report = Report(plan)
        self.recorder = Recorder()
        self._known: list[tuple[object, list[int]]] = []

    def run(self) -> Report:
        """All of it; whether it is a success is in the report."""
        began = time.monotonic()
        engine = load_engine(self.plan, self.show.step)
        text = document(engine.speech, self.plan.document_tokens)
        talks = [Talk(one, one.first(engine.speech, text)) for one in CONVERSATIONS]
        figure = figure_prompt(engine.speech, self.plan.figure_tokens)
        sizes = Sizes.of(engine, self.plan, [talk.ids for talk in talks], len(figure))
        self.place.require(sizes.storage // 2)
        self._introduce(engine, sizes, talks)
        replay = Replay(engine.model, self.recorder)
        settings = settings_for(self.place.pages, sizes.nbytes)
        with Session(engine, self.plan, settings, self.recorder, self.show.step) as session:
            self._converse(session, talks, replay)
            self._take(session.figures(figure, self.show.step, restarted=False), replay)
            self.report.errors |= session.errors
        handover = Handover(
            plan=self.plan,
            store=str(self.place.pages),
            sizes=sizes.nbytes,
            record=str(self.place.record),
            parts=[Part(talk.name, talk.question, talk.ids) for talk in talks],
            figure=figure,
        )
        self._restart(handover, replay)
        self.report.seconds = time.monotonic() - began
        return self.report

    def _introduce(self, engine: Engine, sizes: Sizes, talks: Sequence[Talk]) -> None:
        one, other = (len(talk.ids) for talk in talks)
        weights = "SmolLM2-135M-Instruct, " if self.plan.model == "smollm2" else "a tiny random model, "
        self.show.note(f"Model:    {weights}{self.plan.dtype}, on the CPU")
        self.show.note(f"Document: {SOURCE}")
        self.show.note(
            f"Prompts:  two conversations about it, {one:,} and {other:,} tokens at first, with no beginning in common"
        )
        self.show.note(
            f"Tiers:    device {sizes.device_pages} pages ({sizes.device / MEBIBYTE:.0f} MiB), host {sizes.host_pages}"
            f" pages ({sizes.host / MEBIBYTE:.0f} MiB): room for one conversation, not for two; storage at most"
            f" {sizes.storage / MEBIBYTE:.0f} MiB"
        )
        if self.plan.inject:
            self.show.note(f"INJECTED: pages from {self.plan.inject} come back as zeros; this demo must fail")

    def _converse(self, session: Session, talks: Sequence[Talk], replay: Replay) -> None:
        for _ in range(self.plan.turns):
            for talk in talks:
                turn = session.turn(talk.name, talk.question, talk.ids, self.show.step, restarted=False)
                self.show.turn(turn)
                self._compare(turn, replay)
                talk.answered(session.engine, turn.tokens)

    def _compare(self, turn: Turn, replay: Replay) -> None:
        """Run what made this turn's KV and answer again, without HiCache, and compare the answers."""
        self.report.turns.append(turn)
        self.show.step(f"turn {turn.name}: comparing its answer with the same run without a cache")
        turn.answer_same = replay.tokens(turn.run) == turn.tokens

    def _take(self, figures: Sequence[Figure], replay: Replay) -> None:
        """Compare the figures' first tokens too: hits of equal pages are one and the same run."""
        for figure in figures:
            if figure.runs:
                self.show.step(f"hits from {figure.label}: comparing with the same run without a cache")
                same = [
                    self._said(run, replay) == [t] for run, t in zip(figure.runs, figure.tokens, strict=True)
                ]
                figure.answer_same = all(same)
        self.report.figures += figures

    def _said(self, run: int, replay: Replay) -> list[int]:
        """What a run without HiCache says; hits of the same pages, cut the same way, are one and the same run."""
        program = self.recorder.programs[run]
        same = (program.prompt, program.given, [call[:2] for call in program.calls])
        for known, said in self._known:
            if known == same:
                return said
        self._known.append((same, replay.tokens(run)))
        return self._known[-1][1]

    def _restart(self, handover: Handover, replay: Replay) -> None:
        """The new process; its answers are compared here, where the older runs are still at hand."""
        self.recorder.save(self.place.record)
        turns: list[Turn] = []
        figures: list[Figure] = []
        self.show.step("a new process: starting")
        for message in messages(handover, self.place.path):
            match message:
                case Step(text):
                    self.show.step(text)
                case TurnDone(turn):
                    turns.append(turn)
                    self.show.turn(turn)
                case FiguresDone(figures, errors):
                    for name, count in errors.items():
                        self.report.errors[name] = self.report.errors.get(name, 0) + count
        programs = self.recorder.programs
        programs += Recorder.load(self.place.record).programs[len(programs) :]
        for turn in turns:
            self._compare(turn, replay)
        self._take(figures, replay)
