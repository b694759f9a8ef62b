"""What a stream has given its client so far, and how another replica goes on behind it.

The ids of the tokens are kept, 4 bytes each, and no text: everything above the engine client (tool calls, reasoning,
the events themselves) lives in vLLM's serving classes in this process and never notices. What a prompt's KV usage was
is said by the first replica's first output, and stays so: another replica computes something else.

Never continued, with the reason in words:

* several answers (`n`), whose engines' states are not told apart here;
* prompt logprobs, which only computing all of the prompt gives;
* a pinned request, whose client asked for that replica;
* an answer of more than `MOST_TOKENS`, of which nothing is kept any more.

An answer that is not streamed has yielded nothing until its end: it begins again instead.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE, GenerateRequest, KVCacheUsage
from kvmanager.scheduling.rebalancing import to_come

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

_UNBOUNDED = 2**31
MOST_TOKENS = 32_768
"""Of an answer that goes on elsewhere: 128 KiB. Longer than what models that reason say, and no stream costs more."""
ROOM_TO_MOVE = 64
"""Tokens that may come between an order to move a stream and its end where it is."""


class GeneratedTokens:
    """See the module's docstring. O(1) and 4 bytes per token, at most `MOST_TOKENS` of them."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._tokens: array[int] | None = array("i")
        self._usage: KVCacheUsage | None = None
        self._cached_tokens: int | None = None
        self.began = False
        """An output has been yielded."""
        self.leaves = False
        """It has been told to leave its replica. All is kept until it has, for it goes on behind what comes meanwhile:
        with a client that reads slowly that may be much."""
        self.num_tokens = 0

    @property
    def streams(self) -> bool:
        """Whether its outputs are told as they come; else the only one is the last."""
        return self._request.sampling_params.output_kind.name == "DELTA"

    def hear(self, output: RequestOutput) -> None:
        """This output is about to be yielded. Of a continued answer, put in the usage of its first attempt."""
        if not self.began:
            self.began = True
            self._usage = getattr(output, FIRST_USAGE, None)
            self._cached_tokens = output.num_cached_tokens
        if not self.streams or len(output.outputs) != 1:
            return
        tokens = output.outputs[0].token_ids
        self.num_tokens += len(tokens)
        if self._tokens is not None:
            if self.num_tokens > MOST_TOKENS and not self.leaves:
                self._tokens = None
            else:
                self._tokens.extend(tokens)

    def as_of_the_first(self, output: RequestOutput) -> None:
        """Give an output of a continuation the usage that its first attempt had."""
        output.num_cached_tokens = self._cached_tokens
        if output.finished:
            output.kv_transfer_params = {KV_CACHE_USAGE: dict(self._usage)} if self._usage is not None else None

    def why_not(self) -> str | None:
        """Why no other replica can go on behind what was yielded; None: one can."""
        request, params = self._request, self._request.sampling_params
        if request.replica_pin is not None:
            return "it is pinned to a replica"
        if not self.began:
            return None
        if not self.streams:
            return "it is not streamed"
        if params.n > 1:
            return "it has several answers"
        if params.prompt_logprobs is not None:
            return "it asks for logprobs of its prompt"
        if self._tokens is None:
            return f"its answer is longer than {MOST_TOKENS} tokens"
        if self.num_tokens >= (params.max_tokens or self.num_tokens + 1):
            return "its answer is at its end"
        return None

    def why_not_moved(self) -> str | None:
        """Why it may not be taken from a replica that is well; None: it may."""
        if not self.streams:
            return "it is not streamed, and would begin again"
        if self.leaves:
            return "it is leaving its replica already"
        if self.num_tokens + ROOM_TO_MOVE > MOST_TOKENS:
            return f"its answer is longer than {MOST_TOKENS} tokens, or nearly"
        return self.why_not()

    @property
    def to_come(self) -> int:
        """Tokens that it is expected to have yet."""
        most = self._request.sampling_params.max_tokens or _UNBOUNDED
        return to_come(self._request.predicted_tokens, self.num_tokens, most)

    @property
    def tokens(self) -> list[int]:
        """What was yielded; empty before anything was."""
        return self._tokens.tolist() if self._tokens is not None else []

    def continuation(self, own_hashes: Sequence[bytes], exact_hashes: Sequence[bytes]) -> GenerateRequest:
        """The request that goes on; the hashes are those of the prompt and the answer together.

        Raises RuntimeError where nothing is kept: the client would read the answer's beginning again.
        """
        if self._tokens is None:
            raise RuntimeError("an answer of which nothing is kept cannot go on elsewhere")
        return dataclasses.replace(
            self._request,
            resumed_tokens=self.tokens,
            block_hashes=list(own_hashes),
            exact_block_hashes=list(exact_hashes),
        )
