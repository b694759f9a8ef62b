"""What a replica says of its built engine when it registers with the manager: no setting holds it.

What else an engine knows reaches the manager with what it belongs to: a load path's terms with each prompt
(`PlanQuery.extras`), bytes and blocks with each segment. The size of a block is the setting's: an engine that has
another one shares no KV, and says so here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """See the module's docstring."""

    fingerprint: bytes
    """Of all that its KV depends on other than tokens: KV under another one is a mismatch."""
    apart: str = ""
    """Why it shares no KV, in words, where the settings and the model's files do not say so; empty: they do, or it
    shares KV."""
