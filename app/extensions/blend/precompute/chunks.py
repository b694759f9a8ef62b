"""Chunks to be computed alone: those of a blended prompt, and the exact request that computes one."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams

from configs.secret.api_keys import FARTHEST_PRIORITY
from deployments.protocol.extensions.blend_request import BlendRequest
from deployments.protocol.wire import GenerateRequest
from kvmanager.extensions.blend.chunks import BLEND


@dataclass(frozen=True, slots=True)
class MissingChunk:
    """A chunk to be computed alone, as an exact prompt of its tenant. `tag`: the tenant's name in the index."""

    token_ids: list[int]
    block_hashes: list[bytes]
    cache_salt: str
    tag: str

    @property
    def key(self) -> bytes:
        """Its name: equal for equal tokens of one tenant only, for the salt is in it."""
        return self.block_hashes[-1]

    def request(self) -> GenerateRequest:
        """Return the exact request that computes the chunk alone, behind all others, and so stores it."""
        return GenerateRequest(
            request_id=f"precompute-{uuid.uuid4().hex}",
            prompt_token_ids=self.token_ids,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            cache_salt=self.cache_salt,
            block_hashes=self.block_hashes,
            tenant=self.tag,
            priority=FARTHEST_PRIORITY,
            precomputes=BLEND,
        )


def blend_of(request: GenerateRequest) -> BlendRequest | None:
    """Return what a prompt brings to be blended; None: it is none of these."""
    found: BlendRequest | None = request.extras.get(BLEND)
    return found


def chunks_of(request: GenerateRequest) -> list[MissingChunk]:
    """A blended prompt's chunks that can be stored, each once; none of another prompt."""
    blend = blend_of(request)
    if blend is None:
        return []
    chunks: dict[bytes, MissingChunk] = {}
    for chunk in blend.chunks:
        if chunk.block_hashes:
            ids = request.prompt_token_ids[chunk.start_token : chunk.start_token + chunk.tokens]
            found = MissingChunk(ids, list(chunk.block_hashes), blend.chunk_salt, request.tenant)
            chunks.setdefault(found.key, found)
    return list(chunks.values())
