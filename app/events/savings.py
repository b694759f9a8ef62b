"""What reuse has saved since this ingress began, by tenant: tokens by their source, and the seconds of prefill.

A reused token's seconds are what its replica would have computed it in, by the prefill rate that the KV manager has
measured (`kvmanager.loading.load_rates.PrefillTime`): its own, and those of its pairs with the tokens before it. What
is not priced yet waits for a rate, and is never priced twice. Until there are samples enough for a rate, the first ones
say what it is about (`early`): that is shown, and not kept. So the number only grows once it is not early. It counts
computation, not time to the first token: what the loads took instead is not subtracted. One event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.metrics.usage import SOURCES
from deployments.protocol.wire import KVCacheUsage
from kvmanager.loading.load_rates import pairs

WINDOW_S = 60.0
"""Of the recent hit rates."""
_REUSED = SOURCES[:-1]


@dataclass(slots=True)
class Savings:
    """Of one tenant, or of all."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    prompts: int = 0
    seconds: float = 0.0
    unpriced_tokens: int = 0
    unpriced_pairs: float = 0.0
    early_prefill_s: Mapping[str, float] | None = None
    """The rate by its first samples; None: not known."""
    _marks: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)
    """When, and the tokens by then: of the last `WINDOW_S`."""

    def count(self, usage: KVCacheUsage) -> None:
        """One prompt has been computed."""
        given = {"device": usage["device"], "cpu": usage["cpu"], "redis": usage["redis"]}
        recomputed, reused = usage["recomputed"], sum(given.values())
        self.prompts += 1
        self.tokens["recomputed"] += recomputed
        for source, tokens in given.items():
            self.tokens[source] += tokens
        self.unpriced_tokens += reused
        self.unpriced_pairs += pairs(reused + recomputed, 0) - pairs(recomputed, reused)

    def price(self, prefill_s: Mapping[str, float] | None) -> None:
        """Turn what waits into seconds, by the rate in force; None: there is none yet."""
        if prefill_s is not None:
            self.seconds += self._worth(prefill_s)
            self.unpriced_tokens, self.unpriced_pairs = 0, 0.0

    def mark(self, now: float) -> None:
        """Remember the token counts by now: once a second while any client watches."""
        while self._marks and self._marks[0][0] < now - WINDOW_S:
            self._marks.popleft()
        self._marks.append((now, dict(self.tokens)))

    def report(self) -> dict[str, Any]:
        """`saved_prefill_s` is None while no prefill was measured at all; `saved_is_early`: few were."""
        waits, early = self.unpriced_tokens > 0, self.early_prefill_s
        seconds = self.seconds + (self._worth(early) if waits and early is not None else 0.0)
        return {
            "prompts": self.prompts,
            "tokens": dict(self.tokens),
            "hit_tokens": {source: self.tokens[source] for source in _REUSED},
            "saved_prefill_s": None if waits and not seconds else round(seconds, 3),
            "saved_is_early": waits and early is not None,
        }

    def _worth(self, prefill_s: Mapping[str, float]) -> float:
        """Seconds that what waits would have taken."""
        return prefill_s["per_token"] * self.unpriced_tokens + prefill_s["per_pair"] * self.unpriced_pairs

    def hit_rates(self) -> dict[str, tuple[float | None, float | None]]:
        """By tier the share of all prompts' tokens that it gave: ever, and lately; None: there were no prompts."""
        before = self._marks[0][1] if self._marks else dict.fromkeys(SOURCES, 0)
        lately = {source: self.tokens[source] - before[source] for source in SOURCES}
        return {source: (_share(source, self.tokens), _share(source, lately)) for source in _REUSED}


class AllSavings:
    """By tenant, and of all together (`everybody`). A tenant that had no prompt has none: there are only its zeros."""

    def __init__(self) -> None:
        self.everybody = Savings()
        self._of: dict[str, Savings] = {}

    def count(self, tenant: str, usage: KVCacheUsage) -> None:
        """One prompt of a tenant has been computed."""
        self.everybody.count(usage)
        self._of.setdefault(tenant, Savings()).count(usage)

    def of(self, tenant: str) -> Savings:
        """A tenant's own. As many are remembered as there are tenants with keys."""
        return self._of.setdefault(tenant, Savings())

    def tick(
        self, now: float, prefill_s: Mapping[str, float] | None, early_prefill_s: Mapping[str, float] | None = None
    ) -> None:
        """Price and mark all savings: once a second while any client watches. O(tenants).

        `prefill_s`: the rate, `early_prefill_s`: what few samples say of it; None: not known, or the manager is away.
        """
        for savings in self._all():
            savings.early_prefill_s = early_prefill_s or savings.early_prefill_s
            savings.price(prefill_s)
            savings.mark(now)

    def _all(self) -> Iterable[Savings]:
        yield self.everybody
        yield from self._of.values()


def _share(source: str, tokens: Mapping[str, int]) -> float | None:
    total = sum(tokens.values())
    return round(tokens[source] / total, 4) if total else None
