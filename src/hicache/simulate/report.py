"""What a simulation says: hits by tier as fractions of the prompts' tokens, and what was moved for them."""

from __future__ import annotations

from typing import Any

from hicache.records import JobKind
from hicache.simulate.drive import TIERS, Outcome, Simulator

_DAY_S = 86400.0


def hit_rates(outcome: Outcome, first: int = 0) -> dict[str, float]:
    """Tokens from each tier, and from all, over the prompts' tokens; of the requests from number ``first`` on."""
    tokens = sum(outcome.tokens[first:])
    rates = {tier.name.lower(): sum(outcome.hits[tier][first:]) / tokens if tokens else 0.0 for tier in TIERS}
    return {**rates, "all": sum(rates.values())}


def report(outcome: Outcome, simulator: Simulator, page_nbytes: int) -> dict[str, Any]:
    """One simulation as plain values, for JSON and for the table.

    hit_rate and hit_rate_last_half: fractions of input tokens, over all requests and over the later half of them.
    """
    requests = len(outcome.tokens)
    whole, late = hit_rates(outcome), hit_rates(outcome, requests // 2)
    span_s = outcome.at[-1] - outcome.at[0] if requests else 0.0
    written = simulator.store.written * page_nbytes if simulator.store else 0
    return {
        "requests": requests,
        "input_tokens": sum(outcome.tokens),
        "trace_seconds": span_s,
        "hit_rate": whole.pop("all"),
        "hit_rate_last_half": late.pop("all"),
        "hit_rate_by_tier": whole,
        "hit_rate_last_half_by_tier": late,
        "hit_tokens_by_tier": {tier.name.lower(): sum(outcome.hits[tier]) for tier in TIERS},
        "bytes_moved": {kind.value: simulator.pages_moved[kind] * page_nbytes for kind in JobKind},
        "store_bytes_written": written,
        "store_bytes_written_a_day": written * _DAY_S / span_s if span_s else None,
    }
