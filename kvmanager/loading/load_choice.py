"""Load or recompute: what a plan loads of what is stored, by measured rates, and why.

`kvmanager.loading.load_split` says what is best by what is known. What is *not* known is the rest of the matter:

* Nothing is measured yet: load, for that measures it; but no more than `MOST_UNMEASURED` loads at a time from a tier
  without a measurement, lest a burst of prompts wait for a slow one. Where everything is loaded,
  computing stays unmeasured: once loads are measured, one in `PREFILL_PROBE` such plans loads nothing.
* What is not done is not measured: a few plans do it nevertheless (`kvmanager.loading.probes`).

What extensions of plans bring is chosen by them, after the prompt's own chain, by the same rates (`LoadChoice.add`).

Loads that were planned and have not ended are known by their bytes (`kvmanager.loading.loads_under_way`). One thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple, Protocol, cast

from kvmanager.index.locations import Location, Tier
from kvmanager.loading.load_rates import (
    ALL_REPLICAS,
    ClusterRates,
    ExtensionSample,
    LateSample,
    LinearTime,
    PrefillTime,
    Sample,
)
from kvmanager.loading.load_split import Split, StoredPart, best_split, load_times
from kvmanager.loading.loads_under_way import LoadsUnderWay
from kvmanager.loading.prefix_load import MOST_LOAD_S, load_deadline_s
from kvmanager.loading.probes import Probes
from kvmanager.moves.plan import PlanExpectation, PlannedLoad, PlanQuery, PlanReason
from kvmanager.segments.keys import SegmentKey

MOST_UNMEASURED = 4
PREFILL_PROBE = 8
_SHARED = (Tier.CPU, Tier.REDIS)


class LoadMode(StrEnum):
    """What decides: `kv.load_or_recompute`."""

    AUTO = "auto"
    """Whatever is expected to be faster."""
    LOAD = "load"
    """All that is stored is loaded."""
    RECOMPUTE = "recompute"
    """Nothing is loaded."""


@dataclass(slots=True)
class PromptChoice:
    """The choice for one prompt at one replica; made when `choose` is called, with what is stored of the prompt."""

    owner: LoadChoice
    now: float
    replica: str
    device_tokens: int
    prompt_tokens: int
    queued_tokens: int
    needs_landing: bool
    """See `PlanQuery`."""
    load_s: float = 0.0
    """Expected until the first token with what is loaded, 0 while not known."""
    recompute_s: float = 0.0
    """Expected until the first token without."""
    deadline_s: float = 0.0
    """How long the load may take once it has begun; 0 where nothing is loaded."""
    sizes: dict[Location, int] = field(default_factory=dict)
    """Bytes that are loaded, as they are stored, by where they are; without what another load is bringing here."""
    keys: list[SegmentKey] = field(default_factory=list)
    """The segments of these bytes."""
    ahead: dict[Tier, float] = field(default_factory=dict)
    """Bytes that others are loading from the tiers in question."""
    reads_s: float = 0.0
    """How long what extensions bring is read once it is there; 0: not known, or nothing is."""
    loads: list[PlannedLoad] = field(default_factory=list)
    """What is loaded, also by extensions."""

    def choose(self, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """Return how many leading segments the plan should load, and why. For `kvmanager.moves.planner`, which leases
        them."""
        return self.owner.choose(self, segments)

    def expectation(self) -> PlanExpectation:
        """Return what is expected of the prompt, as far as something was chosen."""
        short_tokens = self.owner.short_tokens(self.replica)
        return PlanExpectation(self.load_s, self.recompute_s, self.deadline_s, self.device_tokens, short_tokens)


class SampleListener(Protocol):
    """An extension that learns from what replicas measure of it."""

    def report(self, replica: str, expected_s: object, seconds: object, now: float) -> None:
        """Note that what was expected to take ``expected_s`` took ``seconds``; what cannot be is to be ignored."""
        ...

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone."""
        ...


class _Costs(NamedTuple):
    """What computing, loading and waiting take."""

    prefill: PrefillTime
    times: Mapping[Tier, LinearTime]
    queue_s: float


