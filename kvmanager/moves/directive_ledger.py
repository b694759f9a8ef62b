"""The books of directives for devices: which are under way, and how those before them ended.

Life of a directive: begun (or refused at once) → acknowledged, or lost when its deadline passes or its replica goes.
Invariants: every directive that was asked for is counted once, under one outcome; at most ``most_in_flight`` are under
way at a replica, so that a replica that does not answer is not sent an endless queue. One thread.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvmanager.moves.directives import DirectiveKind, Outcome
from kvmanager.moves.leases import Numbers


@dataclass(frozen=True, slots=True)
class _OpenDirective:
    kind: DirectiveKind
    replica: str
    lost_at: float


class DirectiveLedger:
    """See the module. ``now`` and deadlines are seconds on the manager's clock.

    ``grace_s``: how long after its deadline an acknowledgement is still waited for.
    """

    def __init__(self, grace_s: float, numbers: Numbers, most_in_flight: int = 8) -> None:
        self._grace_s = grace_s
        self._most_in_flight = most_in_flight
        self._in_flight: dict[int, _OpenDirective] = {}
        self._at_replica: Counter[str] = Counter()
        self._outcomes: Counter[tuple[DirectiveKind, Outcome]] = Counter()
        self._worst_step_s: dict[DirectiveKind, float] = {}
        self._blocks: Counter[DirectiveKind] = Counter()
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._in_flight)

    def in_flight_at(self, replica: str) -> int:
        """Return how many directives a replica has not acknowledged yet."""
        return self._at_replica[replica]

    def begin(self, now: float, kind: DirectiveKind, replica: str, deadline: float) -> int | Outcome:
        """Note that a directive is sent to a replica; return its id, or why it is not to be sent."""
        if deadline <= now:
            return self.count(kind, Outcome.REFUSED_LATE)
        if self._at_replica[replica] >= self._most_in_flight:
            return self.count(kind, Outcome.REFUSED_FULL)
        order_id = self._numbers.next()
        self._in_flight[order_id] = _OpenDirective(kind, replica, deadline + self._grace_s)
        self._at_replica[replica] += 1
        return order_id

    def acknowledge(self, order_id: int, outcome: Outcome, blocks: int = 0, step_s: float = 0.0) -> bool:
        """Note how a directive ended; False when it is not under way, for example because it was counted as lost.

        ``blocks``: device blocks that it changed; ``step_s``: the longest time for which it held up the engine.
        """
        flight = self._in_flight.pop(order_id, None)
        if flight is None:
            return False
        self._left(flight.replica)
        self.count(flight.kind, outcome)
        self._blocks[flight.kind] += blocks
        self._worst_step_s[flight.kind] = max(step_s, self._worst_step_s.get(flight.kind, 0.0))
        return True

    def expire(self, now: float) -> list[int]:
        """Count as lost what should have been acknowledged long ago; return the ids. O(in flight)."""
        return self._lose([order_id for order_id, flight in self._in_flight.items() if flight.lost_at <= now])

    def forget_replica(self, replica: str) -> list[int]:
        """Count as lost what a replica that is gone had to do; return the ids. O(in flight)."""
        return self._lose([order_id for order_id, flight in self._in_flight.items() if flight.replica == replica])

    def count(self, kind: DirectiveKind, outcome: Outcome) -> Outcome:
        """Count a directive that was never begun, or one that is made of others; return its outcome."""
        self._outcomes[kind, outcome] += 1
        return outcome

    def report(self) -> dict[str, Any]:
        """Describe the books, by kind: how directives ended, the blocks they changed, their worst added step time."""
        outcomes: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self._outcomes.items()):
            outcomes.setdefault(kind.value, {})[outcome.value] = count
        return {
            "in_flight": len(self._in_flight),
            "outcomes": outcomes,
            "blocks": {kind.value: count for kind, count in sorted(self._blocks.items())},
            "worst_step_s": {kind.value: seconds for kind, seconds in sorted(self._worst_step_s.items())},
        }

    def _lose(self, order_ids: list[int]) -> list[int]:
        for order_id in order_ids:
            flight = self._in_flight.pop(order_id)
            self._left(flight.replica)
            self.count(flight.kind, Outcome.LOST)
        return order_ids

    def _left(self, replica: str) -> None:
        self._at_replica[replica] -= 1
        if not self._at_replica[replica]:
            del self._at_replica[replica]
