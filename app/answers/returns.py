"""Learns which answers come back: what a template strips from history is not worth being stored.

The ingress sees it when a conversation goes on: the answer is in the new prompt as it was sampled, or it is not. That
is seen whether or not the answer's KV was stored, so nothing has to be stored for the sake of finding out.
"""

from __future__ import annotations

from typing import Literal

from app.gate.observed_prompt import Kind

Saving = Literal["auto", "always", "never"]
"""The setting `kv.save_answers`."""

WORTH_SAVING = 0.1
"""The share that must come back. Storing an answer costs some hundredth of computing it again."""
_KEPT = 0.98
"""What a vote weighs after the next one: some 50 count."""
_START = 8.0
"""Votes that an unknown kind begins with: its answers are stored until experience says otherwise, 42 times."""


class Returns:
    """Shares of answers that come back, by their kind. There are four kinds for each tenant."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._votes: dict[Kind, tuple[float, float]] = {}

    def see(self, kind: Kind, came_back: bool) -> None:
        """A conversation has gone on after an answer of this kind."""
        back, gone = self._votes.get(kind, (_START, 0.0))
        self._votes[kind] = _KEPT * back + came_back, _KEPT * gone + (not came_back)

    def share(self, kind: Kind) -> float:
        """The decayed share of such answers that came back; 1 without experience."""
        back, gone = self._votes.get(kind, (_START, 0.0))
        return back / (back + gone)

    def worth_saving(self, kind: Kind | None) -> bool:
        """Whether to store the KV of such an answer; None: it is no chat's, and nothing is learned of it."""
        if self._saving == "auto" and kind is not None:
            return self.share(kind) >= WORTH_SAVING
        return self._saving != "never"
