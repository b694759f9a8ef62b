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

    from app.backend.manager_control import ManagerControl


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
        """End the outputs of `request_id`, with or without an error: no caller waits for them. Idempotent.

        May be called for requests that have ended or never began.
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
        """The last known reports of the replicas that can be sent to on their device pools, by unique name."""
        ...

    def lacking_tokens(self, request: GenerateRequest) -> int | None:
        """What the best decode replica would have to compute of a prompt; None while there are no roles."""
        ...

    def ranks(self) -> Collection[int] | None:
        """The ranks of the replicas that can be sent to now, from local knowledge; None when not known."""
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
    control: ManagerControl
    health: Callable[[], Awaitable[HealthReport]]
    metrics: Callable[[], Sequence[MetricsSource]] = tuple
    """The parts that there are now (replicas, manager): /metrics adds their families to the ingress's own."""
    ending: Callable[[], bool] = lambda: False
    """Whether this ingress is being stopped, and waits for its requests to end."""
    follow_replicas: Callable[[Callable[[int], None]], None] = lambda hear: None
    """Call `hear` with how many replicas there are, now if that is known, and whenever it changes."""
