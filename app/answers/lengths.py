"""How long a prompt's answers are expected to be, and what came of it (`kvmanager.scheduling.answer_lengths`).

Each tenant has a trie of its own, an equal part of the memory: what one does, another can neither read from what is
expected of its prompts, nor push out. Learned from are answers that ended by themselves or by their length; one that
was aborted says nothing, nor does one that was not allowed to end (`ignore_eos`). Nothing here raises: a defect is
counted, and nothing is expected then.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from math import log2
from typing import TYPE_CHECKING

from app.metrics.labels import RANKED_EVEN, RANKED_RIGHT, RANKED_WRONG
from kvmanager.scheduling.answer_lengths import AnswerLengths, LengthEstimate
from kvmanager.scheduling.virtual_counters import Bill, ServedWork

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from app.metrics.ingress import IngressMetrics
    from deployments.protocol.wire import GenerateRequest

logger = logging.getLogger(__name__)

NODE_BYTES = 320
"""Of a node of a trie, with its key and its place in the order."""
_MOST_TOKENS = 2**31


class ExpectedLengths:
    """The tries of all tenants; one per ingress."""

    def __init__(
        self,
        tenants: Collection[str],
        block_tokens: int,
        blocks_per_segment: int,
        most_bytes: int,
        metrics: IngressMetrics,
    ) -> None:
        """`tenants`: all that there are; none means that there is one, without a name. `most_bytes`: of all tries."""
        names = tuple(tenants) or ("",)
        nodes = max(1, most_bytes // NODE_BYTES // len(names))
        self._block_tokens = block_tokens
        self._metrics = metrics
        self._tries = {tenant: AnswerLengths(blocks_per_segment, nodes) for tenant in names}
        self._before: dict[str, tuple[float, float]] = {}
        """By tenant, of the last answer that ended: how long it was, and how long it was expected to be."""
        self._defects = 0

    def by_prompt_length(self, tenant: str, prompt_tokens: int, params: SamplingParams) -> int:
        """Return the expected tokens of each answer to a prompt of this length, before its blocks are known."""
        try:
            prior = self._tries[tenant].prior(prompt_tokens)
            return _within(params, LengthEstimate(prior, prior).tokens)
        except Exception:
            self.note_defect()
            return 0

    def of(self, tenant: str, request: GenerateRequest) -> ExpectedAnswer:
        """What to expect of a request whose blocks have been named."""
        answer = ExpectedAnswer(self, tenant, request)
        try:
            estimate = self._tries[tenant].estimate(answer.hashes, answer.prompt_tokens)
            tokens = _within(answer.params, estimate.tokens)
            cached = estimate.known_blocks * self._block_tokens
            answer.estimate, answer.tokens = estimate, tokens
            answer.work = ServedWork(answer.prompt_tokens, cached, tokens * answer.params.n)
        except Exception:
            self.note_defect()
        return answer

    def learn(self, answer: ExpectedAnswer, tokens: float, cut_off: bool) -> None:
        """An answer, or the mean of several to one prompt, has ended."""
        if answer.estimate is None or answer.tokens is None or answer.params.ignore_eos:
            return
        self._tries[answer.tenant].learn(answer.hashes, answer.prompt_tokens, answer.estimate, tokens, cut_off)
        if not cut_off:
            self._report(answer.tenant, max(1.0, tokens), answer.tokens)

    def _report(self, tenant: str, tokens: float, expected: float) -> None:
        self._metrics.answer_length_error.observe(abs(log2(tokens / expected)))
        other_tokens, other_expected = self._before.get(tenant, (tokens, expected))
        self._before[tenant] = tokens, expected
        if other_tokens == tokens:
            return
        if other_expected == expected:
            ranked = RANKED_EVEN
        else:
            ranked = RANKED_RIGHT if (other_expected < expected) == (other_tokens < tokens) else RANKED_WRONG
        self._metrics.answer_lengths_ranked.labels(ranked).inc()

    def note_defect(self) -> None:
        """Something here has failed: log the first, count all."""
        if not self._defects:
            logger.exception("answers' lengths cannot be estimated; further failures are only counted")
        self._defects += 1
        self._metrics.answer_length_defects.inc()


class ExpectedAnswer:
    """What is expected of one prompt. `tokens`: of each of its answers; None: nothing is expected."""

    def __init__(self, lengths: ExpectedLengths, tenant: str, request: GenerateRequest) -> None:
        self.tenant = tenant
        self.hashes = request.block_hashes
        self.prompt_tokens = len(request.prompt_token_ids)
        self.params = request.sampling_params
        self.estimate: LengthEstimate | None = None
        self.tokens: int | None = None
        self.work = ServedWork(self.prompt_tokens)
        self.bill: Bill | None = None
        """What its tenant is charged, once its turn has come."""
        self._lengths = lengths
        self._heard = False
        self._sampled = 0
        self._ended = 0
        self._cut_off = False

    def hear(self, output: RequestOutput, replica: str) -> None:
        """The next output of the request, from whichever replica. Raises nothing."""
        try:
            sampled = sum(len(completion.token_ids) for completion in output.outputs)
            self._charge(output, sampled)
            self._sampled += sampled
            for completion in output.outputs:
                if completion.finish_reason in ("stop", "length"):
                    self._ended += 1
                    self._cut_off |= completion.finish_reason == "length"
            if output.finished and self._ended == self.params.n:
                self._lengths.learn(self, self._sampled / self._ended, self._cut_off)
        except Exception:
            self._lengths.note_defect()

    def left(self) -> None:
        """Bill a request that ends without an output: how much of it was computed is not known. Raises nothing.

        It is billed as if nothing was reused and, where outputs come at the end only, as if all expected tokens were
        sampled. Otherwise a client that leaves in time would get new prompts at the price of cached ones, and long
        answers for nothing.
        """
        if self.bill is not None and not self._heard:
            self.bill.prompt_was(0)
            if self.params.output_kind.name != "DELTA":
                self.bill.sampled((self.tokens or 0) * self.params.n)

    def _charge(self, output: RequestOutput, sampled: int) -> None:
        if self.bill is not None:
            if not self._heard:
                self.bill.prompt_was(output.num_cached_tokens or 0)
            self.bill.sampled(sampled)
        self._heard = True


def _within(params: SamplingParams, tokens: int) -> int:
    """Clamp `tokens` to what a request allows of each answer; with `ignore_eos`, return the most it allows."""
    most = _MOST_TOKENS if params.max_tokens is None else params.max_tokens
    if params.ignore_eos:
        return most
    return max(1, min(max(tokens, params.min_tokens), most))
