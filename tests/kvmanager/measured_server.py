"""A server whose rates are known, as the load choice sees it: plans, loads and prefills that take their time."""

import random

from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.loading.load_choice import LoadChoice, LoadMode
from kvmanager.moves.plan import PlannedLoad, PlanQuery
from kvmanager.routing.cost import STARTING_CREDITS
from kvmanager.segments.keys import SegmentKey

BLOCK = 32
SEGMENT_BLOCKS = 8
SEGMENT_TOKENS = BLOCK * SEGMENT_BLOCKS
SEGMENT_BYTES = 1_000_000
DEADLINE_S = 2.0
CPU = Location(Tier.CPU, "node")
FAST, SLOW = 1e9, 1e6
"""Bytes per second: loading a segment in 1 ms, or in 1 s."""


class Server:
    """A replica that computes `tokens_per_s` and links that the test sets; prompts come one after the other."""

    def __init__(self, mode=LoadMode.AUTO, noise=0.0):
        self.choice = LoadChoice(mode, BLOCK, SEGMENT_TOKENS, DEADLINE_S, STARTING_CREDITS)
        self.now = 0.0
        self.rates = {Tier.CPU: 1e9, Tier.REDIS: FAST}
        self.latency_s = 0.002
        self.tokens_per_s = 2560.0  # a segment in 0.1 s
        self.rest_tells = True
        """Whether the rest of a prompt that was loaded tells how fast the replica computes."""
        self._rng = random.Random(1)
        self._noise = noise
        self._leases = 0

    def prefill_s(self, tokens):
        return tokens / self.tokens_per_s

    def load_s(self, segments):
        return sum(
            self.latency_s + sum(s.nbytes for s in segments if s.location.tier is tier) / self.rates[tier]
            for tier in {s.location.tier for s in segments}
        )

    def warm_up(self, tiers=(Tier.CPU, Tier.REDIS)):
        """Enough samples of everything."""
        for number in range(1, 9):
            self.now += 0.1
            samples = [("prefill", 100 * number, self.prefill_s(100 * number), 0)]
            for tier in tiers:
                count = 1 + number % 4
                found = stored([Location(tier, "node")] * count)
                samples.append(("load", tier.value, count * SEGMENT_TOKENS, count * SEGMENT_BYTES, self.load_s(found)))
            self.choice.report(self.now, "replica", samples)
        return self

    def plan(self, segments, device=0, queued=0, again=False, **query):
        """One plan; its load is under way. Each plan is for another prompt, unless it is for that one `again`."""
        if not again:
            self._leases += 1
            segments = [each._replace(key=SegmentKey(self._leases.to_bytes(4) + each.key[4:])) for each in segments]
        blocks = segments[-1].start_block + segments[-1].num_blocks
        query = PlanQuery([b""] * blocks, prompt_tokens=blocks * BLOCK + 20, queued_tokens=queued, **query)
        choice = self.choice.for_prompt(self.now, "replica", device, query)
        count, reason = choice.choose(segments)
        self._leases += again
        self.choice.planned(choice, self._leases, reason)
        return count, reason, self._leases

    def serve(self, segments):
        """One prompt from its plan to its first token; returns seconds, how many segments were loaded, and why."""
        count, reason, lease = self.plan(segments)
        total = (segments[-1].start_block + segments[-1].num_blocks) * BLOCK + 20
        seconds = min(DEADLINE_S, self._noisy(self.load_s(segments[:count]))) if count else 0.0
        arrived = count if seconds < DEADLINE_S else 0
        samples = []
        if arrived:
            for tier in {segment.location.tier for segment in segments[:count]}:
                mine = [segment for segment in segments[:count] if segment.location.tier is tier]
                tokens, nbytes = len(mine) * SEGMENT_TOKENS, sum(segment.nbytes for segment in mine)
                share = self.load_s(mine) / self.load_s(segments[:count])
                samples.append(("load", tier.value, tokens, nbytes, seconds * share))
        elif count:
            samples.append(("late", segments[0].location.tier.value, sum(s.nbytes for s in segments[:count]), seconds))
        computed = total - arrived * SEGMENT_TOKENS
        compute_s = self._noisy(self.prefill_s(computed))
        if self.rest_tells or not arrived:
            samples.append(("prefill", computed, compute_s, total - computed))
        self.now += seconds + compute_s
        self.choice.report(self.now, "replica", samples)
        self.choice.ended(lease)
        return seconds + compute_s, count, reason

    def _noisy(self, seconds):
        return seconds * 2 ** self._rng.gauss(0, self._noise)


def stored(locations, nbytes=SEGMENT_BYTES):
    return [
        PlannedLoad(
            SegmentKey(bytes([number]) * 32), number * SEGMENT_BLOCKS, SEGMENT_BLOCKS, *location, nbytes, nbytes
        )
        for number, location in enumerate(locations)
    ]


IN_REDIS = stored([REDIS] * 4)
