"""What an engine step takes: seconds, linear in what it computes."""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDING = 1e-6  # a token that fits exactly fits


@dataclass(frozen=True, slots=True)
class StepCost:
    """``base_s + decode_s * decodes + prefill_s * prefill tokens + context_s * tokens that the decodes attend to``."""

    base_s: float
    decode_s: float
    prefill_s: float
    context_s: float = 0.0

    def seconds(self, decodes: int, prefill_tokens: int, context_tokens: int) -> float:
        """The time of one step."""
        return (
            self.base_s
            + self.decode_s * decodes
            + self.prefill_s * prefill_tokens
            + self.context_s * context_tokens
        )  # fmt: skip

    def prefill_budget(self, target_s: float, decodes: int, context_tokens: int) -> int:
        """The most prefill tokens of a step that takes no longer than ``target_s``; negative where none does."""
        return int((target_s - self.seconds(decodes, 0, context_tokens)) / self.prefill_s + _ROUNDING)
