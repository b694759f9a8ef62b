"""A chunk as a request of its own, and what fills a replica with such requests, out of the settings.

A fill that a prompt brings is no client's request: it never was at the ingress, so it counts in no usage, limit or
admission of a client. One ordered by hand counts in the ingress (`app.control.fills`).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from configs.settings import Settings
from deployments.protocol.wire import FILL_OUTCOME, GenerateRequest
from deployments.replica.chunk_fill import ChunkFill, ChunkSource
from deployments.replica.fill_queue import ColdChunk
from kvmanager.loading.load_choice import LoadMode

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


def fill_request(chunk: ColdChunk) -> GenerateRequest:
    """The exact request that computes a chunk alone, and so stores it."""
    from vllm.sampling_params import SamplingParams

    return GenerateRequest(
        request_id=f"{chunk.fill_id}{uuid.uuid4().hex}",
        prompt_token_ids=list(chunk.token_ids),
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        cache_salt=chunk.cache_salt,
        block_hashes=chunk.block_hashes,
        tenant=chunk.tenant,
    )


def fill_output(request: GenerateRequest, outcome: str) -> RequestOutput:
    """Return the answer to a fill ordered by hand: no token, and the outcome."""
    from vllm.outputs import RequestOutput

    told = {FILL_OUTCOME: outcome}
    return RequestOutput(request.request_id, None, None, None, [], finished=True, kv_transfer_params=told)


def filler(
    settings: Settings, source: ChunkSource, compute: Callable[[GenerateRequest], Awaitable[None]]
) -> ChunkFill | None:
    """What fills a replica with unknown chunks; None where the settings say that stored KV is never used."""
    load = LoadMode(settings.kv.load_or_recompute)
    if load is LoadMode.RECOMPUTE:
        return None
    least_tokens = 1 if load is LoadMode.LOAD else 512
    return ChunkFill(
        settings.blending.fill,
        source,
        lambda chunk: compute(fill_request(chunk)),
        settings.block_size_tokens,
        least_tokens,
    )
