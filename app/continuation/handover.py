"""Prompts that are prefilled on one replica and decoded on another, where replicas have roles (`roles`).

The first attempt goes to a prefill replica, which samples one token and ends; the client has it at once. The second is
a continuation behind that token on a decode replica, which finds the prompt's KV in the tiers. No protocol beyond: what
is not there is computed, and whatever fails is tried elsewhere as any stream is (`app.openai.retries`).

A prompt stays whole on a decode replica where a hand-over does not pay (`kvmanager.scheduling.rebalancing`). Other
requests than these go to any replica, as without roles: several answers, prompt logprobs, pinned, not exact, not
streamed, or whose answer is of one token anyhow. On the ingress's event loop.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.metrics.labels import HANDED_OVER, HANDOVER_FAILED, HANDOVER_NOT_NEEDED, HANDOVER_WHOLE
from deployments.protocol.stage_stamps import STAGE_STAMPS, StageStamps
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest
from kvmanager.scheduling.rebalancing import HandoverChoice
from kvmanager.segments.keys import EXACT

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

LEAST_TOKENS = 256
"""A prompt of which fewer are to be computed stays whole, whatever was measured; a block where all are handed over."""
_GOES_ON = "length"
"""How a prefill of one token ends when its answer could have gone on."""


def handover_choice(split: str, block_tokens: int) -> HandoverChoice:
    """Return the choice of `roles.split`, for KV blocks of `block_tokens`."""
    measures = split == "auto"
    return HandoverChoice(LEAST_TOKENS if measures else block_tokens, measures)


class Handovers:
    """Those of one ingress."""

    def __init__(
        self,
        choice: HandoverChoice,
        deadline_s: float,
        lacking_tokens: Callable[[GenerateRequest], int | None],
        count: Callable[[str, float | None], None],
    ) -> None:
        """`deadline_s`: how long a prefill replica may wait for its KV to be stored.

        `lacking_tokens`: what the best decode replica lacks of a prompt, None while there are no roles to speak of.

        `count` hears an outcome for each prompt that could have been handed over, and the gap of one that was, in
        seconds.
        """
        self.deadline_s = deadline_s
        self.choice = choice
        self.count = count
        self._lacking_tokens = lacking_tokens

    def begin(self, request: GenerateRequest) -> Handover | None:
        """What becomes of a new request; None: nothing, it goes to any replica."""
        params = request.sampling_params
        could = (
            request.replica_pin is None
            and request.fidelity == EXACT
            and not request.extras
            and params.output_kind.name == "DELTA"
            and params.n == 1
            and params.prompt_logprobs is None
            and params.max_tokens is not None
            and params.max_tokens > 1
        )
        lacking = self._lacks(request) if could else None
        if lacking is None:
            return None
        splits = self.choice.pays(lacking, len(request.prompt_token_ids))
        if not splits:
            self.count(HANDOVER_WHOLE, None)
        return Handover(self, splits)

    def _lacks(self, request: GenerateRequest) -> int | None:
        try:
            return self._lacking_tokens(request)
        except Exception:  # the choice of a way never costs the request
            logger.exception("request %s: what decode replicas lack of it is not known", request.request_id)
            return None


class Handover:
    """One request. `splits`: prefill it at one replica and decode it at another; else one decode replica does both."""

    def __init__(self, all_of_them: Handovers, splits: bool) -> None:
        self._all = all_of_them
        self._splits = splits
        self._told: dict[str, Any] | None = None
        self.routed = 0.0
        """When the prefill replica had taken it; 0.0 before its prefill has ended."""

    def of_attempt(self, attempt: GenerateRequest, is_first: bool) -> GenerateRequest:
        """The attempt with its phase, and what a prefill needs. `attempt` has parameters of its own."""
        if not (self._splits and is_first):
            return dataclasses.replace(attempt, phase="decode")
        params = attempt.sampling_params
        params.max_tokens, params.min_tokens = 1, min(1, params.min_tokens)  # they say the same of the first token
        return dataclasses.replace(attempt, phase="prefill", store_within_s=self._all.deadline_s)

    def takes(self, attempt: GenerateRequest, output: RequestOutput) -> bool:
        """Whether this output ends the prefill, and a decode replica goes on.

        If it has a token, that is for the client, as an output of an answer that goes on.
        """
        if attempt.phase != "prefill" or not output.finished:
            return False
        (answer,) = output.outputs
        if answer.finish_reason != _GOES_ON:
            self._end(HANDOVER_NOT_NEEDED)
            return False
        self.routed = attempt.progress.routed
        self._told = told = output.kv_transfer_params or {}
        stamps: StageStamps | None = told.get(STAGE_STAMPS)
        computed = told.get(KV_CACHE_USAGE, {}).get("recomputed", 0)
        if stamps is not None and stamps.scheduled:
            self._all.choice.prefilled(time.monotonic(), computed, stamps.first_token - stamps.scheduled)
        output.finished, output.kv_transfer_params, answer.finish_reason = False, None, None
        return True

    def went_on(self, prompt_tokens: int, gap_s: float, replica: str) -> None:
        """Record the decode replica's first output, `gap_s` after the client had the prefill's."""
        logger.info("a prompt of %d tokens was handed over to %s in %.0f ms", prompt_tokens, replica, 1e3 * gap_s)
        self._all.choice.handed_over(time.monotonic(), prompt_tokens, gap_s)
        self._end(HANDED_OVER, gap_s)

    def failed(self) -> None:
        """An attempt has failed before the decode replica said anything; the next one is as any other."""
        self._end(HANDOVER_FAILED)

    def as_of_the_prefill(self, output: RequestOutput) -> None:
        """The answer's last output says what became of its prompt, which is the prefill replica's to say."""
        if self._told is not None and output.finished:
            output.kv_transfer_params = self._told

    def _end(self, outcome: str, gap_s: float | None = None) -> None:
        if self._splits:
            self._splits = False
            self._all.count(outcome, gap_s)
