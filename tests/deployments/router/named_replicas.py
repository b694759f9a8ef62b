"""Serve's router over replicas that only have a name, and a mirror that is told what a test wants."""

from __future__ import annotations

from typing import Any

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from configs.settings import load_settings
from deployments.protocol.manager_client import ManagerUnavailableError
from deployments.protocol.wire import GenerateRequest
from deployments.router.prefix_affinity import PrefixAffinityRouter, RouterOptions
from kvmanager.index.deltas import Deltas, Event, Part
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import split_segments

BLOCK = 32
DEPLOYMENT = DeploymentID(name="replica", app_name="chat")


class NoManager:
    """Stands in for the manager's client: the tests feed the mirror themselves."""

    def __init__(self, app_name: str) -> None:
        pass

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        raise ManagerUnavailableError("none in this test")


class NamedReplica:
    """What the router reads of Serve's `RunningReplica`."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self._actor_handle = None


REPLICAS: list[Any] = [NamedReplica(name) for name in ("a", "b", "c")]


def pending(argument: Any, request_id: str = "r") -> PendingRequest:
    metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id)
    return PendingRequest(args=[argument], kwargs={}, metadata=metadata)


def ask(blocks: list[bytes], tokens: int, **options: Any) -> GenerateRequest:
    params: Any = None
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=[0] * tokens,
        sampling_params=params,
        cache_salt="salt",
        block_hashes=blocks,
        **options,
    )


def block_names(first: int, count: int) -> list[bytes]:
    return [BlockHash(number.to_bytes(32, "little")) for number in range(first, first + count)]


def stored(blocks: list[bytes]) -> list[Event]:
    """The events that tell of a prompt's segments of eight blocks in a CPU tier."""
    spans = split_segments(list(map(BlockHash, blocks)), 0, len(blocks), 8, len(blocks))
    return [("seg+", "cpu", "node", span.key, span.start_block, span.marks) for span in spans]


class Routing:
    """A router and the events that its mirror has heard."""

    def __init__(self) -> None:
        self.router = PrefixAffinityRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, self_actor_id="test"
        )
        options = RouterOptions.from_settings(load_settings({"engine": {"block_size_tokens": BLOCK}}))
        self.router.initialize_state(options=options.as_dict())
        self._last = 0

    def hear(self, *events: Event) -> None:
        mirror = self.router._follow_placement().mirror
        first, self._last = self._last + 1, self._last + len(events)
        if first == 1:
            assert mirror.apply(Deltas(1, 1, 0, [], Part(1, 0, True, [])))
        assert mirror.apply(Deltas(1, first, self._last, list(events)))

    async def choose(self, request: Any, request_id: str) -> list[str]:
        ranks = await self.router.choose_replicas(REPLICAS, pending(request, request_id))
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id.unique_id for rank in ranks]

    async def order(self, request: Any) -> list[str]:
        """What would be chosen; the request never comes."""
        order = await self.choose(request, "never")
        self.complete(order[0] if order else "", "never")
        return order

    async def send(self, request: GenerateRequest, replica: str, request_id: str) -> None:
        """As Serve does: ask for a choice, then say what was chosen."""
        await self.choose(request, request_id)
        chosen = ReplicaID(unique_id=replica, deployment_id=DEPLOYMENT)
        result: Any = None
        self.router.on_request_routed(pending(request, request_id), chosen, result)

    def complete(self, replica: str, request_id: str) -> None:
        self.router.on_request_completed(ReplicaID(unique_id=replica, deployment_id=DEPLOYMENT), request_id)
