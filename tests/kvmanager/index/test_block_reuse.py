"""Reuse by the block: a manager finds every leading block that lies in any stored segment, and stores none twice."""

import random

import pytest
from naive_manager import hashes_of

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.index.trie import MOST_TWINS
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.routing.mirror import PlacementMirror
from tests.sizes import LIVES

LOCATIONS = (Location(Tier.CPU, "node0"), Location(Tier.CPU, "node1"), REDIS)


class BlockWorld:
    """A manager beside a plain record of which segments each location holds, and of their blocks."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.most = self.rng.choice([1, 2, 3, 4, 8])
        self.manager = KVManager(ManagerConfig(self.most, max_deltas=50, max_ghosts=self.rng.choice([5, 1000])), 1)
        self.budgets = [self.rng.randint(5, 60) for _ in LOCATIONS]
        for location, budget in zip(LOCATIONS, self.budgets, strict=True):
            self.manager.set_budget(location, budget)
        self.held = {location: {} for location in LOCATIONS}
        self.mirror = PlacementMirror(self.most)

    def prompt(self):
        length = self.rng.randint(1, 24)
        parts = self.rng.randint(0, length)  # random sequences part at random blocks
        return hashes_of([0] * parts + [self.rng.randrange(3) for _ in range(length - parts)])

    def free(self, directives):
        for order in directives:
            for key in order.keys:
                del self.held[order.source][key]

    def serve(self):
        hashes, location = self.prompt(), self.rng.choice(LOCATIONS)
        self.manager.release(self.manager.plan(0.0, "replica", location.holder, PlanQuery(hashes)).lease_id)
        first = self.rng.randint(0, len(hashes)) if self.rng.random() < 0.3 else 0
        spans = self.manager.cut(location, hashes, first, len(hashes), self.rng.randint(0, len(hashes)))
        present = self.reach(hashes, [location])
        if first == 0:
            assert [span.start_block for span in spans[:1]] == ([present] if present < len(hashes) else [])
        offer = self.manager.offer(0.0, "replica", location, spans, [1] * len(spans))
        self.free(offer.evict)
        kept = self.rng.sample(offer.keys, self.rng.randint(0, len(offer.keys))) if offer.keys else []
        kept = self.manager.commit(0.0, location, kept, [1] * len(kept))
        self.keep(location, [span for span in spans if span.key in kept])
        self.manager.abandon(offer.save_id)
        self.free(self.manager.expire(0.0))

    def keep(self, location, spans):
        self.held[location] |= {span.key: span for span in spans}

    def prefetch(self):
        hashes = self.prompt()
        plan = self.manager.plan(0.0, "replica", "node0", PlanQuery(hashes))
        keys = [segment.key for segment in plan.segments]
        self.manager.release(plan.lease_id)
        offer = self.manager.prefetch(0.0, "replica", LOCATIONS[0], keys)
        self.free(offer.evict)
        self.keep(LOCATIONS[0], [self.held[REDIS][key] for key in offer.keys])
        self.manager.commit(0.0, LOCATIONS[0], offer.keys, [1] * len(offer.keys))

    def lose(self):
        location = self.rng.choice(LOCATIONS)
        if self.held[location]:
            key = self.rng.choice(sorted(self.held[location]))
            del self.held[location][key]
            self.free(self.manager.dropped(0.0, location, [key]))

    def clear(self):
        self.free(self.manager.clear({self.rng.choice([Tier.CPU, Tier.REDIS])}))

    def register_again(self):
        """A location is lost, and tells the same or another manager what it holds, in its own cuts."""
        number = self.rng.randrange(len(LOCATIONS))
        location, spans = LOCATIONS[number], list(self.held[LOCATIONS[number]].values())
        self.manager.forget_holder(location)
        while self.manager.sweeping:
            self.manager.sweep(0.0)
        self.manager.set_budget(location, self.budgets[number])
        kept = set(self.manager.adopt(0.0, location, spans, [1] * len(spans)))
        self.held[location] = {key: span for key, span in self.held[location].items() if key in kept}

    def step(self):
        names = ("serve", "prefetch", "lose", "clear", "register_again")
        getattr(self, self.rng.choices(names, (20, 4, 2, 0.3, 0.5))[0])()

    def reach(self, hashes, locations):
        """Leading blocks in the set of all blocks of the segments that are stored there."""
        spans = [span for location in locations for span in self.held[location].values()]
        blocks = {span.marks[at : at + 8] for span in spans for at in range(0, len(span.marks), 8)}
        return next((number for number, block in enumerate(hashes) if block[:8] not in blocks), len(hashes))

    def check(self):
        hashes, node = self.prompt(), self.rng.choice(["node0", "node1", "x"])
        plan = self.manager.reserve(0.0, "replica", node, hashes)
        reached = 0
        for segment in plan.segments:
            span = self.held[segment.location][segment.key]
            assert (segment.start_block, segment.num_blocks) == (span.start_block, span.num_blocks)
            assert segment.start_block <= reached < segment.end_block <= span.end_block
            used = hashes[segment.start_block : segment.end_block]
            assert span.marks.startswith(b"".join(block[:8] for block in used))
            assert segment.last_hash == (b"" if segment.end_block == span.end_block else used[-1])
            reached = segment.end_block
        assert reached == self.reach(hashes, LOCATIONS)
        self.manager.release(plan.lease_id)
        report = self.manager.lookup(hashes)
        in_cpu, in_redis = self.reach(hashes, LOCATIONS[:2]), self.reach(hashes, [REDIS])
        assert (report["cpu"], report["redis"]) == (in_cpu, in_redis)
        assert [segment["end"] for segment in report["segments"]][-1:] >= ([reached] if reached else [])
        while not self.mirror.apply(deltas := self.manager.deltas_since(self.mirror.position, 20)) or deltas.more:
            pass
        assert self.mirror.coverage(hashes, "replica") == (0, in_cpu, max(0, in_redis - in_cpu))


@pytest.mark.parametrize("seed", range(LIVES))
def test_every_stored_block_is_found_and_none_is_cut_twice(seed):
    world = BlockWorld(seed)
    for _ in range(150):
        world.step()
        world.check()


def test_twenty_questions_about_a_document_store_it_once():
    manager = KVManager(ManagerConfig(16), epoch=1)
    manager.set_budget(LOCATIONS[0], 10**9)
    rng = random.Random(1)
    document, stored = [rng.randrange(10**6) for _ in range(70)], 0
    whole = set()
    for _ in range(20):
        question = [rng.randrange(10**6) for _ in range(rng.randint(1, 8))]
        hashes = hashes_of(document + question)
        spans = manager.cut(LOCATIONS[0], hashes, 0, len(hashes), len(hashes))
        offer = manager.offer(0.0, "replica", LOCATIONS[0], spans, [span.num_blocks for span in spans])
        manager.commit(0.0, LOCATIONS[0], offer.keys, [span.num_blocks for span in spans])
        assert len(offer.keys) == len(spans)
        stored += sum(span.num_blocks for span in spans)
        whole |= set(hashes)
    assert stored == len(whole) == manager.stats(0.0)["locations"][0]["bytes"], "a block is stored twice"


@pytest.mark.parametrize("nodes", [20, MOST_TWINS + 1])
def test_many_nodes_store_conversations_that_begin_with_the_same_blocks(nodes):
    manager = KVManager(ManagerConfig(4), epoch=1)
    for number in range(nodes):
        location, hashes = Location(Tier.CPU, f"node{number}"), hashes_of([0, 0, number + 1, number + 1])
        manager.set_budget(location, 10)
        offer = manager.offer(0.0, "replica", location, manager.cut(location, hashes, 0, 4, 4), [4])
        manager.commit(0.0, location, offer.keys, [4] * len(offer.keys))
    stored = [place["segments"] for place in manager.stats(0.0)["locations"]]
    assert stored == [1] * min(nodes, MOST_TWINS) + [0] * (nodes - MOST_TWINS)
    assert manager.stats(0.0)["counters"]["refused_twins"] == max(0, nodes - MOST_TWINS)


@pytest.mark.parametrize("blocks", [4, 6, 8])
def test_a_whole_segment_of_another_sequence_with_the_same_marks_is_named_with_the_prompts_own_hash(blocks):
    """The index tells blocks apart by 8 bytes; the loader compares all 32, so it has to be told which they are."""
    manager = KVManager(ManagerConfig(4), epoch=1)
    manager.set_budget(LOCATIONS[0], 10)
    stored = hashes_of(range(blocks))
    spans = manager.cut(LOCATIONS[0], stored, 0, blocks, blocks)
    offer = manager.offer(0.0, "replica", LOCATIONS[0], spans, [1] * len(spans))
    manager.commit(0.0, LOCATIONS[0], offer.keys, [1] * len(spans))
    assert {segment.last_hash for segment in manager.reserve(0.0, "replica", "node0", stored).segments} == {b""}
    alike = [block[:8] + bytes(24) for block in stored]
    plan = manager.reserve(0.0, "replica", "node0", alike)
    assert [segment.last_hash or segment.key for segment in plan.segments] == [alike[end - 1] for end in (4, blocks)][
        : len(spans)
    ]
