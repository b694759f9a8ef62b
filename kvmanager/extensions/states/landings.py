"""Landings: block boundaries at which a prompt of a model with states may begin, since its states there are stored.

The states at a boundary are stored as a segment of their own: one block that follows on the block before the boundary,
under a name that no block of tokens has (`kvmanager.segments.keys.state_name`). So it is a leaf of the chain that it
needs, which is placed, leased and evicted as any other segment. A chain may be cut in any way, and never looks longer
or shorter than it can be used.
Pure: any thread.
"""

from dataclasses import dataclass
from typing import Final

from kvmanager.moves.plan import PlannedLoad

STATES: Final = "states"
"""Name of a `LandingQuery` in the extras of a query whose engine has states, of a `PlannedLanding` in a plan's, and of
the index of the token with which a prompt's last message begins in those of a request."""
NO_STATE: Final = "no_state"
"""Reason of a plan that loads nothing of a prompt whose beginning is stored: no states are, at any boundary of it."""


@dataclass(frozen=True, slots=True)
class LandingQuery:
    """What is asked for a prompt whose engine has states."""

    message_block: int = 0
    """The last boundary before the prompt's last message: others may begin alike up to there; 0: not known."""
    least_blocks: int = 1
    """How far behind stored states they are worth being kept."""


@dataclass(frozen=True, slots=True)
class PlannedLanding:
    """Where a prompt's computation begins, and where its states are worth being kept."""

    state: PlannedLoad | None = None
    """The states at the end of the plan's segments, under its lease; None: there are none, and no segments either."""
    kept_block: int = 0
    """The boundary behind the landing at which states are worth being kept: up to which the prompt is stored, without
    states, else that before its last message; 0: there is none."""
