"""Replays a trace through one manager and counts.

The hit rate is the share of a trace's blocks that a request found stored, from its first block on without a gap. With
one tier, every block of a request is offered to the manager after it: that is the definition of DESIGN §7's table.
Requests are served one after the other, in order of arrival, and what is moved has arrived before the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmanager.config import ManagerConfig
from kvmanager.manager import KVManager
from load_tests.simulator.costs import Costs
from load_tests.simulator.one_replica.clairvoyant import clairvoyant_manager
from load_tests.simulator.one_replica.oracle import NextUses
from load_tests.simulator.one_replica.serving import Served, Serving
from load_tests.simulator.policies import served_name
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest

BELADY = "belady"
"""The policy that knows the future: of the simulator only."""
PROGRESS_EVERY = 64
"""Requests."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated, in trace blocks of `BLOCK_TOKENS`."""

    policy: str
    """A name of `load_tests.simulator.policies`, ``belady``, or ``module:Class``."""
    capacity_blocks: int
    """Of the CPU tier, shared by all replicas."""
    device_blocks: int = 0
    """Of each replica's pool; 0 leaves that tier out."""
    redis_blocks: int = 0
    """0 leaves that tier out."""
    replicas: int = 1
    router: str | None = None
    """Of `load_tests.simulator.cluster.routers`; None for one replica."""
    rate_scale: float | None = None
    """How much faster than it was recorded a trace reaches the replicas of a router; None: chosen by it."""
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """Sums over the requests served. Blocks are the trace's, tokens those in them."""

    requests: int = 0
    blocks: int = 0
    device_blocks: int = 0
    cpu_blocks: int = 0
    redis_blocks: int = 0
    saved_blocks: int = 0
    promoted_blocks: int = 0
    demoted_blocks: int = 0
    evicted_blocks: int = 0
    input_tokens: int = 0
    device_tokens: int = 0
    cpu_tokens: int = 0
    redis_tokens: int = 0
    recomputed_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Estimate for each request, without waiting for other requests."""

    def add(self, request: TraceRequest, served: Served, costs: Costs) -> None:
        """Count a request."""
        # The engine computes at least the last token of a prompt: its output is the first token of the answer.
        reusable = request.input_tokens - 1
        device = min(served.device * BLOCK_TOKENS, reusable)
        cpu = min((served.device + served.cpu) * BLOCK_TOKENS, reusable) - device
        redis = min((served.device + served.cpu + served.redis) * BLOCK_TOKENS, reusable) - device - cpu
        recomputed = request.input_tokens - device - cpu - redis
        self.requests += 1
        self.blocks += served.blocks
        self.device_blocks += served.device
        self.cpu_blocks += served.cpu
        self.redis_blocks += served.redis
        self.saved_blocks += served.saved
        self.promoted_blocks += served.promoted
        self.demoted_blocks += served.demoted
        self.evicted_blocks += served.evicted
        self.input_tokens += request.input_tokens
        self.device_tokens += device
        self.cpu_tokens += cpu
        self.redis_tokens += redis
        self.recomputed_tokens += recomputed
        self.ttft_s.append(costs.ttft_s(recomputed, cpu, redis))


def make_manager(setup: Setup, future: NextUses) -> KVManager:
    """Return a manager as it serves, but with one trace block per segment. Raises ValueError for the policy."""
    if setup.policy == BELADY:
        return clairvoyant_manager(ManagerConfig(blocks_per_segment=1), epoch=1, next_use=future.next_use)
    config = ManagerConfig(blocks_per_segment=1, eviction_policy=served_name(setup.policy), policy_seed=setup.seed)
    return KVManager(config, epoch=1)


def replay(
    trace: Sequence[TraceRequest], setup: Setup, costs: Costs, progress: Callable[[int], None] = lambda done: None
) -> Tally:
    """Serve a trace on one replica; ``progress`` hears of the requests served so far, now and then."""
    future = NextUses(trace if setup.policy == BELADY else ())
    manager = make_manager(setup, future)
    block_bytes = BLOCK_TOKENS * costs.kv_bytes_per_token
    serving = Serving(manager, block_bytes, setup.capacity_blocks, setup.redis_blocks, setup.device_blocks)
    tally = Tally()
    for done, request in enumerate(trace):
        if done % PROGRESS_EVERY == 0:
            progress(done)
        future.serve(done)
        tally.add(request, serving.serve(request.timestamp_s, request), costs)
    progress(len(trace))
    return tally
