"""A manager that is obviously right: everything is recomputed by scanning all there is.

It follows the real one's choices where a policy is free to choose (which of several equally cold victims) and asserts
that each choice was allowed. Blocks hold one token and hotness halves every `HALF_LIFE` requests.
"""

from dataclasses import dataclass, field
from math import exp2, log2

from kvmanager.keys import block_hashes
from kvmanager.locations import REDIS, Tier

HALF_LIFE = 4.0
EPSILON = 1e-9


def hashes_of(tokens):
    return block_hashes(tokens, 1, "tests")


@dataclass(eq=False)
class NaiveCopy:
    key: bytes
    nbytes: int
    state: str = "reserved"  # or "committed" or "doomed"
    save_id: int = 0


@dataclass
class NaiveManager:
    budgets: dict
    blocks_per_segment: int
    lease_s: float
    save_s: float
    cpu_high_water: float
    now: float = 0.0
    requests: int = 0
    known: dict = field(default_factory=dict)  # key -> span
    uses: dict = field(default_factory=dict)  # key -> request numbers
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

    def leaves(self, location):
        held = self.copies[location]
        parents = {self.known[key].parent for key, copy in held.items() if copy.state != "doomed"}
        return {key for key in self.resident(location) if key not in parents and not self.leased(held[key])}

    def score(self, key):
        return log2(sum(exp2(request / HALF_LIFE) for request in self.uses[key]))

    # Loading

    def deepest(self, hashes, keys):
        ends = [end for end, key in enumerate(hashes, 1) if key in keys]
        return hashes[ends[-1] - 1] if ends else None

    def stored_anywhere(self):
        return set().union(*(self.resident(location) for location in self.copies))

    def plan(self, now, replica, node, hashes, device_blocks, plan):
        self.now = max(self.now, now)
        self.requests += 1
        stored = self.deepest(hashes, self.stored_anywhere())
        for key in {*self.ancestors(self.deepest(hashes, self.known)), *self.ancestors(stored)}:
            self.uses[key].append(self.requests)
        expected = [key for key in reversed(self.ancestors(stored)) if self.known[key].end_block > device_blocks]
        assert [segment.key for segment in plan.segments] == expected
        assert (plan.lease_id == 0) == (not expected)
        copies = []
        for segment in plan.segments:
            span = self.known[segment.key]
            assert (segment.start_block, segment.num_blocks) == (span.start_block, span.num_blocks)
            places = [location for location in self.copies if segment.key in self.resident(location)]
            nearest = min(places, key=lambda place: (place.tier is not Tier.CPU, place.holder != node))
            assert segment.location == nearest
            copies.append(self.copies[nearest][segment.key])
            assert segment.nbytes == copies[-1].nbytes
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

    def know(self, span):
        if span.parent is not None and span.parent not in self.known and span.key not in self.known:
            return False
        if span.key not in self.known:
            self.known[span.key] = span
            self.uses[span.key] = [self.requests]
        old = self.known[span.key]
        stored = any(span.key in held for held in self.copies.values())
        if old.start_block != span.start_block and not stored:
            if span.parent is not None and span.parent not in self.known:
                return False
            self.known[span.key] = span
        return True

    def upheld(self, location, span):
        held = self.copies[location]
        return span.parent is None or (span.parent in held and held[span.parent].state != "doomed")

    def may_store(self, location, span):
        """Whether the segment is new here and its chain is there, room aside."""
        return (
            self.know(span)
            and span.key not in self.copies[location]
            and self.known[span.key].start_block == span.start_block
            and self.upheld(location, self.known[span.key])
        )

    def offer(self, now, replica, location, spans, nbytes, offer):
        sized = sorted(zip(spans, nbytes, strict=True), key=lambda sized: sized[0].start_block)
        self.grant(now, replica, location, sized, offer)

    def promote(self, now, replica, location, keys, offer):
        at_redis = self.resident(REDIS)
        spans = [self.known[key] for key in dict.fromkeys(keys) if key in at_redis]
        spans = sorted((span for span in spans if span.key not in self.copies[location]), key=lambda s: s.start_block)
        self.grant(now, replica, location, [(span, self.copies[REDIS][span.key].nbytes) for span in spans], offer)

    def grant(self, now, replica, location, sized, offer):
        due, self.due = self.expired(now), set()
        named = [(order.source, key) for order in offer.evict for key in order.keys]
        assert set(named[: len(due)]) == due
        victims = [key for place, key in named[len(due) :] if place == location]
        assert len(victims) == len(named) - len(due)
        stored = []
        for span, size in sized:
            if not self.may_store(location, span):
                assert span.key not in stored
                continue
            if span.key not in offer.keys:
                assert self.room_at_most(location, span) < size
                continue
            while self.budgets[location] - self.used_bytes(location) < size:
                self.evict_for(location, span, victims.pop(0))
            self.copies[location][span.key] = NaiveCopy(span.key, size, save_id=offer.save_id)
            stored.append(span.key)
        assert victims == []
        assert tuple(stored) == offer.keys
        assert (offer.save_id == 0) == (not stored)
        if stored:
            self.saves[offer.save_id] = (self.now + self.save_s, replica)

    def evict_for(self, location, span, victim):
        leaves = self.leaves(location) - {span.parent}
        assert victim in leaves
        assert self.score(victim) < self.score(span.key) + EPSILON
        assert self.score(victim) <= min(map(self.score, leaves)) + EPSILON
        del self.copies[location][victim]

    def room_at_most(self, location, span):
        """Return the bytes that ``span`` could get by evicting all that is clearly colder, leaf by leaf."""
        held = self.copies[location]
        spared = dict(held)
        while colder := [
            key for key in self.leaves(location) - {span.parent} if self.score(key) < self.score(span.key) - EPSILON
        ]:
            for key in colder:
                del held[key]
        room = self.budgets[location] - self.used_bytes(location)
        self.copies[location] = spared
        return min(room, self.budgets[location])

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

    def adopt(self, now, location, spans, nbytes, accepted):
        self.now = max(self.now, now)
        expected = []
        for span, size in sorted(zip(spans, nbytes, strict=True), key=lambda sized: sized[0].start_block):
            held = self.copies[location]
            if self.may_store(location, span) and self.used_bytes(location) + size <= self.budgets[location]:
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

    # Redis

    def next_demotion(self, now, most_bytes, demotion):
        due = {(location, key) for location, key in self.expired(now) if location == REDIS}
        if demotion is None:
            return
        self.due -= due
        victims = [key for order in demotion.evict for key in order.keys]
        assert {order.source for order in demotion.evict} <= {REDIS}
        assert {(REDIS, key) for key in victims[: len(due)]} == due
        victims = victims[len(due) :]
        assert len(demotion.keys) == len(set(demotion.keys)) > 0
        assert len(demotion.keys) == 1 or sum(demotion.nbytes) <= most_bytes
        assert demotion.source.tier is Tier.CPU
        assert set(demotion.keys) <= self.resident(demotion.source)
        sources = [self.copies[demotion.source][key] for key in demotion.keys]
        assert [copy.nbytes for copy in sources] == list(demotion.nbytes)
        targets = []
        for key, size in zip(demotion.keys, demotion.nbytes, strict=True):
            span = self.known[key]
            assert key not in self.copies[REDIS]
            assert self.upheld(REDIS, span)
            while self.budgets[REDIS] - self.used_bytes(REDIS) < size:
                self.evict_for(REDIS, span, victims.pop(0))
            targets.append(NaiveCopy(key, size))
            self.copies[REDIS][key] = targets[-1]
        assert victims == []
        assert demotion.demotion_id not in self.demotions
        self.demotions[demotion.demotion_id] = (self.now + self.save_s, demotion.source, sources, targets)

    def finish_demotion(self, now, demotion_id, stored):
        self.expired(now)
        held = self.copies[REDIS]
        if demotion_id in self.demotions:
            for copy in self.demotions[demotion_id][3]:
                if copy.key in stored and held.get(copy.key) is copy:
                    copy.state = "committed" if copy.state == "reserved" else copy.state
            self.land(demotion_id)
        elif self.budgets[REDIS]:
            self.due |= {(REDIS, key) for key in stored if key not in held}

    def land(self, demotion_id):
        _, _, sources, targets = self.demotions.pop(demotion_id)
        held = self.copies[REDIS]
        for copy in reversed(targets):
            if held.get(copy.key) is copy and copy.state == "reserved":
                self.uproot(REDIS, copy.key, bytes_lost=True)
            if copy.key not in held and self.budgets[REDIS]:
                self.due.add((REDIS, copy.key))
        self.unlease(sources)

    def relieve(self, now, directives):
        self.now = max(self.now, now)
        at_redis = self.resident(REDIS)
        for order in directives:
            for key in order.keys:
                if (order.source, key) in self.due:
                    continue
                leaves = self.leaves(order.source)
                assert order.source.tier is Tier.CPU
                assert key in leaves & at_redis
                assert self.score(key) <= min(map(self.score, leaves)) + EPSILON
                assert self.used_bytes(order.source) > self.cpu_high_water * self.budgets[order.source]
                del self.copies[order.source][key]
                self.due.add((order.source, key))
        for location, budget in self.budgets.items():
            leaves = self.leaves(location)
            if location.tier is Tier.CPU and leaves and self.used_bytes(location) > self.cpu_high_water * budget:
                coldest = min(map(self.score, leaves)) + EPSILON
                assert any(self.score(key) <= coldest and key not in at_redis for key in leaves)

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
        self.now = max(self.now, now)
        for lease_id in [lease_id for lease_id, (end, _, _) in self.leases.items() if end <= self.now]:
            self.release(lease_id)
        for save_id in [save_id for save_id, (end, _) in self.saves.items() if end <= self.now]:
            self.abandon(save_id)
        for demotion_id in [demotion_id for demotion_id, (end, *_) in self.demotions.items() if end <= self.now]:
            self.land(demotion_id)
        return self.due

    def carried_out(self, directives):
        """Check that ``directives`` evict what is due, all of it and nothing else."""
        named = [(order.source, key) for order in directives for key in order.keys]
        assert (set(named), len(named)) == (self.due, len(self.due))
        self.due = set()
