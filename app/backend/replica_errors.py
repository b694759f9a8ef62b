"""What went wrong on the way to a replica, in the terms of vLLM's exceptions, which carry an HTTP status.

| answered | came back as (Ray wraps it in a `RayTaskError`) | means |
|---|---|---|
| 400 | vLLM's client errors | the replica refused the request's content |
| 429 | Serve's `BackPressureError` | every replica's queue is full |
| 503 | other errors of Ray and Serve, vLLM's `EngineDeadError`, a timeout | nothing can serve the request now |
| 500 | anything else, a plain `ValueError` too | a defect of ours: logged, and the client sees nothing of it |

After the response has started vLLM's classes write the same error as an event into the stream. Of what means 503,
`replica_gone` names the failures after which another replica may well answer (`app.openai.retries`).
"""

from __future__ import annotations

import logging

from ray.exceptions import (
    ActorUnavailableError,
    AsyncioActorExit,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, RayServeException, ReplicaUnavailableError
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from app.gate.errors import OverloadedError, UnavailableError
from app.metrics.labels import ENGINE_DEAD, PROCESS_GONE, STOPPED, UNREACHABLE
from deployments.engine.crash_report import EngineDiedError

logger = logging.getLogger(__name__)

_PROCESS_GONE = (
    RayActorError, WorkerCrashedError, AsyncioActorExit, NodeDiedError, ObjectLostError, OutOfMemoryError,
)  # fmt: skip
_MEANT = ("ray.kill", "node has died", "exit_actor")
"""In Ray's words for a death that no request can be the reason of: Serve ended the replica, or its machine is
gone."""


def replica_gone(error: Exception) -> str | None:
    """One of `GONE_REASONS` when the replica, and not the request, is why it failed; None otherwise."""
    cause = _cause(error)
    if isinstance(cause, EngineDeadError):
        return ENGINE_DEAD
    if isinstance(cause, ActorUnavailableError | ReplicaUnavailableError):
        return UNREACHABLE
    if isinstance(cause, NodeDiedError) or (isinstance(cause, RayActorError) and _is_meant(cause)):
        return STOPPED
    return PROCESS_GONE if isinstance(cause, _PROCESS_GONE) else None


def crash_report(error: Exception) -> tuple[str, ...] | None:
    """The request ids that a dying engine named as suspects; None when there is no such crash report."""
    cause = _cause(error)
    return cause.suspects if isinstance(cause, EngineDiedError) else None


def _is_meant(error: RayActorError) -> bool:
    text = str(error)
    return any(words in text for words in _MEANT)


def translate(error: Exception, request_id: str) -> Exception:
    """The exception to raise towards vLLM's serving classes in place of `error`."""
    cause = _cause(error)
    if isinstance(cause, GracefulHTTPError | VLLMClientError | GenerationError):
        return cause
    if isinstance(cause, BackPressureError):
        return OverloadedError()
    if isinstance(cause, TimeoutError | EngineDeadError | RayError | RayServeException):
        logger.warning("request %s: no replica could serve it: %s: %s", request_id, type(cause).__name__, cause)
        if isinstance(cause, TimeoutError):
            return UnavailableError("The request took too long and was ended. Please try again later.")
        return UnavailableError("The replica that worked on this request is gone. Please try again.")
    logger.error("request %s failed on its replica", request_id, exc_info=error)
    return GenerationError("Internal server error")


def _cause(error: Exception) -> BaseException:
    """What a replica raised, out of what Ray wraps around it."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    return cause
