"""Directives: the moves that the manager orders and others carry out.

Those for a device are acknowledged with an `Outcome`; the books of what is under way are in
`kvmanager.moves.directive_ledger`. One that comes too late or finds no room is refused: it was to make something
faster, and is worth no wait of a request.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from kvmanager.index.locations import Location
from kvmanager.segments.keys import SegmentKey


class DirectiveKind(StrEnum):
    """What is to be done with the segments."""

    EVICT = "evict"
    """Free them at ``source``. For a shared tier the manager has already forgotten them there: no answer is awaited."""
    OFFLOAD = "offload"
    """Copy them from a device to its node's CPU tier, before something overwrites them there."""
    PROMOTE = "promote"
    """Copy them from a shared tier to a device, before a request asks for them."""
    MOVE = "move"
    """Bring what one device holds to another: offload what no shared tier has, then promote."""


class Outcome(StrEnum):
    """How a directive ended."""

    DONE = "done"
    """Also when nothing was left to do."""
    REFUSED_LATE = "refused_late"
    """Its deadline had passed before it could begin, or, for a promotion, before anything had come."""
    REFUSED_FULL = "refused_full"
    """There was no room for it, or only room that something hotter has; or too many directives were under way."""
    REFUSED_GONE = "refused_gone"
    """What it names is not where it should be, or its replica is unknown."""
    FAILED = "failed"
    """A part that it needs did not do its work: a tier was gone, a segment not what was stored."""
    LOST = "lost"
    """It was not acknowledged in time."""


@dataclass(frozen=True, slots=True)
class Directive:
    """One order. Keys are in the order in which they must be handled: children before parents for an eviction."""

    kind: DirectiveKind
    keys: tuple[SegmentKey, ...]
    """Empty only for a device: everything it holds."""
    source: Location | None
    target: Location | None
    deadline: float
    """Seconds on the manager's clock after which the order is void; infinite for an eviction."""


def evict(source: Location, keys: tuple[SegmentKey, ...]) -> Directive:
    """Return the order to free ``keys`` at ``source``."""
    return Directive(DirectiveKind.EVICT, keys, source, target=None, deadline=math.inf)
