"""Sends a prompt to a replica, and to another one when the first is gone: again, or behind what it has answered.

Invariants:

* once an output has been yielded every further attempt continues it (`app.continuation.generated_tokens`), or there is
  none: the client has seen it, and a second answer may differ;
* a pinned prompt is never moved: the client asked for that replica;
* what is the request's own fault (400), an overload (429) or a missed deadline is never tried again;
* what may have ended its engine is tried again as `app.openai.poison_registry` says: never when it is guilty, else in
its turn; its continuation is on trial until it has passed the place where the engine died;
* an order to leave a replica that is well (`leave`) counts as no retry, and neither does a hand-over
  (`app.continuation.handover`), which is the first attempt's way to end;
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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from app.backend.protocols import ReplicaHandle
from app.backend.replica_call import is_cancelled
from app.backend.replica_errors import crash_report, replica_gone
from app.continuation.generated_tokens import GeneratedTokens
from app.continuation.handover import Handover, Handovers
from app.gate.errors import PoisonPromptError, RefusedPromptError
from app.metrics.ingress import IngressMetrics
from app.metrics.labels import DRAINED, ENGINE_DEAD, HANDED_OVER, PROCESS_GONE, VOLUNTARY
from app.openai.poison_registry import Digest, PoisonRegistry, Turn, Verdict
from deployments.protocol.wire import GenerateRequest, Progress
from kvmanager.routing.roles import Phase

logger = logging.getLogger(__name__)

NameBlocks = Callable[[Sequence[int]], Awaitable[tuple[Sequence[bytes], Sequence[bytes]]]]
"""From tokens to the hashes of their full blocks: under the request's own salt, and under that of exact prompts."""
PASSED_TOKENS = 8
"""Of a continuation: by then it has passed what its last engine had computed and not told."""
ASK_AGAIN_S = 0.02
"""Between two questions of a suspect for its turn."""
_PLAIN = SamplingParams()
_ODD = (
    "n", "seed", "min_p", "min_tokens", "logprobs", "prompt_logprobs", "bad_words", "logit_bias", "allowed_token_ids",
    "structured_outputs", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "top_p",
)  # fmt: skip
"""What few requests ask for: the more of it, the likelier a suspect is the culprit, and the later it is tried again."""

_LONGEST_BLOCK = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class PromptSender:
    """What all prompts of an ingress are sent with."""

    replicas: ReplicaHandle
    metrics: IngressMetrics
    most_retries: int
    """How often a prompt may be sent again, elsewhere."""
    poison: PoisonRegistry
    handovers: Handovers | None = None
    """None: replicas have no roles."""


