"""What is used does not expire in Redis, and no parent before what hangs on it."""

from __future__ import annotations

import random

import pytest

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import SegmentSpan, split_segments
from tests.sizes import LIVES

CUT = 2
HERE = Location(Tier.CPU, "node")
EVERY_S, EXPIRE_S = 10.0, 100.0


class World:
    """A manager whose Redis forgets segments when their time is over; `expiry` is by segment."""

    def __init__(self, **config: float) -> None:
        self.brain = KVManager(ManagerConfig(blocks_per_segment=CUT, **{"redis_renew_s": EVERY_S, **config}), epoch=1)
        self.brain.set_budget(HERE, 10**6)
        self.brain.set_budget(REDIS, 10**6)
        self.now = 0.0
        self.expiry: dict[SegmentKey, float] = {}
        self.spans: dict[SegmentKey, SegmentSpan] = {}

    def store(self, hashes: list[BlockHash]) -> list[SegmentSpan]:
        """Save a prompt and copy it to Redis."""
        spans = split_segments(hashes, 0, len(hashes), CUT, len(hashes))
        offer = self.brain.offer(self.now, "replica", HERE, spans, [1] * len(spans))
        self.brain.commit(self.now, HERE, offer.keys, [1] * len(offer.keys))
        while (demotion := self.brain.next_demotion(self.now, 100)) is not None:
            for key in demotion.keys:
                self.expiry[key] = self.now + EXPIRE_S
            self.brain.finish_demotion(self.now, demotion.demotion_id, dict.fromkeys(demotion.keys, 1))
        self.spans |= {span.key: span for span in spans}
        return spans

    def use(self, hashes: list[BlockHash]) -> None:
        self.brain.release(
            self.brain.plan(self.now, "replica", "node", PlanQuery(hashes, device_blocks=len(hashes))).lease_id
        )

    def renew(self, most: int = 1000) -> list[SegmentKey]:
        renewed = self.brain.renewals.take(self.now, most)
        for key in renewed:
            self.expiry[key] = self.now + EXPIRE_S
        return renewed

    def check(self) -> None:
        for key, span in self.spans.items():
            if span.parent is not None:
                assert self.expiry[SegmentKey(span.parent)] >= self.expiry[key]


def prompt(seed: int, blocks: int, begin: list[BlockHash] | None = None) -> list[BlockHash]:
    draw = random.Random(seed)
    return (begin or []) + [BlockHash(draw.randbytes(32)) for _ in range(blocks)]


def test_what_a_device_answers_is_renewed_with_all_that_it_follows_on_children_first() -> None:
    world, hashes = World(), prompt(1, 6)
    spans = world.store(hashes)
    world.renew()
    world.now = EVERY_S
    world.use(hashes)
    assert world.renew() == [span.key for span in reversed(spans)]


def test_nothing_is_renewed_twice_within_a_while_nor_what_nobody_uses() -> None:
    world, hashes, other = World(), prompt(2, 6), prompt(3, 4)
    world.store(hashes)
    world.store(other)
    world.renew()
    world.now = EVERY_S - 1
    world.use(hashes)
    assert world.renew() == []
    world.now = EVERY_S
    world.use(hashes)
    assert len(world.renew()) == 3
    world.use(hashes)
    assert world.renew() == []


def test_what_is_written_below_has_what_is_above_renewed() -> None:
    world, head = World(), prompt(4, 4)
    above = world.store(head)
    world.renew()
    world.now = EVERY_S / 2
    world.store(prompt(5, 2, head))
    assert world.renew() == [span.key for span in reversed(above)]
    world.check()


def test_many_are_renewed_in_several_calls_and_a_chain_in_one() -> None:
    world = World()
    prompts = [prompt(10 + number, 6) for number in range(5)]
    for hashes in prompts:
        world.store(hashes)
    world.renew()
    world.now = EVERY_S
    for hashes in prompts:
        world.use(hashes)
    sizes = [len(world.renew(most=4)) for _ in range(4)]
    assert sizes == [6, 6, 3, 0]


def test_where_nothing_expires_nothing_is_renewed_nor_after_redis_is_lost() -> None:
    forever = World(redis_renew_s=0.0)
    forever.store(prompt(6, 4))
    forever.now = 1e6
    forever.use(prompt(6, 4))
    assert forever.renew() == []
    world = World()
    world.store(prompt(7, 4))
    world.now = EVERY_S
    world.use(prompt(7, 4))
    world.brain.forget_holder(REDIS)
    assert world.renew() == []


@pytest.mark.parametrize("seed", range(LIVES // 3))
def test_in_a_random_life_no_parent_expires_before_a_child_and_nothing_that_is_used(seed: int) -> None:
    world, draw = World(), random.Random(seed)
    prompts = [prompt(1000, 4)]
    world.store(prompts[0])
    used: dict[int, float] = {0: 0.0}
    for _ in range(300):
        world.now += draw.uniform(0, 5)
        chosen = draw.randrange(len(prompts))
        if draw.random() < 0.2:
            prompts.append(prompt(draw.randrange(10**6), 2 * draw.randint(1, 3), prompts[chosen]))
            chosen = len(prompts) - 1
            world.store(prompts[chosen])
        world.use(prompts[chosen])
        used[chosen] = world.now
        world.renew()
        world.check()
        for number, when in used.items():
            keys = [span.key for span in split_segments(prompts[number], 0, len(prompts[number]), CUT, 0)]
            assert min(world.expiry[key] for key in keys) >= when + EXPIRE_S - EVERY_S
