"""What computing and loading take, measured: for plans (`kvmanager.loading.load_choice`) and for the router's credits.

Replicas report how long prefills and loads took. Two fits (`kvmanager.loading.changing_time`):

* prefill: ``fixed + per_token * tokens + per_pair * pairs``, where *pairs* are the pairs of a computed token and one
  before it, what attention computes: tokens that follow a long context cost more. A transformer's
  linear operators go by tokens and its attention by pairs (Vidur, arXiv 2405.05465, section 4).
* a load from a tier: ``latency + bytes / rate``, of the bytes as they are stored there. Loads are measured whole where
  they are waited for, at the replica: the network, the object store, decoding, verifying and writing into the device
  are all in it, whatever the codec. Bytes that were on their way from there already when a load was planned count as
  its own: it waits for them too.

A load that was given up took longer than it was waited for; it counts as twice that, or as twice what was expected, so
a link that brings nothing doubles its price with each load that it wastes.

A credit is the share of its prefill that a token saves, ``1 - load time / recompute time``, for a load of the size that
was typical for the tier lately. Until there are `ENOUGH` samples nothing is known, and a tier's starting credit stands.
One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from kvmanager.index.locations import Tier
from kvmanager.loading.changing_time import ChangingTime

ENOUGH = 4
"""Fewer samples say too little. One load that was given up says enough."""
PREFILL_HALF_LIFE_SAMPLES, PREFILL_HALF_LIFE_S = 32.0, 600.0
LOAD_HALF_LIFE_SAMPLES, LOAD_HALF_LIFE_S = 8.0, 30.0
"""A sample counts half after this many samples, or this many seconds. A network changes sooner than a processor."""
SAME_CREDIT = 0.1
"""A replica's credit that is no further from that of all is taken for chance. Chosen, not measured."""
_SIZE_HALF_LIFE = 16.0


class LinearTime(NamedTuple):
    """``seconds = latency_s + amount / per_s``; a rate may be infinite."""

    latency_s: float
    per_s: float

    def seconds(self, amount: float) -> float:
        """Return how long ``amount`` takes."""
        return self.latency_s + amount / self.per_s


