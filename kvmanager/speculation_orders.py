"""The words that speculation speaks: what to weigh, what is ordered of a device, and what came of it."""

from dataclasses import dataclass
from typing import NamedTuple

from kvmanager.directives import DirectiveKind
from kvmanager.keys import BlockHash


@dataclass(frozen=True, slots=True)
class SpeculationSetting:
    """What to weigh, and the bounds. Loading is that of the tier that is promoted from."""

    window_share: float = 0.5
    """How far ahead to look, of the median think time. Longer: fewer moves, and more room for turns not due yet."""
    least_window_s: float = 1.0
    least_probability: float = 0.03
    """Of a turn in the window: below it a conversation is not worth any room."""
    advantage: float = 1.3
    """A conversation takes the place of others only if it is worth so many times as much, lest they take turns."""
    load_latency_s: float = 0.02
    """What a load costs a request whatever its size: a turn of a transfer thread and of the engine."""
    load_bytes_per_s: float = 5e9
    move_bytes_per_s: float = 1e9
    """Promotions to one replica, on average."""
    order_s: float = 2.0
    """An order that is not carried out by then is refused as late."""
    retry_s: float = 5.0
    """After an order failed, the conversation, or for a full device the replica, is left alone for so long."""
    pin_s: float = 60.0
    """A pin that nobody renews ends after so long."""
    horizon_s: float = 3600.0
    """After such a silence a conversation is forgotten."""
    most_blocks: int = 1_000_000
    """Of all remembered conversations, at 32 bytes each; the oldest are forgotten first."""


class Order(NamedTuple):
    """One order, to a replica's device: promote (bring what is missing of the blocks), pin (for ``ttl_s``), unpin."""

    order_id: int
    """0 for an unpin, whose outcome nobody waits for."""
    kind: DirectiveKind
    replica: str
    hashes: list[BlockHash]
    """For a promotion and a pin: of all of a conversation's blocks, from block 0 on."""
    deadline_s: float
    """Seconds from now after which it shall be refused."""
    ttl_s: float


@dataclass(slots=True)
class SpeculationCounters:
    """What came of it. A next turn is found or missed; a promotion is used or wasted in the end, unless refused."""

    answers: int = 0
    next_turns: int = 0
    found: int = 0
    """Next turns whose whole known KV was on the device of the replica that they came to."""
    missed: int = 0
    predicted: int = 0
    """Promotions that were ordered."""
    promoted: int = 0
    used: int = 0
    wasted: int = 0
    wasted_blocks: int = 0
    pinned: int = 0
    refused: int = 0
    """Promotions and pins."""
    forgotten: int = 0
    """Conversations dropped for want of memory, before their time."""
