"""All rules over one set of figures."""

from __future__ import annotations

from dataclasses import dataclass

from app.cli.doctor.advice import Advice, Rule, Severity
from app.cli.doctor.figures import Figures
from app.cli.doctor.rules import first_token, mistakes, reuse, storage

RULES = (
    Rule(mistakes.layerwise_buffer_below_a_layer, needs_traffic=False),
    Rule(mistakes.slow_dtype, needs_traffic=False),
    Rule(mistakes.more_threads_than_cores, needs_traffic=False),
    Rule(mistakes.cpu_tier_below_device_pool, needs_traffic=False),
    Rule(mistakes.separator_in_ordinary_text, needs_traffic=False),
    Rule(storage.compress_cold_data, needs_traffic=True),
    Rule(storage.compressing_hot_data, needs_traffic=True),
    Rule(reuse.volatile_heads, needs_traffic=True),
    Rule(reuse.blend_chunks, needs_traffic=True),
    Rule(reuse.keep_kv_longer, needs_traffic=True),
    Rule(reuse.tier_slower_than_recompute, needs_traffic=True),
    Rule(first_token.hide_loads, needs_traffic=True),
)

_ORDER = list(Severity)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`advice`: the gravest first. `not_enough_seen`: names of rules that need more traffic than there was."""

    advice: tuple[Advice, ...]
    not_enough_seen: tuple[str, ...]


def examine(figures: Figures) -> Diagnosis:
    """What the rules say."""
    enough = figures.traffic.enough
    found = [rule.advise(figures) for rule in RULES if enough or not rule.needs_traffic]
    advice = sorted((one for one in found if one is not None), key=lambda one: _ORDER.index(one.severity))
    unseen = [] if enough else [rule.name for rule in RULES if rule.needs_traffic]
    return Diagnosis(tuple(advice), tuple(unseen))
