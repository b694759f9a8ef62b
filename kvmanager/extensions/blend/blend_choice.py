"""Blend or compute: what a blend of a prompt's chunks takes, by measured rates, and whether its answer begins sooner.

A blend computes the layers before the check layer for all of its tokens, and the others for those that are not stored
and a share of those that are (CacheBlend, arXiv 2405.16444, section 4). So of a prefill of these tokens it takes

``share = (c + (L - c) · kept) / L,   kept = (uncached + ratio · reused) / tokens``

with check layer ``c`` of ``L`` layers. The tokens that are computed lie everywhere, so their pairs shrink alike.
Loading the chunks hides behind the layers before ``c``, and only layers from ``c`` on are read.

What the formula does not see (work in slices, neighbours' steps between them, the row gathering) is learned per replica
from how long blends took: one factor, which returns to 1 with time, so that a replica that was slow is tried again.
Pure; times are seconds on any clock that does not jump.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import NamedTuple

from kvmanager.extensions.blend.chunks import BLENDS, BlendTerms, PlannedChunk
from kvmanager.index.locations import Tier
from kvmanager.loading.load_choice import MOST_UNMEASURED
from kvmanager.loading.load_rates import ClusterRates, PrefillTime
from kvmanager.loading.load_split import StoredPart, load_times
from kvmanager.loading.loads_under_way import LoadsUnderWay
from kvmanager.moves.plan import PlanReason

LEAST_REUSED_TOKENS = 512
"""Fewer are not worth a blend's fixed costs, which prefill rates do not show: with 480 tokens reused the demo model's
blend took 17 ms and its prefill 18 ms."""
CORRECTION_WEIGHT = 0.25
"""Of a new blend, against all before it."""
CORRECTION_HALF_LIFE_S = 300.0
MOST_CORRECTION = 16.0
"""Measured over expected time above which a blend stood still for reasons of its own."""


class BlendSpan(NamedTuple):
    """Tokens ``start`` to ``end`` of a prompt, of which ``reused`` are stored with chunks."""

    start: int
    end: int
    reused: int
    ratio: float
    terms: BlendTerms

    @property
    def share_before(self) -> float:
        """The share of a prefill of these tokens that the layers before the check layer take."""
        return min(1.0, max(0.0, self.terms.check_layer / max(1, self.terms.layers)))

    @property
    def share(self) -> float:
        """The share of a prefill of these tokens that the blend takes."""
        tokens = max(1, self.end - self.start)
        computed = (tokens - self.reused + min(1.0, max(0.0, self.ratio)) * self.reused) / tokens
        return self.share_before + (1.0 - self.share_before) * computed


def blend_of(
    stored: Sequence[tuple[int, int]], rest: range, block_tokens: int, ratio: float, terms: BlendTerms
) -> BlendSpan:
    """Return the blend of a prompt's chunks in the ``rest`` of its tokens, behind its own stored beginning.

    ``stored``: of each chunk where it begins and how many of its leading tokens are stored, in order. The blend ends
    with a block of the prompt, before the prompt's last token. O(chunks).
    """
    last = sum(stored[-1]) if stored else 0
    start = rest.start
    end = min(last, rest.stop - 1) // block_tokens * block_tokens
    reused = sum(max(0, min(end, at + tokens) - max(start, at)) for at, tokens in stored)
    return BlendSpan(start, max(start, end), reused, ratio, terms)


def blend_s(blend: BlendSpan, prefill: PrefillTime, load_s: float) -> float:
    """Return how long a blend takes whose chunks come in ``load_s``; nothing is learned from earlier ones here."""
    tokens = blend.end - blend.start
    whole_s = prefill.seconds(tokens, blend.start) - (prefill.fixed_s if tokens else 0.0)
    return prefill.fixed_s + whole_s * blend.share + max(0.0, load_s - whole_s * blend.share_before)


def chunk_parts(chunks: Sequence[PlannedChunk], terms: BlendTerms) -> list[StoredPart]:
    """Return what is read of chunks for a blend, for `kvmanager.loading.load_split.load_times`.

    Of a CPU tier's segments the layers from the check layer on; what Redis has may be coded, and is read whole.
    """
    share = 1.0 - min(1.0, max(0.0, terms.check_layer / max(1, terms.layers)))
    return [
        StoredPart(
            load.end_block,
            load.tier,
            round(load.read_bytes(load.blocks) * share) if load.tier is Tier.CPU else load.nbytes,
        )
        for chunk in chunks
        for load in chunk.loads
    ]


@dataclass(slots=True)
class _LogFactor:
    log_factor: float
    at: float


class BlendCorrection:
    """How much longer than `blend_s` says blends take, by replica. One thread."""

    def __init__(self) -> None:
        self._of: dict[str, _LogFactor] = {}

    def report(self, replica: str, expected_s: object, seconds: object, now: float) -> None:
        """Note a blend that took ``seconds``, where `blend_s` said ``expected_s``. What cannot be is ignored."""
        if not (_is_time(expected_s) and _is_time(seconds)):
            return
        ratio = float(seconds) / float(expected_s)  # type: ignore[arg-type]
        ratio = min(max(ratio, 1.0 / MOST_CORRECTION), MOST_CORRECTION)
        before = self._log_factor(replica, now)
        self._of[replica] = _LogFactor(before + CORRECTION_WEIGHT * (log(ratio) - before), now)

    def factor(self, replica: str, now: float) -> float:
        """Return by what `blend_s` is to be multiplied for a replica; 1 where nothing is known."""
        return exp(self._log_factor(replica, now))

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone."""
        self._of.pop(replica, None)

    def _log_factor(self, replica: str, now: float) -> float:
        known = self._of.get(replica)
        if known is None:
            return 0.0
        age_s = max(0.0, now - known.at)
        return known.log_factor * float(0.5 ** (age_s / CORRECTION_HALF_LIFE_S))


