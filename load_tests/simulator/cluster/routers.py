"""The routers that are compared, by name. Each is given prompts one by one and names a replica at once.

``random``, ``round-robin``, ``power-of-two`` (the shorter of two random queues) and ``session-hash`` do not look at
what is cached. ``text-prefix`` follows the rules of Ray Serve LLM's `PrefixCacheAffinityRouter` (ray 2.60.0): see
`load_tests.simulator.cluster.text_prefix`. ``pure-affinity`` goes where most leading blocks are on the device, whatever
waits there. ``ours`` is the code that serves: `kvmanager.routing`, `kvmanager.routing.spreading`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvmanager.index.locations import Tier
from kvmanager.routing.cost import RoutingState
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.routing.spreading import Spread, Spreading
from kvmanager.segments.keys import BlockHash
from load_tests.simulator.cluster.text_prefix import TextPrefixTree
from load_tests.simulator.trace import BLOCK_TOKENS

SESSION_BLOCKS = 1
"""Blocks after the first, which often is a system prompt that all share, that tell one conversation from another."""
MATCH_RATE = 0.1
"""Of Ray Serve LLM: a smaller share of a prompt in the tree is no match."""
SERVED_BLOCK_TOKENS = 16
"""A block of vLLM's on CUDA: what the weight of running decodes is per, when serving."""


class Prompt(NamedTuple):
    """What a router is told of a request."""

    request_id: str
    hashes: Sequence[BlockHash]
    hash_ids: Sequence[int]
    tokens: int


class ClusterView(Protocol):
    """What a router sees of the replicas. The queue lengths are exact, the mirror is late."""

    names: list[str]
    mirror: PlacementMirror

    def ongoing(self, replica: str) -> int:
        """Return the number of requests that a replica has and has not ended."""

    def credits(self) -> dict[Tier, float]:
        """Return the measured credits."""


class Router(ABC):
    """One policy, over one cluster and one source of randomness."""

    def __init__(self, view: ClusterView, rng: random.Random) -> None:
        self.view = view
        self.rng = rng

    @abstractmethod
    def choose(self, prompt: Prompt, now: float) -> str:
        """Return the replica for a prompt, which goes there."""

    def first_token(self, request_id: str) -> None:  # noqa: B027 - most do not care
        """Note that a request's prefill is done."""

    def finished(self, request_id: str) -> None:  # noqa: B027
        """Note that a request has ended."""

    def take_moves(self) -> list[Spread]:
        """Return the moves ordered since the last call."""
        return []

    def shorter(self, names: Sequence[str]) -> str:
        """Return the one of ``names`` with the fewest requests, the first of equals."""
        return min(names, key=self.view.ongoing)

    def two(self) -> list[str]:
        """Return two replicas at random, or the only one."""
        return self.rng.sample(self.view.names, min(2, len(self.view.names)))


class RandomRouter(Router):
    """Any replica."""

    def choose(self, prompt: Prompt, now: float) -> str:  # noqa: D102 - the interface says it
        return self.rng.choice(self.view.names)


class RoundRobin(Router):
    """One after the other."""

    _next = 0

    def choose(self, prompt: Prompt, now: float) -> str:  # noqa: D102
        self._next += 1
        return self.view.names[(self._next - 1) % len(self.view.names)]


class PowerOfTwo(Router):
    """The shorter queue of two random replicas; Ray Serve's default."""

    def choose(self, prompt: Prompt, now: float) -> str:  # noqa: D102
        return self.shorter(self.two())


class SessionHash(Router):
    """A conversation stays where the hash of its beginning points."""

    def choose(self, prompt: Prompt, now: float) -> str:  # noqa: D102
        session = prompt.hash_ids[1 : 1 + SESSION_BLOCKS] or prompt.hash_ids[:1]
        digest = blake2b(repr(tuple(session)).encode(), digest_size=8).digest()
        return self.view.names[int.from_bytes(digest, "big") % len(self.view.names)]


class TextPrefix(Router):
    """Ray Serve LLM's rules. Queues further apart than ``imbalance`` (by default never) fall back to two choices."""

    def __init__(self, view: ClusterView, rng: random.Random, imbalance: float = float("inf")) -> None:
        super().__init__(view, rng)
        self._imbalance = imbalance
        self._tree = TextPrefixTree(view.names)

    def choose(self, prompt: Prompt, now: float) -> str:  # noqa: D102
        queues = [self.view.ongoing(name) for name in self.view.names]
        if max(queues) - min(queues) > self._imbalance:
            chosen = self.shorter(self.two())
        else:
            matched, names = self._tree.match(prompt.hash_ids)
            rate = min(1.0, matched * BLOCK_TOKENS / prompt.tokens)
            chosen = self.shorter(names if rate >= MATCH_RATE else self._tree.smallest())
        self._tree.insert(prompt.hash_ids, chosen)
        return chosen


class PureAffinity(Router):
    """The replica with most of the prompt on its device, a random one of equals."""

    def choose(self, prompt: Prompt, now: float) -> str:  # noqa: D102
        hits = self.view.mirror.coverages(prompt.hashes, self.view.names)
        most = max(found.device for found in hits.values())
        return self.rng.choice([name for name, found in hits.items() if found.device == most])


class Ours(Router):
    """`kvmanager.routing` as the Serve router uses it (`deployments.router`)."""

    def __init__(self, view: ClusterView, rng: random.Random) -> None:
        super().__init__(view, rng)
        self._state = RoutingState(BLOCK_TOKENS, decode_weight=BLOCK_TOKENS / SERVED_BLOCK_TOKENS)
        self._spreading = Spreading(blocks_per_segment=1)
        self._moves: list[Spread] = []

    def choose(self, prompt: Prompt, now: float) -> str:  # noqa: D102
        state = self._state
        state.credits = self.view.credits()
        found = self.view.mirror.coverages(prompt.hashes, self.view.names)
        hits = {name: state.with_in_flight(name, held, prompt.hashes) for name, held in found.items()}
        order = state.rank(self.view.names, hits, prompt.tokens, now)
        chosen = order[0]
        waits = {name: state.wait(name, hits[name], prompt.tokens) for name in order}
        self._moves += self._spreading.consider(now, prompt.hashes, chosen, waits, hits)
        uncached = max(0, prompt.tokens - sum(hits[chosen]) * BLOCK_TOKENS)
        state.route(prompt.request_id, chosen, uncached, len(prompt.hashes), now, prompt.hashes)
        return chosen

    def first_token(self, request_id: str) -> None:  # noqa: D102
        self._state.first_token(request_id)

    def finished(self, request_id: str) -> None:  # noqa: D102
        self._state.finished(request_id)

    def take_moves(self) -> list[Spread]:  # noqa: D102
        moves, self._moves = self._moves, []
        return moves


_ROUTERS: dict[str, Callable[[ClusterView, random.Random], Router]] = {
    "random": RandomRouter,
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "session-hash": SessionHash,
    "text-prefix": TextPrefix,
    "text-prefix-10": lambda view, rng: TextPrefix(view, rng, imbalance=10),
    "pure-affinity": PureAffinity,
    "ours": Ours,
}


def router_names() -> list[str]:
    """Return the names that `make_router` knows."""
    return list(_ROUTERS)


def make_router(name: str, view: ClusterView, seed: int) -> Router:
    """Return a new router over ``view``. Raises ValueError for a name that is not known."""
    if name not in _ROUTERS:
        raise ValueError(f"unknown router {name!r}; choose one of {', '.join(_ROUTERS)}")
    return _ROUTERS[name](view, random.Random(seed))
