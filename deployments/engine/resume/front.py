"""Hands the part of an answer that a client already has to the part of vLLM that turns tokens into text.

The detokenizer reads the answered tokens once more, one by one as in the first run: so it holds back the same
characters where a stop string may begin, or where a character is not complete. What it says of them is dropped.

A request's first output also keeps where its prompt's KV came from, as `FIRST_USAGE`: an attribute of the output, since
vLLM's merging of outputs drops what the connector said. The last one says it too where a stop string ends the answer:
that is found here, so the engine never tells of that request's end.

Leans on vLLM: `AsyncLLM.output_processor`, whose `add_request(request, prompt, parent_req, request_index, queue)` comes
before the engine hears of a request, in the engine's process or this one; `OutputProcessor.request_states`, and of a
`RequestState` `make_request_output`, which gets an engine's output's `kv_transfer_params` as its fifth argument, the
`detokenizer` (`update`, `get_next_output_text`, `num_output_tokens`), the `logprobs_processor`
(`logprobs`, `num_logprobs`; the last four tokens are context) and `sent_tokens_offset`; `RequestOutputCollector.put`.
`tests/deployments/engine/resume` holds it on a live engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logprobs import append_logprobs_for_next_position

from deployments.engine.resume.crossing import resumed_tokens
from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_CONTEXT_TOKENS = 4


def hear_what_was_said(llm: AsyncLLM) -> None:
    """From now on requests may enter with answered tokens. Before the first request, on any thread."""
    processor: Any = llm.output_processor
    add = processor.add_request

    def add_request(request: Any, prompt: Any, parent_req: Any = None, index: int = 0, queue: Any = None) -> None:
        add(request, prompt, parent_req, index, queue)
        if queue is not None and parent_req is None:
            _keep_first_usage(queue)
        _tell_usage_at_the_end(processor.request_states[request.request_id])
        tokens = resumed_tokens(request.sampling_params)
        if tokens:
            _say_again(processor.request_states[request.request_id], tokens)

    processor.add_request = add_request


def _say_again(state: Any, tokens: Sequence[int]) -> None:
    """Bring a request's state to where it was when it had answered `tokens`."""
    detokenizer, logprobs = state.detokenizer, state.logprobs_processor
    for token in tokens:
        detokenizer.update([token], False)
        detokenizer.get_next_output_text(False, True)
    state.sent_tokens_offset = detokenizer.num_output_tokens()
    if logprobs.logprobs is not None:
        for token in tokens[-_CONTEXT_TOKENS:]:
            append_logprobs_for_next_position(logprobs.logprobs, [token], [0.0], [None], 1, logprobs.num_logprobs)


def _tell_usage_at_the_end(state: Any) -> None:
    make = state.make_request_output
    told: dict[str, Any] = {}

    def make_telling(
        new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any,
        kv_transfer_params: Any = None, *more: Any, **named: Any
    ) -> Any:  # fmt: skip
        said = kv_transfer_params or {}
        if KV_CACHE_USAGE in said:
            told.update(said[KV_CACHE_USAGE])
        elif told and finish_reason is not None:
            kv_transfer_params = {**said, KV_CACHE_USAGE: dict(told)}
        return make(
            new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *more, **named
        )  # fmt: skip

    state.make_request_output = make_telling


def _keep_first_usage(queue: Any) -> None:
    def put_first(output: Any) -> None:
        del queue.put  # vLLM's own again
        usage = (getattr(output, "kv_transfer_params", None) or {}).get(KV_CACHE_USAGE)
        if usage is not None:
            setattr(output, FIRST_USAGE, dict(usage))
        queue.put(output)

    queue.put = put_first