class PrefillTime(NamedTuple):
    """What computing KV takes: once, per token, and per pair of a token and one before it."""

    fixed_s: float
    per_token_s: float
    per_pair_s: float = 0.0

    def seconds(self, tokens: float, context: float = 0) -> float:
        """Return how long ``tokens`` take that follow ``context`` tokens; nothing for none."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs(tokens, context)


def pairs(tokens: float, context: float) -> float:
    """Return the pairs of one of ``tokens`` and one before it, the ``context`` before them included."""
    return tokens * (context + tokens / 2)


@dataclass(slots=True)
class _TypicalSize:
    """Decayed means of what was loaded from a tier, or computed."""

    tokens: float = 0.0
    nbytes: float = 0.0
    ahead: float = 0.0

    def add(self, tokens: float, nbytes: float, ahead: float) -> None:
        keep = 0.5 ** (1.0 / _SIZE_HALF_LIFE) if self.tokens else 0.0
        self.tokens = keep * self.tokens + (1 - keep) * tokens
        self.nbytes = keep * self.nbytes + (1 - keep) * nbytes
        self.ahead = keep * self.ahead + (1 - keep) * ahead


class LoadRates:
    """The rates of one replica, or of all that are alike. ``now``: seconds on any clock that does not jump."""

    def __init__(self, starting_credits: Mapping[Tier, float]) -> None:
        self._starting = dict(starting_credits)
        self._prefill = ChangingTime(2, PREFILL_HALF_LIFE_SAMPLES, PREFILL_HALF_LIFE_S)
        self._loads = {tier: ChangingTime(1, LOAD_HALF_LIFE_SAMPLES, LOAD_HALF_LIFE_S) for tier in self._starting}
        self._sizes = {tier: _TypicalSize() for tier in self._starting}
        self._given_up: set[Tier] = set()

    def prefilled(self, tokens: int, seconds: float, context: int = 0, *, now: float = 0.0) -> None:
        """Note that ``tokens`` were computed after ``context`` in ``seconds``. What cannot be is ignored."""
        if tokens > 0 and context >= 0 and 0 < seconds < inf:
            self._prefill.add((tokens, pairs(tokens, context)), seconds, now)

    def loaded(
        self, tier: Tier, tokens: int, nbytes: float, seconds: float, ahead: float = 0.0, *, now: float = 0.0
    ) -> None:
        """Note that a load of ``tokens``, ``nbytes`` as they were stored, came from ``tier`` in ``seconds``, in all.

        ``ahead``: bytes that were on their way already. What cannot be is ignored, and a tier without a starting value.
        """
        if tier in self._loads and tokens > 0 and nbytes > 0 and ahead >= 0 and 0 < seconds < inf:
            self._loads[tier].add((nbytes + ahead,), seconds, now)
            self._sizes[tier].add(tokens, nbytes, ahead)

    def given_up(self, tier: Tier, nbytes: float, seconds: float, ahead: float = 0.0, *, now: float = 0.0) -> None:
        """Note that ``nbytes`` from ``tier`` had not come after ``seconds``, when their load was given up."""
        if tier in self._loads and nbytes > 0 and ahead >= 0 and 0 < seconds < inf:
            load = self._loads[tier]
            load.add((nbytes + ahead,), 2 * max(seconds, load.seconds(nbytes + ahead)), now, changed=True)
            self._given_up.add(tier)

    def tier_is_back(self, tier: Tier) -> None:
        """Note that a tier has restarted: if loads from it were given up before, nothing is known of it now."""
        if tier in self._given_up:
            self._given_up.discard(tier)
            self._loads[tier] = ChangingTime(1, LOAD_HALF_LIFE_SAMPLES, LOAD_HALF_LIFE_S)

    def prefill(self) -> PrefillTime | None:
        """Return what computing takes, None while there are too few samples."""
        return PrefillTime(*self._prefill.coefficients) if self._prefill.samples >= ENOUGH else None

    def early_prefill(self) -> PrefillTime | None:
        """Return what the samples say that there are, few as they may be; None without any. No choice rests on it."""
        return PrefillTime(*self._prefill.coefficients) if self._prefill.samples else None

    def tier_time(self, tier: Tier) -> LinearTime | None:
        """Return a tier's latency and bytes per second, None while there are too few samples."""
        load = self._loads.get(tier)
        if load is None or not (load.samples >= ENOUGH or tier in self._given_up):
            return None
        latency_s, per_byte_s = load.coefficients
        return LinearTime(latency_s, 1.0 / per_byte_s if per_byte_s else inf)

    def sampled_at(self, tier: Tier) -> float:
        """Return when the last load from a tier was reported; minus infinity without any."""
        return self._loads[tier].last_at if tier in self._loads else -inf

    def bytes_per_token(self, tier: Tier) -> float:
        """Return what a token's KV from a tier has lately been; 0 while nothing has been loaded."""
        size = self._sizes.get(tier)
        return size.nbytes / size.tokens if size is not None and size.tokens else 0.0

    def measured(self) -> dict[Tier, float]:
        """Return what share of its prefill a token saves, from 0 to 1, by tier, where there are samples enough."""
        prefill = self.prefill()
        if prefill is None:
            return {}
        shares = {}
        for tier, size in self._sizes.items():
            time = self.tier_time(tier)
            if time is not None and not size.tokens:
                shares[tier] = 0.0  # nothing ever arrived
            elif time is not None:
                recompute_s = prefill.seconds(size.tokens)
                shares[tier] = min(1.0, max(0.0, 1.0 - time.seconds(size.nbytes + size.ahead) / recompute_s))
        return shares

    def credits(self) -> dict[Tier, float]:
        """Return the measured shares, and the starting values where there are none."""
        return {**self._starting, **self.measured()}


