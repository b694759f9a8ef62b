"""State of a request's last preemption, kept until it runs again (`preempted_kv`)."""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.moves.plan import Plan


@dataclass(slots=True, eq=False)
class Preemption:
    """The last preemption of a request, until it runs again."""

    blocks: int
    """Full ones that it had computed."""
    saving: bool = False
    save_until: float = 0.0
    asked_at: float | None = None
    plan: Plan | None = None
    answered: bool = False
    over: bool = False
    """A plan that comes now is given back."""
    brings: bool = False
    """Something is being brought ahead, or has been: once."""
