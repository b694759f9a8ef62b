"""What the ingress asks of the rest of the system: implemented over Serve handles, and by fakes in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from app.metrics.parts import MetricsSource
from deployments.protocol.wire import GenerateRequest
from kvmanager.routing.roles import Phase
from kvmanager.scheduling.rebalancing import KVReport

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


class ReplicaHandle(Protocol):
    """The replicas, behind their router. All methods are called on the ingress's event loop."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Send one prompt, once, to the replica that the router picks, or to `request.replica_pin`.

        Yields vLLM's outputs as they come, in the request's own `output_kind`; `prompt_token_ids` may be None. The last
        one carries a `KVCacheUsage` in `kv_transfer_params[KV_CACHE_USAGE]`. Ray's exceptions may pass through as they
        are (`app.backend.replica_errors` reads them). An iterator that is not read to its end is closed (`aclose`,
        where it has one) and `abort` is called.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Nobody waits for `request_id` any more: its outputs end, with or without an error. Idempotent.

        Also for requests that have ended or never began.
        """
        ...

    def none_left(self) -> bool:
        """Whether this process knows that no replica can be sent to."""
        ...

    def only_one(self) -> bool:
        """Whether this process knows that there is at most one replica to be sent to."""
        ...

    def rank_of(self, replica: str) -> int | None:
        """The number of the replica with this unique name; None when not known."""
        ...

    def named(self, rank: int) -> str | None:
        """The unique name of the replica with this number, perhaps of one that is being stopped; None: of none."""
        ...

    def why_not_to(self, replica: str, phase: Phase) -> str | None:
        """Why a request of this phase cannot be sent to the replica with this unique name, in words; None: it can."""
        ...

    def kv_reports(self) -> Mapping[str, KVReport]:
        """What the replicas that can be sent to last said of their device pools, by unique name, as far as known."""
        ...

    def lacking_tokens(self, request: GenerateRequest) -> int | None:
        """What the best decode replica would have to compute of a prompt; None while there are no roles."""
        ...

    def ranks(self) -> Collection[int] | None:
        """The ranks of the replicas that can be sent to now, from local knowledge; None when not known."""
        ...


class ControlPlane(Protocol):
    """The KV manager, as the control API sees it. What it raises, or answers late, becomes a 503."""

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """Where the KV of a prompt with these block hashes lies now (`KVManager.lookup`)."""
        ...

    async def stats(self) -> dict[str, Any]:
        """The manager's figures (`KVManager.stats`)."""
        ...

    async def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """What a tenant, here and below by its tag, may know of them (`KVManager.tenant_stats`)."""
        ...

    async def trie(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> dict[str, Any] | None:
        """The index as a tree (`kvmanager.views.tree`), of one tenant or of all; None: there is no such root."""
        ...

    async def live(self, seen: int, tenants: Sequence[str]) -> dict[str, Any]:
        """What changes from second to second (`deployments.manager.people.calls`), with these tenants' own.

        `seen`: the number of the last order that was heard of; -1: none.
        """
        ...

    async def clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        """Forget all KV in these tiers (`device`, `cpu`, `redis`), or a tenant's; returns what was cleared."""
        ...

    async def pin(self, hashes: Sequence[bytes], ttl_s: float, tenant: str) -> dict[str, Any]:
        """Keep the known beginning of a tenant's prompt for so long.

        What a pin or an unpin cannot do is answered `{"refused": reason, "message": sentence}`.
        """
        ...

    async def unpin(self, hashes: Sequence[bytes], tenant: str) -> dict[str, Any]:
        """End a tenant's pin."""
        ...

    async def pin_node(self, node: bytes, ttl_s: float | None, whose: str | None) -> dict[str, Any]:
        """The same for a segment and all that it follows on, of a tenant or, None, of all; without a time: unpin."""
        ...

    async def hashes_to(self, node: bytes, whose: str | None) -> dict[str, Any]:
        """The `hashes` of a segment's blocks and of all that it follows on, `whose` as for `pin_node`; or refused."""
        ...

    async def would_clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        """What `clear` would take, by tier."""
        ...

    async def evict(
        self,
        hashes: Sequence[bytes],
        node: bytes | None,
        whose: str | None,
        tiers: Collection[str],
        replica: int | None,
        deadline_s: float,
        dry_run: bool,
    ) -> dict[str, Any]:
        """Take what only one prompt needs out of tiers (`deployments.manager.people.orders`), or say what would go.

        Answers as `prefetch` does, with amounts by tier; or, where nothing was begun, as a pin does.
        """
        ...

    async def would_move(self, hashes: Sequence[bytes], source: int, target: int) -> dict[str, Any]:
        """What `move` would do; refused as a pin is."""
        ...

    async def compress(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """Let a prompt's segments be copied to Redis now; how far that is, or refused as a pin is."""
        ...

    async def compressed(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """How far that is (`kvmanager.moves.prompt_orders.Compressed`)."""
        ...

    async def prefetch(self, hashes: Sequence[bytes], replica: int, deadline_s: float) -> dict[str, Any]:
        """Bring a prompt's known beginning to a replica's device.

        Answers when it has ended: `outcome` is "done" or the reason why not, with a `message` then.
        """
        ...

    async def move(self, hashes: Sequence[bytes], source: int, target: int, deadline_s: float) -> dict[str, Any]:
        """Move a prompt's known beginning between two replicas' devices; answers as `prefetch` does."""
        ...


@dataclass(frozen=True, slots=True)
class HealthReport:
    """`serving`: a request sent now is answered. `parts`: each part's `state` ("ok" or what is wrong) and more."""

    serving: bool
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything behind the ingress."""

    replicas: ReplicaHandle
    control: ControlPlane
    health: Callable[[], Awaitable[HealthReport]]
    metrics: Callable[[], Sequence[MetricsSource]] = tuple
    """The parts that there are now (replicas, manager): /metrics adds their families to the ingress's own."""
    ending: Callable[[], bool] = lambda: False
    """Whether this ingress is being stopped, and waits for its requests to end."""
    follow_replicas: Callable[[Callable[[int], None]], None] = lambda hear: None
    """Call `hear` with how many replicas there are, now if that is known, and whenever it changes."""
