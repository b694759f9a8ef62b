"""Prompts so short that computing them is faster than loading anything: they need no plan, and do not wait for one.

The manager says with each plan how long such prompts may be (`kvmanager.loading.load_choice`). That is believed for
`TRUST_S`, and one in `ASK_EVERY` of them is planned all the same, so that the answer stays young. One thread.
"""

from __future__ import annotations

from math import inf

TRUST_S = 30.0
ASK_EVERY = 32


class ShortPrompts:
    """See the module's docstring. Times are seconds on any clock that does not jump."""

    def __init__(self) -> None:
        self._below_tokens = 0
        self._heard_at = -inf
        self._skipped = 0

    def heard(self, now: float, below_tokens: int) -> None:
        """Note what the manager said with a plan."""
        self._below_tokens = below_tokens
        self._heard_at = now

    def skips(self, now: float, prompt_tokens: int) -> bool:
        """Whether a prompt is not worth a plan."""
        if prompt_tokens >= self._below_tokens or now - self._heard_at > TRUST_S:
            return False
        self._skipped += 1
        return self._skipped % ASK_EVERY != 0
