from dataclasses import dataclass

import pytest

from kvmanager.config import ManagerConfig
from kvmanager.extensions import PLAN_EXTENSIONS, plan_extensions
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import block_hashes
from kvmanager.segments.spans import split_segments

CPU = Location(Tier.CPU, "node")
ALL = plan_extensions(PLAN_EXTENSIONS)


@dataclass
class Brain:
    """A manager with one CPU tier of 10 bytes; a segment holds 2 blocks of one token, and one byte."""

    manager: KVManager
    cpu: Location = CPU
    redis: Location = REDIS
    now: float = 0.0

    def hashes(self, text):
        return block_hashes([ord(letter) for letter in text], 1, "tests")

    def spans(self, text, start=0, prompt=None, tenant=""):
        return split_segments(self.hashes(text), start, len(text), 2, len(text) if prompt is None else prompt, tenant)

    def plan(self, text, device=0):
        return self.manager.plan(self.now, "replica", "node", PlanQuery(self.hashes(text), device_blocks=device))

    def offer(self, text, start=0, location=None, nbytes=1, tenant=""):
        spans = self.spans(text, start, tenant=tenant)
        return self.manager.offer(self.now, "replica", location or self.cpu, spans, [nbytes] * len(spans))

    def commit(self, keys, location=None):
        return self.manager.commit(self.now, location or self.cpu, list(keys), [1] * len(keys))

    def serve(self, text, location=None, tenant=""):
        """Plan a prompt, store all that the manager wants of it; return the blocks that were found."""
        plan = self.plan(text)
        found = plan.segments[-1].start_block + plan.segments[-1].num_blocks if plan.segments else 0
        self.manager.release(plan.lease_id)
        self.commit(self.offer(text, location=location, tenant=tenant).keys, location)
        return found

    def stored(self, text):
        return self.manager.lookup(self.hashes(text))["cpu"]

    def kept(self, text):
        """Blocks of a prompt that Redis holds."""
        return self.manager.lookup(self.hashes(text))["redis"]

    def keys(self, text):
        return tuple(span.key for span in self.spans(text))

    def next_demotion(self, most_bytes=100):
        return self.manager.next_demotion(self.now, most_bytes)

    def finish(self, demotion, stored=None):
        """``stored``: the keys, or by key the bytes at Redis; None: all, in the size that was reserved."""
        if not isinstance(stored, dict):
            keys = demotion.keys if stored is None else stored
            sizes = dict(zip(demotion.keys, demotion.nbytes, strict=True))
            stored = {key: sizes[key] for key in keys}
        return self.manager.finish_demotion(self.now, demotion.demotion_id, stored)

    def demote_all(self):
        """Copy to Redis all that is to be copied; return the keys."""
        done = []
        for _ in range(1000):
            demotion = self.next_demotion()
            if demotion is None:
                return done
            self.finish(demotion)
            done += demotion.keys
        raise AssertionError("demotions without end")

    def pin(self, text, ttl_s=60.0):
        return self.manager.pin(self.now, self.keys(text)[-1:], ttl_s)

    def evicted(self):
        """Return the keys that are ordered evicted now."""
        return [key for order in self.manager.expire(self.now) for key in order.keys]

    def counters(self):
        return self.manager.stats(self.now)["counters"]


@pytest.fixture
def brain():
    return make_brain()


@pytest.fixture(scope="session")
def brain_with():
    return make_brain


@pytest.fixture
def tiered():
    """A brain with Redis."""
    return make_brain(redis=20)


def make_brain(budget=10, redis=None, extensions=None, **settings):
    settings = {"eviction_policy": "coldest_first:ColdestFirst", **settings}
    made = Brain(KVManager(ManagerConfig(2, **settings), epoch=1, extensions=extensions or ALL))
    made.manager.set_budget(made.cpu, budget)
    if redis is not None:
        made.manager.set_budget(made.redis, redis)
    return made
