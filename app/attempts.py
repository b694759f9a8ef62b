"""Sends a prompt to a replica, and again to another one when the first is gone before it gave anything.

Invariants:

* once an output has been yielded there is no further attempt: the client has seen it, and a second answer may differ;
* a pinned prompt is never moved: the client asked for that replica;
* what is the request's own fault (400), an overload (429) or a missed deadline is never tried again;
* every attempt has a request id of its own, so that an engine that only looks dead cannot confuse two, and parameters
  and progress of its own;
* an attempt is closed, and thereby cancelled at its replica, before the next begins.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from vllm.outputs import RequestOutput

from app.metrics import IngressMetrics
from app.replica_errors import replica_gone
from app.replica_handle import ReplicaHandle
from deployments.wire import GenerateRequest, Progress

logger = logging.getLogger(__name__)


class Attempts:
    """The attempts at one prompt; on the ingress's event loop. `request_id` is that of the attempt under way."""

    def __init__(
        self, request: GenerateRequest, replicas: ReplicaHandle, metrics: IngressMetrics, most_retries: int
    ) -> None:
        """`request` stays as it is: every attempt gets a copy of what its receiver may change."""
        self.request_id = request.request_id
        self._request = request
        self._replicas = replicas
        self._metrics = metrics
        self._most_retries = most_retries

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What the replica that answers gives. Raises the last attempt's error; the caller keeps the deadline."""
        retries, answered = 0, False
        avoid: list[str] = []
        while True:
            attempt = self._attempt(retries, tuple(avoid))
            outputs = self._replicas.generate(attempt)
            try:
                async for output in outputs:
                    answered = True
                    yield output
                return
            except Exception as error:
                reason = replica_gone(error)
                final = answered or retries >= self._most_retries or self._request.replica_pin is not None
                if reason is None or final or self._replicas.none_left():
                    raise
            finally:
                await _close(outputs)
            retries += 1
            failed = attempt.progress.replica
            avoid += [failed] if failed else []
            self._metrics.retried.labels(reason).inc()
            logger.warning(
                "request %s: replica %s is gone (%s) before its first output; sent again",
                self.request_id,
                failed or "(unknown)",
                reason,
            )

    def _attempt(self, retries: int, avoid: tuple[str, ...]) -> GenerateRequest:
        self.request_id = self._request.request_id + (f"-retry{retries}" if retries else "")
        return dataclasses.replace(
            self._request,
            request_id=self.request_id,
            sampling_params=copy.deepcopy(self._request.sampling_params),
            avoid=avoid,
            progress=Progress(),
        )


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    close = getattr(outputs, "aclose", None)
    if close is not None:
        with contextlib.suppress(Exception):
            await close()
