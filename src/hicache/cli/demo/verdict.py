"""What the demo's findings amount to: pure, so that a test can put any finding to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.cli.demo.plan import FACTOR, TIERS, Figure, Turn


def problems(turns: Sequence[Turn], figures: Sequence[Figure], errors: Mapping[str, int]) -> list[str]:
    """Everything that makes the demo fail, a sentence each; empty when all is well."""
    found = [sentence for turn in turns for sentence in _of_turn(turn)]
    found += [sentence for figure in figures for sentence in _of_figure(figure)]
    for tier in TIERS:
        if not any(getattr(turn, tier) for turn in turns if not turn.restarted):
            found.append(f"{tier} never served a hit in a conversation")
    if not any(turn.storage for turn in turns if turn.restarted):
        found.append("storage never served a hit in the new process")
    if not any(figure.restarted and figure.hit_tokens for figure in figures):
        found.append("storage was not measured in the new process")
    found += [
        f"the cache counted an error and went on without: {name}, {n} times" for name, n in errors.items()
    ]
    return found


def _of_turn(turn: Turn) -> list[str]:
    found = []
    if turn.wrong_pages:
        found.append(
            f"turn {turn.name}: {turn.wrong_pages} of {turn.restored_pages} pages came back with wrong bytes"
        )
    if not turn.answer_same:
        found.append(f"turn {turn.name}: the answer differs from the run with the same chunking and no cache")
    if turn.device + turn.host + turn.storage + turn.computed != turn.prompt_tokens:
        found.append(f"turn {turn.name}: where its tokens come from does not add up to {turn.prompt_tokens}")
    return found


def _of_figure(figure: Figure) -> list[str]:
    found = []
    if figure.wrong_pages:
        found.append(f"{figure.label}: {figure.wrong_pages} pages came back with wrong bytes")
    if figure.hit_tokens < figure.wanted:
        found.append(f"{figure.label}: served {figure.hit_tokens} tokens where {figure.wanted} were expected")
    if figure.runs and not figure.answer_same:
        found.append(
            f"{figure.label}: the first token differs from the run with the same chunking and no cache"
        )
    return found


def ratios(figures: Sequence[Figure]) -> dict[str, float]:
    """How many times sooner the first token comes from each source than by computing, in the same process."""
    computed = {figure.restarted: figure.best for figure in figures if figure.source == "computed"}
    return {
        figure.label: computed[figure.restarted] / figure.best
        for figure in figures
        if figure.source != "computed"
    }


def warnings(figures: Sequence[Figure]) -> list[str]:
    """What is slower than it should be: told loudly, but no failure, because a busy machine looks the same."""
    return [
        f"BELOW TARGET: a hit from {label} gave the first token only {ratio:.1f} times sooner, wanted {FACTOR:.0f}"
        for label, ratio in ratios(figures).items()
        if ratio < FACTOR
    ]