class LoadChoice:
    """See the module's docstring. Times are seconds on any clock that does not jump."""

    def __init__(
        self,
        mode: LoadMode,
        block_tokens: int,
        longest_short_tokens: int,
        load_base_s: float,
        starting_credits: Mapping[Tier, float],
    ) -> None:
        """``load_base_s``: of `kvmanager.loading.prefix_load`. ``longest_short_tokens``: of no longer prompts."""
        self.reasons: Counter[str] = Counter()
        self.mode = mode
        self.block_tokens = block_tokens
        self.rates = ClusterRates(starting_credits)
        self.under_way = LoadsUnderWay()
        self.probes = Probes()
        self._longest_short_tokens = longest_short_tokens
        self._load_base_s = load_base_s
        self._prefill_unmeasured = 0
        self._listeners: dict[str, SampleListener] = {}

    def hear(self, name: str, listener: SampleListener) -> None:
        """Give the samples of an extension to its listener from now on."""
        self._listeners[name] = listener

    # Plans.

    def for_prompt(self, now: float, replica: str, device_blocks: int, query: PlanQuery) -> PromptChoice:
        """Begin a choice for a prompt of which the replica's device has ``device_blocks`` leading blocks."""
        self.under_way.expire(now)
        tokens = max(query.prompt_tokens, len(query.hashes) * self.block_tokens)
        device_tokens = device_blocks * self.block_tokens
        return PromptChoice(self, now, replica, device_tokens, tokens, query.queued_tokens, query.needs_landing)

    def planned(self, choice: PromptChoice, lease_id: int, reason: str) -> None:
        """Note that a plan was made with a choice: its load is under way now, until `ended`."""
        self.reasons[reason] += 1
        if choice.sizes:
            deadline = choice.now + self._load_base_s + choice.deadline_s + self.queue_s(choice)
            self.under_way.begin(lease_id, choice.replica, choice.sizes, choice.ahead, deadline, choice.keys)

    def ended(self, lease_id: int) -> None:
        """Note that a plan's lease was released; others are no error."""
        self.under_way.end(lease_id)

    def choose(self, choice: PromptChoice, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """See `PromptChoice.choose`."""
        # What is being loaded here is only waited for, as long as its bytes among those ahead take.
        sizes = [
            0 if self.under_way.brings(choice.replica, load.key) else load.read_bytes(load.blocks) for load in segments
        ]
        parts = [
            StoredPart(segment.end_block * self.block_tokens, segment.tier, nbytes)
            for segment, nbytes in zip(segments, sizes, strict=True)
        ]
        on_device = sum(part.end_token <= choice.device_tokens for part in parts)
        for segment in segments[on_device:]:
            tier = segment.tier
            choice.ahead[tier] = max(choice.ahead.get(tier, 0.0), self.under_way.nbytes(segment.location))
        count, reason = self._choose(choice, parts, on_device)
        for segment, nbytes in zip(segments[on_device:count], sizes[on_device:count], strict=True):
            if nbytes:
                location = segment.location
                choice.sizes[location] = choice.sizes.get(location, 0) + nbytes
                choice.keys.append(segment.key)
        choice.loads = list(segments[:count])
        choice.deadline_s = self._deadline_s(choice, choice.loads, reason)
        return count, reason

    # What extensions bring.

    def note_ahead(self, choice: PromptChoice, segments: Iterable[PlannedLoad]) -> None:
        """Note in a choice the bytes that others are loading from where these segments lie."""
        for location in dict.fromkeys(segment.location for segment in segments):
            ahead = max(choice.ahead.get(location.tier, 0.0), self.under_way.nbytes(location))
            choice.ahead[location.tier] = ahead

    def add(self, choice: PromptChoice, segments: Sequence[PlannedLoad], reads_s: float) -> None:
        """Load these segments too, which no other load waits for, and read them for ``reads_s`` once they are there."""
        choice.reads_s += reads_s
        prefill = self.rates.prefill(choice.replica)
        if prefill is not None and not choice.recompute_s:
            rest = choice.prompt_tokens - choice.device_tokens
            choice.recompute_s = self.queue_s(choice) + prefill.seconds(rest, choice.device_tokens)
        for segment in segments:
            location, nbytes = segment.location, segment.read_bytes(segment.blocks)
            choice.sizes[location] = choice.sizes.get(location, 0) + nbytes
        choice.loads += segments
        choice.deadline_s = self._deadline_s(choice, choice.loads, PlanReason.HIT)

    def _choose(self, choice: PromptChoice, parts: Sequence[StoredPart], on_device: int) -> tuple[int, PlanReason]:
        if self.mode is LoadMode.RECOMPUTE:
            return 0, PlanReason.DEVICE if on_device == len(parts) else PlanReason.RECOMPUTE_ALWAYS
        if on_device == len(parts):
            return len(parts), PlanReason.DEVICE  # for blocks that leave the device until the prompt's turn comes
        if self.mode is LoadMode.LOAD:
            return len(parts), PlanReason.HIT
        if choice.needs_landing:
            on_device = 0  # it may count for nothing
        prefill = self.rates.prefill(choice.replica)
        if prefill is None:
            return self._without_prefill_rate(choice, parts, on_device)
        return self._by_rates(choice, parts, on_device, prefill)

    def short_tokens(self, replica: str) -> int:
        """Return the length below which a prompt is computed sooner than anything is loaded; 0 where that is not known,
        else at least 1.

        By the nearest tier that has been measured. Never more than a short prompt may have.
        """
        if self.mode is not LoadMode.AUTO:
            return 1
        prefill = self.rates.prefill(replica)
        if prefill is None:
            return 0
        for tier in _SHARED:
            rates = self.rates.tier(replica, tier)
            time, per_token = rates.tier_time(tier), rates.bytes_per_token(tier)
            if time is not None and per_token:
                gain_s = prefill.per_token_s - per_token / time.per_s
                if gain_s * self._longest_short_tokens <= time.latency_s:
                    return self._longest_short_tokens
                return max(1, int(time.latency_s / gain_s))
        return 0

    # What is measured.

    def report(self, now: float, replica: str, samples: Iterable[Sample | LateSample | ExtensionSample]) -> None:
        """Take in what a replica measured."""
        measured: list[Sample | LateSample] = []
        for sample in samples:
            if sample[0] in ("prefill", "load", "late"):
                measured.append(cast("Sample | LateSample", sample))
            elif (listener := self._listeners.get(sample[0])) is not None and len(sample) == 3:
                listener.report(replica, sample[1], sample[2], now)
        self.rates.report(replica, measured, now, lambda tier, nbytes: self.under_way.ahead_of(replica, tier, nbytes))

    def tier_is_back(self, tier: Tier) -> None:
        """Note that a tier has restarted: that it brought nothing before says nothing now."""
        self.rates.tier_is_back(tier)

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone."""
        self.rates.forget_replica(replica)
        self.under_way.forget_replica(replica)
        self.probes.forget_replica(replica)
        for listener in self._listeners.values():
            listener.forget_replica(replica)

    def credits(self, now: float) -> dict[str, dict[str, float]]:
        """Return what share of its prefill a token from each tier saves, by replica; only what is known."""
        found = self.rates.credits(now)
        if self.mode is LoadMode.RECOMPUTE:
            found[ALL_REPLICAS] = {tier.value: 0.0 for tier in _SHARED}
        return found

    def describe(self) -> dict[str, Any]:
        """Return the rates of all replicas together, and plans by reason, for the control API."""
        times = {tier: self.rates.tier(ALL_REPLICAS, tier).tier_time(tier) for tier in _SHARED}
        return {
            "mode": self.mode.value,
            "prefill_s": _described(self.rates.prefill(ALL_REPLICAS)),
            "early_prefill_s": _described(self.rates.early_prefill()),
            "tiers": {
                tier.value: {"latency_s": time.latency_s, "bytes_per_s": None if time.per_s == inf else time.per_s}
                for tier, time in times.items()
                if time is not None
            },
            "plans": {str(reason): count for reason, count in self.reasons.items()},
        }  # fmt: skip

    # Inside.

    def _deadline_s(self, choice: PromptChoice, loads: Sequence[PlannedLoad], reason: PlanReason) -> float:
        if not loads:
            return 0.0
        if reason is PlanReason.PROBE:
            return self._load_base_s  # it is not worth more
        nbytes = {load.tier: choice.ahead.get(load.tier, 0.0) for load in loads}
        for segment in loads:
            nbytes[segment.tier] += segment.nbytes
        measured = {tier: self.rates.tier(choice.replica, tier).tier_time(tier) for tier in nbytes}
        times = {tier: time for tier, time in measured.items() if time is not None}
        return load_deadline_s(self._load_base_s, nbytes, times)

    def queue_s(self, choice: PromptChoice) -> float:
        """Return how long a prompt waits for those before it; 0 where that is not known."""
        prefill = self.rates.prefill(choice.replica)
        return prefill.seconds(choice.queued_tokens) if prefill is not None else 0.0

    def _without_prefill_rate(
        self, choice: PromptChoice, parts: Sequence[StoredPart], on_device: int
    ) -> tuple[int, PlanReason]:
        tiers = {part.tier for part in parts[on_device:]}
        measured = all(self.rates.tier(choice.replica, tier).tier_time(tier) is not None for tier in tiers)
        if measured and self.computing_is_due():
            return 0, PlanReason.PROBE
        return len(parts), PlanReason.HIT

    def computing_is_due(self) -> bool:
        """Whether this plan should compute to measure prefills, whose rate is not known."""
        self._prefill_unmeasured += 1
        return self._prefill_unmeasured % PREFILL_PROBE == 0

    def _by_rates(
        self, choice: PromptChoice, parts: Sequence[StoredPart], on_device: int, prefill: PrefillTime
    ) -> tuple[int, PlanReason]:
        times: dict[Tier, LinearTime] = {}
        crowded = False
        for tier in dict.fromkeys(part.tier for part in parts[on_device:]):
            time = self.rates.tier(choice.replica, tier).tier_time(tier)
            if time is not None:
                times[tier] = time
            elif self.under_way.count(tier) < MOST_UNMEASURED:
                return len(parts), PlanReason.HIT
            else:
                crowded = True

        queue_s = self.queue_s(choice)
        device_tokens = 0 if choice.needs_landing else choice.device_tokens
        split = best_split(
            parts, choice.prompt_tokens, device_tokens, prefill, times, choice.ahead, queue_s, MOST_LOAD_S
        )
        choice.load_s, choice.recompute_s = split.seconds, split.recompute_s
        if split.parts == len(parts):
            waits = any(choice.ahead.values())  # for others: then the time says little of the tier
            own_s, recompute_s = split.seconds - queue_s, split.recompute_s - queue_s
            if not waits and self.probes.computing_is_due(choice.replica, own_s, recompute_s):
                return 0, PlanReason.PROBE
            return split.parts, PlanReason.HIT
        skipped = parts[split.parts].tier
        costs = _Costs(prefill, times, queue_s)
        if skipped in times and self._probe_is_due(choice, parts[on_device:], split, split.parts - on_device, costs):
            return split.parts + 1, PlanReason.PROBE
        if split.parts > on_device:
            return split.parts, PlanReason.PARTIAL
        return 0, PlanReason.UNMEASURED if crowded and skipped not in times else PlanReason.RECOMPUTE_FASTER

    def _probe_is_due(
        self, choice: PromptChoice, lacking: Sequence[StoredPart], split: Split, loaded: int, costs: _Costs
    ) -> bool:
        """Whether to probe the first tier that the split leaves out, with one segment.

        ``lacking``: parts that the device lacks, of which the split loads the first ``loaded``.
        """
        prefill, queue_s = costs.prefill, costs.queue_s
        tier = lacking[loaded].tier
        upto = lacking[: loaded + 1]
        load_s = min(self._load_base_s, load_times(upto, costs.times, choice.ahead)[-1])
        covered = min(upto[-1].end_token, choice.prompt_tokens - 1)
        after_s = prefill.seconds(choice.prompt_tokens - covered, covered)
        loss_s = max(queue_s, load_s) + after_s - split.seconds
        measured_at = self.rates.tier(choice.replica, tier).sampled_at(tier)
        return self.probes.tier_is_due(choice.replica, tier, choice.now, split.seconds - queue_s, loss_s, measured_at)


def _described(prefill: PrefillTime | None) -> dict[str, float] | None:
    if prefill is None:
        return None
    return {"fixed": prefill.fixed_s, "per_token": prefill.per_token_s, "per_pair": prefill.per_pair_s}
