"""Parameters that no workload can be made with: one sentence each, as a ValueError."""

from __future__ import annotations

MESSAGE_TOKENS = 8
"""Tokens that a chat template may put around a message; what prompts are allowed for besides their texts."""


def at_least(least: float, **values: float) -> None:
    """Raise ValueError for the first value below ``least``."""
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")


def positive(**values: float) -> None:
    """Raise ValueError for the first value that is not above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above zero, got {value}.")


def fits(text_tokens: int, messages: int, answer_tokens: int, max_model_tokens: int | None, advice: str) -> None:
    """Raise ValueError, with what to do instead, when a prompt and its answer are longer than the model can take.

    ``text_tokens`` of ``messages`` messages, `MESSAGE_TOKENS` for each and for the beginning of the answer.
    ``max_model_tokens`` None: nothing is known about the model.
    """
    longest = text_tokens + (messages + 1) * MESSAGE_TOKENS + answer_tokens
    if max_model_tokens is not None and longest > max_model_tokens:
        raise ValueError(
            f"the longest request takes {longest:,} tokens, the model has room for {max_model_tokens:,}: {advice}."
        )
