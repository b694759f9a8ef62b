"""A trie that one policy evicts from: the catalogue's rules without the manager around it."""

import random

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.spans import split_segments

CPU = Location(Tier.CPU, "node")


class World:
    """Segments of one block and one byte, named by integers; a request is a tuple of them."""

    def __init__(self, policy, capacity, **settings):
        self.manager = KVManager(ManagerConfig(1, eviction_policy=policy, **settings), epoch=1)
        self.manager.set_budget(CPU, capacity)
        self.capacity = capacity

    def serve(self, request):
        """Plan, then offer all; return the leading blocks found."""
        hashes = [number.to_bytes(32, "little") for number in request]
        plan = self.manager.plan(0, "replica", "node", PlanQuery(hashes))
        self.manager.release(plan.lease_id)
        spans = split_segments(hashes, 0, len(hashes), 1, len(hashes))
        offer = self.manager.offer(0, "replica", CPU, spans, [1] * len(spans))
        self.manager.commit(0, CPU, offer.keys, [1] * len(offer.keys))
        return len(plan.segments)

    def stored(self, *numbers):
        """Return those of the heads that are stored."""
        return {n for n in numbers if self.manager.lookup([n.to_bytes(32, "little")])["cpu"]}

    def hit_rate(self, requests):
        found = sum(self.serve(request) for request in requests)
        return found / sum(map(len, requests))


def conversations(seed, count=260, busy=25):
    """Conversations under one system prompt: many end after a turn, the longer they are the likelier they go on."""
    rng, numbers = random.Random(seed), iter(range(1, 10**9))
    waiting, requests = [], []
    for _ in range(count):
        waiting.append((0, (0, *(next(numbers) for _ in range(rng.randint(2, 8))))))
        while len(waiting) > busy or (waiting and rng.random() < 0.6):
            turn, prompt = waiting.pop(rng.randrange(len(waiting)))
            requests.append((*prompt, next(numbers)))  # the last block is not full: it never comes again
            if rng.random() < 1 - 0.7 / (turn + 1):
                waiting.append((turn + 1, (*prompt, *(next(numbers) for _ in range(rng.randint(1, 3))))))
    return requests


def loop(blocks, rounds):
    """A scan that comes round again and again."""
    return [(number,) for _ in range(rounds) for number in range(1, blocks + 1)]


def one_shots(count):
    return [(10_000 + number,) for number in range(count)]


def zipf(seed, count, heads, drift=0):
    """Popular heads with a question each; with ``drift`` they change places every so many requests."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(heads)]
    order = list(range(1, heads + 1))
    requests = []
    for number in range(count):
        if drift and number % drift == 0:
            rng.shuffle(order)
        head = rng.choices(order, weights)[0]
        requests.append((head, head + 1000, head + 2000, 1_000_000 + number))
    return requests
