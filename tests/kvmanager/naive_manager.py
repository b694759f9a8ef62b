"""A manager that is obviously right: everything is recomputed by scanning all there is.

It follows the real one's choices where a policy is free to choose (which of several equally cold victims, or which leaf
at all if the policy is not `coldest_first`) and asserts that each choice was allowed. Blocks hold one token and hotness
halves every `HALF_LIFE` requests.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from math import log2

import naive_reach
from naive_copy import EPSILON, NaiveCopy
from naive_redis import above, land

from kvmanager.index.locations import REDIS, Tier
from kvmanager.index.trie import MOST_TWINS
from kvmanager.segments.keys import block_hashes

HALF_LIFE = 4.0


def hashes_of(tokens, tenant=""):
    return _hashes(tuple(tokens), tenant)


@cache
def _hashes(tokens, tenant):
    return block_hashes(tokens, 1, f"tests {tenant}")


@dataclass
class NaiveManager:
    budgets: dict
    blocks_per_segment: int
    lease_s: float
    save_s: float
    cpu_high_water: float
    pin_budget: int = 0
    coldest_first: bool = True
    now: float = 0.0
    requests: int = 0
    known: dict = field(default_factory=dict)  # key -> span
    uses: dict = field(default_factory=dict)  # key -> (decayed uses, request number of the last one)
    sizes: dict = field(default_factory=dict)  # key -> raw bytes when last offered before it was pinned
    pins: dict = field(default_factory=dict)  # key -> end
    quotas: dict = field(default_factory=dict)  # tier -> {tenant: bytes}
    evicted: deque = field(default_factory=deque)  # (location, key) that the real one has evicted to make room
    copies: dict = field(default_factory=dict)  # location -> {key: NaiveCopy}
    leases: dict = field(default_factory=dict)  # id -> (deadline, replica, [NaiveCopy])
    saves: dict = field(default_factory=dict)  # id -> (deadline, replica)
    demotions: dict = field(default_factory=dict)  # id -> (deadline, source, [NaiveCopy there], [NaiveCopy at Redis])
    devices: dict = field(default_factory=dict)  # replica -> set of hashes
    due: set = field(default_factory=set)  # (location, key) whose eviction no directive has named yet

    def __post_init__(self):
        self.copies = {location: {} for location in self.budgets}

    # What is where

    def ancestors(self, key):
        path = []
        while key is not None:
            path.append(key)
            key = self.known[key].parent
        return path

    def resident(self, location):
        held = self.copies[location]
        return {
            key
            for key in held
            if all(above in held and held[above].state == "committed" for above in self.ancestors(key))
        }

    def used_bytes(self, location):
        return sum(copy.nbytes for copy in self.copies[location].values())

    def leased(self, copy):
        held = [copies for _, _, copies in (*self.leases.values(), *(flight[:3] for flight in self.demotions.values()))]
        return any(copy in copies for copies in held)

    def leaves(self, location, share=None):
        """What may be evicted, of one partition or of all."""
        held, pinned = self.copies[location], self.pinned()
        parents = {self.known[key].parent for key, copy in held.items() if copy.state != "doomed"}
        return {
            key
            for key in self.resident(location)
            if key not in parents
            and key not in pinned
            and share in (None, self.share(location, key))
            and not self.leased(held[key])
        }

    def decayed(self, key):
        uses, request = self.uses[key]
        return uses * 2 ** ((request - self.requests) / HALF_LIFE)

    def score(self, key):
        uses, request = self.uses[key]
        return log2(uses) + request / HALF_LIFE

    # Quotas and pins

    def share(self, location, key):
        """Name of the partition where a segment counts."""
        tenant = self.known[key].tenant
        return tenant if tenant in self.quotas.get(location.tier, {}) else ""

    def budget_of(self, location, share):
        quotas, budget = self.quotas.get(location.tier, {}), self.budgets[location]
        wanted = sum(quotas.values())
        if wanted > budget:
            return quotas[share] * budget // wanted if share else 0
        return quotas[share] if share else budget - wanted

    def used_of(self, location, share):
        held = self.copies[location]
        return sum(copy.nbytes for key, copy in held.items() if self.share(location, key) == share)

    def room(self, location, key):
        """Bytes that are free for a segment, less than none where a quota was cut down."""
        share = self.share(location, key)
        return min(
            self.budget_of(location, share) - self.used_of(location, share),
            self.budgets[location] - self.used_bytes(location),
        )

    def pinned(self):
        return {above for key in self.pins for above in self.ancestors(key)}

    def pinned_bytes(self):
        return sum(self.sizes[key] for key in self.pinned())

    def trim(self):
        """Follow the evictions from partitions that hold more than they may: as long as there are such leaves."""
        shares = [(location, share) for location in self.copies for share in ("", *self.quotas.get(location.tier, {}))]
        while any(
            self.used_of(place, share) > self.budget_of(place, share) and self.leaves(place, share)
            for place, share in shares
        ):
            location, key = self.evicted.popleft()
            share = self.share(location, key)
            assert self.used_of(location, share) > self.budget_of(location, share)
            self.check_victim(key, self.leaves(location, share))
            del self.copies[location][key]
            self.due.add((location, key))

    def check_victim(self, key, leaves):
        assert key in leaves
        assert not self.coldest_first or self.score(key) <= min(map(self.score, leaves)) + EPSILON

    def end_pins(self, now):
        self.now = max(self.now, now)
        self.pins = {key: end for key, end in self.pins.items() if end > self.now}

    # Loading

    def stored_anywhere(self):
        return set().union(*(self.resident(location) for location in self.copies))

    def plan(self, now, replica, node, hashes, device_blocks, plan, visited, counts=True):
        """``counts``: a request asks, not a directive. ``visited``: the keys that the real one found."""
        self.now = max(self.now, now)
        self.requests += counts
        naive_reach.check_path(self, hashes, list(zip(visited, [end for end, _ in plan.scores], strict=True)))
        for key in visited if counts else ():
            self.uses[key] = (self.decayed(key) + 1, self.requests)
        told = [self.score(key) for key in visited]
        assert all(abs(a - b) < EPSILON for (_, a), b in zip(plan.scores, told, strict=True))
        assert abs(plan.now - self.requests / HALF_LIFE) < EPSILON
        reach = naive_reach.reach(self, hashes, self.stored_anywhere())
        expected = [key for key, (end, _) in zip(visited, plan.scores, strict=True) if device_blocks < end <= reach]
        assert [segment.key for segment in plan.segments] == expected
        assert (plan.lease_id == 0) == (not expected) == (reach <= device_blocks)
        copies, reached = [], device_blocks
        for segment in plan.segments:
            span = self.known[segment.key]
            assert (segment.start_block, segment.num_blocks) == (span.start_block, span.num_blocks)
            assert segment.start_block <= reached < segment.end_block == naive_reach.part(self, hashes, segment.key)
            assert (segment.used_blocks, segment.last_hash) in (
                (0, b"") if segment.end_block == span.end_block
                else (segment.end_block - span.start_block, hashes[segment.end_block - 1]),
            )  # fmt: skip
            reached = segment.end_block
            places = [location for location in self.copies if segment.key in self.resident(location)]
            distance = {place: (place.tier is not Tier.CPU, place.holder != node) for place in places}
            assert distance[segment.location] == min(distance.values())
            copies.append(self.copies[segment.location][segment.key])
            assert segment.nbytes == copies[-1].nbytes
        assert not expected or reached == reach
        if expected:
            self.leases[plan.lease_id] = (self.now + self.lease_s, replica, copies)

    def release(self, lease_id):
        _, _, copies = self.leases.pop(lease_id, (0, "", []))
        self.unlease(copies)

    def unlease(self, copies):
        for copy in copies:
            for location, held in self.copies.items():
                if held.get(copy.key) is copy and copy.state == "doomed" and not self.leased(copy):
                    del held[copy.key]
                    self.due.add((location, copy.key))

    # Saving

    def know(self, span, size):
        if not naive_reach.has_place(self, span) and span.key not in self.known:
            return False
        if span.key not in self.known:
            self.known[span.key] = span
            self.uses[span.key] = (1, self.requests)
        old, pinned = self.known[span.key], span.key in self.pinned()
        stored = any(span.key in held for held in self.copies.values())
        if (old.start_block, old.parent) != (span.start_block, span.parent):
            if stored or pinned:
                return True
            if not naive_reach.has_place(self, span):
                return False
            below = [other.start_block for other in self.known.values() if other.parent == span.key]
            if span.start_block > old.start_block and (
                len(below) > MOST_TWINS or span.start_block >= min(below, default=span.end_block)
            ):
                return False
            kind = old.kind if old.start_block == span.start_block else span.kind
            self.known[span.key] = replace(span, kind=kind)
        if size is not None and not pinned:
            self.sizes[span.key] = size
        return True

    def upheld(self, location, span):
        held = self.copies[location]
        return span.parent is None or (span.parent in held and held[span.parent].state != "doomed")

    def may_store(self, location, span, size=None):
        """Whether the segment is new here and its chain is there, room aside; ``size``: it is offered."""
        return (
            self.know(span, size)
            and span.key not in self.copies[location]
            and self.known[span.key].start_block == span.start_block
            and self.upheld(location, self.known[span.key])
        )

    def offer(self, now, replica, location, spans, nbytes, offer):
        sized = sorted(zip(spans, nbytes, strict=True), key=lambda sized: sized[0].start_block)
        self.grant(now, replica, location, sized, offer, offered=True)

    def prefetch(self, now, replica, location, keys, offer):
        self.expired(now)
        at_redis, here = self.resident(REDIS), self.copies[location]
        spans = [self.known[key] for key in dict.fromkeys(keys) if key in at_redis and key not in here]
        unnamed = above(self, location, spans)
        assert offer.above == tuple((key, self.sizes[key]) for key in offer.keys if key in unnamed)
        spans = sorted((*spans, *(self.known[key] for key in unnamed)), key=lambda span: span.start_block)
        self.grant(now, replica, location, [(span, self.sizes[span.key]) for span in spans], offer)

    def grant(self, now, replica, location, sized, offer, offered=False):
        due, self.due = self.expired(now), set()
        named = [(order.source, key) for order in offer.evict for key in order.keys]
        assert set(named[: len(due)]) == due
        victims = [key for place, key in named[len(due) :] if place == location]
        assert len(victims) == len(named) - len(due)
        stored = []
        for span, size in sized:
            if not self.may_store(location, span, size if offered else None):
                assert span.key not in stored
                continue
            if span.key not in offer.keys:
                assert self.room_at_most(location, span) < size
                continue
            while self.room(location, span.key) < size:
                self.evict_for(location, span, victims.pop(0))
            self.copies[location][span.key] = NaiveCopy(span.key, size, save_id=offer.save_id)
            stored.append(span.key)
        assert victims == []
        assert tuple(stored) == offer.keys
        assert (offer.save_id == 0) == (not stored)
        if stored:
            self.saves[offer.save_id] = (self.now + self.save_s, replica)

    def evict_for(self, location, span, victim):
        assert self.evicted.popleft() == (location, victim)
        self.check_victim(victim, self.leaves(location, self.share(location, span.key)) - {span.parent})
        assert not self.coldest_first or self.score(victim) < self.score(span.key) + EPSILON
        del self.copies[location][victim]

    def room_at_most(self, location, span):
        """Return the bytes that ``span`` could get by evicting all that is clearly colder, leaf by leaf."""
        held, share = self.copies[location], self.share(location, span.key)
        spared = dict(held)
        while self.coldest_first and (
            colder := [
                key
                for key in self.leaves(location, share) - {span.parent}
                if self.score(key) < self.score(span.key) - EPSILON
            ]
        ):
            for key in colder:
                del held[key]
        room = self.room(location, span.key)
        self.copies[location] = spared
        return min(room, self.budget_of(location, share))

    def commit(self, now, location, keys, nbytes, accepted):
        self.now = max(self.now, now)
        expected = []
        for key, size in zip(keys, nbytes, strict=True):
            copy = self.copies[location].get(key)
            if copy is None or copy.state == "doomed":
                continue
            if copy.state == "reserved":
                if size > copy.nbytes or (copy.save_id and self.saves[copy.save_id][0] <= self.now):
                    continue
                copy.state, copy.nbytes = "committed", size
            expected.append(key)
        assert sorted(accepted) == sorted(expected)

    def adopt(self, now, location, spans, nbytes, raw_nbytes, accepted):
        self.now = max(self.now, now)
        expected = []
        sized = zip(spans, nbytes, raw_nbytes, strict=True)
        for span, size, raw_size in sorted(sized, key=lambda sized: sized[0].start_block):
            held = self.copies[location]
            if self.may_store(location, span, raw_size) and size <= self.room(location, span.key):
                held[span.key] = NaiveCopy(span.key, size)
            copy = held.get(span.key)
            if copy is None or copy.state == "doomed":
                continue
            if copy.state == "reserved":
                if size > copy.nbytes or (copy.save_id and self.saves[copy.save_id][0] <= self.now):
                    continue
                copy.state, copy.nbytes = "committed", size
            expected.append(span.key)
            self.due.discard((location, span.key))
        assert list(accepted) == expected

    def abandon(self, save_id):
        if self.saves.pop(save_id, None) is None:
            return
        for location, held in self.copies.items():
            for key, copy in list(held.items()):
                if copy.save_id == save_id and copy.state == "reserved" and held.get(key) is copy:
                    self.uproot(location, key, bytes_lost=True)

    # Losses

    def uproot(self, location, root, *, bytes_lost):
        held = self.copies[location]
        if held[root].state == "doomed":
            if bytes_lost:
                del held[root]
            return
        for key in [key for key, copy in held.items() if copy.state != "doomed" and root in self.ancestors(key)]:
            copy = held[key]
            lost = copy.state == "reserved" or (key == root and bytes_lost)
            if self.leased(copy) and not lost:
                copy.state = "doomed"
                continue
            del held[key]
            if not lost:
                self.due.add((location, key))

    def dropped(self, location, keys):
        stored = [key for key in keys if key in self.copies[location]]
        for key in sorted(stored, key=lambda key: -self.known[key].start_block):
            self.uproot(location, key, bytes_lost=True)

    def clear(self, tiers):
        for location, held in self.copies.items():
            for key in list(held) if location.tier in tiers else ():
                if key in held:
                    self.uproot(location, key, bytes_lost=False)

    def forget_replica(self, replica):
        self.devices.pop(replica, None)
        for lease_id in [lease_id for lease_id, (_, owner, _) in self.leases.items() if owner == replica]:
            self.release(lease_id)
        for save_id in [save_id for save_id, (_, owner) in self.saves.items() if owner == replica]:
            self.abandon(save_id)

    def expired(self, now):
        """End what is over by ``now``; return what is due to be evicted then."""
        self.end_pins(now)
        for lease_id in [lease_id for lease_id, (end, _, _) in self.leases.items() if end <= self.now]:
            self.release(lease_id)
        for save_id in [save_id for save_id, (end, _) in self.saves.items() if end <= self.now]:
            self.abandon(save_id)
        for demotion_id in [demotion_id for demotion_id, (end, *_) in self.demotions.items() if end <= self.now]:
            land(self, demotion_id)
        self.trim()
        return self.due

    def carried_out(self, directives):
        """Check that ``directives`` evict what is due, all of it and nothing else."""
        named = [(order.source, key) for order in directives for key in order.keys]
        assert (set(named), len(named)) == (self.due, len(self.due))
        self.due = set()