class BlendedPrompt(NamedTuple):
    """What is known of a prompt before its blend is judged."""

    now: float
    replica: str
    tokens: int
    ahead: Mapping[Tier, float]
    """Bytes on their way from a tier already."""
    without_s: float
    """Until its first token with the load of its own chain alone; 0: not known, and then it waits ``queue_s`` for
    others and computes the rest."""
    queue_s: float


class Outlook(NamedTuple):
    """When a prompt's first token is expected, in seconds from now: with a blend and without it."""

    with_s: float
    without_s: float


def outlook(blend: BlendSpan, prompt: BlendedPrompt, prefill: PrefillTime, blending_s: float) -> Outlook:
    """Return what a blend of ``blending_s`` (corrected) changes for a prompt. It begins when the rest would."""
    rest_s = prefill.seconds(max(1, prompt.tokens - blend.start), blend.start)
    without_s = prompt.without_s or prompt.queue_s + rest_s
    begins_s = max(0.0, without_s - rest_s)
    after_s = prefill.seconds(max(1, prompt.tokens - blend.end), blend.end)
    return Outlook(begins_s + blending_s + after_s, without_s)


class Judgement(NamedTuple):
    """Whether a blend is worth it. Seconds are 0 where rates of prefills are not known yet."""

    blends: bool
    reason: str
    """Why; if not, why a prompt of which nothing but chunks is stored is computed."""
    blend_s: float = 0.0
    """By the rates of prefills and loads alone."""
    first_token_s: float = 0.0
    """Until the first token, with the blend."""
    without_s: float = 0.0
    """Until the first token, without it."""


class BlendChoice:
    """Judges blends. ``always``: whatever is measured."""

    def __init__(self, always: bool, rates: ClusterRates, under_way: LoadsUnderWay) -> None:
        self.correction = BlendCorrection()
        self._always = always
        self._rates = rates
        self._under_way = under_way

    def judge(self, prompt: BlendedPrompt, blend: BlendSpan, chunks: Sequence[PlannedChunk]) -> Judgement:
        """Say whether a blend of ``chunks`` is worth it."""
        now, replica, without_s = prompt.now, prompt.replica, prompt.without_s
        parts = chunk_parts(chunks, blend.terms)
        times = {tier: self._rates.tier(replica, tier).tier_time(tier) for tier in {part.tier for part in parts}}
        known = {tier: time for tier, time in times.items() if time is not None}
        prefill = self._rates.prefill(replica)
        blending_s = first_token_s = 0.0
        if prefill is not None:
            loads = load_times([part for part in parts if part.tier in known], known, prompt.ahead)
            blending_s = blend_s(blend, prefill, loads[-1] if loads else 0.0)
            corrected_s = blending_s * self.correction.factor(replica, now)
            first_token_s, without_s = outlook(blend, prompt, prefill, corrected_s)
        if not self._always:
            if blend.reused < LEAST_REUSED_TOKENS or (prefill is not None and first_token_s >= without_s):
                return Judgement(False, PlanReason.RECOMPUTE_FASTER)
            if any(self._under_way.count(tier) >= MOST_UNMEASURED for tier in times.keys() - known.keys()):
                return Judgement(False, PlanReason.UNMEASURED)
        return Judgement(True, BLENDS, blending_s, first_token_s, without_s)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
