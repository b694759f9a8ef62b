"""How long a tolerant prompt's load is waited for, so that `kv.ttft_target_s` holds. On the engine thread.

Translation only, of a plan's terms to those of `kvmanager.loading.prefix_load.PrefixLoad`. All times are on
`time.monotonic`'s clock: a step of the machine's clock moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.protocol.kv_port import ARRIVED, FIDELITY, PLAN, PlanDict, PlannedLoad
from kvmanager.loading.prefix_load import LoadedSegment, PrefixLoad
from kvmanager.segments.keys import TOLERANT

if TYPE_CHECKING:
    from vllm.v1.request import Request


def ttft_deadline(
    request: Request, loads: Sequence[PlannedLoad], first_block: int, end_block: int, block_tokens: int, target_s: float
) -> PrefixLoad | None:
    """The pace of a load that begins now and brings a prompt's blocks from `first_block` up to `end_block`.

    `target_s` is counted from the prompt's arrival at the ingress (`kv_port.ARRIVED`). What computing takes is
    the plan's expectation, per token as on average of the prompt. None for an exact prompt, which waits as long as any
    load may take, and as long as nothing is known of computing.
    """
    transfer = request.kv_transfer_params or {}
    plan: PlanDict | None = transfer.get(PLAN)
    expected = plan.get("expected") if plan else None
    if transfer.get(FIDELITY) != TOLERANT or expected is None or not expected["recompute_s"]:
        return None
    prompt_tokens = request.num_prompt_tokens
    token_s = expected["recompute_s"] / max(1, prompt_tokens - expected["device_tokens"])
    block_s = token_s * block_tokens
    segments = [
        LoadedSegment(load.nbytes, block_s * (min(load.end_block, end_block) - max(load.start_block, first_block)))
        for load in loads
    ]
    now = time.monotonic()
    return PrefixLoad(
        segments, token_s * (prompt_tokens - end_block * block_tokens), now, transfer.get(ARRIVED, now) + target_s
    )
