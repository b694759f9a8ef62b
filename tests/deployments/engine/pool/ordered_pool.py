"""What tests of directives ask of a real engine."""

from __future__ import annotations

from typing import Any

from live_engine import BLOCK, PATIENCE_S, LiveEngine

from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.engine import prompt
from load_tests.harness.patience import patience

TOKENS = 12 * BLOCK + 16
"""Three segments of four blocks, and a rest."""


def outcome(answer: Any) -> str:
    return str(answer.result(patience(PATIENCE_S)).outcome)


def stored(engine: LiveEngine, seed: int) -> tuple[list[int], list[int]]:
    """A prompt that the port has and the device has not, and the answer to it."""
    tokens = prompt(seed, TOKENS)
    answer, _ = engine.ask(tokens)
    engine.clear_device()
    return tokens, answer


def spans(engine: LiveEngine) -> list[SegmentSpan]:
    return sorted((span for span, _ in list(engine.port.segments.values())), key=lambda span: span.start_block)
