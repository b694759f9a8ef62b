"""Virtual token counters: what tenants have been served, so that the tenant served least is next.

After VTC (Sheng et al., *Fairness in Serving Large Language Models*, OSDI 2024, algorithms 2 and 4). A tenant's counter
grows by the cost of its work divided by its weight. The cost is in prompt tokens: an answer token counts `ANSWER_COST`
of them, a prompt token whose KV was reused `CACHED_COST` (fairness that does not punish locality: D2LPM, arXiv
2501.14312). Costs are charged before the work, as predicted, and corrected while it is done: only then they are known,
and this is why it is counters and not rounds with deficits.

Invariants:

* *lift*: a tenant that begins to wait has a counter no less than the least of those that wait, or, where none waits,
  than that of the tenant whose turn was last. An idle tenant has saved nothing up, and one that was served alone owes
  nothing. The comparison leaves out what is *prepaid*, charged for answers that are not sampled yet: ending them early
  gives that back, and a tenant that prepays much and ends early would have saved it up;
* of two tenants that both wait all the time, what each was served, divided by its weight, differs by no more than what
  one has under way and one turn (VTC, theorem 4.4), however dear or wrongly predicted their requests are;
* of equal counters, the tenant served longest ago is next.

O(tenants that wait) for each call, and O(log of them) more for an order. Pure; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

ANSWER_COST = 2.0
"""Prompt tokens that a sampled token costs as much as (VTC's weights)."""
CACHED_COST = 0.02
"""Of a prompt token whose KV is reused: it takes up room, and has to be loaded."""


def prompt_cost(prompt_tokens: int, cached_tokens: int) -> float:
    """Return the cost of a prompt that reuses the KV of ``cached_tokens``."""
    cached = min(max(cached_tokens, 0), prompt_tokens)
    return prompt_tokens - cached + CACHED_COST * cached


class VirtualCounters:
    """See the module's docstring. Tenants are known from the start."""

    def __init__(self, tenants: Iterable[str], weights: Mapping[str, float] | None = None) -> None:
        """``weights`` by tenant, above 0; 1 for a tenant without one. Raises ValueError for another weight."""
        self._weights = {tenant: (weights or {}).get(tenant, 1.0) for tenant in tenants}
        if any(not weight > 0 for weight in self._weights.values()):
            raise ValueError(f"a tenant's weight is above 0, got {self._weights}")
        self._counters = dict.fromkeys(self._weights, 0.0)
        self._prepaid = dict.fromkeys(self._weights, 0.0)
        self._turn_of = dict.fromkeys(self._weights, 0)
        """The number of each tenant's last turn."""
        self._turns = 0
        self._last: str | None = None
        """Whose turn was the last one."""

    def counter(self, tenant: str) -> float:
        """Return a tenant's counter, which only means something compared with another's."""
        return self._counters[tenant]

    def begins_to_wait(self, tenant: str, others: Collection[str]) -> None:
        """Lift a tenant that did not wait and does now; ``others`` are those that wait already."""
        ahead = others or (() if self._last is None else (self._last,))
        if ahead:
            least = min(self._counters[other] - self._prepaid[other] for other in ahead)
            self._counters[tenant] = max(self._counters[tenant], least + self._prepaid[tenant])

    def in_order(self, waiting: Iterable[str]) -> list[str]:
        """Return those that wait, whose turn is next first."""
        return sorted(waiting, key=lambda tenant: (self._counters[tenant], self._turn_of[tenant]))

    def turn(self, tenant: str) -> None:
        """A tenant has a turn now."""
        self._turns += 1
        self._turn_of[tenant] = self._turns
        self._last = tenant

    def charge(self, tenant: str, cost: float, prepaid: float = 0.0) -> None:
        """Charge a tenant ``cost`` more than was expected of its work, or less where it is below 0.

        ``prepaid``: by how much more of what it was charged the work is still to be done.
        """
        self._counters[tenant] += cost / self._weights[tenant]
        self._prepaid[tenant] += prepaid / self._weights[tenant]


@dataclass(frozen=True, slots=True)
class ServedWork:
    """What one prompt is expected to be, in tokens; ``answer_tokens`` of all its answers."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0

    @property
    def cost(self) -> float:
        """In uncached prompt tokens."""
        return prompt_cost(self.prompt_tokens, self.cached_tokens) + ANSWER_COST * self.answer_tokens


class Bill:
    """The cost of one prompt and its answers: predicted when it is sent, corrected as it is served, final at its end.

    Nothing is charged before `send` or after `close`.
    """

    __slots__ = (
        "_answers", "_counters", "_open", "_prepaid", "_prompt", "_sampled", "_tenant", "expected", "on_close",
    )  # fmt: skip

    def __init__(self, counters: VirtualCounters, tenant: str, expected: ServedWork) -> None:
        self.expected = expected
        self.on_close: Callable[[str, float], None] = lambda tenant, cost: None
        """Told what it came to."""
        self._counters = counters
        self._tenant = tenant
        self._open = False
        self._prompt = self._answers = 0.0
        """What was charged for the prompt, and for its answers."""
        self._prepaid = 0.0
        """Of the latter, for tokens that are not sampled yet."""
        self._sampled = 0

    def send(self) -> None:
        """The prompt has its turn: charge what is expected."""
        self._open = True
        self.prompt_was(self.expected.cached_tokens)
        self._charge_answers(ANSWER_COST * self.expected.answer_tokens)

    def prompt_was(self, cached_tokens: int) -> None:
        """It is known now of how many of the prompt's tokens the KV was reused."""
        if self._open:
            cost = prompt_cost(self.expected.prompt_tokens, cached_tokens)
            self._counters.charge(self._tenant, cost - self._prompt)
            self._prompt = cost

    def sampled(self, tokens: int) -> None:
        """Note that ``tokens`` more were sampled, and charge at once for those beyond what was expected."""
        if self._open:
            self._sampled += tokens
            self._charge_answers(max(self._answers, ANSWER_COST * self._sampled))

    def close(self) -> None:
        """It has ended, in whatever way: what was expected and not sampled is given back. Idempotent."""
        if self._open:
            self._charge_answers(ANSWER_COST * self._sampled)
            self._open = False
            self.on_close(self._tenant, self._prompt + self._answers)

    def _charge_answers(self, cost: float) -> None:
        prepaid = cost - ANSWER_COST * self._sampled
        self._counters.charge(self._tenant, cost - self._answers, prepaid - self._prepaid)
        self._answers, self._prepaid = cost, prepaid
