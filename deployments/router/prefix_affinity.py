"""`PrefixAffinityRouter`: a Ray Serve request router that sends a prompt where the least work is left.

Translation only: the mirror, the cost with its reservations, and what a hot prefix needs are
`kvmanager.routing.mirror`, `kvmanager.routing` and `kvmanager.routing.spreading`. Imports neither vLLM nor torch,
because Serve's controller loads this class too.

Leans on Ray: `RequestRouter` (alpha) with `initialize_state`, `choose_replicas`, `on_request_routed`,
`on_request_completed`, `update_replicas` with `RunningReplica._actor_handle`; `PendingRequest.args` and
`routing_context.should_backoff`; the router of a handle lives on the loop of the handle's caller, and sees
the very objects that were passed to `remote()`; `on_request_routed` comes before the caller sees an output or a failure
of the replica that took the request. `FIFOMixin` is left out: it would hand one request's choice to another.
`ray.serve._private.request_router.replica_wrapper.gRPCReplicaResult` is what a call over gRPC gives (`TakenCall`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import ReplicaQueueLengthInfo
from ray.serve._private.replica_result import gRPCReplicaResult
from ray.serve._private.request_router import replica_wrapper
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from configs.settings import Settings
from deployments.protocol.wire import GenerateRequest, PinnedCall
from deployments.router.placement_feed import PlacementFeed
from deployments.router.running_replicas import decode_view, running_replicas
from kvmanager.loading.load_rates import ALL_REPLICAS
from kvmanager.routing.cost import STARTING_CREDITS, RoutingState
from kvmanager.routing.mirror import TierHits
from kvmanager.routing.roles import fit_for, in_use
from kvmanager.routing.spreading import Spreading
from kvmanager.segments.keys import BlockHash

EXPECTED_S = 5.0
"""How long a choice counts that Serve does not carry out: by default it asks again within 0.5 s, unless the request was
cancelled."""
SAID_S = 0.1
"""What the replica has said of a call that is over is known, or never will be."""
TAKEN_UP_S = 1.5
"""A replica says at once whether it takes a call; its event loop may stand still meanwhile, for less than that."""


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What the router needs of the settings; plain values, as they travel through Serve's controller."""

    block_size: int
    blocks_per_segment: int

    @classmethod
    def from_settings(cls, settings: Settings) -> RouterOptions:
        """Pick them out."""
        return cls(block_size=settings.block_size_tokens, blocks_per_segment=settings.blocks_per_segment)

    def as_dict(self) -> dict[str, Any]:
        """For Serve's `request_router_kwargs`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Choice:
    """`at`: seconds of the monotonic clock; `found`: what the mirror said of each replica then."""

    at: float
    found: Mapping[str, TierHits]


class TakenCall(gRPCReplicaResult):
    """Serve's result of a call over gRPC: one that a replica has begun is never sent to another one by Serve itself.

    Over gRPC a replica says that it takes a call before it begins it. When it then dies at once, Serve may learn of
    both together. For a call with one answer it reads what the replica said; a stream it would send to the next
    replica, which a prompt that ends processes would end too, without a charge for the first. Here a stream is read the
    same way. Its loss comes with its first output, and `app.openai.retries` decides.

    A replica that lives and cannot be reached, such as one behind a cut link, would be waited for until Ray calls its
    node dead. It counts as unavailable sooner, and Serve then sends it nothing before it has answered a question.
    """

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo | None:
        """Whether the replica takes the call. Raises ActorUnavailableError if it did not say so in time."""
        try:
            async with asyncio.timeout(TAKEN_UP_S):
                return await super().get_rejection_response()
        except TimeoutError:
            raise ActorUnavailableError("it does not say whether it takes the call", self._actor_id.binary()) from None
        except ActorUnavailableError:
            try:
                async with asyncio.timeout(SAID_S):
                    said = await self._call.initial_metadata()
            except TimeoutError:
                said = None
            if not said or said.get("accepted") != "1":
                raise
            return ReplicaQueueLengthInfo(accepted=True, num_ongoing_requests=int(said["num_ongoing_requests"]))


def use_taken_calls() -> None:
    """Call in a process that routes, before the first request; more than once is as good as once."""
    replica_wrapper.gRPCReplicaResult = TakenCall  # type: ignore[misc]  # to mypy a class is no variable


class PrefixAffinityRouter(RequestRouter):
    """See the module's docstring. All methods run on the router's event loop."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with `request_router_kwargs`, before the first request."""
        use_taken_calls()
        self._options = RouterOptions(**kwargs["options"])
        blocks_per_segment = self._options.blocks_per_segment
        self._state = RoutingState(self._options.block_size, blocks_per_segment=blocks_per_segment)
        self._spreading = Spreading(blocks_per_segment)
        self._feed: PlacementFeed | None = None
        self._in_prefill: dict[str, GenerateRequest] = {}
        self._expected: dict[str, _Choice] = {}
        """The choices for requests that are not yet routed, oldest first."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, cheapest first; a pinned request has one rank."""
        feed = self._follow_placement()
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request = pending_request.args[0] if pending_request.args else None
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(request, PinnedCall):
            return [[replica] for name, replica in by_name.items() if name == request.replica]
        if not isinstance(request, GenerateRequest):
            return [candidate_replicas]
        if request.replica_pin is not None:
            return [[replica] for name, replica in by_name.items() if feed.ranks.get(name) == request.replica_pin]
        self._note_first_tokens()
        names = [name for name in by_name if name not in request.avoid] or list(by_name)
        names = fit_for(names, request.phase, feed.roles)
        self._state.credits = {**STARTING_CREDITS, **feed.credits.get(ALL_REPLICAS, {})}
        self._state.credits_of = feed.credits
        now, internal_id = time.monotonic(), pending_request.metadata.internal_request_id
        self._expect_no_more(now, internal_id)
        found = self._coverages(request, names)
        hits = self._with_in_flight(request, found)
        order = self._state.rank(names, hits, request.num_tokens, now, request.phase)
        failed = request.progress.failed
        order.sort(key=lambda name: (name in failed, name != request.prefer))  # stable
        # Between this choice and `on_request_routed` Serve may ask the replica how many requests it has. Prompts that
        # come meanwhile must not find it as idle as this one did.
        uncached, blocks = self._work(request, hits[order[0]])
        self._state.expect(internal_id, order[0], uncached, blocks, now, _hashes(request))
        self._expected[internal_id] = _Choice(now, found)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Count the request at its replica at once, before it is reported, or a burst would herd."""
        request = pending_request.args[0] if pending_request.args else None
        if not isinstance(request, GenerateRequest):
            return
        name, internal_id = replica_id.unique_id, pending_request.metadata.internal_request_id
        now, prompt_tokens = time.monotonic(), request.num_tokens
        request.progress.replica, request.progress.routed = name, now
        choice = self._expected.get(internal_id)
        self._expect_no_more(now, internal_id)
        running = [replica.unique_id for replica in self._replicas]
        names = {name, *fit_for(running, request.phase, self._follow_placement().roles)}
        found = choice.found if choice is not None else {}
        if lacking := names - found.keys():
            found = {**found, **self._coverages(request, list(lacking))}
        hits = self._with_in_flight(request, {other: found[other] for other in names})
        waits = {other: self._state.wait(other, held, prompt_tokens, request.phase) for other, held in hits.items()}
        hashes = _hashes(request)
        for move in self._spreading.consider(now, hashes, name, waits, hits):
            self._follow_placement().order(move)
        uncached, blocks = self._work(request, hits[name])
        self._state.route(internal_id, name, uncached, blocks, now, hashes)
        self._in_prefill[internal_id] = request

    def _work(self, request: GenerateRequest, hits: TierHits) -> tuple[int, int]:
        """Return the tokens to prefill and the blocks to decode on, given `hits`."""
        prompt_tokens, block_size = request.num_tokens, self._options.block_size
        return max(0, prompt_tokens - sum(hits) * block_size), -(-prompt_tokens // block_size)

    def _expect_no_more(self, now: float, internal_id: str) -> None:
        """Take back the choice of this request, and those that were not carried out."""
        if self._expected.pop(internal_id, None) is not None:
            self._state.finished(internal_id)
        for other, choice in list(self._expected.items()):
            if now - choice.at < EXPECTED_S:
                return
            del self._expected[other]
            self._state.finished(other)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has ended, in whatever way; or one attempt at it, of which Serve tells late, while the next one,
        under the same id, is on its way to another replica.
        """
        if self._state.replica_of(internal_request_id) not in (None, replica_id.unique_id):
            return
        self._in_prefill.pop(internal_request_id, None)
        self._expected.pop(internal_request_id, None)
        self._state.finished(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve tells which replicas run; forget the load of those that are gone."""
        gone = {replica_id.unique_id for replica_id in self._replicas} - {r.replica_id.unique_id for r in replicas}
        super().update_replicas(replicas)
        handles = {replica.replica_id.unique_id: replica._actor_handle for replica in replicas}
        running = running_replicas(self._deployment_id.app_name)
        running.tell(handles)
        for name in gone:
            self._state.forget_replica(name)
        drain = [name for name in gone if not running.is_dead(name)]
        if drain and self._feed is not None:
            self._feed.replicas_drain(drain, list(handles))

    def _follow_placement(self) -> PlacementFeed:
        """Start the mirror on the first request: only then is there a loop that will stay."""
        if self._feed is None:
            self._feed = PlacementFeed(self._deployment_id.app_name, self._options.blocks_per_segment)
            decode_view(self._deployment_id.app_name).tell(self._decoders_lack)
        return self._feed

    def _decoders_lack(self, request: GenerateRequest) -> int | None:
        """What the best decode replica would have to compute of a prompt, in tokens; None: there are no roles."""
        names, roles = [replica.unique_id for replica in self._replicas], self._follow_placement().roles
        if not in_use(names, roles):
            return None
        hits = self._with_in_flight(request, self._coverages(request, fit_for(names, "decode", roles)))
        return min(self._work(request, held)[0] for held in hits.values())

    def _coverages(self, request: GenerateRequest, names: list[str]) -> dict[str, TierHits]:
        """What is held of a prompt. Dear for a long one that many replicas hold: once per request."""
        exact_hashes = cast(list[BlockHash], request.exact_block_hashes)
        return self._follow_placement().mirror.coverages(_hashes(request), names, exact_hashes)

    def _with_in_flight(self, request: GenerateRequest, found: Mapping[str, TierHits]) -> dict[str, TierHits]:
        hashes = _hashes(request)
        return {name: self._state.with_in_flight(name, held, hashes) for name, held in found.items()}

    def _note_first_tokens(self) -> None:
        for internal_id, request in list(self._in_prefill.items()):
            if request.progress.first_token:
                del self._in_prefill[internal_id]
                self._state.first_token(internal_id)


def _hashes(request: GenerateRequest) -> list[BlockHash]:
    return cast(list[BlockHash], request.block_hashes)