Sample: TypeAlias = (
    tuple[Literal["prefill"], int, float]
    | tuple[Literal["prefill"], int, float, int]
    | tuple[Literal["load"], str, int, int, float]
)
"""What a replica reports: ("prefill", tokens, seconds, tokens before them if any) or ("load", tier, tokens, bytes as
they are stored at the tier, seconds)."""
ExtensionSample: TypeAlias = tuple[str, float, float]
"""What a replica reports of an extension: (its name, seconds that its plan said, seconds)."""
LateSample: TypeAlias = tuple[Literal["late"], str, int, float]
"""("late", tier, bytes that had not all come, seconds after which they were given up)."""

ALL_REPLICAS = ""
"""The name under which the rates of all replicas together stand."""


class ClusterRates:
    """The rates of every replica, and of all together for a replica that has too few samples of its own. One thread."""

    def __init__(self, starting_credits: Mapping[Tier, float]) -> None:
        self._starting = dict(starting_credits)
        self._rates = {ALL_REPLICAS: LoadRates(starting_credits)}

    def report(
        self,
        replica: str,
        samples: Iterable[Sample | LateSample],
        now: float = 0.0,
        ahead_of: Callable[[Tier, int], float] = lambda tier, nbytes: 0.0,
    ) -> None:
        """Take in what a replica measured at ``now``. Samples of unknown tiers are ignored.

        ``ahead_of(tier, nbytes)``: the bytes that were on their way from a tier before a load of ``nbytes``.
        """
        known = {tier.value: tier for tier in Tier}
        own = self._rates.setdefault(replica, LoadRates(self._starting))
        for sample in samples:
            if sample[0] == "prefill":
                context = sample[3] if len(sample) == 4 else 0
                for rates in (own, self._rates[ALL_REPLICAS]):
                    rates.prefilled(sample[1], sample[2], context, now=now)
            elif (tier := known.get(sample[1])) is not None:
                nbytes = sample[2] if sample[0] == "late" else sample[3]
                before = ahead_of(tier, nbytes)
                for rates in (own, self._rates[ALL_REPLICAS]):
                    if sample[0] == "late":
                        rates.given_up(tier, nbytes, sample[3], before, now=now)
                    else:
                        rates.loaded(tier, sample[2], nbytes, sample[4], before, now=now)

    def prefill(self, replica: str) -> PrefillTime | None:
        """Return what computing takes at a replica, or where it has too few samples, at all of them."""
        own = self._rates.get(replica)
        return (own.prefill() if own else None) or self._rates[ALL_REPLICAS].prefill()

    def early_prefill(self) -> PrefillTime | None:
        """Return what computing takes at all replicas, by however few samples; None without any."""
        return self._rates[ALL_REPLICAS].early_prefill()

    def tier(self, replica: str, tier: Tier) -> LoadRates:
        """Return the rates to judge a tier by: the replica's own, or where it has too few samples, those of all."""
        own = self._rates.get(replica)
        return own if own is not None and own.tier_time(tier) is not None else self._rates[ALL_REPLICAS]

    def tier_is_back(self, tier: Tier) -> None:
        """Note that a tier has restarted."""
        for rates in self._rates.values():
            rates.tier_is_back(tier)

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone."""
        if replica != ALL_REPLICAS:
            self._rates.pop(replica, None)

    def credits(self, now: float = 0.0) -> dict[str, dict[str, float]]:
        """Return the measured credits by replica (`ALL_REPLICAS` too) and tier, to be sent to routers.

        A replica's own differs from that of all only where it differs by more than `SAME_CREDIT`, or chance would send
        every prompt to the replica that was luckier; and less and less with the time since it was measured, for a
        replica that no router chooses measures nothing that could redeem it.
        """
        measured = {name: rates.measured() for name, rates in self._rates.items()}
        common = measured[ALL_REPLICAS]
        found: dict[str, dict[str, float]] = {}
        for name, shares in measured.items():
            for tier, share in shares.items():
                age_s = max(0.0, now - self._rates[name].sampled_at(tier))
                of_all = common.get(tier, share)
                apart = (share - of_all) * 0.5 ** (age_s / LOAD_HALF_LIFE_S)
                found.setdefault(name, {})[tier.value] = of_all + (apart if abs(apart) > SAME_CREDIT else 0.0)
        return found