class RetryingStream:
    """The attempts at one prompt; on the ingress's event loop. `request_id` is that of the attempt under way."""

    def __init__(self, sender: PromptSender, request: GenerateRequest, arrived: float, name_blocks: NameBlocks) -> None:
        """`request` stays as it is: every attempt gets a copy of what its receiver may change.

        `arrived`: when the prompt did, on `time.monotonic`'s clock. `name_blocks` names those of a continuation.
        """
        handovers = sender.handovers
        self.request_id = request.request_id
        self._arrived = arrived
        self._request = request
        self._replicas, self._metrics = sender.replicas, sender.metrics
        self._most_retries, self._registry = sender.most_retries, sender.poison
        self._digest = prompt_digest(request)
        self._name_blocks = name_blocks
        self._leaving: str | None = None
        self._prefer = ""
        """The unique name of the replica that it leaves for; empty: the router's choice."""
        self._aborting: asyncio.Task[None] | None = None
        self._sent = 0
        self._handover: Handover | None = handovers.begin(request) if handovers is not None else None
        self.answered = GeneratedTokens(request)
        self.resumed = 0
        """How often it went on elsewhere."""
        self._engines_ended = 0
        """Engines that may have died of it while it answered; after the second one it ends."""
        self.progress = request.progress
        """Of the attempt under way."""

    @property
    def replica(self) -> str:
        """The unique name of the one that works on it now; empty: none yet."""
        return self.progress.replica

    @property
    def routed(self) -> float:
        """When the replica that computed the prompt had taken it; 0.0: not yet, or its last output says other times."""
        if self.resumed:
            return 0.0
        return (self._handover.routed if self._handover is not None else 0.0) or self.progress.routed

    @property
    def phase(self) -> Phase:
        """What it goes on as where it leaves its replica."""
        return "decode" if self._handover is not None else ""

    def leave(self, reason: str, target: str = "") -> None:
        """End the attempt under way and go on elsewhere, although its replica is well.

        `target`: the unique name of the replica where it goes on if that can be sent to by then; empty: the router
        chooses. Nothing happens to what cannot be moved (`GeneratedTokens.why_not_moved`), or has no replica yet.
        """
        if self._leaving is None and self.replica and self.answered.why_not_moved() is None:
            self._leaving, self._prefer, self.answered.leaves = reason, target, True
            self._aborting = asyncio.get_running_loop().create_task(self._replicas.abort(self.request_id))

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What the replica that answers gives. Raises the last attempt's error; the caller keeps the deadline."""
        retries, reason, told_at = 0, "", 0.0
        gone: list[str] = []
        left: tuple[str, ...] = ()
        while True:
            await self._wait_for_turn(retries)
            attempt = await self._attempt((*gone, *left))
            self._registry.sent(attempt.request_id, self._digest)
            outputs = self._replicas.generate(attempt)
            resumes, first, handed_over = self.answered.began, True, False
            on_trial = PASSED_TOKENS if resumes else 1
            try:
                async for output in outputs:
                    if self._handover is not None and self._handover.takes(attempt, output):
                        handed_over = True
                        if not output.outputs[0].token_ids:
                            break
                    if first and reason == HANDED_OVER and self._handover is not None:
                        prompt_tokens = len(attempt.prompt_token_ids)
                        self._handover.went_on(prompt_tokens, time.monotonic() - told_at, attempt.progress.replica)
                    elif first and reason and (resumes or reason in VOLUNTARY):
                        self._went_on(reason, told_at)
                    if first:
                        self._registry.told(attempt.request_id)
                    first = False
                    if on_trial > 0:
                        on_trial -= sum(len(each.token_ids) for each in output.outputs) or 1
                        if on_trial <= 0 or output.finished:
                            self._registry.cleared(self._digest)
                    if resumes:
                        self.answered.as_of_the_first(output)
                    if self._handover is not None and not self.resumed:
                        self._handover.as_of_the_prefill(output)
                    self.answered.hear(output)
                    yield output
                    told_at = time.monotonic()  # asked for the next: how slowly a client reads is no gap of ours
                    if output.finished:
                        return
                    if handed_over:
                        break
                if handed_over:
                    reason = HANDED_OVER
                    continue
                if self._leaving is None:
                    return
                reason = self._leaving
            except (Exception, asyncio.CancelledError) as error:
                reason = self._why_again(error, attempt, retries)
            finally:
                self._registry.ended(attempt.request_id)
                await _close(outputs)
            if self._handover is not None:
                self._handover.failed()
            name = attempt.progress.replica
            left = (name,) if reason in VOLUNTARY else ()
            if reason not in VOLUNTARY:
                retries += 1
                gone += [name] if name else []
                if not self.answered.began:
                    self._metrics.retried.labels(reason).inc()
            logger.warning(
                "request %s: replica %s is %s after %d tokens; sent again, %s",
                self.request_id,
                name or "(unknown)",
                f"left ({reason})" if reason in VOLUNTARY else f"gone ({reason})",
                self.answered.num_tokens,
                "to go on behind them" if self.answered.began else "to begin again",
            )

    def _why_again(self, error: BaseException, attempt: GenerateRequest, retries: int) -> str:
        """The reason for which another attempt follows this one. Raises `error`, or what it means, when none does."""
        if self._leaving is not None and not is_cancelled():
            return self._leaving
        reason = replica_gone(error) if isinstance(error, Exception) else None
        if reason is None:
            raise error
        assert isinstance(error, Exception)
        self._judge(error, reason, attempt)
        named = crash_report(error)
        if self.answered.began and reason == ENGINE_DEAD and (named is None or attempt.request_id in named):
            self._engines_ended += 1
        if retries >= self._most_retries or self._engines_ended > 1 or self._replicas.none_left():
            raise error
        if (why := self.answered.why_not()) is not None:
            if self.answered.began:
                logger.warning("request %s cannot go on elsewhere: %s", self.request_id, why)
            raise error
        return reason

    def _went_on(self, reason: str, told_at: float) -> None:
        """A continuation has given its first output; the client has had the last one at `told_at` (0.0: none)."""
        self.resumed += 1
        self._metrics.count_resumed(reason, time.monotonic() - told_at if told_at else None)

    async def _wait_for_turn(self, retries: int) -> None:
        """Until the prompt may be sent, which is at once unless it may have ended an engine.

        Raises:
            RefusedPromptError: it has ended one before this request came.
            PoisonPromptError: it is found now to have ended one.
        """
        oddness = _oddness(self._request)
        waited = False
        try:
            while (turn := self._registry.turn(self._digest, oddness, time.monotonic())) is Turn.WAIT:
                waited = True
                await asyncio.sleep(ASK_AGAIN_S)
        finally:
            if waited:
                self._registry.leave(self._digest)
        if turn is Turn.GUILTY:
            if retries or waited:
                raise self._poison("the others that were in its engine have been answered elsewhere")
            self._metrics.poison_refusals.inc()
            raise RefusedPromptError(self._registry.refused_s(self._digest, time.monotonic()))

    def _judge(self, error: Exception, reason: str, attempt: GenerateRequest) -> None:
        """Raise `PoisonPromptError` if this attempt's replica has died of it."""
        replica = attempt.progress.replica
        if reason not in (ENGINE_DEAD, PROCESS_GONE) or not replica:
            return
        verdict = self._registry.died(attempt.request_id, replica, crash_report(error), time.monotonic())
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
        return PoisonPromptError(self._registry.refused_s(self._digest, time.monotonic()))

    async def _attempt(self, avoid: tuple[str, ...]) -> GenerateRequest:
        """A copy with an id of its own: of the request, or of what goes on behind what it has answered."""
        self.request_id = self._request.request_id + (f"-retry{self._sent}" if self._sent else "")
        self._sent += 1
        request = self._request
        if self.answered.num_tokens:
            tokens = [*request.prompt_token_ids, *self.answered.tokens]
            request = self.answered.continuation(*await self._name_blocks(tokens))
        prefer, self._prefer = self._prefer, ""
        self._leaving, self.answered.leaves = None, False
        self.progress = Progress(on_drain=lambda: self.leave(DRAINED))
        attempt = dataclasses.replace(
            request,
            request_id=self.request_id,
            sampling_params=copy.deepcopy(request.sampling_params),
            avoid=tuple(name for name in avoid if name != prefer),
            prefer=prefer,
            waited_s=time.monotonic() - self._arrived,
            progress=self.progress,
        )
        return attempt if self._handover is None else self._handover.of_attempt(attempt, is_first=self._sent == 1)


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
