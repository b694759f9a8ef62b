"""A prompt's first token goes to the client at once, and its end when the prompt's KV is stored for who goes on.

A prefill replica samples one token and ends. vLLM gives that token and that end as one output; here they become two.
The text of the first is what an answer that goes on would show: what may still become a stop string is held back, as
`vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer` (0.32.0) does, for the continuation shows it. On the replica's
event loop.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

HANDED_OVER = "length"
"""The finish reason of a prompt that could have gone on; with any other the answer is whole."""


def goes_on(output: RequestOutput) -> bool:
    """Whether this last output is only the end of a prefill."""
    return output.outputs[0].finish_reason == HANDED_OVER


def take_token(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Split a last output of one answer that is sent piece by piece: return its token as an output of its own.

    `output` keeps its end, and what is said of the prompt.
    """
    first = copy.copy(output)
    end = output.outputs[0]
    token = copy.copy(end)
    token.finish_reason = token.stop_reason = None
    held_back = _held_back_chars(params)
    token.text = token.text[: max(0, len(token.text) - held_back)]
    first.finished, first.outputs, first.kv_transfer_params, first.metrics = False, [token], None, None
    end.token_ids, end.text, end.logprobs = [], "", None
    return first


def _held_back_chars(params: SamplingParams) -> int:
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return max(map(len, stops)) - 1 if stops and not params.include_stop_str_in_output else 0
