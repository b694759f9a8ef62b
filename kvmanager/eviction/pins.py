"""Pins: chains that are not evicted for a while, whatever their hotness.

Pinning a segment also pins all that it continues, for a leaf without its head is of no use. A pin is about the tokens,
not about a place: it keeps every copy that a shared location has or gets meanwhile, and the ghosts of what is not
stored. It does not bring anything, and it does not hold up what a location loses or an operator clears: the pin stays
on the ghost then, and keeps what comes back.

Every pin ends by itself after its time to live. A pin belongs to a tenant; only that tenant may end it sooner. The pins
of a tenant together keep no more than its budget of bytes, in which a segment counts once, however many pins and copies
it has. Answers and refusals tell about the tenant's own pins only. Chains of two tenants share no segment, for the salt
is in every key. ``now`` never goes backwards. One thread.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvmanager.index.catalog import Catalog
from kvmanager.index.nodes import Node
from kvmanager.index.score_heap import OUTSIDE, ScoreHeap
from kvmanager.segments.keys import SegmentKey


class UnknownKeyError(ValueError):
    """A key names no segment that the index knows. Nothing was changed."""


class PinBudgetError(ValueError):
    """The tenant's pins would keep more bytes than they may. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class PinReport:
    """What a pin has done."""

    segments: int
    """Of the chains of the given keys."""
    nbytes: int
    """Size of these, each counted once."""
    pinned_bytes: int
    """Of all pins of the tenant, now."""
    budget_bytes: int
    until: float
    """The manager's clock when the pin ends; a key that was pinned for longer stays so."""


class _Pin:
    __slots__ = ("deadline", "node", "position", "since", "tenant")

    def __init__(self, node: Node, tenant: str, now: float, deadline: float) -> None:
        self.node = node
        self.tenant = tenant
        self.since = now
        self.deadline = deadline
        self.position = OUTSIDE


class Pins:
    """The pinned chains, by the key of their last segment."""

    def __init__(
        self,
        catalog: Catalog,
        budget_bytes: int,
        longest_s: float,
        tenant_budgets: Mapping[str, int] | None = None,
    ) -> None:
        """``tenant_budgets``: by tag, the parts of ``budget_bytes``; None: all tenants share it."""
        self._catalog = catalog
        self._budget_bytes = budget_bytes
        self._tenant_budgets = tenant_budgets
        self._longest_s = longest_s
        self._pins: dict[SegmentKey, _Pin] = {}
        self._by_deadline: ScoreHeap[_Pin] = ScoreHeap()
        self._bytes: Counter[str] = Counter()
        """Bytes that the pins keep, by tenant."""

    def pin(self, now: float, keys: Sequence[SegmentKey], ttl_s: float, tenant: str = "") -> PinReport:
        """Pin the chains that end with ``keys`` for ``ttl_s`` seconds; a key pinned before, for the longer of both.

        Raises ValueError for a time out of bounds, `UnknownKeyError` and `PinBudgetError`; nothing is changed then.
        O(segments of the chains).
        """
        if not 0 < ttl_s <= self._longest_s:
            raise ValueError(f"a pin lasts more than 0 and up to {self._longest_s:g} seconds, got {ttl_s}")
        payer = self._payer(tenant)
        ends = self._nodes(keys)
        if any((pin := self._pins.get(end.key)) is not None and pin.tenant != tenant for end in ends):
            raise UnknownKeyError("a segment is pinned by another tenant, so it cannot be one of this one")
        members = {node: None for end in ends for node in _chain(end)}
        budget = self._budget_of(tenant)
        grown = self._bytes[payer] + sum(node.nbytes for node in members if not node.pins)
        if grown > budget:
            setting = "kv.pin_budget_bytes" if self._tenant_budgets is None else "tenants.NAME.pin_bytes"
            raise PinBudgetError(
                f"the pins would keep {grown} bytes, more than their budget of {budget}; unpin something or raise "
                f"{setting}"
            )
        deadline = now + ttl_s
        for end in ends:
            pin = self._pins.get(end.key)
            if pin is None:
                pin = self._pins[end.key] = _Pin(end, tenant, now, deadline)
                self._by_deadline.push(pin, deadline)
                for node in _chain(end):
                    self._catalog.pin(node)
            elif deadline > pin.deadline:
                pin.deadline = deadline
                self._by_deadline.update(pin, deadline)
        self._bytes[payer] = grown
        return PinReport(len(members), sum(node.nbytes for node in members), grown, budget, deadline)

    def unpin(self, keys: Sequence[SegmentKey], tenant: str = "") -> list[SegmentKey]:
        """End a tenant's pins of ``keys``; return those that had one of it.

        What other pins share with them stays pinned. Raises `UnknownKeyError`, and nothing is changed then.
        O(segments of the chains).
        """
        pins = [self._pins.get(node.key) for node in self._nodes(keys)]
        ended = [pin.node.key for pin in pins if pin is not None and pin.tenant == tenant]
        for key in ended:
            self._end(self._pins[key])
        return ended

    def expire(self, now: float) -> None:
        """End the pins whose time is over. O(segments of their chains)."""
        while (pin := self._by_deadline.lowest()) is not None and pin.deadline <= now:
            self._end(pin)

    def report(self, now: float) -> dict[str, float]:
        """Return numbers for the statistics. O(pins)."""
        return {
            "pins": len(self._pins),
            "pinned_bytes": self._bytes.total(),
            "pin_budget_bytes": self._budget_bytes,
            "oldest_pin_s": now - min((pin.since for pin in self._pins.values()), default=now),
        }

    def report_of(self, tenant: str) -> dict[str, int]:
        """Return a tenant's own numbers. O(pins)."""
        return {
            "pins": sum(pin.tenant == tenant for pin in self._pins.values()),
            "pinned_bytes": self._bytes[self._payer(tenant)],
            "pin_budget_bytes": self._budget_of(tenant),
        }

    def _payer(self, tenant: str) -> str:
        """Whose budget a tenant's pins count in: its own, or the one that all share."""
        return "" if self._tenant_budgets is None else tenant

    def _budget_of(self, tenant: str) -> int:
        return self._budget_bytes if self._tenant_budgets is None else self._tenant_budgets.get(tenant, 0)

    def _end(self, pin: _Pin) -> None:
        del self._pins[pin.node.key]
        self._by_deadline.discard(pin)
        for node in _chain(pin.node):
            self._catalog.unpin(node)
            if not node.pins:
                self._bytes[self._payer(pin.tenant)] -= node.nbytes

    def _nodes(self, keys: Sequence[SegmentKey]) -> list[Node]:
        nodes = self._catalog.trie.nodes
        for key in keys:
            if key not in nodes:
                raise UnknownKeyError(f"no segment {key.hex()} is known, so nothing was changed; see /api/v1/kv/lookup")
        return [nodes[key] for key in dict.fromkeys(keys)]


def _chain(end: Node) -> Iterator[Node]:
    """Yield a node and all its ancestors."""
    node: Node | None = end
    while node is not None:
        yield node
        node = node.parent
