"""A call that a replica has begun is never sent to another one by Serve itself, and one that none takes up soon is.

Over gRPC a replica says that it takes a call before it begins it. When it then dies at once, Serve may learn of both
together. For a call with one answer it reads what the replica said; a stream it would send to the next replica, which
a prompt that ends processes would end too, without a charge for the first. Here a stream is read the same way. Its loss
comes with its first output, and `app.openai.retries` decides.

A replica that lives and cannot be reached, such as one behind a cut link, would be waited for until Ray calls its node
dead. It counts as unavailable sooner, and Serve then sends it nothing before it has answered a question.

Leans on Ray: `ray.serve._private.request_router.replica_wrapper.gRPCReplicaResult` is what a call over gRPC gives.
"""

from __future__ import annotations

import asyncio

from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import ReplicaQueueLengthInfo
from ray.serve._private.replica_result import gRPCReplicaResult
from ray.serve._private.request_router import replica_wrapper

SAID_S = 0.1
"""What the replica has said of a call that is over is known, or never will be."""

TAKEN_UP_S = 1.5
"""A replica says at once whether it takes a call; its event loop may stand still meanwhile, for less than that."""


class TakenCall(gRPCReplicaResult):
    """Serve's result of a call over gRPC, on the router's loop."""

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
