"""Until when a load is waited for: as long as it pays, and so that a tolerant prompt holds `kv.ttft_target_s`.

Translation only, of a plan's terms to those of `kvmanager.loading.prefix_load.PrefixLoad`. On the engine thread. All
times are on `time.monotonic`'s clock: a step of the machine's clock moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.protocol.engine_hints import hints_of
from deployments.transfer.jobs import load_parts
from kvmanager.loading.prefix_load import LoadedSegment, PrefixLoad
from kvmanager.moves.plan import NOTHING_EXPECTED, PlannedLoad
from kvmanager.segments.keys import TOLERANT

if TYPE_CHECKING:
    from vllm.v1.request import Request


def load_pace(
    request: Request,
    loads: Sequence[PlannedLoad],
    first_block: int,
    end_block: int,
    block_tokens: int,
    target_s: float | None,
    least_s: float,
) -> PrefixLoad | None:
    """The pace of a load that begins now and brings a prompt's blocks from `first_block` up to `end_block`.

    What computing takes is the plan's expectation, per token as on average of the prompt. None while nothing is known
    of that: the load goes on to its deadline. A load goes on for `least_s`, and as long as the first token was
    expected to take, whatever its speed. A tolerant prompt's has `target_s` instead, if it is not None, counted from
    the prompt's arrival at the ingress (`EngineHints.arrived`).
    """
    hints = hints_of(request.kv_transfer_params)
    expected = hints.plan.expected if hints.plan else NOTHING_EXPECTED
    if not expected.recompute_s:
        return None
    prompt_tokens = request.num_prompt_tokens
    token_s = expected.recompute_s / max(1, prompt_tokens - expected.device_tokens)
    block_s = token_s * block_tokens
    parts = load_parts(loads, first_block, end_block)
    segments = [LoadedSegment(part.nbytes, block_s * part.blocks) for part in parts]
    rest_s = token_s * (prompt_tokens - end_block * block_tokens)
    now = time.monotonic()
    if target_s is not None and hints.fidelity == TOLERANT:
        return PrefixLoad(segments, rest_s, now, (now if hints.arrived is None else hints.arrived) + target_s)
    return PrefixLoad(segments, rest_s, now, least_s=max(least_s, expected.load_s))
