"""Directives: the moves that the manager orders and others carry out."""

import math
from dataclasses import dataclass
from enum import StrEnum

from kvmanager.keys import SegmentKey
from kvmanager.locations import Location


class DirectiveKind(StrEnum):
    """What is to be done with the segments."""

    EVICT = "evict"
    """Free them at ``source``. The manager has already forgotten them there: no answer is awaited."""


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
