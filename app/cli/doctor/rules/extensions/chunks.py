"""Chunks that are no prefix: where blending would reuse them, and where separators cut ordinary text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.cli.doctor.advice import Advice, Rule, Severity
from app.cli.doctor.figures import Figures
from app.cli.doctor.rules.ordinary_text import times_in_ordinary_text, times_in_tokens
from app.cli.doctor.rules.reuse import LOW_HIT_RATE, MOST, share_of


def separators_of(settings: Mapping[str, Any]) -> Sequence[object] | None:
    """Return what the settings have as separators; None: nothing."""
    blending = settings.get("blending")
    return blending.get("separators") if isinstance(blending, Mapping) else None


def separator_in_ordinary_text(figures: Figures) -> Advice | None:
    """A separator that stands in ordinary text cuts documents into pieces that no other prompt has."""
    setup = figures.setup
    for separator in (setup.separators or ()) if setup else ():
        if isinstance(separator, list):
            times, shown = times_in_tokens(separator, (setup and setup.page_tokens) or ()), f"the tokens {separator}"
        else:
            times, shown = times_in_ordinary_text(str(separator)), repr(separator)
        if times:
            return Advice(
                "separator-in-ordinary-text",
                Severity.WARNING,
                f"blending.separators has {shown}: {times} times in a page of ordinary text",
                "blending.separators",
                "null",
                "Each place where it stands begins a chunk. Many are too short to be stored, and documents are cut. "
                "Empty, chunks begin with special tokens of the model, which no text holds.",
                "docs/concepts/blending.md#how-chunks-are-recognized",
            )
    return None


def blend_chunks(figures: Figures) -> Advice | None:
    """Few tokens are found, most prompts begin as none before, and they hold chunks, which blending finds anywhere.

    Chunks are seen where some prompts are blended already, or where the separators are set. Otherwise they cannot be
    seen from outside, and the advice is a hint.
    """
    traffic, setup = figures.traffic, figures.setup
    if setup is None or setup.fidelity == "blended" or traffic.hit_rate >= LOW_HIT_RATE:
        return None
    cold = share_of(figures, "cold")
    if cold < MOST and not traffic.chunk_tokens:
        return None
    if traffic.chunk_tokens >= MOST * traffic.prompt_tokens:  # requests ask for it already
        return None
    evidence = f"{traffic.hit_rate:.0%} of prompt tokens were reused, {cold:.0%} of prompts begin as none before"
    if traffic.chunk_tokens:
        severity, seen = Severity.WARNING, f"{traffic.chunk_tokens} tokens came in prompts of several chunks"
        why = "Prompts hold several chunks. Blended, a prompt reuses each of them at any place and in any order."
    elif setup.separators:
        severity, seen = Severity.WARNING, f"{len(setup.separators)} separators are set, and no prompt was blended"
        why = "Separators say where chunks begin, but only blended prompts use them, at any place and in any order."
    else:
        severity, seen = Severity.INFO, "no prompt was blended"
        why = "If prompts hold documents in changing order, blending reuses each. Larger tiers would not find them."
    why = f"{why} Blended answers may differ from exact ones: try it on a tenant (tenants.NAME.fidelity) first."
    return Advice(
        "blend-chunks", severity, f"{evidence}, {seen}", "kv.fidelity", "blended", why, "docs/concepts/blending.md"
    )


OF_SETTINGS = (Rule(separator_in_ordinary_text, needs_traffic=False),)
OF_TRAFFIC = (Rule(blend_chunks, needs_traffic=True),)
