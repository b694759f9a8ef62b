"""Directives: the moves that the manager orders and others carry out.

Those for a device are acknowledged with an `Outcome`; the books of what is under way are in
`kvmanager.moves.directive_ledger`. One that comes too late or finds no room is refused: it was to make something
faster, and is worth no wait of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from kvmanager.index.locations import Location
from kvmanager.moves.plan import Plan
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import SegmentSpan


class DirectiveKind(StrEnum):
    """A directive for a device, by the name that metrics and the HTTP API have for it."""

    EVICT = "evict"
    """Free blocks."""
    OFFLOAD = "offload"
    """Copy segments to the node's CPU tier, before something overwrites them."""
    ONBOARD = "promote"
    """Copy segments from a shared tier to the device, before a request asks for them."""
    MOVE = "move"
    """Bring what one device holds to another: offload what no shared tier has, then onboard."""


class Outcome(StrEnum):
    """How a directive ended."""

    DONE = "done"
    """Also when nothing was left to do."""
    REFUSED_LATE = "refused_late"
    """Its deadline had passed before it could begin, or, for an onboarding, before anything had come."""
    REFUSED_FULL = "refused_full"
    """There was no room for it, or only room that something hotter has; or too many directives were under way."""
    REFUSED_GONE = "refused_gone"
    """What it names is not where it should be, or its replica is unknown."""
    REFUSED_MODEL = "refused_model"
    """The model has windows or states, of which a device has only what its requests need."""
    FAILED = "failed"
    """A part that it needs did not do its work: a tier was gone, a segment not what was stored."""
    LOST = "lost"
    """It was not acknowledged in time."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Free what ``keys`` name at ``source``, in this order: children before parents.

    Segments of a shared tier, which the manager has already forgotten there: no answer is awaited. Of a device, single
    blocks: a block's key is its hash.
    """

    source: Location
    keys: tuple[SegmentKey, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy segments, a chain with parents first, from a device to its node's CPU tier."""

    spans: tuple[SegmentSpan, ...]


@dataclass(frozen=True, slots=True)
class Onboard:
    """Bring what a plan has of a sequence to a device; ``hashes`` are those of its blocks, as far as the plan goes."""

    hashes: tuple[BlockHash, ...]
    plan: Plan
    tenant: str = ""
    """Tag of the tenant whose KV it is; empty: none, or not known."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Empty a device, or of the blocks of a tenant (by tag)."""

    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Bring what the device of ``source`` holds of a sequence to that of ``target``, through the shared tiers.

    Replicas are named by their unique names or ranks. Unless ``keep``, the source frees its own once the target has it.
    """

    source: str | int
    target: str | int
    hashes: Sequence[BlockHash]
    keep: bool = True


DeviceDirective: TypeAlias = Evict | Offload | Onboard | Clear
"""What a replica carries out; a move is made of these."""

KINDS: dict[type, DirectiveKind] = {
    Evict: DirectiveKind.EVICT,
    Offload: DirectiveKind.OFFLOAD,
    Onboard: DirectiveKind.ONBOARD,
}
"""Kinds of those that are entered in the books (`kvmanager.moves.directive_ledger`)."""


class DirectiveOrder(NamedTuple):
    """A directive on its way to a replica."""

    number: int
    """With which it is acknowledged."""
    directive: DeviceDirective
    deadline_s: float
    """Seconds from its delivery after which it is void; infinite: it never is."""


class DirectiveResult(NamedTuple):
    """How a directive ended, and what it changed."""

    outcome: Outcome
    segments: int = 0
    blocks: int = 0
    """Device blocks."""
    step_s: float = 0.0
    """The longest time for which it held up the engine."""
