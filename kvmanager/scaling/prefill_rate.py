"""How long a replica's queued prompts take: tokens times seconds per token, of the prompts that were computed last.

The manager's rates (`kvmanager.loading.load_rates`) tell tiers apart and lie in another process; what is wanted here is
one figure that is there at once. A sample counts by its tokens, and half as much after `HALF_LIFE_TOKENS` more. One
thread.
"""

from __future__ import annotations

HALF_LIFE_TOKENS = 16_384.0


class PrefillRate:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Note that a prompt's `tokens` were computed in `seconds`. Impossible values are ignored."""
        if tokens <= 0 or not 0.0 < seconds < float("inf"):
            return
        fade = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds

    def seconds(self, tokens: int) -> float | None:
        """Return how long `tokens` take, 0 for none; None before anything was computed."""
        if tokens <= 0:
            return 0.0
        return tokens * self._seconds / self._tokens if self._tokens else None
