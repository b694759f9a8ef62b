"""Sends a prompt to a replica, and again to another one when the first is gone before it gave anything.

Invariants:

* once an output has been yielded there is no further attempt: the client has seen it, and a second answer may differ;
* a pinned prompt is never moved: the client asked for that replica;
* what is the request's own fault (400), an overload (429) or a missed deadline is never tried again;
* what may have ended its engine is tried again as `app.openai.suspects` says: never when it is guilty, else in its
turn;
* every attempt has a request id of its own, so that an engine that only looks dead cannot confuse two, and parameters
  and progress of its own;
* an attempt is closed, and thereby cancelled at its replica, before the next begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import hashlib
import logging
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from app.backend.protocols import ReplicaHandle
from app.backend.replica_errors import replica_gone, witness
from app.gate.errors import PoisonPromptError, RefusedPromptError
from app.metrics.ingress import IngressMetrics
from app.metrics.labels import ENGINE_DEAD, PROCESS_GONE
from app.openai.suspects import Digest, Suspects, Turn, Verdict
from deployments.protocol.wire import GenerateRequest, Progress

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.02
"""Between two questions of a suspect for its turn."""
_PLAIN = SamplingParams()
_ODD = (
    "n", "seed", "min_p", "min_tokens", "logprobs", "prompt_logprobs", "bad_words", "logit_bias", "allowed_token_ids",
    "structured_outputs", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "top_p",
)  # fmt: skip
"""What few requests ask for: the more of it, the likelier a suspect is the culprit, and the later it is tried again."""

_LONGEST_BLOCK = 1024


class Attempts:
    """The attempts at one prompt; on the ingress's event loop. `request_id` is that of the attempt under way."""

    def __init__(
        self,
        request: GenerateRequest,
        replicas: ReplicaHandle,
        metrics: IngressMetrics,
        most_retries: int,
        suspects: Suspects,
        arrived: float | None = None,
    ) -> None:
        """`request` stays as it is: every attempt gets a copy of what its receiver may change.

        `arrived`: when the prompt did, on `time.monotonic`'s clock; None: now.
        """
        self.request_id = request.request_id
        self._arrived = time.monotonic() if arrived is None else arrived
        self._request = request
        self._replicas = replicas
        self._metrics = metrics
        self._most_retries = most_retries
        self._suspects = suspects
        self._digest = prompt_digest(request)
        self.progress = request.progress
        """Of the attempt under way."""

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What the replica that answers gives. Raises the last attempt's error; the caller keeps the deadline."""
        retries, answered = 0, False
        avoid: list[str] = []
        while True:
            await self._wait_for_turn(retries)
            attempt = self._attempt(retries, tuple(avoid))
            self._suspects.sent(attempt.request_id, self._digest)
            outputs = self._replicas.generate(attempt)
            try:
                async for output in outputs:
                    if not answered:
                        self._suspects.cleared(self._digest)
                    answered = True
                    yield output
                return
            except Exception as error:
                reason = replica_gone(error)
                if reason is None:
                    raise
                self._judge(error, reason, attempt)
                final = answered or retries >= self._most_retries or self._request.replica_pin is not None
                if final or self._replicas.none_left():
                    raise
            finally:
                self._suspects.ended(attempt.request_id)
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

    async def _wait_for_turn(self, retries: int) -> None:
        """Until the prompt may be sent, which is at once unless it may have ended an engine.

        Raises:
            RefusedPromptError: it has ended one before this request came.
            PoisonPromptError: it is found now to have ended one.
        """
        oddness = _oddness(self._request)
        waited = False
        try:
            while (turn := self._suspects.turn(self._digest, oddness, time.monotonic())) is Turn.WAIT:
                waited = True
                await asyncio.sleep(ASK_AGAIN_S)
        finally:
            if waited:
                self._suspects.leave(self._digest)
        if turn is Turn.GUILTY:
            if retries or waited:
                raise self._poison("the others that were in its engine have been answered elsewhere")
            self._metrics.poison_refusals.inc()
            raise RefusedPromptError(self._suspects.refused_s(self._digest, time.monotonic()))

    def _judge(self, error: Exception, reason: str, attempt: GenerateRequest) -> None:
        """Raise `PoisonPromptError` if this attempt's replica has died of it."""
        replica = attempt.progress.replica
        if reason not in (ENGINE_DEAD, PROCESS_GONE) or not replica:
            return
        verdict = self._suspects.died(attempt.request_id, replica, witness(error), time.monotonic())
        if verdict is Verdict.GUILTY:
            raise self._poison(f"replica {replica} died with it ({reason})") from None

    def _poison(self, why: str) -> PoisonPromptError:
        self._metrics.poison_prompts.inc()
        logger.error(
            "request %s: prompt %s (%d tokens) has ended an engine and is refused: %s",
            self.request_id,
            self._digest.hex()[:16],
            len(self._request.prompt_token_ids),
            why,
        )
        return PoisonPromptError(self._suspects.refused_s(self._digest, time.monotonic()))

    def _attempt(self, retries: int, avoid: tuple[str, ...]) -> GenerateRequest:
        self.request_id = self._request.request_id + (f"-retry{retries}" if retries else "")
        self.progress = Progress()
        return dataclasses.replace(
            self._request,
            request_id=self.request_id,
            sampling_params=copy.deepcopy(self._request.sampling_params),
            avoid=avoid,
            waited_s=time.monotonic() - self._arrived,
            progress=self.progress,
        )


def prompt_digest(request: GenerateRequest) -> Digest:
    """What names a prompt and its tenant: the last full block's hash, which holds the salt and all blocks before it,
    and the last tokens, which hold what is no full block.
    """
    blocks, tokens = request.block_hashes, request.prompt_token_ids
    head = blocks[-1] if blocks else request.cache_salt.encode()
    return hashlib.sha256(head + array("q", tokens[-_LONGEST_BLOCK:] if blocks else tokens).tobytes()).digest()[:16]


def _oddness(request: GenerateRequest) -> tuple[int, int]:
    params = request.sampling_params
    odd = sum(getattr(params, name, None) != getattr(_PLAIN, name) for name in _ODD)
    return odd, len(request.prompt_token_ids)


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    close = getattr(outputs, "aclose", None)
    if close is not None:
        with contextlib.suppress(Exception):
            await close()
